// Prepares an operand for emulated.py, which approximates stochastic products by two ordinary matrix products: each code
// becomes RANK features in E4M3, for the product of the errors, and one value in bfloat16, for the plain product.
//
// The features of a code are its row of its mask's table (in 16-bit floating point) with the code's sign, times its chunk's
// share of the row's largest scale; the value is the code times its chunk's scale.
//
// Writing RANK + 2 bytes for each code is what takes the time (the floor), so tables must not come from memory: a block of
// threads has DIMENSIONS inner dimensions, whose tables it holds in shared memory, and walks over `per_block` rows. Table
// entries lie so that the 8 threads that load at once, each for another dimension, use different banks of shared memory
// and do not wait for each other; what a warp (32 threads) writes of a row makes whole lines of memory.
//
// Compiled at run time with RANK (a multiple of 8) and DIMENSIONS (8, 16 or 32) defined.

typedef unsigned int u32;
typedef unsigned short u16;
typedef signed char s8;
typedef long long i64;

#define CODES 128
#define AT_ONCE 32               // rows of a block
#define THREADS (AT_ONCE * DIMENSIONS)
#define PARTS (RANK / 8)         // of 16 bytes, an entry's
#define AHEAD 4                  // rows of a thread whose codes are on their way

struct Operand {
    const s8 *codes;       // (rows, D)
    const float *scales;   // (rows, C)
    const float *inverse;  // (rows,): of the row's largest scale
    const uint4 *table;    // (masks, 128, RANK) in 16 bits
    const i64 *masks;      // (dimensions of a chunk,): which mask
    uint2 *features;       // (rows, width, RANK)
    u16 *values;           // (rows, D)
    int rows, D, C;
    int chunk;             // inner dimensions of a chunk
    int first, width;      // inner dimensions: from which on, how many
    int per_block;         // rows
};

#ifndef EMULATED
extern __shared__ uint4 shared[];

// Two products in 16 bits, and both in E4M3, saturated, as the low half.
static __device__ __forceinline__ u32 product_in_8_bits(u32 pair, u32 factors) {
    u32 product;
    u16 out;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(pair), "r"(factors));
    asm("cvt.rn.satfinite.e4m3x2.f16x2 %0, %1;" : "=h"(out) : "r"(product));
    return out;
}
// A number in 16 bits, twice.
static __device__ __forceinline__ u32 twice(float x) {
    u32 pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %1;" : "=r"(pair) : "f"(x));
    return pair;
}
static __device__ __forceinline__ u16 bfloat16(float x) {
    u16 out;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(out) : "f"(x));
    return out;
}
#endif

static __device__ __forceinline__ u32 four(u32 first, u32 second, u32 factors) {
    return product_in_8_bits(first, factors) | product_in_8_bits(second, factors) << 16;
}

struct Row {
    int code;
    float scale, inverse;
};

static __device__ __forceinline__ void load(Row *rows, const Operand &p, int row, int end, int d, int c) {
#pragma unroll
    for (int k = 0; k < AHEAD; k++) {
        const i64 own = row + k * AT_ONCE < end ? row + k * AT_ONCE : end - 1;
        rows[k] = {p.codes[own * p.D + d], p.scales[own * p.C + c], p.inverse[own]};
    }
}

static __device__ __forceinline__ void store(const Operand &p, const Row &of, i64 row, int at, int lane) {
    p.values[row * p.D + p.first + at] = bfloat16(__fmul_rn((float)of.code, of.scale));
    const float share = __fmul_rn(of.scale, of.inverse);
    const u32 factors = twice(of.code < 0 ? -share : share);
    const uint4 *entry = shared + (of.code < 0 ? -of.code : of.code) * (PARTS * DIMENSIONS) + lane;
    uint2 *out = p.features + (row * p.width + at) * PARTS;
#pragma unroll
    for (int r = 0; r + 1 < PARTS; r += 2) {
        const uint4 x = entry[r * DIMENSIONS], y = entry[(r + 1) * DIMENSIONS];
        uint4 made;
        made.x = four(x.x, x.y, factors);
        made.y = four(x.z, x.w, factors);
        made.z = four(y.x, y.y, factors);
        made.w = four(y.z, y.w, factors);
        if (PARTS % 2 == 0) {
            *(uint4 *)(out + r) = made;
        } else {  // not aligned to 16 bytes
            out[r] = {made.x, made.y};
            out[r + 1] = {made.z, made.w};
        }
    }
    if (PARTS % 2) {
        const uint4 x = entry[(PARTS - 1) * DIMENSIONS];
        out[PARTS - 1] = {four(x.x, x.y, factors), four(x.z, x.w, factors)};
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) stochastic_features(const Operand p) {
    const int thread = threadIdx.x, lane = thread % DIMENSIONS, at = blockIdx.x * DIMENSIONS + lane;
    for (int i = thread; i < CODES * PARTS * DIMENSIONS; i += THREADS) {
        const int d = blockIdx.x * DIMENSIONS + i % DIMENSIONS;
        if (d < p.width) shared[i] = p.table[p.masks[(p.first + d) % p.chunk] * (CODES * PARTS) + i / DIMENSIONS];
    }
    __syncthreads();
    if (at >= p.width) return;
    const int begin = blockIdx.y * p.per_block, end = p.rows - begin < p.per_block ? p.rows : begin + p.per_block;
    const int d = p.first + at, c = d / p.chunk;
    int row = begin + thread / DIMENSIONS;
    Row next[AHEAD], rows[AHEAD];
    if (row < end) load(next, p, row, end, d, c);
    for (; row < end; row += AHEAD * AT_ONCE) {
#pragma unroll
        for (int k = 0; k < AHEAD; k++) rows[k] = next[k];
        if (row + AHEAD * AT_ONCE < end) load(next, p, row + AHEAD * AT_ONCE, end, d, c);
#pragma unroll
        for (int k = 0; k < AHEAD; k++)
            if (row + k * AT_ONCE < end) store(p, rows[k], row + k * AT_ONCE, at, lane);
    }
}
