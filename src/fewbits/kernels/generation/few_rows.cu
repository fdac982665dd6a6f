// y = x W^T for a few rows of x and a packed W, read once at the memory's speed; see few_rows.py for what it computes.
//
// One row of a product reads each weight once and does two operations with it: the memory's speed is the floor, and
// everything here serves to keep enough bytes on their way. How a block works:
//
// 1. A warp takes a tile of 16 outputs and a slice of the inner dimension; a block's WARPS warps have slices of the
//    same 16 outputs, whose sums are added in shared memory in the warps' order (equal bits from run to run).
// 2. Lane 4 g + t reads weights of output g and of output g + 8: a piece of up to 16 bytes, VALUES weights that lie next
//    to each other. Four lanes side by side so have a CHUNK of the inner dimension, which never has more than one block
//    with a scale of its own. A warp copies LOADS chunks at a time to shared memory, with their scales, DEPTH - 1 such
//    stages ahead of what it multiplies, and waits for its own copies only: registers as targets would not do, because
//    a warp's few scoreboards make it wait for the newest load together with the oldest.
// 3. Weights become float16 in registers, exactly or (the 4-bit tables) rounded to it: 4 bits through a table of pairs in
//    shared memory, which has one copy for each lane's bank; integers, made positive, by placing their bits where a
//    float16 below 2**-14 has its mantissa, so that they stand for 2**-24 times themselves; float8 by moving its bits,
//    which leaves a power of two. Scales, these powers and what made integers positive are left for later.
// 4. Tensor cores (m16n8k16) sum: the first operand is the weights, the second x, as 8 columns. Which dimension of a
//    chunk stands where does not matter as long as both operands agree, so each lane's own weights are its share of k.
//    The sums of a block with a scale are multiplied by it in float32 and added to those of the blocks before.
// 5. x comes into shared memory once a block of threads: normalised if NORM, times a power of two that brings its largest
//    magnitude to 2**12 .. 2**13 (float16 then holds it with its full precision), in the order that lanes read. For
//    integers its sums over each chunk are kept beside it: they take off again what made the integers positive.
//
// EARLY: blocks start while the kernel before still runs, and ask for their first weights before they wait for it.
//
// Compiled at run time with these defined: KIND (0: 4-bit table, 1: INT4, 2: INT8, 3: E4M3, 4: E5M2, 5: bfloat16, 6:
// float16 weights), VALUES, SCALES (0: one a row or none, 1: float32 for each block, 2: 8-bit codes for each block with
// second-level scales), VECTOR_SCALES (scales of LOADS chunks are read at once), ZERO_POINTS, GROUPS (of 8 rows of x),
// WARPS, LOADS, DEPTH, ROUNDS (of LOADS chunks a warp), FULL (these are all of K, no more), GATED, ACTIVATION (0: silu, 1: tanh
// gelu, 2: gelu), NORM, X_KIND and OUT_KIND (0: float32, 1: bfloat16, 2: float16), HALF (of other 16-bit operands), ADD,
// EARLY, ONE (x has one row), SHARE (four dimensions of K that a thread has, rounded up; 0: too many for registers).

#define WORDS (VALUES * BITS / 32)   // of 32 bits that a lane reads of an output and a chunk: 1, 2, 4
#define ROWS (GROUPS * 8)
#define SUM_ROWS (ONE ? 1 : ROWS)
#define SLICES WARPS
#define ADDING THREADS
#define SIMPLE 0
#define TEAMS_HERE 1
#define SUMS_OF_X POSITIVE
#define BESIDE (LOADS < 2 ? 1 : 2)
#define TABLE_BYTES (KIND == 0 ? 256 * 128 : 0)
#define SUMS_BYTES (2 * WARPS * 16 * SUM_ROWS * 4)

#include "operands.cu"

// A stage of a warp: 16 rows of LOADS chunks, so far apart that lanes read different banks; then scales, zero points.
#define ROW_BYTES (LOADS * CHUNK_BYTES)
#define ROW_PITCH (ROW_BYTES + (128 + 16 * WORDS - ROW_BYTES % 128) % 128)
#define SCALE_BYTES (VECTOR_SCALES ? (SCALES == 1 ? 4 : 1) * LOADS : 0)  // of a row
#define SCALES_IN_STAGE (16 * ROW_PITCH)
#define SECOND_IN_STAGE (SCALES_IN_STAGE + 16 * SCALE_BYTES)
#define ZEROS_IN_STAGE (SECOND_IN_STAGE + (SCALES == 2 && VECTOR_SCALES ? 64 : 0))
#define STAGE_BYTES ((ZEROS_IN_STAGE + (ZERO_POINTS && VECTOR_SCALES ? 16 * LOADS : 0) + 15) / 16 * 16)

