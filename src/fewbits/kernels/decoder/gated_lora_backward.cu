// The backward pass of a gated activation with LoRA branches: de and du, and with them all small products that the branches'
// gradients need, in one pass over memory; gated_lora_backward.py has the formulas.
//
// The problem is that of gated_lora_forward.cu: dh, e and u are read once and de and du written once, which is the floor,
// and the products with 16 inner values or results must not read any of these again.
//
// 1. Tiles of 16 rows and 32 columns lie in a warp's registers as launch/tensor_core.cu explains. de, du and h are computed
//    there and are operands of the tensor cores at once. Only the products that sum over rows (dw) need them transposed,
//    which the instruction movmatrix does once.
// 2. dw, the gradients of the branches' weights, sum over the rows that a block walks down: they stay in registers.
// 3. t, the gradients of the branches' inner values, sum over columns, of which each warp has a few. The warps' partial sums
//    of a block are added in shared memory, one step later; those of different slabs of columns, and the dw of different
//    blocks, by a second kernel, gated_lora_sum. All in a fixed order, so equal calls give equal bits.
//
// Compiled at run time with ACTIVATION (0: silu, 1: gelu_tanh), WRITE_D, FLOAT8 and WARPS (7, 8, 14 or 16) defined.

#include "launch/tensor_core.cu"

#define STAGES 2
#define STAGE_BYTES (3 * STEP * COLUMNS * 2)  // of a warp: dh, e, u
#define X_PITCH (3 * RANK * 2 + 16)           // so that 8 rows lie in different banks
#define X_BYTES (STEP * X_PITCH)
#define X_SLOTS (STAGES + 1)
#define T_BYTES (STEP * 2 * RANK * 4)  // a warp's share of t

struct Arguments {
    const u16 *dh, *e, *u;     // (M, I) bfloat16
    const u16 *xd, *xe, *xu;   // (M, 16)
    const u16 *wd, *we, *wu;   // (I, 16) of any strides
    u16 *de, *du;              // (M, I): WRITE_D
    u8 *q;                     // (M, 2 I) E4M3: FLOAT8
    const float *inverse;      // (1,)
    int *qmax;                 // (1,) bits of a float32 that is not negative
    float *t_shares;           // (slabs, M, 32)
    float *dw_shares;          // (splits, slabs, 3, SLAB, 16): gate, up, down
    u16 *t;                    // (M, 32)
    float *dw;                 // (3, I, 16)
    float scale_e, scale_u;
    int M, I, splits;
    int pitch_dh, pitch_e, pitch_u, pitch_xd, pitch_xe, pitch_xu;  // bytes of a row
    int pitch_de, pitch_du, pitch_q, pitch_t;
    int stride_wdi, stride_wdr, stride_wei, stride_wer, stride_wui, stride_wur;  // values
};

// Where in shared memory what lies, in bytes.
#define STAGE_AT 0
#define T_AT (STAGE_AT + STAGES * WARPS * STAGE_BYTES)
#define W_AT (T_AT + 2 * WARPS * T_BYTES)  // down, gate, up
#define X_AT (W_AT + 3 * WARPS * W_BYTES)
#define SHARED_BYTES (X_AT + X_SLOTS * X_BYTES)

// 1. The kernel.

// Begin to copy a step: what this lane needs of dh, e and u, and some of x.
static __device__ __forceinline__ void fetch(const Arguments &p, u32 stage, u32 x, int slab, int tile) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int column = slab * SLAB + warp * COLUMNS + lane % 4 * 8, row = tile * STEP + lane / 4;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const bool there = row + 8 * i < p.M;
        const int m = there ? row + 8 * i : 0;
        copy_async(stage + (0 + i) * 512, row_of(p.dh + column, m, p.pitch_dh), there);
        copy_async(stage + (2 + i) * 512, row_of(p.e + column, m, p.pitch_e), there);
        copy_async(stage + (4 + i) * 512, row_of(p.u + column, m, p.pitch_u), there);
    }
    if (warp < 3) {
        const u16 *from = warp == 0 ? p.xd : warp == 1 ? p.xe : p.xu;
        const int pitch = warp == 0 ? p.pitch_xd : warp == 1 ? p.pitch_xe : p.pitch_xu;
        const int m = tile * STEP + lane / 2;
        const bool there = m < p.M;
        copy_async(x + lane / 2 * X_PITCH + warp * 32 + lane % 2 * 16,
                   row_of(from + lane % 2 * 8, there ? m : 0, pitch), there);
    }
}

