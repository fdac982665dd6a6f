// A gated activation h = f(e) * u with LoRA branches added to e and u, and the product xa = h @ w_d that the next linear's
// LoRA branch (down's) needs, in one pass over memory; gated_lora_forward.py has the formulas.
//
// The problem. Reading e and u and writing h once is the least that memory allows (the floor). The branches' products have
// only 16 inner values or results, but as operations of their own they would read or write (M, I) again.
//
// 1. A block of threads has a slab of columns and walks down the rows. Each warp (32 threads) holds a tile of 16 rows and 32
//    columns in registers, in the layout that the tensor cores take and give: launch/tensor_core.cu explains it.
// 2. On such a tile the branches are added by the tensor cores, f and the product with u are computed, h is written, and the
//    same registers are an operand of the tensor cores' next product, h @ w_d.
// 3. xa sums over all columns, of which each warp has a few. The warps' partial sums of a block are added in shared memory,
//    one step later, so that no warp waits; those of the slabs by a second kernel, gated_lora_forward_sum. The order is
//    fixed, so equal calls give equal bits.
//
// Compiled at run time with ACTIVATION (0: silu, 1: gelu_tanh), WRITE_H, FLOAT8 and WARPS (7, 8, 14 or 16) defined.

#include "launch/tensor_core.cu"

#define STAGES 3
#define STAGE_BYTES (2 * STEP * COLUMNS * 2)  // of a warp: e, u
#define X_PITCH (2 * RANK * 2 + 16)           // so that 8 rows lie in different banks
#define X_BYTES (STEP * X_PITCH)
#define X_SLOTS (STAGES + 1)
#define T_BYTES (STEP * RANK * 4)  // a warp's share of xa

struct Arguments {
    const u16 *e, *u;         // (M, I) bfloat16
    const u16 *xe, *xu;       // (M, 16)
    const u16 *we, *wu, *wd;  // (I, 16) of any strides
    u16 *h;                   // (M, I): WRITE_H
    u8 *q;                    // (M, I) E4M3: FLOAT8
    const float *inverse;     // (1,)
    int *qmax;                // (1,) bits of a float32 that is not negative
    float *shares;            // (slabs, M, 16)
    u16 *xa;                  // (M, 16)
    float scale;
    int M, I, splits;
    int pitch_e, pitch_u, pitch_xe, pitch_xu, pitch_h, pitch_q, pitch_xa;  // bytes of a row
    int stride_wei, stride_wer, stride_wui, stride_wur, stride_wdi, stride_wdr;  // values
};

// Where in shared memory what lies, in bytes.
#define STAGE_AT 0
#define T_AT (STAGE_AT + STAGES * WARPS * STAGE_BYTES)
#define W_AT (T_AT + 2 * WARPS * T_BYTES)  // gate, up, down
#define X_AT (W_AT + 3 * WARPS * W_BYTES)
#define SHARED_BYTES (X_AT + X_SLOTS * X_BYTES)

// Begin to copy a step: what this lane needs of e and u, and some of x.
static __device__ __forceinline__ void fetch(const Arguments &p, u32 stage, u32 x, int slab, int tile) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int column = slab * SLAB + warp * COLUMNS + lane % 4 * 8, row = tile * STEP + lane / 4;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const bool there = row + 8 * i < p.M;
        const int m = there ? row + 8 * i : 0;
        copy_async(stage + (0 + i) * 512, row_of(p.e + column, m, p.pitch_e), there);
        copy_async(stage + (2 + i) * 512, row_of(p.u + column, m, p.pitch_u), there);
    }
    if (warp < 2) {
        const int m = tile * STEP + lane / 2;
        const bool there = m < p.M;
        copy_async(x + lane / 2 * X_PITCH + warp * 32 + lane % 2 * 16,
                   row_of((warp ? p.xu : p.xe) + lane % 2 * 8, there ? m : 0, warp ? p.pitch_xu : p.pitch_xe), there);
    }
}

static __device__ __forceinline__ u32 lane_of_x() {
    const int lane = threadIdx.x % 32;
    return (lane / 16 * 8 + lane % 8) * X_PITCH + lane / 8 % 2 * 16;
}

static __device__ __forceinline__ float activated(float e) {
#if ACTIVATION == 0
    return e * logistic(e);
#else
    return e * logistic(1.5957691216057308f * e * __fmaf_rn(0.044715f, e * e, 1.0f));
#endif
}

// One step of a warp. ``refill`` is called when the step's e and u have been read.
template <class Refill>
static __device__ __forceinline__ void step(const Arguments &p, u32 &largest, float inverse, int slab, int tile, u32 stage,
                                            u32 x, u32 w, u32 share, Refill refill) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    float t[2][4] = {};  // ranks 0 - 7 and 8 - 15
    u32 h[4][2];         // of each tile the two rows' pairs
#pragma unroll
    for (int s = 0; s < 2; s++) {  // tiles 2 s and 2 s + 1
        float in[2][2][4];
        u32 right[4];
        load_branches(in, stage, x, w, s);
        if (s == 1) refill();
#pragma unroll
        for (int j = 0; j < 2; j++)
#pragma unroll
            for (int row = 0; row < 2; row++)
                h[2 * s + j][row] = bf16_pair(activated(in[j][0][2 * row]) * in[j][1][2 * row],
                                              activated(in[j][0][2 * row + 1]) * in[j][1][2 * row + 1]);
        load_turned(right, w + 2 * (WARPS * W_BYTES) + 512 * s);
        const u32 rows[4] = {h[2 * s][0], h[2 * s][1], h[2 * s + 1][0], h[2 * s + 1][1]};
        multiply_add(t[0], rows, right[0], right[2]);
        multiply_add(t[1], rows, right[1], right[3]);
    }
