// A matrix of 16 bits as float8 codes and as codes of its transpose, under one multiplier or one for each 128 values;
// float8_operands.py has the formulas.
//
// The problem. Five of its bytes must move for each two values (2 read, 1 written twice), and everything else has to hide behind that:
// the largest magnitude of each row and each column of a tile, two conversions, and one turn.
//
// 1. A thread holds 8 x 8 values, so that both conversions find their pairs in its own registers, and eight codes of a row or of a
//    column are one word of 8 bytes. Rows go to memory from there; columns by way of shared memory, in lines of 128 bytes.
// 2. Magnitudes are compared two at a time, as the bits of the values without their signs, whose order is that of the numbers and has
//    NaN above all. The 16 threads of eight rows halve what they compare at each step.
// 3. Multipliers, which take a division each, are computed by one thread each and go round by shared memory.
// 4. Sums of columns (a bias's gradient) cost a second reading of x elsewhere; here 64 additions a thread. Each tile writes its own.
// 5. What is rounded may be x, x * sigmoid(p(x)) with p(x) = linear * x + cubic * x^3 (SiLU; GELU by tanh), or its gradient by dy: 64
//    exponentials and reciprocals of the special units a thread, which hide too, and the activation itself is never stored.
//
// Compiled at run time with these macros: THROUGH 0 (x), 1 (the activation), 2 (its gradient); WAY 0 (multipliers of 1 x 128 values), 1 (of 128 x 128), 2 (one, given); ROWS, COLUMNS,
// RECORD, SUMS 0 or 1: what is wanted; POWER_OF_TWO; E5M2, else E4M3; FLOAT16, else bfloat16.

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;
typedef long long i64;

#define THREADS 256
#define SIDE 128
#define WARPS (THREADS / 32)
#define LARGEST (E5M2 ? 57344.0f : 448.0f)
#define MAGNITUDES 0x7fff7fffu

struct Arguments {
    const u8 *x;              // (M, K), rows ``pitch`` values apart
    const float *multiplier;  // (1,): WAY 2
    u8 *rows;                 // (M, K)
    float *row_scales;        // (ceil(K / 128), M), or of tiles (ceil(M / 128), ceil(K / 128))
    u8 *columns;              // (K, M)
    float *column_scales;     // (ceil(M / 128), K), or of tiles (ceil(K / 128), ceil(M / 128))
    int *largest;             // (1,) float32 that is not negative: RECORD
    float *sums;              // (ceil(M / 128), K), of each tile's rows: SUMS
    const u8 *dy;             // (M, K): THROUGH 2
    int M, K, pitch;
    float epsilon, overflow, linear, cubic;
};