// Where in shared memory what lies, in bytes; x comes last, with the sums of its chunks behind each row.
#define TABLE_AT 0
#define MAP_AT (TABLE_AT + TABLE_BYTES)
#define STAGES_AT (MAP_AT + MAP_BYTES)
#define SUMS_AT (STAGES_AT + WARPS * DEPTH * STAGE_BYTES)
#define FACTORS_AT (SUMS_AT + SUMS_BYTES)      // of the rows of x: what undoes the powers of two
#define PARTIAL_AT (FACTORS_AT + 4 * ROWS)     // sums of squares and maxima of warps
#define OFFSETS_AT (PARTIAL_AT + 8 * WARPS)    // of the matrices' scales
#define INNER_AT ((OFFSETS_AT + 16 + 15) / 16 * 16)  // of branches: inner_parts.cu
#define NEXT_AT (INNER_AT + PARTS_BYTES)
#define X_AT (NEXT_AT + NEXT_BYTES)
#define X_BYTES(chunks) ((chunks) * CHUNK * 2)
#define X_PITCH(chunks) (((X_BYTES(chunks) + (POSITIVE ? (chunks) * 4 : 0) + 127) / 128) * 128 + 32)  // other banks

// 1. Weights: to shared memory, and from there.

#include "weights.cu"

// 2. x in shared memory.

#include "x.cu"

// 3. Products.

struct Sums {
    float y[GROUPS][4];  // of output g, then g + 8: rows 2 t and 2 t + 1 of x
};

static __device__ __forceinline__ void load_piece(int at, u32 *w) {
#if WORDS == 4
    const uint4 v = SHARED(uint4, at);
    w[0] = v.x, w[1] = v.y, w[2] = v.z, w[3] = v.w;
#elif WORDS == 2
    const uint2 v = SHARED(uint2, at);
    w[0] = v.x, w[1] = v.y;
#else
    w[0] = SHARED(u32, at);
#endif
}

// Adds the sums of one chunk to those of the tile.
static __device__ __forceinline__ void add_block(const Arguments &p, int pitch, int chunk, const float (&own)[GROUPS][4],
#if SCALES
                                                 const Scales &scales, int l,
#endif
                                                 Sums *sums) {
    const int t = threadIdx.x % 4, chunks = (p.K + CHUNK - 1) / CHUNK;
#pragma unroll
    for (int group = 0; group < GROUPS; group++)
#pragma unroll
        for (int column = 0; column < (ONE ? 1 : 2); column++) {  // of one row of x the others are nobody's
#if POSITIVE
            const int m = group * 8 + 2 * t + column;
            const float sum_of_x = SHARED(float, X_AT + (m < p.M ? m : p.M - 1) * pitch + X_BYTES(chunks) + chunk * 4);
#endif
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float sum = own[group][2 * half + column];
#if POSITIVE && ZERO_POINTS
                sum -= (HALF_RANGE / BITS_FACTOR + scales.zero[half][l]) * sum_of_x;
#elif POSITIVE
                sum -= HALF_RANGE / BITS_FACTOR * sum_of_x;
#endif
#if SCALES
                sums->y[group][2 * half + column] += scales.scale[half][l] * sum;
#else
                sums->y[group][2 * half + column] += POSITIVE ? BITS_FACTOR * sum : sum;
#endif
            }
        }
}

static __device__ __forceinline__ void multiply(const Arguments &p, int i, u32 lane_bank, Sums *sums) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, chunks = (p.K + CHUNK - 1) / CHUNK;
    const int chunk = chunk_of(i), pitch = X_PITCH(chunks), stage = stage_of(i) + g * ROW_PITCH + t * 4 * WORDS;
    int from[GROUPS];
#pragma unroll
    for (int group = 0; group < GROUPS; group++) {  // a column without a row of x sees the last one; nobody reads it
        const int m = group * 8 + g < p.M ? group * 8 + g : p.M - 1;
        from[group] = X_AT + m * pitch + chunk * STEPS * 32 + t * 8;
    }
#if SCALES
    Scales scales;
    load_scales(p, i, &scales);
#endif
    // Chunks of which each has sums of its own, side by side, so that products need not wait for one another.
