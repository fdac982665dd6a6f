// What becomes of a tile's sums in few_rows.cu and columns.cu: scales of whole rows, bias, branch, activation, the output;
// included by both, with their macros, SLICES (warps that share a tile), SUM_ROWS (rows of x in their sums), ADDING (threads
// that add them up) and SIMPLE (there is one matrix, or two if GATED).

#pragma once

#include "inner_parts.cu"

static __device__ __forceinline__ float activated(float x) {
#if ACTIVATION == 0
    return x / (1.0f + __expf(-x));
#elif ACTIVATION == 1
    return 0.5f * x * (1.0f + tanhf(0.7978845608028654f * (x + 0.044715f * x * x * x)));
#else
    return 0.5f * x * (1.0f + erff(x * 0.7071067811865476f));
#endif
}

// What stands there then, as the next kernel reads it.
static __device__ __forceinline__ float store(const Arguments &p, int m, i64 n, float y) {
    const i64 at = m * p.out_pitch + n;
    y *= p.out_factor;
#if OUT_KIND == 0
    float *out = (float *)p.out + at;
#if ADD
    y += *out;
#endif
    *out = y;
    return y;
#elif OUT_KIND == 1
    const u16 rounded = (u16)bf16_pair(y, y);
    ((u16 *)p.out)[at] = rounded;
    return from_bf16(rounded);
#else
    const u16 rounded = (u16)half_pair(y, y);
    ((u16 *)p.out)[at] = rounded;
    return from_half(rounded);
#endif
}

// What a row of the matrix still needs: the factor that x was brought by, a scale of the whole row, bias and branch, of which
// ``branch`` is B t with PARTS.
static __device__ __forceinline__ float finished(const Matrix &w, int row, int m, float sum, float branch) {
    sum *= SHARED(float, FACTORS_AT + 4 * m);
#if SCALES == 0 && KIND < 5
    sum *= ((const float *)w.scales)[w.scales_a_row ? row : 0] * (POSITIVE ? 1.0f : BITS_FACTOR);
#endif
    if (w.bias) sum += from_16(w.bias[row]);
#if PARTS
    if (w.branch) sum += w.branch_scale * branch;
#else
    if (w.branch) {
        branch = 0.0f;
        const u16 *b = w.branch + (i64)row * w.rank;
        const float *t = w.inner + (i64)m * w.inner_pitch;
        if (w.rank % 8 == 0 && w.inner_pitch % 4 == 0 && ((i64)w.branch | (i64)w.inner) % 16 == 0) {
#pragma unroll 2
            for (int r = 0; r < w.rank; r += 8) {
                const uint4 eight = *(const uint4 *)(b + r);
                const float4 low = load_four_from_others(t + r), high = load_four_from_others(t + r + 4);
                branch += from_16(eight.x & 0xffff) * low.x + from_16(eight.x >> 16) * low.y;
                branch += from_16(eight.y & 0xffff) * low.z + from_16(eight.y >> 16) * low.w;
                branch += from_16(eight.z & 0xffff) * high.x + from_16(eight.z >> 16) * high.y;
                branch += from_16(eight.w & 0xffff) * high.z + from_16(eight.w >> 16) * high.w;
            }
        } else {
            for (int r = 0; r < w.rank; r++) branch += from_16(b[r]) * load_from_others(t + r);
        }
        sum += w.branch_scale * branch;
    }
#endif
    return sum;
}

// Writes output ``row`` of a tile for row m of x: ``sum`` is its product with x, ``other`` that of a gated product's second half.
// ``branches``: B t of both, with PARTS. What was written, as the next kernel reads it; zero if there is no such output.
static __device__ __forceinline__ float write_output(const Arguments &p, int tile, int m, int row, float sum, float other,
                                                     float2 branches = float2{0.0f, 0.0f}) {
#if GATED
    const int n = tile * 8 + row;
    if (n < p.w[0].N) {
        sum = finished(p.w[0], n, m, sum, branches.x), other = finished(p.w[1], n, m, other, branches.y);
        return store(p, m, n, activated(sum) * other);
    }
#else
    int of = 0, left = tile;
    i64 before = 0;
    if (!SIMPLE) while (of < 2 && left >= p.w[of].tiles) left -= p.w[of].tiles, before += p.w[of].N, of++;
    const int n = left * 16 + row;
    if (n < p.w[of].N) return store(p, m, before + n, finished(p.w[of], n, m, sum, branches.x));
#endif
    return 0.0f;
}

// Adds the sums that SLICES warps left at ``base`` for a tile, in the warps' order, and writes what becomes of them;
// ``thread`` of the ADDING threads that do it, of which the first 32 are a warp: where there are branches in parts, they are
// enough for all rows of x, and ``own`` is what that warp has of this tile.
static __device__ __forceinline__ void add_up(const Arguments &p, int tile, int base, int thread, const Turn &turn, const BranchSums &own) {
    const int outputs = GATED ? 8 : 16;
    float written = 0.0f;
#if PARTS || NEXT
    if (thread >= 32) return;
#endif
    float2 branches = {0.0f, 0.0f};
#if PARTS
    branches.x = branch_of(own, thread / outputs, thread % outputs, 0);
    if (GATED) branches.y = branch_of(own, thread / outputs, thread % outputs, 1);
#endif
    if (tile < p.tiles) for (int i = thread; i < p.M * outputs; i += ADDING) {
        const int m = i / outputs, row = i % outputs;
        float sum = 0.0f, other = 0.0f;
#pragma unroll
        for (int from = 0; from < SLICES; from++) {
            sum += SHARED(float, base + ((from * SUM_ROWS + m) * 16 + row) * 4);
            if (GATED) other += SHARED(float, base + ((from * SUM_ROWS + m) * 16 + row + 8) * 4);
        }
        written = write_output(p, tile, m, row, sum, other, branches);
    }
#if NEXT
    begin_next(p, tile, tile * outputs + thread % outputs, written, turn);
#endif
}
