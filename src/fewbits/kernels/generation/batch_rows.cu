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

#include "batch_parts.cu"

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
