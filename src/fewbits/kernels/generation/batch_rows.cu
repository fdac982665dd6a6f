// y = x W^T for 2 to 64 rows of x and a packed W; batch_rows.py says what is computed.
//
// A batch of sequences that decode together has as many rows of x. The weights are still what is read most, so each is read
// once, but now the tensor cores have real columns to fill, and x no longer lies in registers. How a block works:
//
// 1. A warp has R tiles of 16 outputs and a part of the inner dimension K. The block's WN * WK warps are WN neighbours that
//    have other outputs, times WK slices of K; SPLIT blocks may share the same outputs, each with a part of K.
// 2. Lane 4 g + t reads 16 bytes of output g and 16 bytes of output g + 8 at a time: VALUES weights that lie next to each
//    other. Four lanes side by side so have a CHUNK of K. Which dimension of a chunk stands where in a product does not
//    matter as long as both operands agree, so a lane's own weights are its share of each product's 16 dimensions. The
//    loads go to registers, AHEAD chunks at once, while those before are used.
// 3. All weights of a lane's 16 bytes share one scale, since blocks have at least 32 dimensions (16 in 8 bits). The codes
//    become float16, are multiplied by their scale in float16 (times a power of two of the whole matrix, so that
//    float16's range holds them), and go to the tensor cores: m16n8k16, sums in float32, 8 rows of x at a time.
// 4. x comes as batch_x.cu left it: normalised, in float16, in the order in which lanes read it. A stage of it, CS chunks
//    for each of the WK slices, is copied to shared memory DEPTH - 1 stages ahead of its use.
// 5. At the end the slices' sums are added in shared memory in their order. Where SPLIT blocks share outputs each leaves its
//    sums in memory, and the one that arrives last adds them up in their order: equal calls give equal bits.
//
// Shapes: x (M, K) with M at most ROWS = 8 * GROUPS, W (N, K), out (M, N).
//
// Compiled with the macros of few_rows.cu that say how weights are read (VALUES is 16 bytes of them) and what stands around
// the product, with GROUPS, R, WN, WK, SPLIT, CS, DEPTH, STAGES (of a block), AHEAD, BLOCK (dimensions that share a scale)
// and WHOLE (the blocks' parts are all of K, no more).

#define WARPS (WN * WK)
#define ROWS (8 * GROUPS)
#define SLICES WK
#define ADDING THREADS
#define SUM_ROWS ROWS
#define SIMPLE 0
#define PARTS 0  // of inner values: a batch's come whole
#define NEXT 0
#define TABLE_BYTES (KIND == 0 ? 256 * 256 : 0)
#define TILES (WN * R)                        // of a block
#define CHUNK_OF_X (ROWS * CHUNK * 2)         // bytes
#define STAGE_BYTES (WK * CS * CHUNK_OF_X)
#define STAGE_CHUNKS (WK * CS)
#define VISITS (STAGES * CS)                  // chunks of a warp

#include "operands.cu"

#define TABLE_AT 0
#define MAP_AT (TABLE_AT + TABLE_BYTES)
#define FACTORS_AT (MAP_AT + MAP_BYTES)       // of the rows of x: what undoes the powers of two
#define OFFSETS_AT (FACTORS_AT + 4 * ROWS)    // of the matrices' scales
#define LAST_AT (OFFSETS_AT + 12)             // whether this block is the last of those that share its outputs
#define X_AT ((LAST_AT + 4 + 127) / 128 * 128)
#define SUMS_AT X_AT                          // when x has been used

#include "codes.cu"
#include "results.cu"

struct BatchArguments {
    Arguments p;           // its x is what batch_x.cu left
    const float *factors;  // (M,)
    float *parts;          // (SPLIT, tiles, ROWS, 16) where SPLIT blocks share outputs
    int *arrived;          // (blocks,) of those, zero between calls
    float up[3], down[3];  // powers of two of the matrices: what scales are multiplied by, and what undoes it
};

// A lane's rows of W: of each tile outputs g and g + 8.
struct Rows {
    const u8 *codes[R][2];
#if SCALES
    int scale[R][2];
    const Matrix *matrix[R];  // of a gated product the second half is in the matrix after it
#endif
};