static __device__ __forceinline__ u32 lane_of_x() {
    const int lane = threadIdx.x % 32;
    return (lane / 16 * 8 + lane % 8) * X_PITCH + lane / 8 % 2 * 16;
}

// Four values of tile j: e, u and dh with their branches in, de, du and h as pairs for each of the two rows out.
static __device__ __forceinline__ void activate(const float *e, const float *u, const float *dh, u32 *de, u32 *du,
                                                u32 *h) {
    float a[4], b[4], c[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
#if ACTIVATION == 0
        const float s = logistic(e[i]), f = e[i] * s;
        const float slope = __fmaf_rn(f, 1.0f - s, s);
#else
        const float square = e[i] * e[i];
        const float s = logistic(1.5957691216057308f * e[i] * __fmaf_rn(0.044715f, square, 1.0f)), f = e[i] * s;
        const float slope = __fmaf_rn(f * (1.0f - s), __fmaf_rn(0.2140644488143471f, square, 1.5957691216057308f), s);
#endif
        a[i] = dh[i] * u[i] * slope;
        b[i] = dh[i] * f;
        c[i] = f * u[i];
    }
#pragma unroll
    for (int row = 0; row < 2; row++) {
        de[row] = bf16_pair(a[2 * row], a[2 * row + 1]);
        du[row] = bf16_pair(b[2 * row], b[2 * row + 1]);
        h[row] = bf16_pair(c[2 * row], c[2 * row + 1]);
    }
}

static __device__ __forceinline__ void write_t(const Arguments &p, u32 t, int slab, int tile) {
    const int m = tile * STEP;
    write_t<2 * RANK>(p.t_shares + ((i64)slab * p.M + m) * (2 * RANK), t, p.M - m);
}

static __device__ __forceinline__ void write_dw(const Arguments &p, const float (*dw)[4][4]) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    float *to = p.dw_shares + (i64)blockIdx.x * (3 * SLAB * RANK);
#pragma unroll
    for (int branch = 0; branch < 3; branch++)
#pragma unroll
        for (int j = 0; j < 4; j++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int column = warp * COLUMNS + lane % 4 * 8 + 2 * j + i % 2, r = lane / 4 + i / 2 * 8;
                to[(branch * SLAB + column) * RANK + r] = dw[branch][j][i];
            }
}

// What a lane carries from step to step.
struct Carried {
    float dw[3][4][4];  // of gate, up and down: (16 ranks, 8 columns) tiles
    u32 largest;        // magnitudes, a pair
    float inverse;
};

// One step of a warp. ``refill`` is called when the step's dh, e and u have been read.
template <class Refill>
static __device__ __forceinline__ void step(const Arguments &p, Carried &carried, int slab, int tile, u32 stage, u32 x,
                                            u32 w, u32 share, Refill refill) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    float t[4][4] = {};  // gate's ranks 0 - 7 and 8 - 15, up's
#if WRITE_D
    u32 gates[2][4], ups[2][4];
#endif
#if FLOAT8
    u32 codes_e[2][2], codes_u[2][2];
