// y = x W^T for one row of x (up to eight), K values, and a packed W (N, K), with x in registers; few_rows.py defines y.
//
// The problem. Decoding one token uses each weight once, so the time to read W is the floor, and everything else has to
// happen while weights are on their way. few_rows.cu reads x from shared memory for every product, and each lane decodes
// every block's scale: with one row of x these two cost more of shared memory's time than the weights cost of the
// memory's. Here neither is read in the loop.
//
// The idea. Tensor cores multiply 16 outputs by 8 columns, and one row of x fills a single column. The other seven are
// used for other blocks of the same row, so that a whole set of 8 blocks of x stays in registers while tile after tile of
// outputs passes. In numbered steps:
//
// 1. Of a product (mma.m16n8k16: 16 outputs, 16 dimensions, 8 columns) column c holds x of the c-th block of dimensions,
//    which has a scale of its own, and zeros elsewhere. A warp always has the same slice of the inner dimension, so this
//    second operand is the same for all tiles of outputs: it stays in registers, STEPS pairs for each 8 columns. With
//    the weights of block b only column b of a product has a meaning; the others are x of other dimensions times these
//    weights, and nobody reads them.
// 2. The lanes 4 g + t that have columns 2 t and 2 t + 1 of a product are those that need these blocks' scales: a lane
//    decodes 2 scales of 8 for each of its two outputs, multiplies its own columns by them and adds them up in float32.
// 3. With more rows of x (MC: 2, 4 or 8 columns for each block) there are fewer blocks in a set of 8 columns.
// 4. Weights come straight from memory to registers, 16 bytes a lane and output, AHEAD such chunks before they are used,
//    those of the next tile while this one is multiplied. 4-bit tables are pairs in shared memory, a copy for each lane's
//    bank, 256 bytes apart, so that one byte permutation makes an address of a weight's byte and the lane's bank.
//
// A block has TEAMS teams of SLICES warps; a team has a tile of 16 outputs, each of its warps a slice of the inner
// dimension. Sums of the slices are added in shared memory in the warps' order: equal calls give equal bits.
//
// Compiled with the macros of few_rows.cu that say how weights are read (VALUES is 16 bytes of them), and with SLICES,
// TEAMS, SETS (of 8 columns that a warp has), AHEAD, MC, COLS (blocks with a scale of their own in a chunk), WHOLE (the
// slices are all of K, no more), PAIRS (two blocks' scales are read at once), SIMPLE (one matrix, or two if GATED, whose
// outputs fill their tiles, each with scales of its own).

#define WARPS (SLICES * TEAMS)
#define SUM_ROWS MC
#define ADDING 32
#define TEAMS_HERE TEAMS
#define SUMS_OF_X 0
#define CHUNKS_OF_SET (8 / (COLS * MC))
#define CHUNKS (SETS * CHUNKS_OF_SET)  // of a slice
#define SCALES_OF_LANE (MC == 1 ? 2 : 1)
#define TABLE_BYTES (KIND == 0 ? 256 * 256 : 0)
#define TEAM_SUMS (SLICES * 16 * SUM_ROWS * 4)
#define SLOTS (APART ? 2 * SLICES : 2)  // tiles whose sums are kept
// A warp that has left its sums goes on with its next tile; the team's warps in turn wait for the others and add up. No
// warp is more than SLICES tiles ahead, since it waits at one of so many: the sums of SLOTS tiles are never written
// while they are read, and a barrier is free again when its turn comes. A block has 15 such barriers; bigger ones wait.
#define APART (WARPS <= 15)

#include "operands.cu"

#define TABLE_AT 0
#define MAP_AT (TABLE_AT + TABLE_BYTES)
#define FACTORS_AT (MAP_AT + MAP_BYTES)        // of the rows of x: what undoes the powers of two
#define PARTIAL_AT (FACTORS_AT + 4 * MC)       // sums of squares and maxima of warps
#define OFFSETS_AT (PARTIAL_AT + 8 * WARPS)    // of the matrices' scales
#define INNER_AT ((OFFSETS_AT + 16 + 15) / 16 * 16)  // of branches: inner_parts.cu
#define NEXT_AT (INNER_AT + PARTS_BYTES)
#define X_AT (NEXT_AT + NEXT_BYTES)
#define SUMS_AT X_AT                           // when x has gone to registers
#define X_BYTES(chunks) ((chunks) * CHUNK * 2)
#define X_PITCH(chunks) ((X_BYTES(chunks) + 127) / 128 * 128 + 32)  // other banks

