// What kernels in CUDA C++ that multiply on tensor cores have in common; a kernel's source includes it.
//
// A warp takes 16 rows of 32 columns at a time, a block its warps' columns, and walks down the rows. Lane 4 g + q
// has columns 8 q ... 8 q + 7 of rows g and g + 8: 16 bytes a row, read and written as they lie in memory. To the
// tensor cores (m16n8k16) these are four tiles of 8 columns, tile j with every lane's columns 2 j and 2 j + 1: which
// column is called which does not matter as long as w's rows are in the same order. So what comes out of one product
// is what the next one takes.
//
// Fragments are those of m16n8k16: lane 4 g + q has, of a matrix of 8 x 8 numbers of 16 bits, 2 q and 2 q + 1 of
// row g. On a CPU the tests' emulation does what stands here up to part 2 (EMULATED).

#pragma once
typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;
typedef long long i64;

#define RANK 16     // of a low-rank branch
#define STEP 16     // rows of a step
#define COLUMNS 32  // of a warp
#define THREADS (32 * WARPS)
#define SLAB (COLUMNS * WARPS)        // columns of a block
#define W_BYTES (COLUMNS * RANK * 2)  // of a warp and a branch

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
// All but the last so many groups of this thread's copies are there.
template <int LEFT> static __device__ __forceinline__ void wait_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}

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

// 2. What a block that walks down its columns needs.

// Where a block is: its slab of columns, and the step of rows, up to the last one.
struct Place {
    int slab, tile, last;
};

// All slabs of the same rows are next to each other, so that blocks that run at the same time read whole rows.
static __device__ __forceinline__ Place place_of_block(int M, int I, int splits) {
    const int tiles = (M + STEP - 1) / STEP, slabs = I / SLAB, each = (tiles + splits - 1) / splits;
    const int first = blockIdx.x / slabs * each;
    return {(int)(blockIdx.x % slabs), first, first + each < tiles ? first + each : tiles};
}

template <class T> static __device__ __forceinline__ T *row_of(T *base, int m, int pitch) {
    return (T *)((u8 *)base + (i64)m * pitch);
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

// Tile s of each branch's numbers and of its product x w: what the block has read at ``stage``, in float32, the two
// tiles of 8 columns; x and w are this lane's places in shared memory.
template <int BRANCHES>
static __device__ __forceinline__ void load_branches(float (&in)[2][BRANCHES][4], u32 stage, u32 x, u32 w, int s) {
    u32 left[4], right[4];
#pragma unroll
    for (int branch = 0; branch < BRANCHES; branch++) {
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

// The warps' shares of t of a step, added and written. They lie as the tensor cores leave them, two numbers a place.
template <int RANKS> static __device__ __forceinline__ void write_t(float *to, u32 t, int rows) {
#pragma unroll
    for (int first = 0; first < STEP * RANKS / 2; first += THREADS) {
        const int i = first + threadIdx.x;
        if (STEP * RANKS / 2 % THREADS && i >= STEP * RANKS / 2) continue;
        float x = 0.0f, y = 0.0f;
#pragma unroll
        for (int warp = 0; warp < WARPS; warp++) {
            const uint2 share = load_pair(t + warp * (STEP * RANKS * 4) + 8 * i);
            x += __uint_as_float(share.x);
            y += __uint_as_float(share.y);
        }
        const int row = i / 8 % 8 + i % 2 * 8, column = i / 64 * 8 + i / 2 % 4 * 2;
        if (row < rows) *(float2 *)(to + row * RANKS + column) = float2{x, y};
    }
}

// Four numbers of so many shares, each ``pitch`` times four after the one before.
static __device__ __forceinline__ float4 sum_of(const float *shares, int count, i64 pitch) {
    const float4 *from = (const float4 *)shares;
    float4 sum = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 8
    for (int i = 0; i < count; i++) {
        const float4 share = from[i * pitch];
        sum.x += share.x, sum.y += share.y, sum.z += share.z, sum.w += share.w;
    }
    return sum;
}
