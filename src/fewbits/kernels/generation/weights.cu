// The weights of few_rows: stages of a warp in shared memory, scales, and codes to pairs of 16-bit numbers; included by
// few_rows.cu, with its macros.

#pragma once

static __device__ __forceinline__ int tile_of(int i) { return blockIdx.x + i / ROUNDS * gridDim.x; }
static __device__ __forceinline__ int chunk_of(int i) { return (i % ROUNDS * WARPS + (int)threadIdx.x / 32) * LOADS; }
static __device__ __forceinline__ int stage_of(int i) {
    return STAGES_AT + ((int)threadIdx.x / 32 * DEPTH + i % DEPTH) * STAGE_BYTES;
}

#define THERE(chunk) (FULL || (chunk) * CHUNK < p.K)

// Begin to copy stage i.
static __device__ __forceinline__ void fetch(const Arguments &p, int i) {
    const int tile = tile_of(i), chunk = chunk_of(i), lane = threadIdx.x % 32;
    const u32 to = shared_address() + stage_of(i);
    // Lanes side by side have pieces of one row; so many rows at a time, of each half of the tile.
    const int pieces = ROW_BYTES / 16, at_once = pieces < 32 ? 32 / pieces : 1, turns = pieces < 4 ? 1 : 8 / at_once;
    const int own_row = lane / pieces, piece = lane % pieces, bytes = chunk * CHUNK_BYTES + piece * 16;
    const bool there = FULL || bytes * 8 / BITS < p.K;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int first = 0;
        const Matrix &w = matrix_of(p, tile, half, &first);
        const u8 *from = w.codes + (i64)first * w.row_bytes + (there ? bytes : 0);
        const int last = w.N - 1 - first;  // of the matrix, counted from this half's first
#pragma unroll
        for (int turn = 0; turn < turns; turn++) {
            const int row = turn * at_once + own_row;
            if (at_once > 8 && row >= 8) break;
            copy_16(to + (half * 8 + row) * ROW_PITCH + piece * 16, from + (row < last ? row : last) * (int)w.row_bytes, there);
        }
    }
#if VECTOR_SCALES
    if (lane < 16) {
        int first_row = 0;
        const Matrix &w = matrix_of(p, tile, lane / 8, &first_row);
        const int first = (row_in(w, first_row + lane % 8) >> w.block_shift) * w.scales_a_row + chunk;
#if SCALES == 1
#pragma unroll
        for (int l = 0; l < LOADS; l += 4)
            copy_16(to + SCALES_IN_STAGE + lane * SCALE_BYTES + l * 4, (const float *)w.scales + first + l, true);
#else
        copy_few<LOADS>(to + SCALES_IN_STAGE + lane * SCALE_BYTES, (const u8 *)w.scales + first);
        copy_few<4>(to + SECOND_IN_STAGE + lane * 4, w.scale_scales + (first >> p.scale_shift));
#endif
#if ZERO_POINTS
        copy_few<LOADS>(to + ZEROS_IN_STAGE + lane * LOADS, w.zero_points + first);
#endif
    }
#endif
}

#if SCALES
struct Scales {  // of LOADS chunks, with what the bits stand for; what has to be added to integers beside HALF_RANGE
    float scale[2][LOADS];
#if ZERO_POINTS
    float zero[2][LOADS];
#endif
};

static __device__ __forceinline__ void load_scales(const Arguments &p, int i, Scales *s) {
    const int tile = tile_of(i), chunk = chunk_of(i), g = threadIdx.x % 32 / 4, stage = stage_of(i);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int first_row = 0;
        const Matrix &w = matrix_of(p, tile, half, &first_row);
        const int own = half * 8 + g, row = row_in(w, first_row + g);
#if SCALES == 2
        const float offset = SHARED(float, OFFSETS_AT + 4 * (int)(&w - p.w));
#endif
#if VECTOR_SCALES
#if SCALES == 1
#pragma unroll
        for (int l = 0; l < LOADS; l += 4) {
            const float4 four = SHARED(float4, stage + SCALES_IN_STAGE + own * SCALE_BYTES + l * 4);
            s->scale[half][l] = four.x, s->scale[half][l + 1] = four.y, s->scale[half][l + 2] = four.z, s->scale[half][l + 3] = four.w;
        }
#else
        const float second = SHARED(float, stage + SECOND_IN_STAGE + own * 4);
#pragma unroll
        for (int l = 0; l < LOADS; l += 4) {
            const u32 codes = SHARED(u32, stage + SCALES_IN_STAGE + own * SCALE_BYTES + l);
#pragma unroll
            for (int j = 0; j < 4; j++)
                s->scale[half][l + j] = SHARED(float, MAP_AT + 4 * (codes >> (8 * j) & 255)) * second + offset;
        }
#endif
#else
        const int first = (row >> w.block_shift) * w.scales_a_row;
#pragma unroll
        for (int l = 0; l < LOADS; l++) {
            const int at = first + (chunk + l) / p.block_chunks;
            if (!THERE(chunk + l)) s->scale[half][l] = 0.0f;
#if SCALES == 1
            else s->scale[half][l] = __ldg((const float *)w.scales + at);
#else
            else s->scale[half][l] = SHARED(float, MAP_AT + 4 * __ldg((const u8 *)w.scales + at)) * __ldg(w.scale_scales + (at >> p.scale_shift)) + offset;
#endif
        }
#endif
#pragma unroll
        for (int l = 0; l < LOADS; l++) {
            s->scale[half][l] *= BITS_FACTOR;
#if ZERO_POINTS && VECTOR_SCALES
            s->zero[half][l] = SHARED(signed char, stage + ZEROS_IN_STAGE + own * LOADS + l) / BITS_FACTOR;
#elif ZERO_POINTS
            s->zero[half][l] = THERE(chunk + l) ? __ldg(w.zero_points + first + (chunk + l) / p.block_chunks) / BITS_FACTOR : 0.0f;
#endif
        }
    }
}
#endif

// Four weights of a lane's piece, those of product ``step``, as two pairs of float16 (KIND 5: bfloat16).
static __device__ __forceinline__ void decode(const u32 *w, int step, u32 lane_bank, u32 *first, u32 *second) {
#if KIND == 0
    const u32 word = w[step / 2] >> (step % 2 * 16);
    *first = word_at<TABLE_AT>((word << 7 & 0x7f80) | lane_bank);
    *second = word_at<TABLE_AT>((word >> 1 & 0x7f80) | lane_bank);
#elif KIND == 1  // pairs (0, 4), (1, 5) 16 times as large, then (2, 6), (3, 7): x lies and is scaled likewise
    const u32 word = w[step / 2] >> (step % 2 * 8);
    *first = (word & 0x000f000f) ^ 0x00080008;
    *second = (word & 0x00f000f0) ^ 0x00800080;
#elif KIND == 2  // pairs (0, 2), (1, 3)
    *first = (w[step] & 0x00ff00ff) ^ 0x00800080;
    *second = (w[step] >> 8 & 0x00ff00ff) ^ 0x00800080;
#elif KIND == 3  // the same pairs; sign, 4 and 3 bits to sign, 5 and 10
    *first = (w[step] << 8 & 0x80008000) | (w[step] << 7 & 0x3f803f80);
    *second = (w[step] & 0x80008000) | (w[step] >> 1 & 0x3f803f80);
#elif KIND == 4
    *first = w[step] << 8 & 0xff00ff00;
    *second = w[step] & 0xff00ff00;
#else
    *first = w[2 * step];
    *second = w[2 * step + 1];
#endif
}

