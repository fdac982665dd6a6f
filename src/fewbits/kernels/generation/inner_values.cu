// Inner values of low-rank branches, t = x A^T, computed in blocks of their own; included by batch_x.cu, with its macros, INNER
// (such blocks; 0: no branch asks for them), INNER_M (rows of x) and A_ROWS (rows of A that a block takes).
//
// An adapter adds s t B^T to a product x W^T. B's side is added where a tile of outputs is finished (results.cu), and by then t
// has to be there. A kernel in front that computes t costs what a launch costs, four times a layer. But a batch's product has a
// kernel in front already: batch_x.cu, which puts x in order with one block a row and leaves most of the GPU idle.
// So blocks behind those compute t there.
//
// A block takes A_ROWS rows of A. Its threads share K, eight values each; sums go over the lanes of a warp, then over warps,
// in a fixed order. x is normalised at the end: the factor of a row is the same for all its values.
//
// For one or two rows there is no such kernel: there the kernel that makes x begins t, see inner_parts.cu.

#pragma once

struct LowRank {
    const u16 *a[3];   // (rank, K), rows one behind the other
    float *inner[3];   // (M, rank), rows ``pitch`` values apart
    int rank[3], pitch[3];
};

#if INNER
#include "x_order.cu"

// Which branch has row ``row`` of all As, one behind the other; its row in that A.
static __device__ __forceinline__ int branch_of(const LowRank &low, int *row) {
    int of = 0;
    while (of < 2 && *row >= low.rank[of]) *row -= low.rank[of], of++;
    return of;
}

static __device__ __forceinline__ float sum_of_warp(float x) {
#pragma unroll
    for (int d = 16; d; d /= 2) x += __shfl_xor_sync(0xffffffffu, x, d);
    return x;
}

#define INNER_SUM(warp, m, i) SHARED(float, (((warp) * INNER_M + (m)) * (A_ROWS + 1) + (i)) * 4)

template <class P> static __device__ __forceinline__ void compute_inner(const P &p, int block) {
    const LowRank &low = p.low;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, ranks = low.rank[0] + low.rank[1] + low.rank[2];
    for (int begin = block * A_ROWS; begin < ranks; begin += INNER * A_ROWS)
        for (int i = 0; i < A_ROWS && begin + i < ranks; i++) {
            int row = begin + i;
            const int of = branch_of(low, &row);
            if (threadIdx.x % 8 == 0)
                for (int k = 8 * threadIdx.x; k < p.K; k += 8 * THREADS) ask_for(low.a[of] + (i64)row * p.K + k);
        }
    wait_for_the_kernel_before();
    for (int begin = block * A_ROWS; begin < ranks; begin += INNER * A_ROWS) {
        const u16 *rows[A_ROWS];
#pragma unroll
        for (int i = 0; i < A_ROWS; i++) {
            int row = begin + i < ranks ? begin + i : ranks - 1;
            const int of = branch_of(low, &row);
            rows[i] = low.a[of] + (i64)row * p.K;
        }
        float sum[A_ROWS][INNER_M] = {}, squares[INNER_M] = {};
        for (int k = 8 * threadIdx.x; k < p.K; k += 8 * THREADS) {
            uint4 a[A_ROWS];
#pragma unroll
            for (int i = 0; i < A_ROWS; i++) a[i] = *(const uint4 *)(rows[i] + k);
#if NORM
            const Four weight[2] = {norm_weights(p, k), norm_weights(p, k + 4)};
#endif
#pragma unroll
            for (int m = 0; m < INNER_M; m++) {
                Four x[2] = {four_of(p, m, k), four_of(p, m, k + 4)};
#if NORM
#pragma unroll
                for (int e = 0; e < 8; e++) {
                    squares[m] += x[e / 4].x[e % 4] * x[e / 4].x[e % 4];
                    x[e / 4].x[e % 4] *= weight[e / 4].x[e % 4];
                }
#endif
#pragma unroll
                for (int i = 0; i < A_ROWS; i++) {
                    const u32 words[4] = {a[i].x, a[i].y, a[i].z, a[i].w};
#pragma unroll
                    for (int e = 0; e < 8; e++) sum[i][m] += from_16(words[e / 2] >> (e % 2 * 16) & 0xffff) * x[e / 4].x[e % 4];
                }
            }
        }
#pragma unroll
        for (int m = 0; m < INNER_M; m++) {
#pragma unroll
            for (int i = 0; i < A_ROWS; i++) {
                const float all = sum_of_warp(sum[i][m]);
                if (lane == 0) INNER_SUM(warp, m, i) = all;
            }
            if (NORM) {
                const float all = sum_of_warp(squares[m]);
                if (lane == 0) INNER_SUM(warp, m, A_ROWS) = all;
            }
        }
        __syncthreads();
        const int i = threadIdx.x % A_ROWS, m = threadIdx.x / A_ROWS;
        int row = begin + i;
        if (m < INNER_M && row < ranks) {
            float y = 0.0f, square = 0.0f;
            for (int w = 0; w < WARPS; w++) {
                y += INNER_SUM(w, m, i);
                if (NORM) square += INNER_SUM(w, m, A_ROWS);
            }
#if NORM
            y *= 1.0f / sqrtf(square / p.K + p.eps);
#endif
            const int of = branch_of(low, &row);
            low.inner[of][(i64)m * low.pitch[of] + row] = y;
        }
        __syncthreads();
    }
}
#endif
