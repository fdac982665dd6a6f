// Runs generation/packed_attention.cu on a CPU; built by emulated.py with the kernel's macros.
#undef EARLY
#define EARLY 0
#define multiply_add multiply_add_of_bfloat16
#include "tensor_core_emulation.h"
#undef multiply_add
#define EMULATED 1
#define __grid_constant__
#define __align__(n)

inline float __int_as_float(int x) { return __uint_as_float((u32)x); }
inline float __shfl_xor_sync(unsigned mask, float value, int bits) {
    return __uint_as_float(__shfl_xor_sync(mask, __float_as_uint(value), bits));
}
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline u32 atomicAdd(u32 *at, u32 x) { const u32 old = *at; *at += x; return old; }
inline void __threadfence() {}
inline void wait_for_the_kernel_before() {}
inline u16 half_of_float(float x) { const _Float16 y = (_Float16)x; u16 bits; memcpy(&bits, &y, 2); return bits; }
inline float float_of_half(u16 bits) { _Float16 y; memcpy(&y, &bits, 2); return (float)y; }
inline u32 half_pair(float low, float high) { return half_of_float(low) | (u32)half_of_float(high) << 16; }
inline u16 bfloat_of_float(float x) { return (u16)emulation::to_bf16(x); }
inline float half_in(u32 pair, int i) { return float_of_half((u16)(pair >> (16 * i))); }
inline float power_of_two(float x) { return exp2f(x); }
inline bool any_of_warp(bool x) { return __reduce_add_sync(0xffffffffu, x) > 0; }
inline void multiply_add(float *d, const u32 *a, u32 b0, u32 b1, const float *c) {
    const u32 own[6] = {a[0], a[1], a[2], a[3], b0, b1};
    const auto *of = emulation::exchanged(own, 6);
    const int g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
    for (int i = 0; i < 4; i++) {
        const int row = g + i / 2 * 8, column = 2 * q + i % 2;
        float sum = c[i];
        for (int k = 0; k < 16; k++)
            sum += half_in(of[row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2], k % 2) *
                   half_in(of[column * 4 + k % 8 / 2][4 + k / 8], k % 2);
        d[i] = sum;
    }
}
inline void multiply_add_16(float *d, const u32 *a, u32 b0, u32 b1) {
    if (HALF == 1) multiply_add_of_bfloat16(d, a, b0, b1);
    else multiply_add(d, a, b0, b1, d);
}
inline void load_any(u32 *to, const void *at) { if ((size_t)at % 16) abort(); memcpy(to, at, 16); }
#define shared_bytes ((u8 *)emulation::memory.data())
template <int BYTES, bool SHARED = false> inline void copy(u32 to, const void *from, bool there) {
    if ((size_t)from % BYTES) abort();
    emulation::own_copies().groups.back().push_back({to, from, there, BYTES});
}
template <int N> inline void read_shared(u32 *to, u32 at) { memcpy(to, emulation::shared_at(at, 4 * N), 4 * N); }
inline u16 read_shared_16(u32 at) { u16 out; memcpy(&out, emulation::shared_at(at, 2), 2); return out; }
inline float load_fresh(const float *at) { return *at; }
#include SOURCE

static Arguments arguments;
static void block() { packed_attention(arguments); }

extern "C" void run(const Arguments *p, int splits, int heads, int sequences, int shared) {
    arguments = *p;
    emulation::launch(block, {(unsigned)splits, (unsigned)heads, (unsigned)sequences}, THREADS, shared);
}
