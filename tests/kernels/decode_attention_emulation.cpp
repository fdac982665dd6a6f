// Runs generation/decode_attention.cu on a CPU; built by emulated.py with the kernel's macros.
#undef EARLY
#define EARLY 0
#include "tensor_core_emulation.h"
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
inline u16 to_16(float x) { return (u16)emulation::to_bf16(x); }
inline float from_16(u32 x) { return __uint_as_float(x << 16); }
inline uint4 load_16(const u16 *at) { uint4 v; memcpy(&v, at, 16); return v; }
inline void ask_for(const void *) {}
inline float load_fresh(const float *at) { return *at; }
#include SOURCE

static Arguments arguments;
static void block() { decode_attention(arguments); }

extern "C" void run(const Arguments *p, int splits, int heads, int sequences) {
    arguments = *p;
    emulation::launch(block, {(unsigned)splits, (unsigned)heads, (unsigned)sequences}, THREADS, 16);
}
