// Runs codec/float8_operands.cu on a CPU; built by emulated.py with the kernel's macros defined.
#define EARLY 1
#include "tensor_core_emulation.h"
#define EMULATED 1

inline uint4 load_once(const u8 *at) { uint4 v; memcpy(&v, at, 16); return v; }
inline float __fdiv_rn(float x, float y) { volatile float z = x / y; return z; }
inline float wide(u16 h) {
    const int exponent = h >> 10 & 31, mantissa = h & 1023;
    const float size = exponent == 31 ? (mantissa ? NAN : INFINITY)
                     : exponent ? ldexpf(1024 + mantissa, exponent - 25) : ldexpf(mantissa, -24);
    return h >> 15 ? -size : size;
}
inline float exp2_fast(float x) { return exp2f(x); }
inline float reciprocal(float x) { return 1.0f / x; }
inline u32 to_half(float x) {  // nearest even
    const u32 sign = __float_as_uint(x) >> 31 << 15;
    if (x != x) return 0x7fff;
    const float y = fabsf(x);
    if (y >= 65520.0f) return sign | 0x7c00;
    if (y < 0.00006103515625f) return sign | (u32)nearbyintf(y * 16777216.0f);
    u32 bits = __float_as_uint(y);
    bits += 0xfff + (bits >> 13 & 1);
    return sign | ((bits >> 13) - (112 << 10));
}
inline u32 half_pair(float low, float high) {
    return FLOAT16 ? to_half(low) | to_half(high) << 16 : bf16_pair(low, high);
}
inline u32 larger(u32 a, u32 b) {
    const u32 low = max(a & 0xffffu, b & 0xffffu);
    return low | max(a >> 16, b >> 16) << 16;
}
inline u32 to_e5m2(float x) {  // nearest even, cut to 57344
    const u32 sign = __float_as_uint(x) >> 31 << 7;
    if (x != x) return 0x7f;
    const float y = fminf(fabsf(x), 57344.0f);
    if (y < 0.00006103515625f) return sign | (u32)nearbyintf(y * 65536.0f);
    u32 bits = __float_as_uint(y);
    bits += 0xfffff + (bits >> 21 & 1);
    return sign | ((bits >> 21) - (112 << 2));
}
inline u32 code_pair(float low, float high) {
    return E5M2 ? to_e5m2(low) | to_e5m2(high) << 8 : e4m3_pair(low, high);
}
#include SOURCE

static Arguments arguments;
static void block() { float8_tile(arguments); }

extern "C" void run(const Arguments *p, int blocks) {
    arguments = *p;
    emulation::launch(block, {(unsigned)blocks, 1, 1}, THREADS, 0);
}