#ifndef EMULATED
static __device__ __forceinline__ u32 code_pair(float low, float high) {
    u16 out;
#if E5M2
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(out) : "f"(high), "f"(low));
#else
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(out) : "f"(high), "f"(low));
#endif
    return out;
}
static __device__ __forceinline__ float wide(u16 half) {
    float out;
    asm("cvt.f32.f16 %0, %1;" : "=f"(out) : "h"(half));
    return out;
}
static __device__ __forceinline__ float exp2_fast(float x) {
    float out;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
    return out;
}
static __device__ __forceinline__ float reciprocal(float x) {
    float out;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
    return out;
}
static __device__ __forceinline__ u32 half_pair(float low, float high) {
    u32 out;
#if FLOAT16
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
#else
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
#endif
    return out;
}
static __device__ __forceinline__ u32 larger(u32 a, u32 b) { return __vmaxu2(a, b); }
static __device__ __forceinline__ uint4 load_once(const u8 *at) {
    uint4 v;
    asm("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at));
    return v;
}
#endif

// The low (0) or the high (1) value of a pair.
static __device__ __forceinline__ float value_of(u32 pair, int high) {
#if FLOAT16
    return wide((u16)(high ? pair >> 16 : pair));
#else
    return __uint_as_float(high ? pair & 0xffff0000u : pair << 16);
#endif
}

// x * sigmoid(p(x)), or dy times its derivative.
static __device__ __forceinline__ float through(float x, float dy, const Arguments &p) {
    const float square = x * x;
    const float s = reciprocal(1.0f + exp2_fast(-1.44269504f * x * (p.linear + p.cubic * square)));
#if THROUGH == 2
    const float slope = p.linear + 3.0f * p.cubic * square, rest = 1.0f - s;
    return dy * (s + (rest == 0.0f ? 0.0f : x * s * rest * slope));  // far out, 0 times what overflows
#else
    return s == 0.0f ? 0.0f : x * s;
#endif
}

// What brings the largest magnitude ``amax`` to LARGEST.
static __device__ __forceinline__ float multiplier_of(float amax, const Arguments &p) {
    amax = amax < p.epsilon ? p.epsilon : amax;  // a NaN stays
    float multiplier = __fdiv_rn(LARGEST, amax);
    if (__float_as_uint(multiplier) == 0x7f800000u) multiplier = p.overflow;
#if POWER_OF_TWO
    multiplier = amax == amax ? __uint_as_float(__float_as_uint(multiplier) & 0x7f800000u) : amax;
#endif
    return amax == 0.0f ? 1.0f : multiplier;
}

static __device__ __forceinline__ u32 larger_of_lanes(u32 x, int bits) { return larger(x, __shfl_xor_sync(0xffffffffu, x, bits)); }

extern "C" __global__ void __launch_bounds__(THREADS, 3) float8_tile(const Arguments p) {
    __shared__ uint4 turned[SIDE * SIDE / 16];
    __shared__ u32 of_rows[SIDE / 2], of_columns[WARPS][SIDE / 2];  // largest magnitudes, in pairs
    __shared__ float multipliers[2 * SIDE];                         // of rows, then of columns
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32, group = thread % 16;
    const int row_tiles = (p.M + SIDE - 1) / SIDE, column_tiles = (p.K + SIDE - 1) / SIDE;
    const int row_tile = blockIdx.x % row_tiles, column_tile = blockIdx.x / row_tiles;
    const int first_row = row_tile * SIDE, first_column = column_tile * SIDE;
    const int row = first_row + thread / 16 * 8, column = first_column + group * 8;
    const bool has_columns = column < p.K;
#if SUMS
    __shared__ float of_warps[WARPS][SIDE];
#endif
    u32 w[8][4];
#pragma unroll
    for (int r = 0; r < 8; r++) {
        uint4 v = {0, 0, 0, 0};
        if (has_columns && row + r < p.M) v = load_once(p.x + ((i64)(row + r) * p.pitch + column) * 2);
        w[r][0] = v.x, w[r][1] = v.y, w[r][2] = v.z, w[r][3] = v.w;
#if THROUGH == 2
        uint4 d = {0, 0, 0, 0};
        if (has_columns && row + r < p.M) d = load_once(p.dy + ((i64)(row + r) * p.K + column) * 2);
        const u32 dy[4] = {d.x, d.y, d.z, d.w};
#elif THROUGH == 1
        const u32 dy[4] = {0, 0, 0, 0};
#endif
#if THROUGH
#pragma unroll
        for (int i = 0; i < 4; i++)
            w[r][i] = half_pair(through(value_of(w[r][i], 0), value_of(dy[i], 0), p),
                                through(value_of(w[r][i], 1), value_of(dy[i], 1), p));
#endif
    }

#if SUMS
#pragma unroll
    for (int k = 0; k < 8; k++) {
        float sum = 0.0f;
#pragma unroll
        for (int r = 0; r < 8; r++) sum += value_of(w[r][k / 2], k % 2);
        sum += __uint_as_float(__shfl_xor_sync(0xffffffffu, __float_as_uint(sum), 16));
        if (lane < 16) of_warps[warp][group * 8 + k] = sum;
    }
#endif

    // The largest magnitudes.
#if WAY == 0 && ROWS
    u32 pairs[4];  // of two rows each
#pragma unroll
    for (int i = 0; i < 4; i++) {
        u32 two[2];
#pragma unroll
        for (int k = 0; k < 2; k++) {
            const u32 *x = w[2 * i + k];
            two[k] = larger(larger(x[0] & MAGNITUDES, x[1] & MAGNITUDES), larger(x[2] & MAGNITUDES, x[3] & MAGNITUDES));
        }
        pairs[i] = larger(__byte_perm(two[0], two[1], 0x5410), __byte_perm(two[0], two[1], 0x7632));
    }
    const bool up = lane & 8, upper = lane & 4;
    const u32 low = larger(up ? pairs[2] : pairs[0], __shfl_xor_sync(0xffffffffu, up ? pairs[0] : pairs[2], 8));
    const u32 high = larger(up ? pairs[3] : pairs[1], __shfl_xor_sync(0xffffffffu, up ? pairs[1] : pairs[3], 8));
    u32 mine = larger(upper ? high : low, __shfl_xor_sync(0xffffffffu, upper ? low : high, 4));
    mine = larger_of_lanes(larger_of_lanes(mine, 2), 1);
    if (lane % 4 == 0) of_rows[thread / 16 * 4 + (up ? 2 : 0) + (upper ? 1 : 0)] = mine;
#endif
#if (WAY == 0 && COLUMNS) || WAY == 1 || RECORD
    u32 most[4];  // of two columns each
#pragma unroll
    for (int i = 0; i < 4; i++) {
        most[i] = w[0][i] & MAGNITUDES;
#pragma unroll
        for (int r = 1; r < 8; r++) most[i] = larger(most[i], w[r][i] & MAGNITUDES);
    }
#if WAY == 0
#pragma unroll
    for (int i = 0; i < 4; i++) most[i] = larger_of_lanes(most[i], 16);
    if (lane < 16)
#pragma unroll
        for (int i = 0; i < 4; i++) of_columns[warp][group * 4 + i] = most[i];
#else
    u32 whole = larger(larger(most[0], most[1]), larger(most[2], most[3]));
#pragma unroll
    for (int bits = 1; bits < 32; bits *= 2) whole = larger_of_lanes(whole, bits);
    if (lane == 0) of_columns[warp][0] = whole;
#endif
#endif

    // Their multipliers.
#if WAY != 2 || RECORD || SUMS
    __syncthreads();
#endif
#if SUMS
    if (thread < SIDE && first_column + thread < p.K) {
        float sum = of_warps[0][thread];
#pragma unroll
        for (int i = 1; i < WARPS; i++) sum += of_warps[i][thread];
        p.sums[(i64)row_tile * p.K + first_column + thread] = sum;
    }
#endif
#if WAY == 0
    {
        const bool is_row = thread < SIDE;
        const int at = thread % SIDE;
        u32 pair = is_row ? of_rows[at / 2] : of_columns[0][at / 2];
        if (!is_row)
#pragma unroll
            for (int i = 1; i < WARPS; i++) pair = larger(pair, of_columns[i][at / 2]);
        if (is_row ? ROWS : COLUMNS) {
            const float multiplier = multiplier_of(value_of(pair, at % 2), p), scale = __fdiv_rn(1.0f, multiplier);
            multipliers[thread] = multiplier;
            if (is_row && first_row + at < p.M) p.row_scales[(i64)column_tile * p.M + first_row + at] = scale;
            if (!is_row && first_column + at < p.K) p.column_scales[(i64)row_tile * p.K + first_column + at] = scale;
        }
    }
    __syncthreads();
#elif WAY == 1 || RECORD
    u32 all = of_columns[0][0];
#pragma unroll
    for (int i = 1; i < WARPS; i++) all = larger(all, of_columns[i][0]);
    const float amax = value_of(larger(all, all >> 16), 0);
#endif
#if WAY == 1
    const float multiplier = multiplier_of(amax, p), scale = __fdiv_rn(1.0f, multiplier);
    if (thread == 0) {
        if (ROWS) p.row_scales[(i64)row_tile * column_tiles + column_tile] = scale;
        if (COLUMNS) p.column_scales[(i64)column_tile * row_tiles + row_tile] = scale;
    }
#elif WAY == 2
    const float multiplier = __ldg(p.multiplier);
#if RECORD
    if (thread == 0) atomicMax(p.largest, (int)__float_as_uint(amax));
#endif
#endif

#if ROWS
#pragma unroll
    for (int r = 0; r < 8; r++) {
#if WAY == 0
        const float multiplier = multipliers[thread / 16 * 8 + r];
#endif
        u32 codes[4];
#pragma unroll
        for (int i = 0; i < 4; i++)
            codes[i] = code_pair(__fmul_rn(value_of(w[r][i], 0), multiplier), __fmul_rn(value_of(w[r][i], 1), multiplier));
        const uint2 eight = {codes[0] | codes[1] << 16, codes[2] | codes[3] << 16};
        if (has_columns && row + r < p.M) *(uint2 *)(p.rows + (i64)(row + r) * p.K + column) = eight;
    }
#endif
#if COLUMNS
    // Column k of the tile is line k; its eighths lie in an order that keeps 16 threads off each other's banks.
#pragma unroll
    for (int k = 0; k < 8; k++) {
#if WAY == 0
        const float multiplier = multipliers[SIDE + group * 8 + k];
#endif
        u32 codes[4];
#pragma unroll
        for (int i = 0; i < 4; i++)
            codes[i] = code_pair(__fmul_rn(value_of(w[2 * i][k / 2], k % 2), multiplier),
                                 __fmul_rn(value_of(w[2 * i + 1][k / 2], k % 2), multiplier));
        const uint2 eight = {codes[0] | codes[1] << 16, codes[2] | codes[3] << 16};
        ((uint2 *)turned)[(group * 8 + k) * 16 + (warp ^ group % 8) * 2 + lane / 16] = eight;
    }
    __syncthreads();
    const int eighth = thread % 8;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int k = thread / 8 + 32 * i, m = first_row + eighth * 16;
        const uint4 codes = turned[k * 8 + (eighth ^ k / 8 % 8)];
        if (first_column + k < p.K && m < p.M) *(uint4 *)(p.columns + (i64)(first_column + k) * p.M + m) = codes;
    }
#endif
}