static __device__ __forceinline__ Rows rows_of(const Arguments &p, int first_tile, int g, int t) {
    Rows rows;
#pragma unroll
    for (int r = 0; r < R; r++) {
        const int tile = first_tile + r < p.tiles ? first_tile + r : p.tiles - 1;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int first = 0;
            const Matrix &w = matrix_of(p, tile, half, &first);
            const int row = row_in(w, first + g);
            rows.codes[r][half] = w.codes + (i64)row * w.row_bytes + t * 16;
#if SCALES
            rows.scale[r][half] = (row >> w.block_shift) * w.scales_a_row;
            if (half == 0) rows.matrix[r] = &w;
#endif
        }
    }
    return rows;
}

static __device__ __forceinline__ bool is_there(const Arguments &p, int chunk, int t) {
    return WHOLE || chunk * CHUNK + t * VALUES < p.K;
}

struct Chunk {
    uint4 piece[R][2];
};

static __device__ __forceinline__ Chunk load_chunk(const Arguments &p, const Rows &rows, int chunk, int t) {
    Chunk c = {};
    if (is_there(p, chunk, t)) {
#pragma unroll
        for (int r = 0; r < R; r++)
#pragma unroll
            for (int half = 0; half < 2; half++) c.piece[r][half] = load_once(rows.codes[r][half] + chunk * CHUNK_BYTES);
    }
    return c;
}

#if SCALES
// Scales of a lane's pieces as they are stored.
struct Stored {
#if SCALES == 1
    float scale[R][2];
#else
    u32 code[R][2];
    float second[R][2];
#endif
#if ZERO_POINTS
    int zero[R][2];
#endif
};

static __device__ __forceinline__ Stored load_scales(const Arguments &p, const Rows &rows, int chunk, int t) {
    Stored s = {};
    if (is_there(p, chunk, t)) {
#pragma unroll
        for (int r = 0; r < R; r++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const Matrix &w = rows.matrix[r][GATED ? half : 0];
                const int at = rows.scale[r][half] + (chunk * CHUNK + t * VALUES) / BLOCK;
#if SCALES == 1
                s.scale[r][half] = __ldg((const float *)w.scales + at);
#else
                s.code[r][half] = __ldg((const u8 *)w.scales + at);
                s.second[r][half] = __ldg(w.scale_scales + (at >> p.scale_shift));
#endif
#if ZERO_POINTS
                s.zero[r][half] = __ldg(w.zero_points + at);
#endif
            }
    }
    return s;
}
#endif

// What codes of a lane's pieces are multiplied by, and what integers have too much, as pairs of float16.
struct Scales {
#if SCALES
    u32 scale[R][2];
#endif
#if ZERO_POINTS
    u32 much[R][2];
#endif
};

#if SCALES
static __device__ __forceinline__ Scales decoded(const BatchArguments &b, const Rows &rows, const Stored &stored) {
    Scales s;
#pragma unroll
    for (int r = 0; r < R; r++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int of = (int)(rows.matrix[r] - b.p.w) + (GATED ? half : 0);
#if SCALES == 1
            const float scale = stored.scale[r][half];
#else
            const float scale = SHARED(float, MAP_AT + 4 * stored.code[r][half]) * stored.second[r][half] + SHARED(float, OFFSETS_AT + 4 * of);
#endif
            s.scale[r][half] = half_pair(scale * b.up[of], scale * b.up[of]);
#if ZERO_POINTS
            const float zero = (float)stored.zero[r][half];
            s.much[r][half] = half_pair(1024.0f + HALF_RANGE + zero, 1024.0f + (KIND == 1 ? 16.0f : 1.0f) * (HALF_RANGE + zero));
#endif
        }
    return s;
}
#endif

// Four weights of a piece, those of product ``step``, as two pairs of float16 times their scale.
static __device__ __forceinline__ void weights_of(const Chunk &c, const Scales &scales, int r, int half, int step, u32 lane_bank,
                                                  u32 *first, u32 *second) {
#if KIND >= 5
    const uint4 &four = c.piece[r][half];
    const u32 w[4] = {four.x, four.y, four.z, four.w};
    *first = w[2 * step], *second = w[2 * step + 1];
#else
    decode(c.piece[r][half], step, lane_bank, first, second);
#if POSITIVE
    // The bits stand where a float16 of 1024 and more has its last ones: an exact integer, 1024 and half the range too much.
    // With 4 bits the second pair is 16 times as large, and meets an x of a sixteenth.
#if ZERO_POINTS
    const u32 much = scales.much[r][half], one = bytes_of(much, much, 0x1010), other = bytes_of(much, much, 0x3232);
#else
    const u32 one = KIND == 1 ? 0x64086408 : 0x64806480, other = 0x64806480;
#endif
    *first = less_pair(*first | 0x64006400, one);
    *second = less_pair(*second | 0x64006400, other);
#endif
#if SCALES
    *first = times_pair(*first, scales.scale[r][half]);
    *second = times_pair(*second, scales.scale[r][half]);
#endif
#endif
}

