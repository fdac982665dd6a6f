// Inner values of low-rank branches, t = x A^T, begun by the kernel that makes x; included by x.cu and results.cu, and so by
// few_rows.cu, columns.cu and batch_rows.cu.
//
// The problem. A branch adds s t B^T to a product x W^T. B's side is added where a tile of outputs is finished, and by then t has
// to be there. For one or two rows of x a kernel in front that computes t costs what a launch costs, four times a layer: 0.72 of
// 2.77 ms of a step of the 8B shape with rank 16. Blocks of the product's own grid that compute it have to be waited for:
// a counter that every thread asked made it 3.00 ms.
//
// The floor. A and B of the shape's seven linears are 2.6 MB a layer, 0.6 us of an H200's memory, 1 % of the step. t itself is
// 16 to 48 numbers, two per mille of the products' arithmetic.
//
// The idea. Each x is made by another kernel of ours, tile by tile (o and down make what q, k, v and gate, up read; gate, up
// what down reads; attention what o reads). The block that finishes a tile has its 16 numbers in registers, and they are all
// that these 16 columns of the next product's A ever need. In numbered steps:
//
// 1. A is kept as (N / 8, NEXT, 8): what a tile needs is one piece of 32 NEXT bytes, which a warp asks for long before, while
//    weights are multiplied, and its lanes read in the order in which tensor cores want it.
// 2. The warp that finishes a tile multiplies it by the next norm's weights and adds its products with A to the block's sums,
//    in shared memory: its warps finish one after the other. The norm's factor is one for all of x, and comes later.
//    A product on tensor cores has 8 columns, and x fills one or two: as the sum of two numbers of 16 bits it fills two or
//    four, and nothing of it is rounded away.
// 3. With its last tile a block writes its NEXT sums: a part. Parts are few, one a block.
// 4. Each block of the next kernel adds up all parts (PART_COUNT of them, 8 to 25 KB from the second cache, asked for together with
//    x), multiplies by the norm's factor, which it computes anyway, and has t in shared memory before its first tile.
// 5. B t of a tile is one such product for 16 ranks, by the warp that finishes the tile, before it waits for the others.
//
// No launch, flag, counter or wait is added: a kernel starts after the one before has ended, as it does without branches. All
// sums are taken in a fixed order: equal calls give equal bits.
//
// Compiled with INNER_M (rows of x, one or two), PARTS (fours of numbers that a part has of a row of x for this product's
// branches; 0: none), PART_COUNT, NEXT (ranks of the next product's branches, a multiple of 4; 0: none begin here), NEXT_NORM
// (a norm is in front of them); WARPS; TEAMS_HERE (of a block, each with tiles and parts of its own).

#pragma once

#define FOURS (INNER_M * PARTS)  // of a part
#define PART_LANES (FOURS <= 1 ? 1 : FOURS <= 2 ? 2 : FOURS <= 4 ? 4 : FOURS <= 8 ? 8 : FOURS <= 16 ? 16 : 32)
#define PARTS_AT_ONCE (32 / PART_LANES * WARPS)  // that a block's threads read with one instruction
#define PART_TURNS ((PART_COUNT + PARTS_AT_ONCE - 1) / PARTS_AT_ONCE)
#define PART_LOADS (PART_TURNS <= 9 ? PART_TURNS : 8)  // that a thread asks for before it adds them
#define HALVES_AT (INNER_AT + WARPS * FOURS * 16)
#define PARTS_BYTES (PARTS ? (WARPS + 1) * FOURS * 16 : 0)
#define NEXT_BYTES (TEAMS_HERE * INNER_M * NEXT * 4)

#if PARTS || NEXT
// A number as two of 16 bits, whose sum has more than 16 of its bits: rounded, and above it what that left.
static __device__ __forceinline__ u32 two_halves(float x) {
#if HALF == 2
    const u32 first = half_pair(x, 0.0f);
    return first | half_pair(0.0f, x - from_16(first & 0xffff));
#else
    const u32 first = bf16_pair(x, 0.0f);
    return first | bf16_pair(0.0f, x - from_16(first & 0xffff));
#endif
}
#endif

