// The rows of x that few_rows.cu and columns.cu multiply by: normalised, scaled and put in the order in which lanes read
// them; included by both, with their macros.

#pragma once

#include "inner_parts.cu"
#include "x_order.cu"

#if SUMS_OF_X
// Sums over the chunks of a row, of x as it lies there, times what makes the integers positive.
static __device__ __forceinline__ void sum_chunks(int at, int chunks) {
    for (int c = threadIdx.x; c < chunks; c += THREADS) {
        float sum = 0.0f;
        for (int i = 0; i < CHUNK; i += 4) {
            const uint2 four = SHARED(uint2, at + (c * CHUNK + i) * 2);
            const float odd = KIND == 1 ? 16.0f : 1.0f;  // the second pair
            sum += from_half(four.x & 0xffff) + from_half(four.x >> 16) + odd * (from_half(four.y & 0xffff) + from_half(four.y >> 16));
        }
        SHARED(float, at + X_BYTES(chunks) + c * 4) = sum;
    }
}
#endif

// What a thread knows before the kernel before has ended: the norm's weights of its share of K.
struct Known {
    uint2 norm[NORM && SHARE ? SHARE : 1];
};

static __device__ __forceinline__ void load_known(const Arguments &p, Known *known) {
#if NORM && SHARE
#pragma unroll
    for (int j = 0; j < SHARE; j++) {
        const int k = 4 * (threadIdx.x + j * THREADS);
        known->norm[j] = k < p.K ? *(const uint2 *)(p.norm + k) : uint2{0, 0};
    }
#endif
}

static __device__ __forceinline__ void times_norm(const Arguments &p, const Known &known, int j, int k, Four *v) {
#if NORM && SHARE
    const uint2 w = known.norm[j];
    v->x[0] *= from_16(w.x & 0xffff) + p.norm_offset, v->x[1] *= from_16(w.x >> 16) + p.norm_offset;
    v->x[2] *= from_16(w.y & 0xffff) + p.norm_offset, v->x[3] *= from_16(w.y >> 16) + p.norm_offset;
#elif NORM
    const Four w = norm_weights(p, k);
#pragma unroll
    for (int e = 0; e < 4; e++) v->x[e] *= w.x[e];
#endif
}

// All rows of x, and FACTORS. A thread's share of a row stays in registers between the two walks if SHARE says how many
// times four dimensions it is; else the second walk finds it in the first cache.
static __device__ __forceinline__ void bring_x(const Arguments &p, const Known &known) {
    const int chunks = (p.K + CHUNK - 1) / CHUNK, pitch = X_PITCH(chunks), lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int shares = SHARE ? SHARE : (p.K + 4 * THREADS - 1) / (4 * THREADS);
    for (int m = 0; m < p.M; m++) {
        float squares = 0.0f, largest = 0.0f;
        Four share[SHARE ? SHARE : 1];
#if SHARE
#pragma unroll
        for (int j = 0; j < SHARE; j++) {
            const int k = 4 * (threadIdx.x + j * THREADS);
            share[j] = k < p.K ? four_of(p, m, k) : Four{};
        }
#endif
#if PARTS
        if (m == 0) add_parts(p);
#endif
#if SHARE
#pragma unroll
#endif
        for (int j = 0; j < shares; j++) {
            const int k = 4 * (threadIdx.x + j * THREADS);
            if (!SHARE && k >= p.K) break;
            Four v = SHARE ? share[SHARE ? j : 0] : four_of(p, m, k);
            squares += v.x[0] * v.x[0] + v.x[1] * v.x[1] + v.x[2] * v.x[2] + v.x[3] * v.x[3];
            times_norm(p, known, j, k, &v);
            largest = fmaxf(fmaxf(largest, fmaxf(fabsf(v.x[0]), fabsf(v.x[1]))), fmaxf(fabsf(v.x[2]), fabsf(v.x[3])));
            if (SHARE) share[SHARE ? j : 0] = v;
        }
#pragma unroll
        for (int d = 16; d; d /= 2) {
            squares += __shfl_xor_sync(0xffffffffu, squares, d);
            largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, d));
        }
        if (m) __syncthreads();  // the row before has been read
        if (lane == 0) SHARED(float, PARTIAL_AT + 8 * warp) = squares, SHARED(float, PARTIAL_AT + 8 * warp + 4) = largest;
        __syncthreads();
        squares = 0.0f, largest = 0.0f;
#pragma unroll
        for (int i = 0; i < WARPS; i++) {
            squares += SHARED(float, PARTIAL_AT + 8 * i);
            largest = fmaxf(largest, SHARED(float, PARTIAL_AT + 8 * i + 4));
        }
        float factor = 1.0f;
#if NORM
        factor = 1.0f / sqrtf(squares / p.K + p.eps);
        largest *= factor;
#endif
#if PARTS
        finish_inner(m, factor);
#endif
        float undo = 1.0f;
#if KIND != 5
        const int exponent = (int)(__float_as_uint(largest) >> 23) - 127;
        if (exponent > -100 && exponent < 100) {  // not zero, not infinite
            factor *= __uint_as_float((u32)(12 - exponent + 127) << 23);
            undo = __uint_as_float((u32)(exponent - 12 + 127) << 23);
        }
#endif
        if (threadIdx.x == 0) SHARED(float, FACTORS_AT + 4 * m) = undo;
#if SHARE
#pragma unroll
#endif
        for (int j = 0; j < shares + (SHARE ? 0 : 1); j++) {
            const int k = 4 * (threadIdx.x + j * THREADS);
            if (k >= chunks * CHUNK) break;
            Four v = {};
            if (SHARE) v = share[SHARE ? j : 0];
            else if (k < p.K) {
                v = four_of(p, m, k);
                times_norm(p, known, j, k, &v);
            }
#pragma unroll
            for (int e = 0; e < 4; e++) v.x[e] *= factor;
            store_x(X_AT + m * pitch, k, v);
        }
    }
    __syncthreads();
#if SUMS_OF_X
    for (int m = 0; m < p.M; m++) sum_chunks(X_AT + m * pitch, chunks);
    __syncthreads();
#endif
}