struct Sums {
    float y[R][GROUPS][4];  // of output g, then g + 8: rows 2 t and 2 t + 1 of 8 of x
};

static __device__ __forceinline__ void multiply(const Chunk &c, const Scales &scales, int x_at, int g, int t, u32 lane_bank, Sums *sums) {
#pragma unroll
    for (int pair = 0; pair < STEPS / 2; pair++) {
        u32 a[R][2][4];
#pragma unroll
        for (int r = 0; r < R; r++)
#pragma unroll
            for (int odd = 0; odd < 2; odd++) {
                weights_of(c, scales, r, 0, 2 * pair + odd, lane_bank, &a[r][odd][0], &a[r][odd][2]);
                weights_of(c, scales, r, 1, 2 * pair + odd, lane_bank, &a[r][odd][1], &a[r][odd][3]);
            }
#pragma unroll
        for (int group = 0; group < GROUPS; group++) {
            const uint4 x = SHARED(uint4, x_at + ((pair * ROWS + group * 8 + g) * 4 + t) * 16);
#pragma unroll
            for (int r = 0; r < R; r++) {
                multiply_add(sums->y[r][group], a[r][0], x.x, x.y);
                multiply_add(sums->y[r][group], a[r][1], x.z, x.w);
            }
        }
    }
}

// Begin to copy stage ``stage`` of x.
static __device__ __forceinline__ void fetch(const Arguments &p, int part, int stage) {
    const u8 *from = (const u8 *)p.x + ((i64)part * STAGES + stage) * STAGE_BYTES;
    const u32 to = shared_address() + X_AT + stage % DEPTH * STAGE_BYTES;
    for (int i = threadIdx.x * 16; i < STAGE_BYTES; i += THREADS * 16) copy_16(to + i, from + i, true);
}

static __device__ __forceinline__ void fill_tables(const Arguments &p) {
    fill_pairs(p.values);
#if SCALES == 2
    for (int i = threadIdx.x; i < 256; i += THREADS) SHARED(float, MAP_AT + 4 * i) = p.map[i];
    if (threadIdx.x < 3) SHARED(float, OFFSETS_AT + 4 * threadIdx.x) = p.w[threadIdx.x].scale_offset ? *p.w[threadIdx.x].scale_offset : 0.0f;
#endif
}

static __device__ __forceinline__ int sum_at(int slice, int tile, int m, int row) {
    return SUMS_AT + (((slice * TILES + tile) * ROWS + m) * 16 + row) * 4;
}

// A warp's sums to shared memory.
static __device__ __forceinline__ void leave(const Arguments &p, int of, int slice, int g, int t, const Sums &sums) {
#pragma unroll
    for (int r = 0; r < R; r++)
#pragma unroll
        for (int group = 0; group < GROUPS; group++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int m = group * 8 + 2 * t + i % 2;
                if (m < p.M) SHARED(float, sum_at(slice, of * R + r, m, g + i / 2 * 8)) = sums.y[r][group][i];
            }
}

static __device__ __forceinline__ float sum_of_slices(int tile, int m, int row) {
    float sum = 0.0f;
#pragma unroll
    for (int slice = 0; slice < WK; slice++) sum += SHARED(float, sum_at(slice, tile, m, row));
    return sum;
}

static __device__ __forceinline__ float *part_at(const BatchArguments &b, int part, int tile, int m, int row) {
    return b.parts + (((i64)part * b.p.tiles + tile) * ROWS + m) * 16 + row;
}

static __device__ __forceinline__ float sum_of_parts(const BatchArguments &b, int tile, int m, int row) {
    float sum = 0.0f;
#pragma unroll
    for (int part = 0; part < SPLIT; part++) sum += load_from_others(part_at(b, part, tile, m, row));
    return sum;
}

