// How rows of x are read, four dimensions at a time, and the order in which lanes read them; included with the macros KIND,
// VALUES, CHUNK, STEPS and X_KIND.

#pragma once

// Byte of k in a row: a lane's four dimensions of one product lie together, then those of its neighbours.
static __device__ __forceinline__ u32 x_place(u32 k) {
    const u32 in_lane = k % VALUES;
#if KIND == 1
    const u32 e = in_lane % 8, step = in_lane / 8 * 2 + e % 4 / 2, place = e % 2 * 2 + e / 4;
#else
    const u32 step = in_lane / 4, place = KIND >= 2 && KIND <= 4 ? in_lane % 2 * 2 + in_lane % 4 / 2 : in_lane % 4;
#endif
    return ((k / CHUNK * STEPS + step) * 4 + k % CHUNK / VALUES) * 8 + place * 2;
}

struct Four {
    float x[4];
};

template <class P> static __device__ __forceinline__ Four four_of(const P &p, int m, int k) {
    Four v;
#if X_KIND == 0
    const float4 x = *(const float4 *)((const float *)p.x + m * p.x_pitch + k);
    v.x[0] = x.x, v.x[1] = x.y, v.x[2] = x.z, v.x[3] = x.w;
#else
    const uint2 x = *(const uint2 *)((const u16 *)p.x + m * p.x_pitch + k);
    v.x[0] = from_16(x.x & 0xffff), v.x[1] = from_16(x.x >> 16), v.x[2] = from_16(x.y & 0xffff), v.x[3] = from_16(x.y >> 16);
#endif
    return v;
}

// The norm's weights of dimensions k to k + 3.
template <class P> static __device__ __forceinline__ Four norm_weights(const P &p, int k) {
    const uint2 w = *(const uint2 *)(p.norm + k);
    return {from_16(w.x & 0xffff) + p.norm_offset, from_16(w.x >> 16) + p.norm_offset,
            from_16(w.y & 0xffff) + p.norm_offset, from_16(w.y >> 16) + p.norm_offset};
}

// Four dimensions from k on as lanes need them, in 16 bits: two pairs.
static __device__ __forceinline__ uint2 pairs_of(Four v) {
#if KIND == 1  // its odd dimensions meet codes that are 16 times as large
    v.x[1] *= 0.0625f, v.x[3] *= 0.0625f;
#endif
#if KIND == 5
    return {bf16_pair(v.x[0], v.x[1]), bf16_pair(v.x[2], v.x[3])};
#else
    return {half_pair(v.x[0], v.x[1]), half_pair(v.x[2], v.x[3])};
#endif
}

static __device__ __forceinline__ void store_x(int at, int k, Four v) {
    const uint2 pairs = pairs_of(v);
#if KIND >= 1 && KIND <= 4
    SHARED(u16, at + x_place(k)) = pairs.x, SHARED(u16, at + x_place(k + 1)) = pairs.x >> 16;
    SHARED(u16, at + x_place(k + 2)) = pairs.y, SHARED(u16, at + x_place(k + 3)) = pairs.y >> 16;
#else
    SHARED(uint2, at + x_place(k)) = pairs;
#endif
}
