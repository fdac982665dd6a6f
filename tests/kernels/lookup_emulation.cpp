// Runs stochastic/lookup.cu on a CPU; built by emulated.py with the kernel's macros defined.
#include "cuda_emulation.h"
#define shared ((u32 *)emulation::memory.data())
#define EMULATED 1
struct int2 { int x, y; };
static inline void mma_u8(int *d, unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
    emulation::mma(d, {a0, a1, a2, a3, b0, b1}, emulation::bytes<unsigned char>);
}
static inline void mma_u8_first(int *d, unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
    for (int i = 0; i < 4; i++) d[i] = 0;
    mma_u8(d, a0, a1, a2, a3, b0, b1);
}
static inline unsigned kept(unsigned x) { return x; }
static inline void mma_s8(int *d, unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
    emulation::mma(d, {a0, a1, a2, a3, b0, b1}, emulation::bytes<signed char>);
}
static inline uint4 load_once(const void *at) { return *(const uint4 *)at; }
static inline unsigned __reduce_max_sync(unsigned mask, unsigned x) {
    for (int bit = 1; bit < 32; bit *= 2) {
        const unsigned other = __shfl_xor_sync(mask, x, bit);
        x = other > x ? other : x;
    }
    return x;
}
static inline unsigned __reduce_or_sync(unsigned mask, unsigned x) {
    for (int bit = 1; bit < 32; bit *= 2) x |= __shfl_xor_sync(mask, x, bit);
    return x;
}
static inline float __fdiv_rn(float x, float y) { volatile float z = x / y; return z; }
static inline unsigned __float_as_uint(float x) { unsigned bits; memcpy(&bits, &x, 4); return bits; }
static inline float __uint_as_float(unsigned bits) { float x; memcpy(&x, &bits, 4); return x; }
// Asynchronous copies arrive as late as they may: when the thread awaits their group; until then their place is garbage.
struct Copy { unsigned to; const void *from; int bytes; };
static std::vector<std::vector<Copy>> groups[2048];
template <int bytes> static inline void copy_async(unsigned to, const void *from) {
    if (to % bytes || (size_t)from % bytes || to + bytes > emulation::memory.size() * 4) abort();
    auto &own = groups[threadIdx.x];
    if (own.empty()) own.emplace_back();
    own.back().push_back({to, from, bytes});
    memset((char *)emulation::memory.data() + to, 0xee, bytes);
}
#define copy_16 copy_async<16>
static inline void copy_4(unsigned to, const void *from) { copy_async<4>(to, from); }
static inline void end_group() {
    auto &own = groups[threadIdx.x];
    if (own.empty()) own.emplace_back();
    own.emplace_back();
}
template <int newer> static inline void await_groups() {
    auto &own = groups[threadIdx.x];
    while ((int)own.size() > newer + 1) {  // the last one has not ended
        for (const Copy &c : own.front()) memcpy((char *)emulation::memory.data() + c.to, c.from, c.bytes);
        own.erase(own.begin());
    }
}
static inline void prefetch(const void *at) { (void)*(const volatile char *)at; }
static inline void let_next_start() {}
static inline void await_previous() {}
#include SOURCE

static Product product;
static void look_up_block() {
    if (threadIdx.x == 0)  // the first to run: garbage that, taken for codes, has some that no weight has
        for (unsigned &word : emulation::memory) word = 0x80a58037u;
    groups[threadIdx.x].clear();
    stochastic_lookup(product);
}
static void combine_block() {
    groups[threadIdx.x].clear();
    stochastic_combine(product);
}

static void add_block() {
    groups[threadIdx.x].clear();
    stochastic_add_row(product);
}

extern "C" void run(const Product *p, const int *grid, int shared_bytes) {
    product = *p;
    emulation::launch(look_up_block, {(unsigned)grid[0], (unsigned)grid[1], (unsigned)grid[2]}, THREADS, shared_bytes);
}

extern "C" void add_row(const Product *p, const int *grid, int threads, int shared_bytes) {
    product = *p;
    emulation::launch(add_block, {(unsigned)grid[0], (unsigned)grid[1], (unsigned)grid[2]}, threads, shared_bytes);
}

extern "C" void combine(const Product *p, const int *grid, int threads, int shared_bytes) {
    product = *p;
    emulation::launch(combine_block, {(unsigned)grid[0], (unsigned)grid[1], (unsigned)grid[2]}, threads, shared_bytes);
}