// Adds the sums of a block's outputs up, over slices and, in the last of the blocks that share them, over those.
static __device__ __forceinline__ void finish(const BatchArguments &b, int first_tile) {
    const Arguments &p = b.p;
    const int tiles = p.tiles - first_tile < TILES ? p.tiles - first_tile : TILES;
#if SPLIT > 1
    for (int i = threadIdx.x; i < tiles * p.M * 16; i += THREADS) {
        const int tile = i / 16 / p.M, m = i / 16 % p.M, row = i % 16;
        *part_at(b, blockIdx.y, first_tile + tile, m, row) = sum_of_slices(tile, m, row);
    }
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) SHARED(int, LAST_AT) = atomicAdd(b.arrived + blockIdx.x, 1) == SPLIT - 1;
    __syncthreads();
    if (!SHARED(int, LAST_AT)) return;
    __threadfence();
    if (threadIdx.x == 0) b.arrived[blockIdx.x] = 0;
#endif
    const int outputs = GATED ? 8 : 16;
    for (int i = threadIdx.x; i < tiles * p.M * outputs; i += THREADS) {
        const int tile = i / outputs / p.M, m = i / outputs % p.M, row = i % outputs;
#if SPLIT > 1
        const float sum = sum_of_parts(b, first_tile + tile, m, row);
        const float other = GATED ? sum_of_parts(b, first_tile + tile, m, row + 8) : 0.0f;
#else
        const float sum = sum_of_slices(tile, m, row), other = GATED ? sum_of_slices(tile, m, row + 8) : 0.0f;
#endif
        int first = 0;
        const float down = b.down[&matrix_of(p, first_tile + tile, 0, &first) - p.w];
        write_output(p, first_tile + tile, m, row, sum * down, other * b.down[1]);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) batch_rows(const __grid_constant__ BatchArguments b) {
    const Arguments &p = b.p;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int of = warp % WN, slice = warp / WN, part = blockIdx.y, block_tile = (int)blockIdx.x * TILES;
    const int first_chunk = part * (STAGES * STAGE_CHUNKS) + slice * CS;
#define CHUNK_OF(visit) (first_chunk + (visit) / CS * STAGE_CHUNKS + (visit) % CS)
    const Rows rows = rows_of(p, block_tile + of * R, g, t);
    Chunk pieces[2][AHEAD];
#pragma unroll
    for (int i = 0; i < AHEAD; i++)
        if (i < VISITS) pieces[0][i] = load_chunk(p, rows, CHUNK_OF(i), t);
    Scales scales = {};
#if SCALES
    Stored stored = load_scales(p, rows, CHUNK_OF(0), t);
#endif
    fill_tables(p);
    wait_for_the_kernel_before();
    for (int m = threadIdx.x; m < p.M; m += THREADS) SHARED(float, FACTORS_AT + 4 * m) = b.factors[m];
#pragma unroll
    for (int stage = 0; stage < DEPTH - 1; stage++) {
        if (stage < STAGES) fetch(p, part, stage);
        commit_copies();
    }
    Sums sums = {};
    u32 lane_bank = 0;
#pragma unroll 1
    for (int n = 0; n < VISITS; n += 2 * AHEAD) {
#pragma unroll
        for (int u = 0; u < 2 * AHEAD; u++) {
            const int visit = n + u, buffer = u / AHEAD;
            if (VISITS % (2 * AHEAD) && visit >= VISITS) break;
            if (u % AHEAD == 0) {  // all of the next pieces at once: they lie side by side in memory
#pragma unroll
                for (int i = 0; i < AHEAD; i++)
                    if (visit + AHEAD + i < VISITS) pieces[1 - buffer][i] = load_chunk(p, rows, CHUNK_OF(visit + AHEAD + i), t);
            }
            if (visit % CS == 0) {
                const int stage = visit / CS;
                wait_copies<DEPTH - 2>();
                __syncthreads();  // all have this stage, and have read the one before
                lane_bank = bank_after_tables(lane * 4);
                if (stage + DEPTH - 1 < STAGES) fetch(p, part, stage + DEPTH - 1);
                commit_copies();
            }
#if SCALES
            scales = decoded(b, rows, stored);
            if (visit + 1 < VISITS) stored = load_scales(p, rows, CHUNK_OF(visit + 1), t);
#endif
            const int x_at = X_AT + visit / CS % DEPTH * STAGE_BYTES + (slice * CS + visit % CS) * CHUNK_OF_X;
            multiply(pieces[buffer][u % AHEAD], scales, x_at, g, t, lane_bank, &sums);
        }
    }
    __syncthreads();
    leave(p, of, slice, g, t, sums);
    __syncthreads();
    finish(b, block_tile);
}