#include "codes.cu"
#include "x.cu"
#include "results.cu"

// Where a lane is: its row and column of fragments, its team and slice.
struct Place {
    int g, t, team, slice;
};

// A lane's two rows of a tile: where its weights of the slice begin, and its scales.
struct Rows {
    const u8 *codes[2];
#if SCALES
    int scale[2];
    const Matrix *matrix[2];
#endif
};

static __device__ __forceinline__ Rows rows_of(const Arguments &p, const Place &at, int tile) {
    Rows rows;
    tile = tile < p.tiles ? tile : p.tiles - 1;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int first = 0;
        const Matrix &w = matrix_of(p, tile, half, &first);
        const int row = row_in(w, first + at.g);
        rows.codes[half] = w.codes + (i64)row * w.row_bytes + at.slice * (CHUNKS * CHUNK_BYTES) + at.t * 16;
#if SCALES
        rows.scale[half] = (row >> w.block_shift) * w.scales_a_row;
        rows.matrix[half] = &w;
#endif
    }
    return rows;
}

// The rows of the team's next tile, ``stride`` tiles on.
static __device__ __forceinline__ Rows rows_after(const Arguments &p, const Place &at, const Rows &rows, int tile, int stride) {
#if SIMPLE
    Rows next = rows;
    const int outputs = stride * (GATED ? 8 : 16);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        next.codes[half] += outputs * p.w[0].row_bytes;
#if SCALES
        next.scale[half] += outputs * p.w[0].scales_a_row;
#endif
    }
    return next;
#else
    return rows_of(p, at, tile + stride);
#endif
}

struct Chunk {
    uint4 half[2];
};

static __device__ __forceinline__ Chunk load_chunk(const Arguments &p, const Place &at, const Rows &rows, int chunk) {
    Chunk c = {};
    if (WHOLE || (at.slice * CHUNKS + chunk) * CHUNK < p.K) {
        c.half[0] = load_once(rows.codes[0] + chunk * CHUNK_BYTES);
        c.half[1] = load_once(rows.codes[1] + chunk * CHUNK_BYTES);
    }
    return c;
}

#if SCALES
// Scales as they are stored, of a lane's blocks of one set and of its two rows.
struct Stored {
#if SCALES == 1
    float scale[2][SCALES_OF_LANE];
#else
    u32 code[2][SCALES_OF_LANE];
    float second[2];
#endif
#if ZERO_POINTS
    int zero[2][SCALES_OF_LANE];
#endif
};

static __device__ __forceinline__ Stored load_scales(const Arguments &p, const Place &at, const Rows &rows, int set) {
    Stored s;
    // The first of the lane's blocks, counted along K in blocks with a scale of their own.
    const int block = 2 * at.t / MC, chunk = at.slice * CHUNKS + set * CHUNKS_OF_SET + block / COLS;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const Matrix &w = *rows.matrix[half];
        const int first = rows.scale[half] + (COLS > 1 ? chunk * COLS + block % COLS : chunk / p.block_chunks);
#pragma unroll
        for (int i = 0; i < SCALES_OF_LANE; i++) {
            const int of = COLS > 1 || p.block_chunks == 1 ? first + i : rows.scale[half] + (chunk + i) / p.block_chunks;
            const bool there = WHOLE || (COLS > 1 ? chunk : chunk + i) * CHUNK < p.K;
#if SCALES == 1
#if PAIRS
            if (i == 0) {
                const float2 both = __ldg((const float2 *)((const float *)w.scales + first));
                s.scale[half][0] = both.x, s.scale[half][SCALES_OF_LANE - 1] = both.y;
            }
#else
            s.scale[half][i] = there ? __ldg((const float *)w.scales + of) : 0.0f;
#endif
#else
#if PAIRS
            if (i == 0) {
                const u32 both = __ldg((const u16 *)((const u8 *)w.scales + first));
                s.code[half][0] = both & 255, s.code[half][SCALES_OF_LANE - 1] = both >> 8;
            }
#else
            s.code[half][i] = there ? __ldg((const u8 *)w.scales + of) : 0;
#endif
            if (i == 0) s.second[half] = there ? __ldg(w.scale_scales + (of >> p.scale_shift)) : 0.0f;
#endif
#if ZERO_POINTS
            s.zero[half][i] = there ? __ldg(w.zero_points + of) : 0;
#endif
        }
    }
    return s;
}

