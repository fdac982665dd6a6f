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
inline u32 subtract_pairs(u32 a, u32 b) { return half_pair(half_in(a, 0) - half_in(b, 0), half_in(a, 1) - half_in(b, 1)); }
inline u32 multiply_add_pairs(u32 a, u32 b, u32 c) {
    return half_pair(half_in(a, 0) * half_in(b, 0) + half_in(c, 0), half_in(a, 1) * half_in(b, 1) + half_in(c, 1));
}
inline void multiply_add(float *c, const u32 *a, u32 b0, u32 b1) {
    const u32 own[6] = {a[0], a[1], a[2], a[3], b0, b1};
    const auto *of = emulation::exchanged(own, 6);
    const int g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
    for (int i = 0; i < 4; i++) {
        const int row = g + i / 2 * 8, column = 2 * q + i % 2;
        float sum = c[i];
        for (int k = 0; k < 16; k++)
            sum += half_in(of[row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2], k % 2) *
                   half_in(of[column * 4 + k % 8 / 2][4 + k / 8], k % 2);
        c[i] = sum;
    }
}
template <int N> inline void load_words(u32 *to, const void *at) {
    if ((size_t)at % (N % 4 == 0 ? 16 : N % 2 == 0 ? 8 : 4)) abort();
    memcpy(to, at, 4 * N);
}
inline float load_fresh(const float *at) { return *at; }
#include SOURCE

static Arguments arguments;
static void block() { packed_attention(arguments); }

extern "C" void run(const Arguments *p, int splits, int heads, int sequences) {
    arguments = *p;
    emulation::launch(block, {(unsigned)splits, (unsigned)heads, (unsigned)sequences}, THREADS, 16);
}