#endif
#pragma unroll
    for (int s = 0; s < 2; s++) {  // tiles 2 s and 2 s + 1
        u32 de[2][2], du[2][2], h[2][2];
        float in[2][3][4];
        u32 left[4], right[4];
        load_branches(in, stage, x, w, s);
        if (s == 1) refill();
#pragma unroll
        for (int j = 0; j < 2; j++) activate(in[j][1], in[j][2], in[j][0], de[j], du[j], h[j]);
#if WRITE_D
#pragma unroll
        for (int row = 0; row < 2; row++)
#pragma unroll
            for (int j = 0; j < 2; j++) {
                gates[row][2 * s + j] = de[j][row];
                ups[row][2 * s + j] = du[j][row];
            }
#endif
#if FLOAT8
#pragma unroll
        for (int j = 0; j < 2; j++)
#pragma unroll
            for (int row = 0; row < 2; row++) {
                const u32 both = larger_pair(de[j][row] & 0x7fff7fffu, du[j][row] & 0x7fff7fffu);
                carried.largest = larger_pair(carried.largest, both);
            }
        const bool finite = (carried.largest & 0xffffu) < 0x7f80u && carried.largest < 0x7f800000u;
        if (finite && carried.inverse == carried.inverse) {
#pragma unroll
            for (int row = 0; row < 2; row++) {
                codes_e[row][s] = float8_of(de[0][row], de[1][row], carried.inverse);
                codes_u[row][s] = float8_of(du[0][row], du[1][row], carried.inverse);
            }
        } else {
#pragma unroll
            for (int row = 0; row < 2; row++) {
                codes_e[row][s] = strange_float8_of(de[0][row], de[1][row], carried.inverse);
                codes_u[row][s] = strange_float8_of(du[0][row], du[1][row], carried.inverse);
            }
        }
#endif
        const u32 rows_e[4] = {de[0][0], de[0][1], de[1][0], de[1][1]};
        const u32 rows_u[4] = {du[0][0], du[0][1], du[1][0], du[1][1]};
        load_turned(right, w + 1 * (WARPS * W_BYTES) + 512 * s);
        multiply_add(t[0], rows_e, right[0], right[2]);
        multiply_add(t[1], rows_e, right[1], right[3]);
        load_turned(right, w + 2 * (WARPS * W_BYTES) + 512 * s);
        multiply_add(t[2], rows_u, right[0], right[2]);
        multiply_add(t[3], rows_u, right[1], right[3]);
#pragma unroll
        for (int branch = 0; branch < 3; branch++) {
            load_turned(left, x + (branch == 0 ? 1 : branch == 1 ? 2 : 0) * 32);
#pragma unroll
            for (int j = 0; j < 2; j++) {
                const u32 *pair = branch == 0 ? de[j] : branch == 1 ? du[j] : h[j];
                multiply_add(carried.dw[branch][2 * s + j], left, turned(pair[0]), turned(pair[1]));
            }
        }
    }
    const int column = slab * SLAB + warp * COLUMNS + lane % 4 * 8;
#pragma unroll
    for (int row = 0; row < 2; row++) {
        const int m = tile * STEP + lane / 4 + 8 * row;
        if (m < p.M) {
#if WRITE_D
            *(uint4 *)row_of(p.de + column, m, p.pitch_de) = uint4{gates[row][0], gates[row][1], gates[row][2], gates[row][3]};
            *(uint4 *)row_of(p.du + column, m, p.pitch_du) = uint4{ups[row][0], ups[row][1], ups[row][2], ups[row][3]};
#endif
#if FLOAT8
            u8 *q = row_of(p.q + column, m, p.pitch_q);
            *(uint2 *)q = uint2{codes_e[row][0], codes_e[row][1]};
            *(uint2 *)(q + p.I) = uint2{codes_u[row][0], codes_u[row][1]};
#endif
        }
    }
#pragma unroll
    for (int i = 0; i < 4; i++) store_four(share + 512 * i, t[i]);
}

extern "C" __global__ void __launch_bounds__(THREADS, 16 / WARPS) gated_lora_backward(const Arguments p) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const Place at = place_of_block(p.M, p.I, p.splits);
    if (at.tile >= at.last) return;

    const u32 base = shared_address(), w = base + W_AT + warp * W_BYTES + lane_of_weight();
    Carried carried = {};
