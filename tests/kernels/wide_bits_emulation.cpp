// Runs stochastic/wide_bits.cu on a CPU; built by emulated.py with the kernels' macros defined. Bulk copies arrive when they are
// waited for; a product's sums are written when it is waited for, so that using them before shows.
#include "cuda_emulation.h"
#define shared ((u32 *)emulation::memory.data())
#define EMULATED 1
#define __popc __builtin_popcount
inline float __int_as_float(int x) { float y; memcpy(&y, &x, 4); return y; }
typedef unsigned int u32;
typedef unsigned char u8;
typedef unsigned long long u64;

struct Bulk { const void *from; int to, bytes; };
struct Turning { int needed = 1, came = 0, turned = 0; std::vector<Bulk> copies; };
static std::map<int, Turning> turnings;
inline void begin_barrier(int at, int threads) { if (at % 8) abort(); turnings[at] = {}; turnings[at].needed = threads; }
inline void barriers_have_begun() {}
inline void turn_if_all_came(Turning &b) { if (b.came == b.needed && b.copies.empty()) b.came = 0, b.turned++; }
inline void come_to(int at) { Turning &b = turnings.at(at); b.came++; turn_if_all_came(b); }
inline void copy_bulk(int to, const u8 *from, int bytes, int at) {
    if (to % 16 || (size_t)from % 16 || bytes % 16 || to + bytes > (int)emulation::memory.size() * 4) abort();
    Turning &b = turnings.at(at);
    b.copies.push_back({from, to, bytes}), b.came++;
    memset(emulation::memory.data() + to / 4, 0xfe, bytes);  // nobody may read what stood there any more
}
inline void wait_until_turned(int at, u32 odd) {
    Turning &b = turnings.at(at);
    while ((u32)(b.turned & 1) == odd) {
        if (!b.copies.empty()) {
            for (const Bulk &c : b.copies) memcpy((char *)emulation::memory.data() + c.to, c.from, c.bytes);
            b.copies.clear();
            turn_if_all_came(b);
        } else emulation::yield();
    }
}
struct Waiting { std::vector<std::vector<std::function<void()>>> groups{1}; };
static std::vector<Waiting> waiting;  // of each thread
inline Waiting &own_products() {
    if (waiting.size() != emulation::threads.size()) waiting.assign(emulation::threads.size(), {});
    return waiting[threadIdx.x];
}
inline void registers_are_written() {}
template <int COUNT> inline void give_registers() {}
template <int COUNT> inline void take_registers() {}
inline void commit_products() { own_products().groups.emplace_back(); }
template <int LEFT> inline void wait_products() {
    auto &groups = own_products().groups;
    while (groups.size() > LEFT + 1) {
        for (auto &product : groups.front()) product();
        groups.erase(groups.begin());
    }
}
inline u64 description_of(int at) { if (at % 128) abort(); return at / 16; }
inline u32 shifted(u32 x, int by) { return (u32)by > 31 ? 0 : x << by; }
// The registers are read when the product is waited for: they must not have changed by then.
template <class Dot> inline void multiply(int *d, const u32 *a, u64 b, Dot dot) {
    struct Own { const u32 *a; u32 was[4]; };
    static std::vector<Own> lanes;
    lanes.resize(emulation::threads.size());
    lanes[threadIdx.x] = {a, {a[0], a[1], a[2], a[3]}};
    __syncwarp();
    std::array<std::array<u32, 4>, 4> of_g;  // of this lane's row group: threads t
    for (int t = 0; t < 4; t++) for (int i = 0; i < 4; i++) of_g[t][i] = lanes[threadIdx.x / 4 * 4 + t].was[i];
    __syncwarp();
    const std::array<u32, 4> was = {a[0], a[1], a[2], a[3]};
    const int t = threadIdx.x % 4;
    own_products().groups.back().push_back([=] {
        for (int i = 0; i < 4; i++) if (a[i] != was[i]) abort();
        for (int group = 0; group < COLUMNS / 8; group++)
            for (int i = 0; i < 4; i++) {
                const int column = 2 * t + i % 2;
                for (int k = 0; k < 8; k++) {
                    const u32 w = ((u32 *)emulation::memory.data())[(b * 16 + group * 256 + k / 4 * 128 + column * 16) / 4 + k % 4];
                    d[4 * group + i] += dot(of_g[k % 4][i / 2 + k / 4 * 2], w);
                }
            }
    });
}
inline void multiply_bits(int *d, const u32 *a, u64 b) { multiply(d, a, b, emulation::bits); }
inline void multiply_bytes(int *d, const u32 *a, u64 b) { multiply(d, a, b, emulation::bytes<int8_t>); }
#include SOURCE

static Product product;
static void wide() { stochastic_wide_bits(product); }
static void wide_a() { stochastic_wide_a(product); }
static void wide_b() { stochastic_wide_b(product); }

extern "C" void run(const Product *p, const char *name, const int *grid, int threads, int shared_bytes) {
    product = *p;
    waiting.clear();
    const bool a = !strcmp(name, "stochastic_wide_a"), b = !strcmp(name, "stochastic_wide_b");
    emulation::launch(a ? wide_a : b ? wide_b : wide, {(unsigned)grid[0], (unsigned)grid[1], (unsigned)grid[2]}, threads, shared_bytes);
}
