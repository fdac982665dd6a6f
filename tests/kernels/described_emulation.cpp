// Runs codec/dequantize_described.cu on a CPU; built by emulated.py with the kernel's macros defined.
#include "cuda_emulation.h"
#include <algorithm>
#include <cmath>
#define EMULATED 1
inline float __uint_as_float(unsigned x) { float y; memcpy(&y, &x, 4); return y; }
inline unsigned __float_as_uint(float x) { unsigned y; memcpy(&y, &x, 4); return y; }
inline float __fdiv_rn(float x, float y) { volatile float z = x / y; return z; }
using std::min;

inline float __fmaf_rn(float x, float y, float z) { return fmaf(x, y, z); }
inline unsigned __umulhi(unsigned x, unsigned y) { return (unsigned)((unsigned long long)x * y >> 32); }
inline unsigned long long __brevll(unsigned long long x) {
    unsigned long long y = 0;
    for (int i = 0; i < 64; i++) y |= (x >> i & 1) << (63 - i);
    return y;
}

// A float16, subnormal numbers, infinities and NaN too.
inline float of_half(unsigned h) {
    const unsigned size = h & 0x7fffu, sign = (h & 0x8000u) << 16;
    if (size >= 0x7c00u) return __uint_as_float(sign | 0x7f800000u | (size & 0x3ffu) << 13);
    return __uint_as_float(__float_as_uint(ldexpf(__uint_as_float(size << 13), 112)) | sign);
}

// float16 to nearest even.
inline unsigned half_bits(float x) {
    const unsigned sign = __float_as_uint(x) >> 31 << 15;
    const float size = fabsf(x);
    if (size != size) return 0x7fff;
    if (size >= 65520.0f) return sign | 0x7c00;
    if (size < 0.00006103515625f) return sign | (unsigned)nearbyintf(ldexpf(size, 24));
    unsigned bits = __float_as_uint(size);
    bits += 0xfff + (bits >> 13 & 1);
    return sign | ((bits >> 13) - (112 << 10));
}

inline unsigned bfloat16_bits(float x) {
    const unsigned bits = __float_as_uint(x);
    return x != x ? 0x7fffu : (bits + 0x7fffu + (bits >> 16 & 1)) >> 16;
}

inline unsigned pair_of(float low, float high) {
    return IS_HALF ? half_bits(low) | half_bits(high) << 16 : bfloat16_bits(low) | bfloat16_bits(high) << 16;
}
#include SOURCE

static Arguments arguments;
static void block() { dequantize_described(arguments); }

extern "C" void run(const Arguments *p, int x) {
    arguments = *p;
    emulation::launch(block, {(unsigned)x, 1, 1}, THREADS, 0);
}
