// What few_rows.cu and columns.cu are given; included by both, with their macros.

#pragma once

#include "hardware.cu"

struct Matrix {
    const u8 *codes;
    const void *scales;
    const float *scale_scales, *scale_offset;
    const signed char *zero_points;
    const u16 *bias;
    const u16 *branch;   // (N, rank) of a low-rank branch, or none; ``inner`` (M, rank) of any pitch is its other side
    const float *inner;
    i64 row_bytes;
    float branch_scale;
    int rank, inner_pitch;  // with PARTS: of the branch's inner values the first
    int N, scales_a_row, tiles, block_shift;  // block_shift: log2 of rows that share scales
};

struct InnerParts {  // see inner_parts.cu
    const float *parts;                // (PART_COUNT, INNER_M, pitch): the first column of this product's branches
    const u16 *next_a, *next_norm;     // (N / 8, NEXT, 8); (N,)
    float *next_sums;                  // (blocks or teams, INNER_M, NEXT)
    float next_offset;
    int pitch;
};

struct Arguments {
    Matrix w[3];
    const void *x;
    const u16 *norm;      // (K,), of the kind of 16 bits that HALF says
    const float *map;     // (256,) values of 8-bit scales
    void *out;
    i64 x_pitch, out_pitch;  // values
    float values[16];
    float eps, norm_offset, out_factor;
    int K, M, tiles, scale_shift, block_chunks;  // log2 of scales that share a second-level one; chunks that share a scale
    InnerParts inner;
};

// The matrix that has a tile's first (half 0) or last eight outputs, and the first of those in it.
static __device__ __forceinline__ const Matrix &matrix_of(const Arguments &p, int tile, int half, int *first) {
#if GATED
    *first = tile * 8;
    return p.w[half];
#else
    int of = 0;
    while (of < 2 && tile >= p.w[of].tiles) tile -= p.w[of].tiles, of++;
    *first = tile * 16 + half * 8;
    return p.w[of];
#endif
}
static __device__ __forceinline__ int row_in(const Matrix &w, int row) { return row < w.N ? row : w.N - 1; }
