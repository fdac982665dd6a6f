// y = x W^T for 8 to 64 rows of x and a packed W on Hopper's tensor cores (compute capability 9.0 and no other); batch_rows.py says
// what is computed, batch_rows.cu how a block is divided. What is different here:
//
// 1. Four warps that lie side by side, a warpgroup, multiply together (warpgroup.cu): their 64 outputs from registers, x from
//    shared memory, while the warps decode the next weights.
// 2. Codes go to shared memory first, RING chunks of each warp, of which one is in use and the others are on their way, so that
//    registers are left for the sums. A lane copies what it will read itself, so no warp waits for another.
// 3. A stage of x is one bulk copy, which the copy engine makes without any warp's help; a barrier in shared memory says when it
//    has come. It goes where the stage before the last one was: by then no product reads that.
//
// Compiled with the macros of batch_rows.cu, RING instead of AHEAD; WN is a multiple of 4, GROUPS a power of two.

#define WARPS (WN * WK)
#define ROWS (8 * GROUPS)

#include "batch_parts.cu"
#include "warpgroup.cu"

#define HAS_COME(stage) (READY_AT + (stage) % DEPTH * 8)            // barriers: stage of x is there; all warps have read it
#define IS_READ(stage) (READY_AT + (DEPTH + (stage) % DEPTH) * 8)
#define RING_AT (X_AT + DEPTH * STAGE_BYTES)
#define SLOT_BYTES (THREADS * R * 32)

// Begin to copy a lane's codes of a chunk.
static __device__ __forceinline__ void ask_for_chunk(const Arguments &p, const Rows &rows, u32 chunk, int t, u32 slot) {
    const u32 to = shared_address() + RING_AT + slot * SLOT_BYTES + threadIdx.x * 16;
    const bool there = is_there(p, chunk, t);
#pragma unroll
    for (int r = 0; r < R; r++)
#pragma unroll
        for (int half = 0; half < 2; half++) copy_16(to + (2 * r + half) * (THREADS * 16), rows.codes[r][half] + chunk * CHUNK_BYTES, there);
}

static __device__ __forceinline__ Chunk chunk_in(int slot) {
    Chunk c;
#pragma unroll
    for (int r = 0; r < R; r++)
#pragma unroll
        for (int half = 0; half < 2; half++)
            c.piece[r][half] = SHARED(uint4, RING_AT + slot * SLOT_BYTES + (2 * r + half) * (THREADS * 16) + threadIdx.x * 16);
    return c;
}

// Begin to copy stage ``stage`` of x; one thread does.
static __device__ __forceinline__ void fetch(const Arguments &p, int part, int stage) {
    const u8 *from = (const u8 *)p.x + ((i64)part * STAGES + stage) * STAGE_BYTES;
    copy_bulk(X_AT + stage % DEPTH * STAGE_BYTES, from, STAGE_BYTES, HAS_COME(stage));
}

struct Codes {
    uint2 pairs[R][2];  // of a product's 16 dimensions
};
struct Operand {
    u32 a[R][4];
};

static __device__ __forceinline__ Codes codes_of_step(const Chunk &c, int step, u32 lane_bank) {
    Codes codes;
#pragma unroll
    for (int r = 0; r < R; r++) codes.pairs[r][0] = codes_of(c, r, 0, step, lane_bank), codes.pairs[r][1] = codes_of(c, r, 1, step, lane_bank);
    return codes;
}

static __device__ __forceinline__ Operand operand_of(const Codes &codes, const Scales &scales) {
    Operand w;
#pragma unroll
    for (int r = 0; r < R; r++) {
        scaled(codes.pairs[r][0], scales, r, 0, &w.a[r][0], &w.a[r][2]);
        scaled(codes.pairs[r][1], scales, r, 1, &w.a[r][1], &w.a[r][3]);
    }
    return w;
}

static __device__ __forceinline__ void begin_products(Sums *sums, const Operand &w, u64 x) {
    registers_are_written();
#pragma unroll
    for (int r = 0; r < R; r++) multiply_wide(sums->y[r][0], w.a[r], x);
    commit_products();
}