#if FLOAT8
    carried.inverse = *p.inverse;
#endif
    u32 stage = base + STAGE_AT + warp * STAGE_BYTES + lane * 16, x = base + X_AT, t = base + T_AT;
    for (int i = 0; i < STAGES; i++) {
        if (at.tile + i < at.last) fetch(p, stage + i * (WARPS * STAGE_BYTES), x + i * X_BYTES, at.slab, at.tile + i);
        commit_copies();
    }
    load_weight(base + W_AT, p.wd, p.stride_wdi, p.stride_wdr, at.slab * SLAB);
    load_weight(base + W_AT + WARPS * W_BYTES, p.we, p.stride_wei, p.stride_wer, at.slab * SLAB);
    load_weight(base + W_AT + 2 * WARPS * W_BYTES, p.wu, p.stride_wui, p.stride_wur, at.slab * SLAB);
    for (int tile = at.tile; tile < at.last; tile++) {
        wait_copies<STAGES - 1>();
        __syncthreads();
        const u32 other_t = 2 * (base + T_AT) + WARPS * T_BYTES - t;
        if (tile > at.tile) write_t(p, other_t, at.slab, tile - 1);
        // The slot of x that was read in the step before, and after the next two.
        const u32 free_x = x == base + X_AT ? x + STAGES * X_BYTES : x - X_BYTES;
        step(p, carried, at.slab, tile, stage, x + lane_of_x(), w, t + warp * T_BYTES + lane * 16, [&]() {
            if (tile + STAGES < at.last) fetch(p, stage, free_x, at.slab, tile + STAGES);
            commit_copies();
        });
        t = other_t;
        stage = 2 * (base + STAGE_AT + warp * STAGE_BYTES + lane * 16) + WARPS * STAGE_BYTES - stage;
        x = x == base + X_AT + STAGES * X_BYTES ? base + X_AT : x + X_BYTES;
    }
    __syncthreads();
    write_t(p, 2 * (base + T_AT) + WARPS * T_BYTES - t, at.slab, at.last - 1);
    write_dw(p, carried.dw);
#if FLOAT8
    u32 bits = max(carried.largest << 16, carried.largest & 0xffff0000u);
#pragma unroll
    for (int i = 16; i; i /= 2) bits = max(bits, __shfl_xor_sync(0xffffffffu, bits, i));
    if (threadIdx.x % 32 == 0) atomicMax(p.qmax, (int)bits);
#endif
}

// The sums of shares: t, scaled and rounded, by the first blocks; dw by the others. Four numbers a thread.
extern "C" __global__ void __launch_bounds__(THREADS) gated_lora_sum(const Arguments p) {
    const i64 i = (i64)blockIdx.x * THREADS + threadIdx.x;
    const int of_t = (p.M * (2 * RANK / 4) + THREADS - 1) / THREADS * THREADS;
    const int slabs = p.I / SLAB;
    if (i < of_t) {
        const int m = (int)(i / 8), column = (int)(i % 8) * 4;
        if (m >= p.M) return;
        const float4 sum = sum_of(p.t_shares + (i64)m * (2 * RANK) + column, slabs, (i64)p.M * (2 * RANK / 4));
        const float scale = column < RANK ? p.scale_e : p.scale_u;
        *(uint2 *)row_of(p.t + column, m, p.pitch_t) =
            uint2{bf16_pair(sum.x * scale, sum.y * scale), bf16_pair(sum.z * scale, sum.w * scale)};
        return;
    }
    const i64 place = (i - of_t) * 4, of_branch = (i64)p.I * RANK;
    if (place >= 3 * of_branch) return;
    const int branch = (int)(place / of_branch), column = (int)(place % of_branch / RANK), slab = column / SLAB;
    const float *from = p.dw_shares + ((slab * 3 + branch) * SLAB + column % SLAB) * RANK + place % RANK;
    *(float4 *)(p.dw + place) = sum_of(from, p.splits, (i64)slabs * (3 * SLAB * RANK / 4));
}