#if FLOAT8
    u32 codes[2][2];
#pragma unroll
    for (int j = 0; j < 4; j++)
#pragma unroll
        for (int row = 0; row < 2; row++) largest = larger_pair(largest, h[j][row] & 0x7fff7fffu);
    const bool finite = (largest & 0xffffu) < 0x7f80u && largest < 0x7f800000u;
    if (finite && inverse == inverse) {
#pragma unroll
        for (int i = 0; i < 4; i++) codes[i / 2][i % 2] = float8_of(h[i % 2 * 2][i / 2], h[i % 2 * 2 + 1][i / 2], inverse);
    } else {
#pragma unroll
        for (int i = 0; i < 4; i++)
            codes[i / 2][i % 2] = strange_float8_of(h[i % 2 * 2][i / 2], h[i % 2 * 2 + 1][i / 2], inverse);
    }
#endif
    const int column = slab * SLAB + warp * COLUMNS + lane % 4 * 8;
#pragma unroll
    for (int row = 0; row < 2; row++) {
        const int m = tile * STEP + lane / 4 + 8 * row;
        if (m < p.M) {
#if WRITE_H
            *(uint4 *)row_of(p.h + column, m, p.pitch_h) = uint4{h[0][row], h[1][row], h[2][row], h[3][row]};
#endif
#if FLOAT8
            *(uint2 *)row_of(p.q + column, m, p.pitch_q) = uint2{codes[row][0], codes[row][1]};
#endif
        }
    }
#pragma unroll
    for (int i = 0; i < 2; i++) store_four(share + 512 * i, t[i]);
}

static __device__ __forceinline__ void write_t(const Arguments &p, u32 t, int slab, int tile) {
    const int m = tile * STEP;
    write_t<RANK>(p.shares + ((i64)slab * p.M + m) * RANK, t, p.M - m);
}

extern "C" __global__ void __launch_bounds__(THREADS, 16 / WARPS) gated_lora_forward(const Arguments p) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const Place at = place_of_block(p.M, p.I, p.splits);
    if (at.tile >= at.last) return;

    const u32 base = shared_address(), w = base + W_AT + warp * W_BYTES + lane_of_weight();
    const u32 first_stage = base + STAGE_AT + warp * STAGE_BYTES + lane * 16;
    u32 largest = 0;
    float inverse = 1.0f;
#if FLOAT8
    inverse = *p.inverse;
#endif
    u32 stage = first_stage, x = base + X_AT, t = base + T_AT;
    for (int i = 0; i < STAGES; i++) {
        if (at.tile + i < at.last) fetch(p, stage + i * (WARPS * STAGE_BYTES), x + i * X_BYTES, at.slab, at.tile + i);
        commit_copies();
    }
    load_weight(base + W_AT, p.we, p.stride_wei, p.stride_wer, at.slab * SLAB);
    load_weight(base + W_AT + WARPS * W_BYTES, p.wu, p.stride_wui, p.stride_wur, at.slab * SLAB);
    load_weight(base + W_AT + 2 * WARPS * W_BYTES, p.wd, p.stride_wdi, p.stride_wdr, at.slab * SLAB);
    for (int tile = at.tile; tile < at.last; tile++) {
        wait_copies<STAGES - 1>();
        __syncthreads();
        const u32 other_t = 2 * (base + T_AT) + WARPS * T_BYTES - t;
        if (tile > at.tile) write_t(p, other_t, at.slab, tile - 1);
        // The slot of x that was read in the step before.
        const u32 free_x = x == base + X_AT ? x + STAGES * X_BYTES : x - X_BYTES;
        step(p, largest, inverse, at.slab, tile, stage, x + lane_of_x(), w, t + warp * T_BYTES + lane * 16, [&]() {
            if (tile + STAGES < at.last) fetch(p, stage, free_x, at.slab, tile + STAGES);
            commit_copies();
        });
        t = other_t;
        stage = stage == first_stage + (STAGES - 1) * (WARPS * STAGE_BYTES) ? first_stage : stage + WARPS * STAGE_BYTES;
        x = x == base + X_AT + STAGES * X_BYTES ? base + X_AT : x + X_BYTES;
    }
    __syncthreads();
    write_t(p, 2 * (base + T_AT) + WARPS * T_BYTES - t, at.slab, at.last - 1);
#if FLOAT8
    u32 bits = max(largest << 16, largest & 0xffff0000u);
#pragma unroll
    for (int i = 16; i; i /= 2) bits = max(bits, __shfl_xor_sync(0xffffffffu, bits, i));
    if (lane == 0) atomicMax(p.qmax, (int)bits);
#endif
}

// xa, scaled and rounded: four numbers a thread.
extern "C" __global__ void __launch_bounds__(THREADS) gated_lora_forward_sum(const Arguments p) {
    const int i = blockIdx.x * THREADS + threadIdx.x, m = i / 4, column = i % 4 * 4;
    if (m >= p.M) return;
    const float4 sum = sum_of(p.shares + (i64)m * RANK + column, p.I / SLAB, (i64)p.M * (RANK / 4));
    *(uint2 *)row_of(p.xa + column, m, p.pitch_xa) =
        uint2{bf16_pair(sum.x * p.scale, sum.y * p.scale), bf16_pair(sum.z * p.scale, sum.w * p.scale)};
}
