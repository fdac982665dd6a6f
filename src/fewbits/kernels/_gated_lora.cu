// The backward pass of a gated activation with its branches' products, in registers; see gated_lora_backward.py.
//
// A warp takes 16 rows of 32 columns at a time, a block its warps' columns, and walks down the rows. Lane 4 g + q has columns 8 q ... 8 q + 7 of rows g and g + 8: 16 bytes a row, read and written as they lie in memory.
// To the tensor cores (m16n8k16) these are four tiles of 8 columns, tile j with every lane's columns 2 j and
// 2 j + 1: which column is called which does not matter as long as w's rows are in the same order. So what comes
// out of one product is what the next one takes, and only de, du and h are turned once (movmatrix), for dw.
//
// dw stays in registers. t's shares of a block's warps are added in shared memory, a step later, and those of the
// slabs of columns by gated_lora_sum, as are dw's of the blocks: all in a fixed order. Blocks share all steps of
// all slabs evenly, one run each.
//
// Compiled at run time with ACTIVATION (0: silu, 1: gelu_tanh), WRITE_D, FLOAT8 and WARPS (4, 8 or 16) defined.

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;
typedef long long i64;

#define THREADS (32 * WARPS)
#define RANK 16
#define COLUMNS 32              // of a warp
#define SLAB (COLUMNS * WARPS)  // columns of a block
#define STEP 16                 // rows of a step
#define STAGES 2
#define STAGE_BYTES (3 * STEP * COLUMNS * 2)  // of a warp: dh, e, u
#define X_PITCH (3 * RANK * 2 + 16)           // so that 8 rows lie in different banks
#define X_BYTES (STEP * X_PITCH)
#define X_SLOTS (STAGES + 1)
#define W_BYTES (COLUMNS * RANK * 2)  // of a warp and a branch
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
    float *dw_shares;          // (blocks + slabs, 3, SLAB, 16): gate, up, down
    u16 *t;                    // (M, 32)
    float *dw;                 // (3, I, 16)
    float scale_e, scale_u;
    int M, I, blocks;
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

// 1. What the hardware does; on a CPU the tests' emulation does it.

#ifndef EMULATED
extern __shared__ __align__(16) u8 shared_bytes[];

// Addresses in shared memory are numbers of 32 bits.
static __device__ __forceinline__ u32 shared_address() { return (u32)__cvta_generic_to_shared(shared_bytes); }

// 16 bytes to shared memory, without waiting; zeros if they are not there.
static __device__ __forceinline__ void copy_async(u32 to, const void *from, bool there) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
                 "r"(there ? 16 : 0) : "memory");
}
static __device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// All but the last group of this thread's copies are there.
static __device__ __forceinline__ void wait_copies() { asm volatile("cp.async.wait_group 1;" ::: "memory"); }

static __device__ __forceinline__ void load_matrices(u32 *to, u32 at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(at) : "memory");
}
static __device__ __forceinline__ void load_turned(u32 *to, u32 at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(at) : "memory");
}
static __device__ __forceinline__ uint2 load_pair(u32 at) {
    uint2 out;
    asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(out.x), "=r"(out.y) : "r"(at) : "memory");
    return out;
}
static __device__ __forceinline__ void store_four(u32 at, const float *x) {
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(at), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3])
                 : "memory");
}
static __device__ __forceinline__ void store_half(u32 at, u16 x) {
    asm volatile("st.shared.b16 [%0], %1;" ::"r"(at), "h"(x) : "memory");
}
static __device__ __forceinline__ u32 turned(u32 matrix) {
    u32 out;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(matrix));
    return out;
}
static __device__ __forceinline__ void multiply_add(float *c, const u32 *a, u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
                 "{%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// Two numbers rounded to bfloat16, the first in the low half.
static __device__ __forceinline__ u32 bf16_pair(float low, float high) {
    u32 out;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
    return out;
}
static __device__ __forceinline__ u32 larger_pair(u32 a, u32 b) {
    u32 out;
    asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
    return out;
}
#if FLOAT8
static __device__ __forceinline__ u32 e4m3_pair(float low, float high) {
    u16 out;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(out) : "f"(high), "f"(low));
    return out;
}
#endif
static __device__ __forceinline__ float logistic(float z) {  // to about 2 ulp
    float power, s;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(z * -1.4426950408889634f));
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(s) : "f"(power + 1.0f));
    return s;
}
#endif

static __device__ __forceinline__ float low_half(u32 pair) { return __uint_as_float(pair << 16); }
static __device__ __forceinline__ float high_half(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }

// 2. The kernel.

// Where a block is: the slab of columns and the rows' step.
struct Place {
    int slab, tile;
};

static __device__ __forceinline__ Place moved(Place at, int steps, int tiles) {  // at least 2 tiles
    at.tile += steps;
    if (at.tile >= tiles) at.tile -= tiles, at.slab++;
    if (at.tile < 0) at.tile += tiles, at.slab--;
    return at;
}

template <class T> static __device__ __forceinline__ T *row_of(T *base, int m, int pitch) {
    return (T *)((u8 *)base + (i64)m * pitch);
}

