// What the kernels for a batch's rows share: a lane's weights and their scales, tables, and what becomes of sums; included by
// batch_rows.cu, whose text says how a block works, and by wide_rows.cu, with their macros.

#pragma once

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
#define READY_AT (LAST_AT + 4)                // wide_rows.cu: 8 bytes for each stage of x
#define X_AT ((READY_AT + 64 + 127) / 128 * 128)
#define SUMS_AT X_AT                          // when x has been used
#define SUM_PITCH 20                          // of a row's 16 outputs: lanes that write side by side have other banks

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

static __device__ __forceinline__ bool is_there(const Arguments &p, u32 chunk, u32 t) {
    return WHOLE || chunk * CHUNK + t * VALUES < (u32)p.K;
}

struct Chunk {
    uint4 piece[R][2];
};

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

static __device__ __forceinline__ Stored load_scales(const Arguments &p, const Rows &rows, u32 chunk, u32 t) {
    Stored s = {};
    if (is_there(p, chunk, t)) {
#pragma unroll
        for (int r = 0; r < R; r++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const Matrix &w = rows.matrix[r][GATED ? half : 0];
                const u32 at = rows.scale[r][half] + (chunk * CHUNK + t * VALUES) / BLOCK;
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

// Four weights of a piece, those of product ``step``, as two pairs of what their codes stand for.
static __device__ __forceinline__ uint2 codes_of(const Chunk &c, int r, int half, int step, u32 lane_bank) {
    const uint4 &four = c.piece[r][half];
    uint2 pairs;
#if KIND >= 5
    const u32 w[4] = {four.x, four.y, four.z, four.w};
    pairs.x = w[2 * step], pairs.y = w[2 * step + 1];
#else
    decode(four, step, lane_bank, &pairs.x, &pairs.y);
#endif
    return pairs;
}

// The same as pairs of float16 times their scale.
static __device__ __forceinline__ void scaled(uint2 pairs, const Scales &scales, int r, int half, u32 *first, u32 *second) {
    *first = pairs.x, *second = pairs.y;
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
}

static __device__ __forceinline__ void weights_of(const Chunk &c, const Scales &scales, int r, int half, int step, u32 lane_bank,
                                                  u32 *first, u32 *second) {
    scaled(codes_of(c, r, half, step, lane_bank), scales, r, half, first, second);
}

struct Sums {
    float y[R][GROUPS][4];  // of output g, then g + 8: rows 2 t and 2 t + 1 of 8 of x
};

static __device__ __forceinline__ void fill_tables(const Arguments &p) {
    fill_pairs(p.values);
#if SCALES == 2
    for (int i = threadIdx.x; i < 256; i += THREADS) SHARED(float, MAP_AT + 4 * i) = p.map[i];
    if (threadIdx.x < 3) SHARED(float, OFFSETS_AT + 4 * threadIdx.x) = p.w[threadIdx.x].scale_offset ? *p.w[threadIdx.x].scale_offset : 0.0f;
#endif
}

static __device__ __forceinline__ int sum_at(int slice, int tile, int m, int row) {
    return SUMS_AT + (((slice * TILES + tile) * ROWS + m) * SUM_PITCH + row) * 4;
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

static __device__ __forceinline__ float *part_at(const BatchArguments &b, int part, int tile, int m, int row) {
    return b.parts + (((i64)part * b.p.tiles + tile) * ROWS + m) * 16 + row;
}

static __device__ __forceinline__ void add_four(float4 *sum, const float4 &y) {
    sum->x += y.x, sum->y += y.y, sum->z += y.z, sum->w += y.w;
}

// Four outputs of a tile, from ``row`` on: their sums over slices, then over the blocks that share them.
static __device__ __forceinline__ float4 four_of_slices(int tile, int m, int row) {
    float4 sum = SHARED(float4, sum_at(0, tile, m, row));
#pragma unroll
    for (int slice = 1; slice < WK; slice++) add_four(&sum, SHARED(float4, sum_at(slice, tile, m, row)));
    return sum;
}

static __device__ __forceinline__ float4 four_of_parts(const BatchArguments &b, int first_tile, int tile, int m, int row) {
#if SPLIT > 1
    float4 parts[SPLIT];  // all asked for before one is there
#pragma unroll
    for (int part = 0; part < SPLIT; part++) parts[part] = load_four_from_others(part_at(b, part, first_tile + tile, m, row));
#pragma unroll
    for (int part = 1; part < SPLIT; part++) add_four(&parts[0], parts[part]);
    return parts[0];
#else
    return four_of_slices(tile, m, row);
#endif
}

// Whether nothing but a norm, an activation and the stream stand around a product.
static __device__ __forceinline__ bool is_plain(const Arguments &p) {
    bool plain = true;
#pragma unroll
    for (int i = 0; i < 3; i++) plain = plain && !p.w[i].bias && !p.w[i].branch;
    return plain;
}

static __device__ __forceinline__ float scale_of_row(const Matrix &w, int row) {
#if SCALES == 0 && KIND < 5
    return ((const float *)w.scales)[w.scales_a_row ? row_in(w, row) : 0] * (POSITIVE ? 1.0f : BITS_FACTOR);
#else
    return 1.0f;
#endif
}

// Where a tile's outputs begin, and which matrix they are of.
struct Outputs {
    int of, first;  // first: in the matrix
    i64 n;          // in a row of the output
};
static __device__ __forceinline__ Outputs outputs_of(const Arguments &p, int tile) {
    Outputs o = {0, 0, 0};
    const Matrix &w = matrix_of(p, tile, 0, &o.first);
    while (&p.w[o.of] != &w) o.n += p.w[o.of++].N;
    o.n += o.first;
    return o;
}

#define QUADS (GATED ? 2 : 4)  // of a tile's outputs in a row
#define AT_ONCE 4              // quads of a thread, so that it waits for memory once

// A block's sums to the output, four outputs at a time, where a product is plain: values to come are all asked for first.
static __device__ __forceinline__ void write_fours(const BatchArguments &b, int first_tile, int tiles) {
    const Arguments &p = b.p;
#pragma unroll 1
    for (int i = threadIdx.x; i < tiles * ROWS * QUADS; i += AT_ONCE * THREADS) {
        float4 y[AT_ONCE], z[AT_ONCE], old[AT_ONCE];
        float *to[AT_ONCE];
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++) {
            const int at = i + j * THREADS, tile = at / QUADS / ROWS, m = at / QUADS % ROWS, row = at % QUADS * 4;
            to[j] = nullptr;
            if (tile >= tiles || m >= p.M) continue;
            const Outputs o = outputs_of(p, first_tile + tile);
            if (o.first + row >= p.w[o.of].N) continue;
            to[j] = (float *)p.out + m * p.out_pitch + o.n + row;
            y[j] = four_of_parts(b, first_tile, tile, m, row);
            if (GATED) z[j] = four_of_parts(b, first_tile, tile, m, row + 8);
#if ADD && OUT_KIND == 0
            old[j] = *(const float4 *)to[j];
#endif
        }
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++) {
            if (!to[j]) continue;
            const int at = i + j * THREADS, tile = at / QUADS / ROWS, m = at / QUADS % ROWS, row = at % QUADS * 4;
            const Outputs o = outputs_of(p, first_tile + tile);
            const float factor = SHARED(float, FACTORS_AT + 4 * m), down = b.down[o.of] * factor;
            float *four = &y[j].x, *other = &z[j].x;
#pragma unroll
            for (int e = 0; e < 4; e++) {
                four[e] *= down * scale_of_row(p.w[o.of], o.first + row + e);
                if (GATED) four[e] = activated(four[e]) * (other[e] * b.down[1] * factor * scale_of_row(p.w[1], o.first + row + e));
                four[e] *= p.out_factor;
            }
#if ADD && OUT_KIND == 0
            add_four(&y[j], old[j]);
#endif
#if OUT_KIND == 0
            *(float4 *)to[j] = y[j];
#else
            u16 *sixteen = (u16 *)p.out + m * p.out_pitch + o.n + row;
#if OUT_KIND == 1
            *(uint2 *)sixteen = uint2{bf16_pair(four[0], four[1]), bf16_pair(four[2], four[3])};
#else
            *(uint2 *)sixteen = uint2{half_pair(four[0], four[1]), half_pair(four[2], four[3])};
#endif
#endif
        }
    }
}

static __device__ __forceinline__ bool in_fours(const Arguments &p) {
    bool aligned = p.out_pitch % 4 == 0 && (i64)p.out % 16 == 0;
#pragma unroll
    for (int i = 0; i < 3; i++) aligned = aligned && p.w[i].N % 4 == 0;
    return aligned && is_plain(p);
}

// Adds the sums of a block's outputs up, over slices and, in the last of the blocks that share them, over those.
static __device__ __forceinline__ void finish(const BatchArguments &b, int first_tile) {
    const Arguments &p = b.p;
    const int tiles = p.tiles - first_tile < TILES ? p.tiles - first_tile : TILES;
#if SPLIT > 1
    for (int i = threadIdx.x; i < tiles * ROWS * 4; i += THREADS) {
        const int tile = i / 4 / ROWS, m = i / 4 % ROWS, row = i % 4 * 4;
        if (m < p.M) *(float4 *)part_at(b, blockIdx.y, first_tile + tile, m, row) = four_of_slices(tile, m, row);
    }
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) SHARED(int, LAST_AT) = atomicAdd(b.arrived + blockIdx.x, 1) == SPLIT - 1;
    __syncthreads();
    if (!SHARED(int, LAST_AT)) return;
    __threadfence();
    if (threadIdx.x == 0) b.arrived[blockIdx.x] = 0;
#endif
    if (in_fours(p)) {
        write_fours(b, first_tile, tiles);
        return;
    }
#pragma unroll 1
    for (int i = threadIdx.x; i < tiles * ROWS * QUADS; i += THREADS) {
        const int tile = i / QUADS / ROWS, m = i / QUADS % ROWS, row = i % QUADS * 4;
        if (m >= p.M) continue;
        const float4 y = four_of_parts(b, first_tile, tile, m, row);
        const float4 z = GATED ? four_of_parts(b, first_tile, tile, m, row + 8) : float4{0.0f, 0.0f, 0.0f, 0.0f};
        const float down = b.down[outputs_of(p, first_tile + tile).of];
        const float *four = &y.x, *other = &z.x;
#pragma unroll
        for (int e = 0; e < 4; e++) write_output(p, first_tile + tile, m, row + e, four[e] * down, other[e] * b.down[1]);
    }
}
