// The order in which lanes read a row of x from shared memory; included with the macros KIND, VALUES, CHUNK and STEPS.

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

static __device__ __forceinline__ void store_x(int at, int k, Four v) {
#if KIND == 1  // its odd dimensions meet codes that are 16 times as large
    v.x[1] *= 0.0625f, v.x[3] *= 0.0625f;
#endif
#if KIND == 5
    const u32 low = bf16_pair(v.x[0], v.x[1]), high = bf16_pair(v.x[2], v.x[3]);
#else
    const u32 low = half_pair(v.x[0], v.x[1]), high = half_pair(v.x[2], v.x[3]);
#endif
#if KIND >= 1 && KIND <= 4
    SHARED(u16, at + x_place(k)) = low, SHARED(u16, at + x_place(k + 1)) = low >> 16;
    SHARED(u16, at + x_place(k + 2)) = high, SHARED(u16, at + x_place(k + 3)) = high >> 16;
#else
    SHARED(uint2, at + x_place(k)) = uint2{low, high};
#endif
}
