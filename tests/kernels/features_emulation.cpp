// Runs stochastic/features.cu on a CPU; built by emulated.py with the kernel's macros defined.
#include "cuda_emulation.h"
#define shared ((uint4 *)emulation::memory.data())
#define EMULATED 1

static inline float half(unsigned bits) {
    const int exponent = bits >> 10 & 31, mantissa = bits & 1023;
    const float size = exponent == 31 ? (mantissa ? NAN : INFINITY)
                       : exponent     ? ldexpf(1024 + mantissa, exponent - 25)
                                      : ldexpf(mantissa, -24);
    return bits >> 15 & 1 ? -size : size;
}
// The nearest number of `digits` binary digits not below 2**lowest, ties to even.
static inline float rounded(float x, int digits, int lowest) {
    if (!std::isfinite(x) || x == 0) return x;
    int exponent;
    frexpf(x, &exponent);
    const int step = exponent - digits < lowest ? lowest : exponent - digits;
    return ldexpf(nearbyintf(ldexpf(x, -step)), step);
}
static inline unsigned half_of(float x) {
    x = rounded(x, 11, -24);
    const unsigned sign = std::signbit(x) ? 0x8000 : 0;
    if (std::isnan(x)) return 0x7fff;
    if (fabsf(x) >= 65536) return sign | 0x7c00;
    int exponent;
    const float part = frexpf(fabsf(x), &exponent);
    if (x == 0 || exponent < -13) return sign | (unsigned)ldexpf(fabsf(x), 24);
    return sign | (unsigned)(exponent + 14) << 10 | ((unsigned)ldexpf(part, 11) & 1023);
}
static inline unsigned e4m3_of(float x) {
    if (std::isnan(x)) return 0x7f;
    const unsigned sign = std::signbit(x) ? 0x80 : 0;
    const float size = fabsf(rounded(x, 4, -9));
    if (size > 448) return sign | 0x7e;
    int exponent;
    const float part = frexpf(size, &exponent);
    if (size == 0 || exponent < -5) return sign | (unsigned)ldexpf(size, 9);
    return sign | (unsigned)(exponent + 6) << 3 | ((unsigned)ldexpf(part, 4) & 7);
}
static inline unsigned product_in_8_bits(unsigned pair, unsigned factors) {
    const float low = half(half_of(half(pair & 0xffff) * half(factors & 0xffff)));
    const float high = half(half_of(half(pair >> 16) * half(factors >> 16)));
    return e4m3_of(low) | e4m3_of(high) << 8;
}
static inline unsigned twice(float x) { return half_of(x) * 0x10001u; }
static inline unsigned short bfloat16(float x) {
    unsigned bits;
    memcpy(&bits, &x, 4);
    if (std::isnan(x)) return 0x7fff;
    return (unsigned short)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
#include SOURCE

static Operand operand;
static void features() { stochastic_features(operand); }

extern "C" void run(const Operand *p, const int *grid, int shared_bytes) {
    operand = *p;
    emulation::launch(features, {(unsigned)grid[0], (unsigned)grid[1], (unsigned)grid[2]}, THREADS, shared_bytes);
}