// A lane's scales, and what has to be added to integers: of its two rows and two columns.
struct Scales {
    float scale[2][2];
#if ZERO_POINTS
    float zero[2][2];
#endif
};

static __device__ __forceinline__ Scales decoded(const Arguments &p, const Rows &rows, const Stored &stored) {
    Scales s;
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
        for (int column = 0; column < 2; column++) {
            const int i = column < SCALES_OF_LANE ? column : 0;
#if SCALES == 1
            s.scale[half][column] = stored.scale[half][i] * BITS_FACTOR;
#else
            const float offset = SHARED(float, OFFSETS_AT + 4 * (int)(rows.matrix[half] - p.w));
            s.scale[half][column] = SHARED(float, MAP_AT + 4 * stored.code[half][i]) * stored.second[half] + offset;
#endif
#if ZERO_POINTS
            s.zero[half][column] = ((float)stored.zero[half][i] + HALF_RANGE) / BITS_FACTOR;
#endif
        }
    return s;
}
#endif

// The second operand of a warp's products, and for integers the sums of x over its columns' blocks.
struct Columns {
    uint2 x[SETS][STEPS];
#if POSITIVE
    float sum[SETS][2];
#endif
};

static __device__ __forceinline__ Columns columns_of(const Arguments &p, const Place &at) {
    Columns c;
    const int chunks = p.K / CHUNK, pitch = X_PITCH(chunks);
    const int m = at.g % MC, block = at.g / MC;
#pragma unroll
    for (int set = 0; set < SETS; set++) {
        const int chunk = at.slice * CHUNKS + set * CHUNKS_OF_SET + block / COLS;
        const bool there = at.t * COLS / 4 == block % COLS && m < p.M && chunk < chunks;
        const int from = X_AT + (there ? m * pitch + chunk * STEPS * 32 : 0) + at.t * 8;
        float sum = 0.0f;
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            const uint2 x = SHARED(uint2, from + step * 32);
            c.x[set][step] = there ? x : uint2{0, 0};
#if POSITIVE
            const float odd = KIND == 1 ? 16.0f : 1.0f;  // the second pair
            if (there) sum += from_half(x.x & 0xffff) + from_half(x.x >> 16) + odd * (from_half(x.y & 0xffff) + from_half(x.y >> 16));
#endif
        }
#if POSITIVE
        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        sum += __shfl_xor_sync(0xffffffffu, sum, 2);
        c.sum[set][0] = __uint_as_float(__shfl_sync(0xffffffffu, __float_as_uint(sum), 8 * at.t));
        c.sum[set][1] = __uint_as_float(__shfl_sync(0xffffffffu, __float_as_uint(sum), 8 * at.t + 4));
#endif
    }
    return c;
}

// A lane's sums of a tile: of its two rows and two columns.
struct Sums {
    float y[2][2];
};

static __device__ __forceinline__ void leave(const Arguments &p, const Place &at, int base, const Sums &sums) {
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
        for (int column = 0; column < (MC == 1 ? 1 : 2); column++) {
            float y = MC == 1 ? sums.y[half][0] + sums.y[half][1] : sums.y[half][column];
            if (MC <= 2) y += __shfl_xor_sync(0xffffffffu, y, 1);
            if (MC <= 4) y += __shfl_xor_sync(0xffffffffu, y, 2);
            const int m = MC == 1 ? 0 : (2 * at.t + column) % MC;
            if (at.t < (MC <= 2 ? 1 : MC / 2) && m < p.M)
                SHARED(float, base + ((at.slice * SUM_ROWS + m) * 16 + half * 8 + at.g) * 4) = y;
        }
}

static __device__ __forceinline__ void fill_tables(const Arguments &p) {
    fill_pairs(p.values);
#if SCALES == 2
    for (int i = threadIdx.x; i < 256; i += THREADS) SHARED(float, MAP_AT + 4 * i) = p.map[i];
    if (threadIdx.x < 3 && p.w[threadIdx.x].scale_offset)
        SHARED(float, OFFSETS_AT + 4 * threadIdx.x) = *p.w[threadIdx.x].scale_offset;
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS, THREADS <= 256 ? 2 : 1) columns(const __grid_constant__ Arguments p) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const Place at = {lane / 4, lane % 4, warp / SLICES, warp % SLICES};
    const int stride = (int)gridDim.x * TEAMS;
    int tile = (int)blockIdx.x * TEAMS + at.team;
    const int count = (p.tiles - (int)blockIdx.x * TEAMS + stride - 1) / stride;  // the same for all teams
    Rows rows = rows_of(p, at, tile);
    Chunk ahead[AHEAD];
