// Enough of CUDA C++ to run a kernel's own source on a CPU: each thread of a block is a coroutine, a barrier or a
// sum over a warp hands over to the next one until all have arrived. Shared memory starts as garbage.
#pragma once
#include "libraries.h"

#define __global__
#define __device__
#define __forceinline__ inline
#define __shared__ static
#define __launch_bounds__(...)

struct uint2 { unsigned x, y; };
struct uint4 { unsigned x, y, z, w; };
struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
struct dim3 { unsigned x = 1, y = 1, z = 1; };

namespace emulation {
struct Thread { ucontext_t context; std::vector<char> stack; bool done = false; };
struct Warp { unsigned arrived = 0, generation = 0, sum = 0, result = 0, lanes[2][32]; };
inline std::vector<Thread> threads;
inline std::vector<Warp> warps;
inline ucontext_t scheduler;
inline unsigned current = 0, block_arrived = 0, block_generation = 0;
inline unsigned alive = 0;
inline std::vector<unsigned> memory;
inline void (*body)();
inline void yield() { swapcontext(&threads[current].context, &scheduler); }
inline void enter() { body(); threads[current].done = true; alive--; yield(); }
}  // namespace emulation

inline dim3 threadIdx, blockIdx, blockDim, gridDim;

inline void __syncthreads() {
    using namespace emulation;
    const unsigned mine = block_generation;
    if (++block_arrived == threads.size()) { block_arrived = 0; block_generation++; }
    while (block_generation == mine) yield();
}

inline unsigned __reduce_add_sync(unsigned mask, unsigned value) {
    using namespace emulation;
    if (mask != 0xffffffffu) abort();
    Warp &warp = warps[threadIdx.x / 32];
    const unsigned mine = warp.generation;
    warp.sum += value;
    if (++warp.arrived == 32) { warp.result = warp.sum; warp.sum = warp.arrived = 0; warp.generation++; }
    while (warp.generation == mine) yield();
    return warp.result;
}

inline void __syncwarp() { __reduce_add_sync(0xffffffffu, 0); }

inline unsigned __shfl_sync(unsigned mask, unsigned value, int from) {
    using namespace emulation;
    if (mask != 0xffffffffu) abort();
    Warp &warp = warps[threadIdx.x / 32];
    const unsigned mine = warp.generation;
    warp.lanes[mine & 1][threadIdx.x % 32] = value;
    if (++warp.arrived == 32) { warp.arrived = 0; warp.generation++; }
    while (warp.generation == mine) yield();
    return warp.lanes[mine & 1][from % 32];
}

inline unsigned __shfl_xor_sync(unsigned mask, unsigned value, int bits) {
    return __shfl_sync(mask, value, threadIdx.x % 32 ^ bits);
}

namespace emulation {
// mma.sync: the fragments of a warp's lanes, 4 words of the first operand (16 rows), 2 of the second (8 columns). Lane l
// has words of rows l / 4 and l / 4 + 8 in turn, and of column l / 4; of the 8 words of a row the (l % 4)-th and
// the (l % 4 + 4)-th.
struct Fragments { unsigned word[6]; };
template <class Dot> inline void mma(int *d, Fragments own, Dot dot) {
    static std::vector<Fragments> lanes[2];
    static std::vector<unsigned> arrived, generation;
    for (auto &of_warps : lanes) of_warps.resize(threads.size());
    arrived.resize(warps.size()), generation.resize(warps.size());
    const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32, mine = generation[warp];
    lanes[mine & 1][threadIdx.x] = own;
    if (++arrived[warp] == 32) { arrived[warp] = 0; generation[warp]++; }
    while (generation[warp] == mine) yield();
    const Fragments *of = &lanes[mine & 1][warp * 32];
    for (int r = 0; r < 4; r++) {
        const int row = lane / 4 + 8 * (r / 2), column = 2 * (lane % 4) + r % 2;
        for (int k = 0; k < 8; k++)
            d[r] += dot(of[row % 8 * 4 + k % 4].word[row / 8 + k / 4 * 2], of[column * 4 + k % 4].word[4 + k / 4]);
    }
}
// m16n8k32 of bytes, T's signedness; m16n8k256 of bits.
template <class T, class U = T> inline int bytes(unsigned x, unsigned y) {
    int sum = 0;
    for (int i = 0; i < 4; i++) sum += (int)(T)(x >> 8 * i) * (int)(U)(y >> 8 * i);
    return sum;
}
inline int bits(unsigned x, unsigned y) { return __builtin_popcount(x & y); }
}  // namespace emulation

inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
    const uint64_t bytes = (uint64_t)y << 32 | x;
    unsigned out = 0;
    for (int i = 0; i < 4; i++) {
        const unsigned s = selector >> (4 * i) & 7;  // a GPU's __byte_perm leaves the high bit out
        out |= (unsigned)(bytes >> (8 * s) & 255) << (8 * i);
    }
    return out;
}
inline int __dp4a(int x, int y, int sum) {
    for (int i = 0; i < 4; i++) sum = (int)((unsigned)sum + (unsigned)((int8_t)(x >> 8 * i) * (int8_t)(y >> 8 * i)));
    return sum;
}
inline unsigned __dp4a(unsigned x, unsigned y, unsigned sum) {
    for (int i = 0; i < 4; i++) sum += (x >> 8 * i & 255) * (y >> 8 * i & 255);
    return sum;
}
template <class T> inline T __ldg(const T *at) { return *at; }
inline float __fmul_rn(float x, float y) { volatile float z = x * y; return z; }
inline float __fadd_rn(float x, float y) { volatile float z = x + y; return z; }
// Addresses in shared memory are offsets, and one beyond it ends the process.
inline size_t __cvta_generic_to_shared(const void *at) { return (const char *)at - (const char *)emulation::memory.data(); }
inline const void *__cvta_shared_to_generic(size_t at) {
    if (at + 4 > emulation::memory.size() * 4) { fprintf(stderr, "shared memory: offset %zu\n", at); abort(); }
    return (const char *)emulation::memory.data() + at;
}

// Asynchronous copies arrive at once.
inline void copy_16(unsigned to, const void *from) {
    if (to % 16 || (size_t)from % 16 || to + 16 > emulation::memory.size() * 4) abort();
    memcpy((char *)emulation::memory.data() + to, from, 16);
}
inline void wait_for_copies() {}

namespace emulation {
inline void launch(void (*kernel)(), dim3 grid, unsigned block, unsigned shared_bytes) {
    body = kernel;
    gridDim = grid;
    blockDim.x = block;
    memory.resize(shared_bytes / 4);
    for (unsigned z = 0; z < grid.z; z++) for (unsigned y = 0; y < grid.y; y++) for (unsigned x = 0; x < grid.x; x++) {
        blockIdx = {x, y, z};
        for (unsigned &word : memory) word = 0xdeadbeefu;
        threads.assign(block, {});
        warps.assign(block / 32, {});
        block_arrived = 0;
        alive = block;
        for (unsigned i = 0; i < block; i++) {
            Thread &t = threads[i];
            t.stack.resize(64 << 10);
            getcontext(&t.context);
            t.context.uc_stack.ss_sp = t.stack.data();
            t.context.uc_stack.ss_size = t.stack.size();
            t.context.uc_link = nullptr;
            makecontext(&t.context, enter, 0);
        }
        while (alive)
            for (current = 0; current < block; current++)
                if (!threads[current].done) {
                    threadIdx.x = current;
                    swapcontext(&scheduler, &threads[current].context);
                }
    }
}
}  // namespace emulation
