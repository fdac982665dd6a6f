// 4-bit codes (NF4 or FP4) of a weight (N, K) to 8-bit floating point (E4M3) in transposed order, (K, N); dequantize.py
// has the formula.
//
// The problem. Codes lie along K in memory and results along N, and memory is fast only where neighbouring threads read
// and write neighbouring bytes. So each piece of the matrix has to be transposed on the chip between reading and writing.
//
// 1. A block of 64 codes shares one scale, so it can only become 16 different values. A thread computes these 16 once; each
//    code then looks its value up in the thread's own registers, four at a time (the byte permutation prmt).
// 2. A thread decodes one block of 64 in each of 4 neighbouring rows and transposes them in registers: the values of 4 rows
//    make one 32-bit word. The 32 threads of a warp have 128 rows, so together they write 128 neighbouring bytes, one whole
//    line of memory, for each of the 64 columns.
//
// Compiled at run time with SCALE_BLOCK defined: how many scales share a second-level scale with double quantisation, where
// scales are codes themselves; 0 without it.

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;
typedef long long i64;

#define THREADS 256
#define BLOCK 64         // values under one scale
#define ROWS (32 * 4)    // of a warp
#define WARPS (THREADS / 32)

struct Arguments {
    const u8 *codes;            // (N, K / 2)
    const void *scales;         // (N, K / 64): bytes if SCALE_BLOCK, else float32
    const float *scale_table;   // (256,): SCALE_BLOCK, as the next two
    const float *scale_scales;  // one for each SCALE_BLOCK scales
    const float *scale_offset;  // (1,)
    const float *inverse;       // (1,)
    u8 *out;                    // (K, N)
    int N, K, pitch;
    float values[16];
};

#ifndef EMULATED
// __byte_perm, which leaves a selector's high bit out; here it asks for the byte's sign, eight times.
static __device__ __forceinline__ u32 bytes_of(u32 low, u32 high, u32 selector) {
    u32 out;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(out) : "r"(low), "r"(high), "r"(selector));
    return out;
}
static __device__ __forceinline__ u32 e4m3_pair(float low, float high) {
    u16 out;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(out) : "f"(high), "f"(low));
    return out;
}
#endif

static __device__ __forceinline__ float scale_of(const Arguments &p, u32 block) {
#if SCALE_BLOCK
    const float first = __ldg(p.scale_table + __ldg((const u8 *)p.scales + block));
    return __fadd_rn(__fmul_rn(first, __ldg(p.scale_scales + block / SCALE_BLOCK)), __ldg(p.scale_offset));
#else
    return __ldg((const float *)p.scales + block);
#endif
}

// Four values of as many codes, from a table of 16 bytes.
static __device__ __forceinline__ u32 look_up(const u32 *table, u32 codes) {
    const u32 low = bytes_of(table[0], table[1], codes & 0x7777u);
    const u32 high = bytes_of(table[2], table[3], codes & 0x7777u);
    // Bytes of ones where a code's highest bit is set: the sign of 0x80, over and over, beside zeros.
    const u32 mask = bytes_of(0x8000u, 0, (codes & 0x8888u) | (codes >> 3 & 0x1111u));
    return (high & mask) | (low & ~mask);
}

extern "C" __global__ void __launch_bounds__(THREADS) dequantize_turned(const Arguments p) {
    const int n = blockIdx.x * ROWS + threadIdx.x % 32 * 4, blocks = p.K / BLOCK;
    const int column = blockIdx.y * WARPS + threadIdx.x / 32;
    if (n >= p.N || column >= blocks) return;
    uint4 codes[4][2];
    float scales[4];
#pragma unroll
    for (int row = 0; row < 4; row++) {
        const uint4 *at = (const uint4 *)(p.codes + (i64)(n + row) * (p.K / 2) + column * (BLOCK / 2));
        codes[row][0] = __ldg(at);
        codes[row][1] = __ldg(at + 1);
        scales[row] = scale_of(p, (u32)(n + row) * blocks + column);
    }
    const float inverse = __ldg(p.inverse);
    u32 tables[4][4];
#pragma unroll
    for (int row = 0; row < 4; row++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float w[4];
#pragma unroll
            for (int j = 0; j < 4; j++) w[j] = __fmul_rn(__fmul_rn(p.values[4 * i + j], scales[row]), inverse);
            tables[row][i] = e4m3_pair(w[0], w[1]) | e4m3_pair(w[2], w[3]) << 16;
        }
    u8 *out = p.out + (i64)column * BLOCK * p.pitch + n;
#pragma unroll
    for (int word = 0; word < 8; word++) {
        u32 eight[4];
#pragma unroll
        for (int row = 0; row < 4; row++) {
            const uint4 four = codes[row][word / 4];
            eight[row] = word % 4 == 0 ? four.x : word % 4 == 1 ? four.y : word % 4 == 2 ? four.z : four.w;
        }
#pragma unroll
        for (int half = 0; half < 2; half++) {
            u32 x[4];
#pragma unroll
            for (int row = 0; row < 4; row++) x[row] = look_up(tables[row], eight[row] >> (16 * half));
            const u32 low[2] = {__byte_perm(x[0], x[1], 0x5140), __byte_perm(x[2], x[3], 0x5140)};
            const u32 high[2] = {__byte_perm(x[0], x[1], 0x7362), __byte_perm(x[2], x[3], 0x7362)};
            const u32 turned[4] = {__byte_perm(low[0], low[1], 0x5410), __byte_perm(low[0], low[1], 0x7632),
                                   __byte_perm(high[0], high[1], 0x5410), __byte_perm(high[0], high[1], 0x7632)};
#pragma unroll
            for (int i = 0; i < 4; i++) {
                *(u32 *)out = turned[i];
                out += p.pitch;
            }
        }
    }
}