#pragma unroll
    for (int l = 0; l < LOADS; l += BESIDE) {
        if (!THERE(chunk + l)) break;
        float own[BESIDE][GROUPS][4] = {};
        u32 w[BESIDE][2][WORDS];
#pragma unroll
        for (int j = 0; j < BESIDE; j++) {
            load_piece(stage + (l + j) * CHUNK_BYTES, w[j][0]);
            load_piece(stage + 8 * ROW_PITCH + (l + j) * CHUNK_BYTES, w[j][1]);
        }
#pragma unroll
        for (int step = 0; step < STEPS; step++)
#pragma unroll
            for (int j = 0; j < BESIDE; j++) {
                u32 a[4];
                decode(w[j][0], step, lane_bank, &a[0], &a[2]);
                decode(w[j][1], step, lane_bank, &a[1], &a[3]);
#pragma unroll
                for (int group = 0; group < GROUPS; group++) {
                    const uint2 b = SHARED(uint2, from[group] + ((l + j) * STEPS + step) * 32);
                    multiply_add(own[j][group], a, b.x, b.y);
                }
            }
#pragma unroll
        for (int j = 0; j < BESIDE; j++)
            if (THERE(chunk + l + j)) {
#if SCALES
                add_block(p, pitch, chunk + l + j, own[j], scales, l + j, sums);
#else
                add_block(p, pitch, chunk + l + j, own[j], sums);
#endif
            }
    }
}

#include "results.cu"

// Sums of a tile over the warps, and what becomes of them; ``number`` counts the block's tiles.
static __device__ __forceinline__ void finish(const Arguments &p, int tile, int number, bool last, Sums *sums) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, warp = threadIdx.x / 32;
    const int base = SUMS_AT + number % 2 * (SUMS_BYTES / 2), own = base + warp * 16 * SUM_ROWS * 4;
#pragma unroll
    for (int group = 0; group < GROUPS; group++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int m = group * 8 + 2 * t + i % 2;
            if (m < p.M) SHARED(float, own + (m * 16 + g + i / 2 * 8) * 4) = sums->y[group][i];
            sums->y[group][i] = 0.0f;
        }
    // Another warp each time, so that none falls behind.
    const int thread = (threadIdx.x + number % WARPS * 32) % THREADS;
    BranchSums branches = {};
#if PARTS
    if (thread < 32) branches = branch_sums(p, tile);
#endif
    __syncthreads();
    add_up(p, tile, base, thread, {number == 0, last, (int)blockIdx.x, NEXT_AT}, branches);
#if NEXT || PARTS
    if (thread < 32) ask_for_branches(p, tile + WARPS * (int)gridDim.x);  // this warp's next turn
#endif
}

static __device__ __forceinline__ void fill_tables(const Arguments &p) {
#if KIND == 0
    check_base();
    // Each pair 32 times, one for each lane's bank; threads begin at different ones so that their banks differ.
    for (int i = threadIdx.x; i < 256; i += THREADS) {
        const u32 pair = half_pair(p.values[i & 15], p.values[i >> 4]);
#pragma unroll
        for (int part = 0; part < 8; part++)
            SHARED(uint4, TABLE_AT + i * 128 + (part + i) % 8 * 16) = uint4{pair, pair, pair, pair};
    }
#endif
#if SCALES == 2
    for (int i = threadIdx.x; i < 256; i += THREADS) SHARED(float, MAP_AT + 4 * i) = p.map[i];
    if (threadIdx.x < 3 && p.w[threadIdx.x].scale_offset)
        SHARED(float, OFFSETS_AT + 4 * threadIdx.x) = *p.w[threadIdx.x].scale_offset;
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS, THREADS <= 256 ? 2 : 1) few_rows(const __grid_constant__ Arguments p) {
    const int count = ((int)p.tiles - (int)blockIdx.x + (int)gridDim.x - 1) / (int)gridDim.x * ROUNDS;
    for (int i = 0; i < DEPTH - 1; i++) {
        if (i < count) fetch(p, i);
        commit_copies();
    }
    fill_tables(p);
    Known known;
    load_known(p, &known);
#if NEXT || PARTS
    // Of the warp's first turn: warp 0 has the first tile, the last warp the next.
    ask_for_branches(p, (int)blockIdx.x + (WARPS - (int)threadIdx.x / 32) % WARPS * (int)gridDim.x);
#endif
    wait_for_the_kernel_before();
    bring_x(p, known);
    const u32 lane_bank = bank_after_tables(threadIdx.x % 32 * 4);
    Sums sums = {};
#pragma unroll 1
    for (int i = 0; i < count; i++) {
        __syncwarp();  // all lanes have read the stage that is written now
        if (i + DEPTH - 1 < count) fetch(p, i + DEPTH - 1);
        commit_copies();
        wait_copies<DEPTH - 1>();
        __syncwarp();
        multiply(p, i, lane_bank, &sums);
        if (i % ROUNDS == ROUNDS - 1) finish(p, tile_of(i), i / ROUNDS, i == count - 1, &sums);
    }
}