// A plain product's sums, where a warp has all of its outputs': out as they lie in registers.
static __device__ __forceinline__ void write_own(const BatchArguments &b, int first_tile, int g, int t, const Sums &sums) {
    const Arguments &p = b.p;
#pragma unroll
    for (int r = 0; r < R; r++) {
        const int tile = first_tile + r;
        if (tile >= p.tiles) return;
        const Outputs o = outputs_of(p, tile);
        const int second = GATED ? 1 : o.of, row = o.first + g, other = GATED ? row : row + 8;
        const Matrix &w = p.w[o.of], &v = p.w[second];
        const i64 n = o.n + g;
        const float down = b.down[o.of] * scale_of_row(w, row), other_down = b.down[second] * scale_of_row(v, other);
#pragma unroll
        for (int group = 0; group < GROUPS; group++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int m = group * 8 + 2 * t + i;
                if (m >= p.M) continue;
                const float factor = SHARED(float, FACTORS_AT + 4 * m);
                const float y = sums.y[r][group][i] * down * factor, z = sums.y[r][group][i + 2] * other_down * factor;
#if GATED
                if (row < w.N) store(p, m, n, activated(y) * z);
#else
                if (row < w.N) store(p, m, n, y);
                if (other < w.N) store(p, m, n + 8, z);
#endif
            }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) wide_rows(const __grid_constant__ BatchArguments b) {
    const Arguments &p = b.p;
    // The same in all lanes, and the compiler should know it.
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int of = warp % WN, slice = WK == 1 ? 0 : warp / WN, part = blockIdx.y, block_tile = (int)blockIdx.x * TILES;
    const u32 first_chunk = part * (STAGES * STAGE_CHUNKS) + slice * CS;
#define CHUNK_OF(visit) (first_chunk + (u32)(visit) / CS * STAGE_CHUNKS + (u32)(visit) % CS)
    const Rows rows = rows_of(p, block_tile + of * R, g, t);
#pragma unroll
    for (int i = 0; i < RING - 1; i++) {
        if (i < VISITS) ask_for_chunk(p, rows, CHUNK_OF(i), t, i);
        commit_copies();
    }
#if SCALES
    Stored stored[2] = {load_scales(p, rows, CHUNK_OF(0), t), {}};
    if (VISITS > 1) stored[1] = load_scales(p, rows, CHUNK_OF(1), t);
#endif
    fill_tables(p);
    if (threadIdx.x == 0) {
        for (int i = 0; i < DEPTH; i++) begin_barrier(HAS_COME(i), 1), begin_barrier(IS_READ(i), WARPS);
        barriers_have_begun();
    }
    wait_for_the_kernel_before();
    for (int m = threadIdx.x; m < p.M; m += THREADS) SHARED(float, FACTORS_AT + 4 * m) = b.factors[m];
    if (threadIdx.x == 0)
        for (int stage = 0; stage < DEPTH && stage < STAGES; stage++) fetch(p, part, stage);
    __syncthreads();
    const u32 lane_bank = bank_after_tables(lane * 4);
    Sums sums = {};
    Scales scales = {}, next_scales = {};
    wait_copies<RING - 2>();
    Chunk chunk = chunk_in(0);
#if SCALES
    scales = decoded(b, rows, stored[0]);
    if (VISITS > 2) stored[0] = load_scales(p, rows, CHUNK_OF(2), t);
#endif
    Operand weights[3];
    Codes codes = codes_of_step(chunk, 0, lane_bank);
    weights[0] = operand_of(codes, scales);
    codes = codes_of_step(chunk, 1, lane_bank);
    u32 slot = 0;
#pragma unroll 1
    for (u32 n = 0; n < VISITS; n += 2) {
#pragma unroll
        for (u32 u = 0; u < 2; u++) {
            const u32 visit = n + u, stage = visit / CS;
            if (VISITS % 2 && visit >= VISITS) break;
            if (visit % CS == 0) {
                if (stage >= 2 && lane == 0) {  // of the stage before the last one this warp's products are done
                    come_to(IS_READ(stage - 2));
                    if (warp == 0 && stage + DEPTH - 2 < STAGES) {
                        wait_until_turned(IS_READ(stage - 2), (stage - 2) / DEPTH % 2);
                        fetch(p, part, stage + DEPTH - 2);
                    }
                }
                wait_until_turned(HAS_COME(stage), stage / DEPTH % 2);
            }
            const u64 x = description_of_x(X_AT + stage % DEPTH * STAGE_BYTES + (slice * CS + visit % CS) * CHUNK_OF_X);
            begin_products(&sums, weights[0], x);
            // While they run: what the next visit needs. The slot of the visit before is free, for what was in it has been decoded.
            if (visit + RING - 1 < VISITS) ask_for_chunk(p, rows, CHUNK_OF(visit + RING - 1), t, slot ? slot - 1 : RING - 1);
            commit_copies();
            slot = slot + 1 < RING ? slot + 1 : 0;
            wait_copies<RING - 2>();
            const Chunk next = chunk_in(slot);
#if SCALES
            next_scales = decoded(b, rows, stored[1 - u]);
            if (visit + 3 < VISITS) stored[1 - u] = load_scales(p, rows, CHUNK_OF(visit + 3), t);
#endif
#pragma unroll
            for (int step = 1; step <= STEPS; step++) {  // codes are looked up a step before they meet their scales
                const Codes after = step + 1 < STEPS ? codes_of_step(chunk, step + 1, lane_bank) : codes_of_step(next, step + 1 - STEPS, lane_bank);
                weights[step % 3] = operand_of(codes, step < STEPS ? scales : next_scales);
                codes = after;
                wait_products<1>();  // those of two steps before: their weights' registers are free for the step after this one
                if (step < STEPS) begin_products(&sums, weights[step % 3], x + step * (PRODUCT_OF_X >> 4));
            }
            if (STEPS % 3) weights[0] = weights[STEPS % 3];
            chunk = next, scales = next_scales;
        }
    }
    wait_products<0>();
#if SLICES * SPLIT == 1
    if (is_plain(p)) {
        write_own(b, block_tile + of * R, g, t, sums);
        return;
    }
#endif
    __syncthreads();
    leave(p, of, slice, g, t, sums);
    __syncthreads();
    finish(b, block_tile);
}
