// Runs codec/dequantize_described.cu on a CPU; built by emulated.py with the kernel's macros defined.
#include "cuda_emulation.h"
#include <algorithm>
#include <cmath>
#define EMULATED 1
inline float __uint_as_float(unsigned x) { float y; memcpy(&y, &x, 4); return y; }
inline unsigned __float_as_uint(float x) { unsigned y; memcpy(&y, &x, 4); return y; }
inline float __fdiv_rn(float x, float y) { volatile float z = x / y; return z; }
using std::min;

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
#include SOURCE

static Arguments arguments;
static void block() { dequantize_described(arguments); }

extern "C" void run(const Arguments *p, int x) {
    arguments = *p;
    emulation::launch(block, {(unsigned)x, 1, 1}, THREADS, 0);
}