// Begin to copy a step: what this lane needs of dh, e and u, and some of x.
static __device__ __forceinline__ void fetch(const Arguments &p, u32 stage, u32 x, Place at) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int column = at.slab * SLAB + warp * COLUMNS + lane % 4 * 8, row = at.tile * STEP + lane / 4;
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
        const int m = at.tile * STEP + lane / 2;
        const bool there = m < p.M;
        copy_async(x + lane / 2 * X_PITCH + warp * 32 + lane % 2 * 16,
                   row_of(from + lane % 2 * 8, there ? m : 0, pitch), there);
    }
}

// A branch's w of a slab: row 8 j + n of a warp's has column 8 (n / 2) + 2 j + n % 2; its halves of 8 ranks are
// exchanged in every second four rows, so that 8 rows lie in different banks.
static __device__ __forceinline__ void load_weight(u32 to, const u16 *from, int stride_i, int stride_r, int first) {
    for (int i = threadIdx.x; i < SLAB * RANK; i += THREADS) {
        const int column = stride_r == 1 ? i / RANK : i % SLAB, r = stride_r == 1 ? i % RANK : i / SLAB;
        const int c = column % COLUMNS, row = c % 8 / 2 * 8 + c / 8 * 2 + c % 2;
        store_half(to + column / COLUMNS * W_BYTES + row * 32 + (r / 8 ^ row / 4 % 2) * 16 + r % 8 * 2,
                   from[(i64)(first + column) * stride_i + (i64)r * stride_r]);
    }
}

// Where lane 8 i + n points to for four matrices of 8 x 8: rows 8 (i / 2) + n, half i % 2 of the ranks.
static __device__ __forceinline__ u32 lane_of_weight() {
    const int lane = threadIdx.x % 32, row = lane / 16 * 8 + lane % 8;
    return row * 32 + (lane / 8 % 2 ^ row / 4 % 2) * 16;
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

#if FLOAT8
// Four values of a row in E4M3, from two pairs.
static __device__ __forceinline__ u32 float8_of(u32 first, u32 second, float inverse) {
    return e4m3_pair(low_half(first) * inverse, high_half(first) * inverse) |
           e4m3_pair(low_half(second) * inverse, high_half(second) * inverse) << 16;
}

// The same where not all is finite: what is not becomes NaN; all is 0 under an inverse scale that is NaN.
static __device__ __noinline__ u32 strange_float8_of(u32 first, u32 second, float inverse) {
    float y[4] = {low_half(first), high_half(first), low_half(second), high_half(second)};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const bool finite = (__float_as_uint(y[i]) & 0x7f800000u) != 0x7f800000u;
        y[i] = inverse != inverse ? 0.0f : finite ? y[i] * inverse : __uint_as_float(0x7fc00000u);
    }
    return e4m3_pair(y[0], y[1]) | e4m3_pair(y[2], y[3]) << 16;
}
#endif

// The warps' shares of t of a step, added and written. They lie as the tensor cores leave them.
static __device__ __forceinline__ void write_t(const Arguments &p, u32 t, Place at) {
    float *to = p.t_shares + ((i64)at.slab * p.M + at.tile * STEP) * (2 * RANK);
#pragma unroll
    for (int i = threadIdx.x; i < STEP * RANK; i += THREADS) {  // two numbers each
        float x = 0.0f, y = 0.0f;
#pragma unroll
        for (int warp = 0; warp < WARPS; warp++) {
            const uint2 share = load_pair(t + warp * T_BYTES + 8 * i);
            x += __uint_as_float(share.x);
            y += __uint_as_float(share.y);
        }
        const int row = i / 8 % 8 + i % 2 * 8, column = i / 64 * 8 + i / 2 % 4 * 2;
        if (at.tile * STEP + row < p.M) *(float2 *)(to + row * (2 * RANK) + column) = float2{x, y};
    }
}

static __device__ __forceinline__ void write_dw(const Arguments &p, float (*dw)[4][4], int slab) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    float *to = p.dw_shares + (i64)(blockIdx.x + slab) * (3 * SLAB * RANK);
#pragma unroll
    for (int branch = 0; branch < 3; branch++)