#pragma unroll
    for (int i = 0; i < AHEAD; i++) ahead[i] = load_chunk(p, at, rows, i);
#if SCALES
    Stored stored = load_scales(p, at, rows, 0);
#endif
    fill_tables(p);
    Known known;
    load_known(p, &known);
#if NEXT || PARTS
    ask_for_branches(p, tile + at.slice * stride);
#endif
    wait_for_the_kernel_before();
    bring_x(p, known);
    const Columns x = columns_of(p, at);
    __syncthreads();
    const u32 lane_bank = bank_after_tables(lane * 4);
#pragma unroll 1
    for (int number = 0; number < count; number++) {
        Sums sums = {};
        const bool more = tile + stride < p.tiles;
        const Rows next = rows_after(p, at, rows, tile, stride);
#if SCALES
        Scales scales;
#endif
#pragma unroll
        for (int chunk = 0; chunk < CHUNKS; chunk++) {
            const int set = chunk / CHUNKS_OF_SET, in_set = chunk % CHUNKS_OF_SET;
#if SCALES
            if (in_set == 0) {
                scales = decoded(p, rows, stored);
                if (set + 1 < SETS) stored = load_scales(p, at, rows, set + 1);
                else if (more) stored = load_scales(p, at, next, 0);
            }
#endif
            float own[2][4] = {};
#pragma unroll
            for (int step = 0; step < STEPS; step++) {
                u32 a[4];
                decode(ahead[chunk % AHEAD].half[0], step, lane_bank, &a[0], &a[2]);
                decode(ahead[chunk % AHEAD].half[1], step, lane_bank, &a[1], &a[3]);
                multiply_add(own[step % 2], a, x.x[set][step].x, x.x[set][step].y);
            }
            __syncwarp();  // or the compiler decodes all chunks before it asks for the first of the next tile
            if (chunk + AHEAD < CHUNKS) ahead[chunk % AHEAD] = load_chunk(p, at, rows, chunk + AHEAD);
            else if (more) ahead[chunk % AHEAD] = load_chunk(p, at, next, chunk + AHEAD - CHUNKS);
#pragma unroll
            for (int column = 0; column < 2; column++)
                if ((2 * at.t + column) / MC / COLS == in_set) {
#pragma unroll
                    for (int half = 0; half < 2; half++) {
                        float sum = own[0][2 * half + column] + own[1][2 * half + column];
#if POSITIVE && ZERO_POINTS
                        sum -= scales.zero[half][column] * x.sum[set][column];
#elif POSITIVE
                        sum -= HALF_RANGE / BITS_FACTOR * x.sum[set][column];
#endif
#if SCALES
                        sums.y[half][column] += scales.scale[half][column] * sum;
#else
                        sums.y[half][column] += POSITIVE ? BITS_FACTOR * sum : sum;
#endif
                    }
                }
        }
        const int base = SUMS_AT + (number % SLOTS * TEAMS + at.team) * TEAM_SUMS;
        const bool adds = number % SLICES == at.slice;  // another warp each time
        leave(p, at, base, sums);
        BranchSums branches = {};
#if PARTS
        if (adds) branches = branch_sums(p, tile < p.tiles ? tile : p.tiles - 1);
#endif
#if APART
        const int barrier = 1 + at.team * SLICES + number % SLICES;
        if (adds) wait_at(barrier, 32 * SLICES);
        else arrive_at(barrier, 32 * SLICES);
#else
        __syncthreads();
#endif
        if (adds) {
            const int next_at = NEXT_AT + at.team * (INNER_M * NEXT * 4);
            add_up(p, tile, base, lane, {number == 0, number == count - 1, (int)blockIdx.x * TEAMS + at.team, next_at}, branches);
#if NEXT || PARTS
            ask_for_branches(p, tile + SLICES * stride);
#endif
        }
        rows = next;
        tile += stride;
    }
}
