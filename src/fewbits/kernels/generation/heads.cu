// One head by one warp, as every attention of one new token starts: decode_attention.cu and packed_attention.cu include it.
// They define D (values of a head), HEAD_NORM, the struct Arguments, and the conversions to_16 and from_16.

#define TURNED ((D + 31) / 32)  // numbers of a head that a lane turns

static __device__ __forceinline__ float sum_of_warp(float x) {
#pragma unroll
    for (int d = 16; d; d /= 2) x += __shfl_xor_sync(0xffffffffu, x, d);
    return x;
}

// The rotation at a position, of the numbers that a lane turns.
struct Angles {
    float cosine[TURNED], sine[TURNED];
};
static __device__ __forceinline__ Angles angles_at(const Arguments &p, i64 position) {
    Angles a;
#pragma unroll
    for (int j = 0; j < TURNED; j++) {
        const int d = threadIdx.x % 32 + 32 * j;
        const bool turns = d < p.rotary;
        a.cosine[j] = turns ? p.cosines[position * p.rotary + d] : 1.0f;
        a.sine[j] = turns ? p.sines[position * p.rotary + d] : 0.0f;
    }
    return a;
}

// One head of D values by one warp: its norm, the rotation, rounding to 16 bits as a model does; to shared memory.
static __device__ __forceinline__ void turn_head(const Arguments &p, const float *from, const u16 *norm, const Angles &angles,
                                                 float factor, float *scratch, float *to) {
    const int lane = threadIdx.x % 32;
    float squares = 0.0f;
    for (int d = lane; d < D; d += 32) {
        const float x = from[d];
        scratch[d] = x;
        squares += x * x;
    }
#if HEAD_NORM
    if (norm) {
        const float inverse = rsqrtf(sum_of_warp(squares) / D + p.eps);
        for (int d = lane; d < D; d += 32) scratch[d] *= inverse * (from_16(norm[d]) + p.norm_offset);
    }
#endif
    __syncwarp();
    const int half = p.rotary / 2;
#pragma unroll
    for (int j = 0; j < TURNED; j++) {
        const int d = lane + 32 * j;
        if (d >= D) break;
        float x = scratch[d];
        if (d < p.rotary) {
            const float other = d < half ? -scratch[d + half] : scratch[d - half];
            x = x * angles.cosine[j] + other * angles.sine[j];
        }
        to[d] = from_16(to_16(x)) * factor;
    }
    __syncwarp();
}