#if PARTS
// What each warp's parts sum up to, in shared memory.
static __device__ __forceinline__ void add_parts(const Arguments &p) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int begin = 0; begin < FOURS; begin += 32) {
        const int column = begin + lane % PART_LANES, there = column < FOURS;
        const float *from = p.inner.parts + (there ? column / PARTS * p.inner.pitch + column % PARTS * 4 : 0);
        float4 sum = {0.0f, 0.0f, 0.0f, 0.0f};
        for (int part = lane / PART_LANES + warp * (32 / PART_LANES); part < PART_COUNT; part += PART_LOADS * PARTS_AT_ONCE) {
            float4 four[PART_LOADS];
#pragma unroll
            for (int i = 0; i < PART_LOADS; i++) {
                const int of = part + i * PARTS_AT_ONCE;
                four[i] = of < PART_COUNT && there ? load_four_from_others(from + of * (INNER_M * p.inner.pitch)) : float4{0.0f, 0.0f, 0.0f, 0.0f};
            }
#pragma unroll
            for (int i = 0; i < PART_LOADS; i++) sum.x += four[i].x, sum.y += four[i].y, sum.z += four[i].z, sum.w += four[i].w;
        }
#pragma unroll
        for (int d = PART_LANES; d < 32; d *= 2) {
            sum.x += __shfl_xor_sync(0xffffffffu, sum.x, d), sum.y += __shfl_xor_sync(0xffffffffu, sum.y, d);
            sum.z += __shfl_xor_sync(0xffffffffu, sum.z, d), sum.w += __shfl_xor_sync(0xffffffffu, sum.w, d);
        }
        if (lane < PART_LANES && there) SHARED(float4, INNER_AT + (warp * FOURS + column) * 16) = sum;
    }
}

// Inner values of row m, from what the warps have: two numbers of 16 bits each.
static __device__ __forceinline__ void finish_inner(int m, float factor) {
    for (int r = threadIdx.x; r < 4 * PARTS; r += THREADS) {
        float t = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; w++) t += SHARED(float, INNER_AT + (w * FOURS * 4 + m * 4 * PARTS + r) * 4);
        const u32 halves = two_halves(t * factor);
        SHARED(u16, HALVES_AT + (m * 4 * PARTS + r) * 2) = halves;
        SHARED(u16, HALVES_AT + ((INNER_M + m) * 4 * PARTS + r) * 2) = halves >> 16;
    }
}

// B t of a tile, by one warp on tensor cores: its lane 4 g + m has ``low`` of outputs g and ``high`` of outputs g + 8, for row m of x;
// of a gated product 4 g + 2 m has ``low`` of the first one's output g and its neighbour ``high`` of the second one's. The
// second operand's columns are the rows of x, each as the first and the second halves of its inner values.
struct BranchSums {
    float low, high;
};
static __device__ __forceinline__ BranchSums branch_sums(const Arguments &p, int tile) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, m = g / (GATED ? 4 : 2);
    int first[2];
    const Matrix *w[2] = {&matrix_of(p, tile, 0, first), &matrix_of(p, tile, 1, first + 1)};
    const int ranks[2] = {w[0]->branch ? w[0]->rank : 0, w[1]->branch ? w[1]->rank : 0};
    const bool second = GATED && g / 2 % 2;  // whether the lane's column is the second matrix's
    const int most = ranks[0] > ranks[1] ? ranks[0] : ranks[1], of_own = m >= INNER_M ? 0 : second ? ranks[1] : ranks[0];
    const int own_pitch = second ? w[1]->inner_pitch : w[0]->inner_pitch;
    const int from = HALVES_AT + ((g % 2 * INNER_M + m) * 4 * PARTS + own_pitch) * 2;
    float c[4] = {};
    for (int r = 4 * t; r < most + 4 * t; r += 16) {
        u32 a[4] = {};
#pragma unroll
        for (int half = 0; half < 2; half++)
            if (r < ranks[half]) {
                const uint2 b = __ldg((const uint2 *)(w[half]->branch + (i64)row_in(*w[half], first[half] + g) * ranks[half] + r));
                a[half] = b.x, a[2 + half] = b.y;
            }
        const uint2 inner = r < of_own ? SHARED(uint2, from + r * 2) : uint2{0, 0};
        multiply_add_16(c, a, inner.x, inner.y);
    }
    return {c[0] + c[1], c[2] + c[3]};
}

