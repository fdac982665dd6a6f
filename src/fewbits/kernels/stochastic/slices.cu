// What kernels over slices of SLICE inner dimensions have in common; a source includes it after its Product.

#pragma once

static __device__ __forceinline__ int level_of(const Product &p, int b, int n, int c) {
    return p.levels ? p.levels[(i64)b * p.level_b + (i64)n * p.level_n + (i64)c * p.level_c] : 0;
}

#ifdef SLICE

// How many inner dimensions a slice has, and which is its first.
static __device__ __forceinline__ int length_of(const Product &p, int s, i64 *first) {
    const int c = s / p.per_chunk, offset = (s - c * p.per_chunk) * SLICE;
    *first = (i64)c * p.chunk + offset;
    int left = p.chunk - offset;
    if (p.D - *first < left) left = (int)(p.D - *first);
    return left < SLICE ? left : SLICE;
}

// The codes of output m, which is there, for the 4 dimensions from ``at`` on of a slice, to a word of zeros.
static __device__ __forceinline__ void load_codes(const Product &p, int b, int m, i64 first, int at, int length,
                                                  u32 *word) {
    const s8 *codes = p.qb + ((i64)b * p.M + m) * p.D + first + at;
    if (at + 4 <= length && (i64)codes % 4 == 0) {
        *word = *(const u32 *)codes;
    } else {
        for (int j = 0; j < 4 && at + j < length; j++) *word |= (u32)(codes[j] & 255) << (8 * j);
    }
}

#endif
