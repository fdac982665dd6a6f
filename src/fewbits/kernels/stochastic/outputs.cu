// What kernels for many rows have in common: weights in the order of their lanes, and four neighbouring outputs at a time.
// A source includes it after its Product and slices.cu.

#pragma once

// Thread (slice, lane) of a block of 256: the words of 4 tiles of weights, in the order in which threads read them. In ones'
// COMPLEMENT every second output's neighbours change places, so that 8 lanes that look up the same byte of their words have
// 8 owners.
template <bool COMPLEMENT> static __device__ __forceinline__ void pack_weights(const Product &p) {
    const int lane = threadIdx.x % LANES, s = blockIdx.x * 8 + threadIdx.x / LANES;
    const int quad = blockIdx.y, b = blockIdx.z, slices = p.per_chunk * p.C;
    if (s >= slices) return;
    i64 first;
    const int length = length_of(p, s, &first), at = 4 * (lane % 4);
    u32 word[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int m = 32 * quad + 4 * (lane / 4) + i;
        word[i] = 0;
        if (m >= p.M) continue;
        load_codes(p, b, m, first, at, length, word + i);
        if (COMPLEMENT) {
            word[i] -= word[i] >> 7 & 0x01010101u;
            if (lane / 4 % 2) word[i] = __byte_perm(word[i], 0, 0x2301);
        }
    }
    ((uint4 *)p.weights)[(((i64)b * slices + s) * p.quads + quad) * LANES + lane] =
        uint4{word[0], word[1], word[2], word[3]};
}

// Values m ... m + 3 of a row of p.M, 0 beyond it; and the other way round.
static __device__ __forceinline__ void load_4(const Product &p, const float *row, int m, float *value) {
    if (p.M % 4 == 0 && m < p.M) {
        const float4 v = *(const float4 *)(row + m);
        value[0] = v.x, value[1] = v.y, value[2] = v.z, value[3] = v.w;
    } else {
#pragma unroll
        for (int t = 0; t < 4; t++) value[t] = m + t < p.M ? row[m + t] : 0.0f;
    }
}

static __device__ __forceinline__ void store_4(const Product &p, float *row, int m, const float *value) {
    if (p.M % 4 == 0 && m < p.M) {
        *(float4 *)(row + m) = float4{value[0], value[1], value[2], value[3]};
    } else {
#pragma unroll
        for (int t = 0; t < 4; t++)
            if (m + t < p.M) row[m + t] = value[t];
    }
}