// What an output of the tile gets of it, for the lane of row m of x that has it; ``half`` 1: the second of a gated product.
static __device__ __forceinline__ float branch_of(const BranchSums &sums, int m, int row, int half) {
#if GATED
    const int from = 4 * row + 2 * m + half;
    return __uint_as_float(__shfl_sync(0xffffffffu, __float_as_uint(half ? sums.high : sums.low), from));
#else
    const u32 low = __shfl_sync(0xffffffffu, __float_as_uint(sums.low), 4 * (row % 8) + m);
    const u32 high = __shfl_sync(0xffffffffu, __float_as_uint(sums.high), 4 * (row % 8) + m);
    return __uint_as_float(row < 8 ? low : high);
#endif
}
#endif

#if !PARTS
struct BranchSums {};
#endif

// Which of its tiles a warp finishes: the block's (or team's) first, its last; the part that these sums belong to, their place.
struct Turn {
    bool first, last;
    int part, at;
};

#if NEXT || PARTS
// Ask for what a tile's end needs of B and of the next A. All lanes of a warp.
static __device__ __forceinline__ void ask_for_branches(const Arguments &p, int tile) {
    const int lane = threadIdx.x % 32, outputs = GATED ? 8 : 16;
    if (tile >= p.tiles) return;
#if PARTS
#pragma unroll
    for (int half = 0; half < (GATED ? 2 : 1); half++) {
        int first = 0;
        const Matrix &w = matrix_of(p, tile, half, &first);
        const int rows = w.N - first < outputs ? w.N - first : outputs;
        if (w.branch)
            for (int at = lane * 16; at < rows * w.rank; at += 512) ask_for(w.branch + (i64)first * w.rank + at);
    }
#endif
#if NEXT
    const int first = tile * (outputs / 8), all = p.w[0].N / 8, pieces = all - first < outputs / 8 ? all - first : outputs / 8;
    for (int at = lane * 16; at < pieces * NEXT * 8; at += 512) ask_for(p.inner.next_a + (i64)first * NEXT * 8 + at);
#endif
}
#endif

#if NEXT
#define DOWN (HALF == 2 ? 0.00390625f : 1.0f)  // float16 has no room for what a norm has not made small yet

// Adds a tile's products with the next A to the sums of the block or team. All lanes of a warp: lane m * outputs + i has output
// ``i`` of row m, zero if there is none; ``n`` is its number.
static __device__ __forceinline__ void begin_next(const Arguments &p, int tile, int n, float x, const Turn &turn) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, outputs = GATED ? 8 : 16, octets = outputs / 8;
    const int m = g / 2, all = p.w[0].N / 8;
#if NEXT_NORM
    if (n < p.w[0].N) x *= from_16(p.inner.next_norm[n]) + p.inner.next_offset;
#endif
    // The lane's column of the second operand: the first or the second halves of a row's outputs.
    const u32 halves = two_halves(x * DOWN);
    u32 b[2] = {};
#pragma unroll
    for (int o = 0; o < octets; o++) {
        const int from = m * outputs + o * 8 + 2 * t;
        const u32 low = __shfl_sync(0xffffffffu, halves, from), high = __shfl_sync(0xffffffffu, halves, from + 1);
        b[o] = m < INNER_M ? bytes_of(low, high, g % 2 ? 0x7632 : 0x5410) : 0;
    }
#pragma unroll
    for (int begin = 0; begin < NEXT; begin += 16) {
        u32 a[4] = {};
#pragma unroll
        for (int i = 0; i < 2 * octets; i++) {
            const int r = begin + g + i % 2 * 8, octet = tile * octets + i / 2;
            if (r < NEXT && octet < all) a[i] = __ldg((const u32 *)(p.inner.next_a + ((i64)octet * NEXT + r) * 8) + t);
        }
        float c[4] = {};
        multiply_add_16(c, a, b[0], b[1]);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int r = begin + g + half * 8, at = turn.at + (t * NEXT + r) * 4;  // lane 4 g + m has row m's
            if (t >= INNER_M || r >= NEXT) continue;
            float sum = (c[2 * half] + c[2 * half + 1]) * (1.0f / DOWN);
            if (!turn.first) sum += SHARED(float, at);
            if (turn.last) p.inner.next_sums[((i64)turn.part * INNER_M + t) * NEXT + r] = sum;
            else SHARED(float, at) = sum;
        }
    }
}
#endif