#pragma unroll
        for (int j = 0; j < 4; j++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int column = warp * COLUMNS + lane % 4 * 8 + 2 * j + i % 2, r = lane / 4 + i / 2 * 8;
                to[(branch * SLAB + column) * RANK + r] = dw[branch][j][i];
                dw[branch][j][i] = 0.0f;
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
static __device__ __forceinline__ void step(const Arguments &p, Carried &carried, Place at, u32 stage, u32 x, u32 w,
                                            u32 share, Refill refill) {
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
#pragma unroll
        for (int branch = 0; branch < 3; branch++) {
            const uint2 low = load_pair(stage + 2 * branch * 512 + 8 * s);
            const uint2 high = load_pair(stage + (2 * branch + 1) * 512 + 8 * s);
            load_matrices(left, x + branch * 32);
            load_matrices(right, w + branch * (WARPS * W_BYTES) + 512 * s);
            const u32 rows[4] = {left[0], left[2], left[1], left[3]};
#pragma unroll
            for (int j = 0; j < 2; j++) {
                float *c = in[j][branch];
                c[0] = low_half(j ? low.y : low.x), c[1] = high_half(j ? low.y : low.x);
                c[2] = low_half(j ? high.y : high.x), c[3] = high_half(j ? high.y : high.x);
                multiply_add(c, rows, right[2 * j], right[2 * j + 1]);
            }
        }
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
    const int column = at.slab * SLAB + warp * COLUMNS + lane % 4 * 8;
#pragma unroll
    for (int row = 0; row < 2; row++) {
        const int m = at.tile * STEP + lane / 4 + 8 * row;
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
    const int tiles = (p.M + STEP - 1) / STEP, steps = tiles * (p.I / SLAB);
    const int each = (steps + p.blocks - 1) / p.blocks, first = blockIdx.x * each;
    const int here = first + each < steps ? each : steps - first;
    if (here <= 0) return;

    const u32 base = shared_address(), w = base + W_AT + warp * W_BYTES + lane_of_weight();
    Carried carried = {};
#if FLOAT8
    carried.inverse = *p.inverse;
#endif
    Place at = {first / tiles, first % tiles};
    u32 stage = base + STAGE_AT + warp * STAGE_BYTES + lane * 16, x = base + X_AT, t = base + T_AT;
    for (int i = 0; i < STAGES; i++) {
        if (i < here) fetch(p, stage + i * (WARPS * STAGE_BYTES), x + i * X_BYTES, moved(at, i, tiles));
        commit_copies();
    }
    for (int left = here; left > 0; left--) {
        wait_copies();
        __syncthreads();
        const u32 other_t = 2 * (base + T_AT) + WARPS * T_BYTES - t;
        if (left < here) write_t(p, other_t, moved(at, -1, tiles));
        if (left == here || at.tile == 0) {
            if (left < here) write_dw(p, carried.dw, at.slab - 1);
            load_weight(base + W_AT, p.wd, p.stride_wdi, p.stride_wdr, at.slab * SLAB);
            load_weight(base + W_AT + WARPS * W_BYTES, p.we, p.stride_wei, p.stride_wer, at.slab * SLAB);
            load_weight(base + W_AT + 2 * WARPS * W_BYTES, p.wu, p.stride_wui, p.stride_wur, at.slab * SLAB);
            __syncthreads();
        }
        // The slot of x that was read in the step before, and after the next two.
        const u32 free_x = x == base + X_AT ? x + STAGES * X_BYTES : x - X_BYTES;
        step(p, carried, at, stage, x + lane_of_x(), w, t + warp * T_BYTES + lane * 16, [&]() {
            if (left > STAGES) fetch(p, stage, free_x, moved(at, STAGES, tiles));
            commit_copies();
        });
        at = moved(at, 1, tiles);
        t = other_t;
        stage = 2 * (base + STAGE_AT + warp * STAGE_BYTES + lane * 16) + WARPS * STAGE_BYTES - stage;
        x = x == base + X_AT + STAGES * X_BYTES ? base + X_AT : x + X_BYTES;
    }
    __syncthreads();
    at = moved(at, -1, tiles);
    write_t(p, 2 * (base + T_AT) + WARPS * T_BYTES - t, at);
    write_dw(p, carried.dw, at.slab);
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
    float4 sum = {0.0f, 0.0f, 0.0f, 0.0f};
    if (i < of_t) {
        const int m = (int)(i / 8), column = (int)(i % 8) * 4;
        if (m >= p.M) return;
        const float4 *from = (const float4 *)(p.t_shares + (i64)m * (2 * RANK) + column);
        const i64 pitch = (i64)p.M * (2 * RANK / 4);
#pragma unroll 8
        for (int s = 0; s < slabs; s++) {
            const float4 share = from[s * pitch];
            sum.x += share.x, sum.y += share.y, sum.z += share.z, sum.w += share.w;
        }
        const float scale = column < RANK ? p.scale_e : p.scale_u;
        *(uint2 *)row_of(p.t + column, m, p.pitch_t) =
            uint2{bf16_pair(sum.x * scale, sum.y * scale), bf16_pair(sum.z * scale, sum.w * scale)};
        return;
    }
    const i64 place = (i - of_t) * 4, of_branch = (i64)p.I * RANK;
    if (place >= 3 * of_branch) return;
    const int branch = (int)(place / of_branch), column = (int)(place % of_branch / RANK), slab = column / SLAB;
    const int tiles = (p.M + STEP - 1) / STEP, each = (tiles * slabs + p.blocks - 1) / p.blocks;
    const float *from = p.dw_shares + (branch * SLAB + column % SLAB) * RANK + place % RANK;
    for (int block = slab * tiles / each; block <= ((slab + 1) * tiles - 1) / each; block++) {
        const float4 share = *(const float4 *)(from + (i64)(block + slab) * (3 * SLAB * RANK));
        sum.x += share.x, sum.y += share.y, sum.z += share.z, sum.w += share.w;
    }
    *(float4 *)(p.dw + place) = sum;
}
