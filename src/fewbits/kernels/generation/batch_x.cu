// The rows of x that batch_rows.cu multiplies by: normalised, times a power of two that lets float16 hold them, in the order
// in which its lanes read them. One block for each row.
//
// x (M, K) becomes (chunks, STEPS / 2, ROWS, 4, 8) of 16 bits: of each chunk of K and each two products of 16 dimensions,
// for each row of x the four lanes that share a column, and a lane's four dimensions of either product. Dimensions from K to K_padded become zeros;
// rows from M on stay as they were, and nobody uses what is computed from them.
//
// Where branches ask for their inner values, the blocks behind those of the rows compute them (inner_values.cu).
//
// Compiled with KIND, VALUES, NORM, X_KIND and HALF as few_rows.cu is, GROUPS (of 8 rows), WIDE, SHARE (times that a block's threads take four dimensions each), WARPS, EARLY, INNER, INNER_M and A_ROWS.

#define SCALES 0
#define ROWS (8 * GROUPS)

#include "hardware.cu"
#include "inner_values.cu"
#include "x_order.cu"

struct RowsOfX {
    const void *x;      // (M, K), rows x_pitch values apart
    const u16 *norm;    // (K,)
    u8 *out;
    float *factors;     // (M,): what undoes the powers of two
    i64 x_pitch;
    float eps, norm_offset;
    int K, K_padded, M;
    LowRank low;
};

#define PARTIAL_AT 0    // sums of squares and maxima of warps

// Four dimensions of a row, times the norm's weights.
static __device__ __forceinline__ Four weighted(const RowsOfX &p, Four v, int k) {
#if NORM
    const Four w = norm_weights(p, k);
#pragma unroll
    for (int e = 0; e < 4; e++) v.x[e] *= w.x[e];
#endif
    return v;
}

// Where the dimension k of row m lies, in bytes.
static __device__ __forceinline__ i64 place_of(int m, int k) {
    const u32 in_row = x_place(k % CHUNK), step = in_row / 32, t = in_row % 32 / 8;
#if WIDE  // as warpgroup.cu says
    const u32 pair = in_row % 8 / 4;
    return (i64)(k / CHUNK) * (ROWS * CHUNK * 2) + step * (ROWS * 32) + m / 8 * 256 + pair * 128 + m % 8 * 16 + t * 4 + in_row % 4;
#else
    return (i64)(k / CHUNK) * (ROWS * CHUNK * 2) + ((step / 2 * ROWS + m) * 4 + t) * 16 + step % 2 * 8 + in_row % 8;
#endif
}

static __device__ __forceinline__ void store_four(const RowsOfX &p, int m, int k, Four v) {
    const uint2 pairs = pairs_of(v);
#if KIND >= 1 && KIND <= 4
    *(u16 *)(p.out + place_of(m, k)) = pairs.x, *(u16 *)(p.out + place_of(m, k + 1)) = pairs.x >> 16;
    *(u16 *)(p.out + place_of(m, k + 2)) = pairs.y, *(u16 *)(p.out + place_of(m, k + 3)) = pairs.y >> 16;
#elif WIDE
    *(u32 *)(p.out + place_of(m, k)) = pairs.x, *(u32 *)(p.out + place_of(m, k + 2)) = pairs.y;
#else
    *(uint2 *)(p.out + place_of(m, k)) = pairs;
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS) batch_x(const __grid_constant__ RowsOfX p) {
    const int m = blockIdx.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#if INNER
    if (m >= p.M) {
        compute_inner(p, m - p.M);
        return;
    }
#endif
    wait_for_the_kernel_before();
    float squares = 0.0f, largest = 0.0f;
    Four kept[SHARE];  // of the row, all asked for before one is there
#pragma unroll
    for (int i = 0; i < SHARE; i++) {
        const int k = 4 * (threadIdx.x + i * THREADS);
        kept[i] = {};
        if (k < p.K) kept[i] = four_of(p, m, k);
    }
#pragma unroll
    for (int i = 0; i < SHARE; i++) {
        Four &v = kept[i];
        const int k = 4 * (threadIdx.x + i * THREADS);
        squares += v.x[0] * v.x[0] + v.x[1] * v.x[1] + v.x[2] * v.x[2] + v.x[3] * v.x[3];
        if (k < p.K) v = weighted(p, v, k);
        largest = fmaxf(fmaxf(largest, fmaxf(fabsf(v.x[0]), fabsf(v.x[1]))), fmaxf(fabsf(v.x[2]), fabsf(v.x[3])));
    }
#pragma unroll
    for (int d = 16; d; d /= 2) {
        squares += __shfl_xor_sync(0xffffffffu, squares, d);
        largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, d));
    }
    if (lane == 0) SHARED(float, PARTIAL_AT + 8 * warp) = squares, SHARED(float, PARTIAL_AT + 8 * warp + 4) = largest;
    __syncthreads();
    squares = 0.0f, largest = 0.0f;
    for (int i = 0; i < WARPS; i++) {
        squares += SHARED(float, PARTIAL_AT + 8 * i);
        largest = fmaxf(largest, SHARED(float, PARTIAL_AT + 8 * i + 4));
    }
    float factor = 1.0f, undo = 1.0f;
#if NORM
    factor = 1.0f / sqrtf(squares / p.K + p.eps);
    largest *= factor;
#endif
#if KIND != 5
    const int exponent = (int)(__float_as_uint(largest) >> 23) - 127;
    if (exponent > -100 && exponent < 100) {  // not zero, not infinite
        factor *= __uint_as_float((u32)(12 - exponent + 127) << 23);
        undo = __uint_as_float((u32)(exponent - 12 + 127) << 23);
    }
#endif
    if (threadIdx.x == 0) p.factors[m] = undo;
#pragma unroll
    for (int i = 0; i < SHARE; i++) {
        Four v = kept[i];
        const int k = 4 * (threadIdx.x + i * THREADS);
#pragma unroll
        for (int e = 0; e < 4; e++) v.x[e] *= factor;
        if (k < p.K_padded) store_four(p, m, k, v);
    }
}
