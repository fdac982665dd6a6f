// Products of prepared stochastic operands with many rows by running the streams as bits, on Hopper's tensor cores (compute
// capability 9.0 and no other). codes.py defines the result; wide_bits.py makes the tables.
//
// The idea. A warpgroup multiplies bits (AND, count the ones) 16 times as fast as bfloat16. Streams have magnitudes only; what to do
// about signs decides how much of that is left (bits.cu needs three products).
//
// 1. Signs. With L steps, let X be the bits of a code of a, all turned over if it is negative (s = 1), and Y those of a code of b,
//    all turned over if that is negative (t = 1). With P = popc(X & Y), u ones of |a|'s bits and w of |b|'s, the signed count S is
//
//        s = t = 0: P     0, 1: P - u     1, 0: P - w     1, 1: P + u + w - L        S = P - t G - s H,
//        G = u or L - u + k for s = 0 or 1, H = w or -w - k for t = 0 or 1, for whatever k:
//
//    one product of bits, and two of signed bytes for each dimension. k = 0 up to 64 steps and -64 up to 128, so that G and H fit.
// 2. Order. The ones of |a| are its first u steps; the ones of |b| lie where its sequence's numbers are below its boundary. Steps
//    may be counted in any order, so they are counted in that of b's numbers: then the ones of |b| are the first w bits, which
//    takes a shift and no table, and those of |a|, which are written once, come from a table for each mask.
// 3. Warpgroups. One has 64 outputs, whose codes (as w with b's sign, a byte) lie in registers, where they become bits; b of the
//    hardware's product are COLUMNS rows of a in shared memory. A visit has 64 inner dimensions: lane 4 g + t of a warp has dimensions
//    16 t ... 16 t + 15 of outputs g and g + 8. It takes STEPS steps of 32 bytes a row: BIT_STEPS of 256 bits, word 2 s + h of lane t's
//    codes as the h-th of step s; then four of bytes, of lane t's codes 4 i ... 4 i + 3 first t and G, then H and s.
// 4. Time. Products of bits and of bytes into one sum must wait for each other, so UNIT visits go together: first all their bits,
//    then all their bytes. While two steps run, the bits of the next two are made. One more thread copies: the rows' steps, DEPTH
//    stages of STAGE_STEPS ahead, and for each unit the codes and the rows' scales, SLOTS ahead. Sums begin at BEGIN, whose bits
//    are those of a float that holds whole numbers: one subtraction makes a count a float. y stays in registers; a chunk's counts
//    are added to it, and y is written, while other warpgroups multiply: a block goes on to its next tile.
//
// Compiled at run time with WORDS (of 32 steps, a code's: 1, 2 or 4), SHARE (codes in a word: 1, or 2 or 4 where WORDS is 1), COLUMNS
// (32, 64 or 128), GROUPS (warpgroups of a block that multiply), UNIT (1 or 2), STAGE_STEPS (2 or 4), DEPTH, SLOTS and LEVELS_OF_B (1:
// p.levels are those of b's rows, whose counts of ones alone differ by them; 0: those of a's) defined.

typedef unsigned int u32;
typedef unsigned char u8;
typedef signed char s8;
typedef long long i64;
typedef unsigned long long u64;

#define LANES 32
#define CONSUMERS (4 * GROUPS)                       // warps that multiply
#define THREADS (CONSUMERS * LANES + 128)
#define VISIT 64                                     // inner dimensions
#define BIT_STEPS (8 * WORDS / SHARE)
#define STEPS (BIT_STEPS + 4)
#define STEP_BYTES (COLUMNS * 32)
#define STAGE_BYTES (STAGE_STEPS * STEP_BYTES)
#define TILE_BYTES (64 * VISIT)                      // of a warpgroup's codes of a visit
#define CODES_BYTES (GROUPS * UNIT * TILE_BYTES)
#define SLOT_BYTES (CODES_BYTES + COLUMNS * 8)
#define SLOT_AT(slot) (DEPTH * STAGE_BYTES + (slot) * SLOT_BYTES)
#define BARRIER(i) (SLOT_AT(SLOTS) + (i) * 8)
#define HAS_COME(stage) BARRIER(stage)               // a stage is there; all warps have read it; the same of slots
#define IS_READ(stage) BARRIER(DEPTH + (stage))
#define SLOT_HAS_COME(slot) BARRIER(2 * DEPTH + (slot))
#define SLOT_IS_READ(slot) BARRIER(2 * DEPTH + SLOTS + (slot))
#define SLOT_COPIES (GROUPS + 1)
#define BEGIN 0x4b400000                             // 1.5 * 2^23 as a float, and that plus n for counts n below 2^22
#define LENGTH (32 * WORDS / SHARE)                  // L
#define SHIFT_OF_G (LENGTH == 128 ? -64 : 0)         // k

struct Product {
    const s8 *qa;          // (B, N, D)
    const float *sa;       // (B, N, C)
    const s8 *qb;          // (B or 1, M, D)
    const float *sb;       // (B or 1, C, M)
    const u8 *levels;      // (B or 1, N or 1, C or 1), or null
    const u32 *words_a;    // (levels of a or 1, masks, 128, WORDS): the ones of a's codes, in b's order
    const s8 *ones_b;      // (levels of b or 1, masks, 128): w, less one from p.skip on
    const u8 *counts_a;    // (levels of a or 1, masks, 128): how many ones
    const u8 *masks;       // (dimensions of a chunk, rounded up to 64): which mask
    const float *factors;  // (levels,): Q^2 / L
    u8 *bits_a;            // (B, tiles of COLUMNS rows, units, steps of UNIT visits, COLUMNS / 8, 2, 8, 16)
    u8 *codes_b;           // (B or 1, tiles of 64 outputs, visits, warp, half, lane, 16): w with b's sign
    float *scales_a;       // (B, tiles of COLUMNS rows, C, COLUMNS, 2): of a row, its scale and its factor
    const int *order;      // (B, N): the row of qa, sa, levels and y at each place of a tile, or null: the place's number
    const u8 *groups;      // (B, tiles of COLUMNS rows): only tiles of own_group are computed, or null: all are
    float *y;              // (B, N, M)
    int N, M, D, C;
    int chunk;             // inner dimensions of a chunk
    int per_chunk;         // visits of a chunk
    int num_masks;
    int shared_b;          // 1: b has one entry for all of the batch
    int level_b, level_n, level_c;  // strides of levels; 0 broadcasts
    int levels_b;          // that ones_b has
    int tiles_a;           // of COLUMNS rows
    int tiles_b;           // of 64 outputs, a multiple of GROUPS
    int batch;
    int skip;              // w from here on are kept as w - 1: codes are bytes
    int own_group;
};

#include "slices.cu"

#ifndef EMULATED
extern __shared__ __align__(128) u32 shared[];
#endif
#include "bit_products.cu"

static __device__ __forceinline__ bool is_own(const Product &p, int b, int tile) {
    return !p.groups || p.groups[(i64)b * p.tiles_a + tile] == p.own_group;
}

static __device__ __forceinline__ int level_of_a(const Product &p, int b, int row, int c) { return LEVELS_OF_B ? 0 : level_of(p, b, row, c); }

static __device__ __forceinline__ int row_of(const Product &p, int b, int n) { return p.order ? p.order[(i64)b * p.N + n] : n; }

// The codes of b as w with their sign. A block has some visits of a tile of 64 outputs; each thread 16 codes at a time.
extern "C" __global__ void __launch_bounds__(256) stochastic_wide_b(const Product p) {
    for (int i = threadIdx.x; i < p.levels_b * p.num_masks * 32; i += 256) shared[i] = ((const u32 *)p.ones_b)[i];
    __syncthreads();
    const int visits = p.per_chunk * p.C, tile = blockIdx.y, lane = threadIdx.x % LANES, half = threadIdx.x / LANES % 2;
    const int m = tile * 64 + threadIdx.x / 64 * 16 + half * 8 + lane / 4;
    uint4 *out = (uint4 *)p.codes_b + ((i64)blockIdx.z * p.tiles_b + tile) * visits * (TILE_BYTES / 16) + threadIdx.x;
    for (int visit = blockIdx.x; visit < visits; visit += gridDim.x) {
        const int c = visit / p.per_chunk, first = (visit - c * p.per_chunk) * VISIT + lane % 4 * 16;
        const i64 d = (i64)c * p.chunk + first;
        uint4 v = {0, 0, 0, 0};
        if (m < p.M && first < p.chunk && d < p.D) {
            v = __ldg((const uint4 *)(p.qb + ((i64)blockIdx.z * p.M + m) * p.D + d));
            const uint4 own = __ldg((const uint4 *)(p.masks + first));
            const u32 *mask = &own.x;
            const s8 *ones = (const s8 *)shared + (LEVELS_OF_B ? level_of(p, blockIdx.z, m, c) : 0) * p.num_masks * 128;
            u32 *word = &v.x;
#pragma unroll
            for (int i = 0; i < 16; i++) {
                const int code = (s8)(word[i / 4] >> 8 * (i % 4));
                const int w = ones[(mask[i / 4] >> 8 * (i % 4) & 255) * 128 + (code < 0 ? -code : code)];
                word[i / 4] = (word[i / 4] & ~(255u << 8 * (i % 4))) | (u32)((code < 0 ? -w : w) & 255) << 8 * (i % 4);
            }
        }
        out[(i64)visit * (TILE_BYTES / 16)] = v;
    }
}

#define CODES_STRIDE (VISIT + 4)  // of a row of codes in shared memory: rows beside each other lie in other banks

// A block has a visit's steps of a tile of rows, a thread 16 bytes at a time: words of one row for lanes t = 0 ... 3. Threads of a
// warp have rows beside each other and the same dimensions.
extern "C" __global__ void __launch_bounds__(256) stochastic_wide_a(const Product p) {
    const int visit = blockIdx.x, c = visit / p.per_chunk, offset = (visit - c * p.per_chunk) * VISIT, b = blockIdx.z;
    if (!is_own(p, b, blockIdx.y)) return;
    const i64 first = (i64)c * p.chunk + offset, tile = (i64)b * p.tiles_a + blockIdx.y;
    int left = p.chunk - offset;  // real dimensions of the visit, a multiple of 16
    if (p.D - first < left) left = (int)(p.D - first);
    for (int i = threadIdx.x; i < COLUMNS * 4; i += 256) {
        const int n = blockIdx.y * COLUMNS + i / 4;
        uint4 v = {0, 0, 0, 0};
        if (n < p.N && i % 4 * 16 < left) v = __ldg((const uint4 *)(p.qa + ((i64)b * p.N + row_of(p, b, n)) * p.D + first) + i % 4);
        u32 *to = shared + (i / 4 * CODES_STRIDE + i % 4 * 16) / 4;
        to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
    }
    __syncthreads();
    const int column = threadIdx.x % COLUMNS, n = blockIdx.y * COLUMNS + column, row = n < p.N ? row_of(p, b, n) : 0;
    const s8 *codes = (const s8 *)shared + column * CODES_STRIDE;
    const u8 *masks = p.masks + offset;
    const i64 level = n < p.N ? (i64)level_of_a(p, b, row, c) * p.num_masks : 0;
    const int of_unit = visit % UNIT;
    uint4 *out = (uint4 *)(p.bits_a + (tile * p.per_chunk * p.C + visit - of_unit) * (STEPS * STEP_BYTES)) + column / 8 * 16 + column % 8;
#define OUT(step, h) out[(step) * (2 * COLUMNS) + (h) * 8]
    for (int j = threadIdx.x / COLUMNS; j < 16 / SHARE; j += 256 / COLUMNS) {
        u32 word[4][WORDS] = {};
#pragma unroll
        for (int t = 0; t < 4; t++)
#pragma unroll
            for (int i = 0; i < SHARE; i++) {
                const int d = 16 * t + j * SHARE + i, code = codes[d];
                const u32 *ones = p.words_a + (level + masks[d]) * (128 * WORDS) + (code < 0 ? -code : code) * WORDS;
                const u32 turned = code < 0 ? 0xffffffffu >> (32 - 32 / SHARE) : 0;
#if WORDS == 4
                const uint4 v = __ldg((const uint4 *)ones);
                word[t][0] = v.x ^ turned, word[t][1] = v.y ^ turned, word[t][2] = v.z ^ turned, word[t][3] = v.w ^ turned;
#else
#pragma unroll
                for (int k = 0; k < WORDS; k++) word[t][k] |= (__ldg(ones + k) ^ turned) << i * (32 / SHARE);
#endif
            }
#pragma unroll
        for (int k = 0; k < WORDS; k++) {
            const int at = j * WORDS + k;
            const bool own = n < p.N;
            OUT(of_unit * BIT_STEPS + at / 2, at % 2) = own ? uint4{word[0][k], word[1][k], word[2][k], word[3][k]} : uint4{0, 0, 0, 0};
        }
    }
    for (int step = threadIdx.x / COLUMNS; step < 4; step += 256 / COLUMNS) {
        u32 of_g[4] = {0, 0, 0, 0}, of_s[4] = {0, 0, 0, 0};
#pragma unroll
        for (int d = 0; d < 16; d++) {
            const int t = d / 4, at = 16 * t + 4 * step + d % 4, code = codes[at];
            if (n >= p.N || at >= left) continue;
            const int u = __ldg(p.counts_a + (level + masks[at]) * 128 + (code < 0 ? -code : code));
            const int g = code < 0 ? LENGTH - u + SHIFT_OF_G : u, s = SHIFT_OF_G ? code < 0 : -(code < 0);
            of_g[t] |= (u32)(-g & 255) << 8 * (d % 4), of_s[t] |= (u32)(s & 255) << 8 * (d % 4);
        }
        OUT(UNIT * BIT_STEPS + of_unit * 4 + step, 0) = uint4{of_g[0], of_g[1], of_g[2], of_g[3]};
        OUT(UNIT * BIT_STEPS + of_unit * 4 + step, 1) = uint4{of_s[0], of_s[1], of_s[2], of_s[3]};
    }
    if (offset) return;
    float *scales = p.scales_a + (tile * p.C + c) * (2 * COLUMNS);
    for (int i = threadIdx.x; i < COLUMNS; i += 256) {
        const int at = blockIdx.y * COLUMNS + i, own = at < p.N ? row_of(p, b, at) : 0;
        scales[2 * i] = at < p.N ? p.sa[((i64)b * p.N + own) * p.C + c] : 0.0f;
        scales[2 * i + 1] = at < p.N ? p.factors[level_of_a(p, b, own, c)] : 0.0f;
    }
}

// Words of ones, turned over by their code's sign. z is a code of b as it is kept.
static __device__ __forceinline__ int code_of(const uint4 &v, int i) {
    const u32 word = i < 4 ? v.x : i < 8 ? v.y : i < 12 ? v.z : v.w;
    return (int)(word << (24 - 8 * (i % 4))) >> 24;
}

// Word j of a lane's 16 codes.
static __device__ __forceinline__ u32 word_of(const uint4 &v, int j, int skip) {
#if SHARE == 1
    const int z = code_of(v, j / WORDS);
    int w = z < 0 ? -z : z;
    if (LENGTH == 128) w += w >= skip;
    const int ones = w - j % WORDS * 32;
    return shifted(0xffffffffu, j % WORDS && ones < 0 ? 0 : ones) ^ ~(u32)(z >> 31);
#else
    u32 word = 0;
#pragma unroll
    for (int i = 0; i < SHARE; i++) {
        const int z = code_of(v, j * SHARE + i), w = z < 0 ? -z : z;
        const u32 own = 0xffffffffu >> (32 - LENGTH) << i * LENGTH;
        word |= (shifted(own, w) ^ ~(u32)(z >> 31)) & own;
    }
    return word;
#endif
}

// Of four codes: t, and what meets a's s.
static __device__ __forceinline__ u32 signs_of(u32 four) { return four >> 7 & 0x01010101u; }

static __device__ __forceinline__ u32 bytes_of(u32 four, int skip) {
#if WORDS == 4
    // -H: -w for positive codes and w - 64 for negative ones.
    const u32 t = signs_of(four), negative = t * 255u, size = (four ^ negative) + t;
    const u32 w = size + ((size + (u32)(128 - skip) * 0x01010101u) >> 7 & 0x01010101u);
    const u32 x = w ^ ~negative, more = (negative & 0xc0c0c0c0u) | (~negative & 0x01010101u);
    return ((x & 0x7f7f7f7fu) + (more & 0x7f7f7f7fu)) ^ ((x ^ more) & 0x80808080u);
#else
    return four;  // H, and a has -s
#endif
}

struct Place {
    int slot;
    u32 odd;
};

static __device__ __forceinline__ void go_on(Place *place, int depth) {
    if (++place->slot == depth) place->slot = 0, place->odd ^= 1;
}

// A warp has read what lies before a barrier.
static __device__ __forceinline__ void leave(int barrier) {
    __syncwarp();
    if (threadIdx.x % LANES == 0) come_to(barrier);
}

struct Tile {
    int b, of_a, of_b;  // tiles of COLUMNS rows, and of 64 GROUPS outputs
};

static __device__ __forceinline__ Tile tile_of(const Product &p, int number) {
    const int of_b = p.tiles_b / GROUPS, rest = number / of_b;
    return {rest / p.tiles_a, rest % p.tiles_a, number % of_b};
}

// What the copying thread does: ask for unit after unit, as soon as all have read what was in its place.
static __device__ __forceinline__ void fetch_all(const Product &p, int tiles) {
    const int units = p.per_chunk * p.C / UNIT;
    Place stage = {0, 1}, slot = {0, 1};  // of the turn before the first, for which nobody waits
    for (int number = blockIdx.x; number < tiles; number += gridDim.x) {
        const Tile tile = tile_of(p, number);
        if (!is_own(p, tile.b, tile.of_a)) continue;
        const i64 of_a = (i64)tile.b * p.tiles_a + tile.of_a, of_b = (i64)(p.shared_b ? 0 : tile.b) * p.tiles_b + tile.of_b * GROUPS;
        const u8 *bits = p.bits_a + of_a * units * (UNIT * STEPS * STEP_BYTES), *codes = p.codes_b + of_b * units * (UNIT * TILE_BYTES);
        for (int unit = 0; unit < units; unit++) {
            wait_until_turned(SLOT_IS_READ(slot.slot), slot.odd);
            for (int group = 0; group < GROUPS; group++)
                copy_bulk(SLOT_AT(slot.slot) + group * (UNIT * TILE_BYTES), codes + ((i64)group * units + unit) * (UNIT * TILE_BYTES),
                          UNIT * TILE_BYTES, SLOT_HAS_COME(slot.slot));
            copy_bulk(SLOT_AT(slot.slot) + CODES_BYTES, (const u8 *)(p.scales_a + (of_a * p.C + unit * UNIT / p.per_chunk) * (2 * COLUMNS)),
                      COLUMNS * 8, SLOT_HAS_COME(slot.slot));
            go_on(&slot, SLOTS);
            for (int i = 0; i < UNIT * STEPS / STAGE_STEPS; i++, bits += STAGE_BYTES) {
                wait_until_turned(IS_READ(stage.slot), stage.odd);
                copy_bulk(stage.slot * STAGE_BYTES, bits, STAGE_BYTES, HAS_COME(stage.slot));
                go_on(&stage, DEPTH);
            }
        }
    }
}

// Begin two steps of one kind.
template <bool BYTES> static __device__ __forceinline__ void multiply_two(int *acc, const u32 *a, int step, Place *place) {
    const int at = step % STAGE_STEPS;
    if (at == 0) wait_until_turned(HAS_COME(place->slot), place->odd);
    const u64 b = description_of(place->slot * STAGE_BYTES + at * STEP_BYTES);
    registers_are_written();
    if (BYTES) multiply_bytes(acc, a, b), multiply_bytes(acc, a + 4, b + STEP_BYTES / 16);
    else multiply_bits(acc, a, b), multiply_bits(acc, a + 4, b + STEP_BYTES / 16);
    commit_products();
    if (at + 2 == STAGE_STEPS) go_on(place, DEPTH);
}

// The stage that ended ``back`` stages before a place is read.
static __device__ __forceinline__ void leave_stage(const Place &place, int back) {
    leave(IS_READ(place.slot >= back ? place.slot - back : place.slot - back + DEPTH));
}

static __device__ __forceinline__ void make_bits(u32 *a, const uint4 (*z)[2], int step, int skip) {
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const int own = step + i / 4;
        a[i] = word_of(z[own / BIT_STEPS][i % 2], 2 * (own % BIT_STEPS) + i % 4 / 2, skip);
    }
}

static __device__ __forceinline__ void make_bytes(u32 *a, const uint4 (*z)[2], int step, int skip) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int own = step + i / 2;
        const uint4 &v = z[own / 4][i % 2];
        const u32 four = own % 4 == 0 ? v.x : own % 4 == 1 ? v.y : own % 4 == 2 ? v.z : v.w;
        a[4 * (i / 2) + i % 2] = signs_of(four), a[4 * (i / 2) + 2 + i % 2] = bytes_of(four, skip);
    }
}

// A unit's products into acc; none is under way before, nor afterwards.
static __device__ __forceinline__ void multiply_unit(int *acc, const uint4 (*z)[2], int skip, Place *place) {
    u32 a[2][8];
    make_bits(a[0], z, 0, skip);
#pragma unroll
    for (int step = 0; step < UNIT * BIT_STEPS; step += 2) {
        multiply_two<false>(acc, a[step / 2 % 2], step, place);
        wait_products<1>();
        // The two steps before are done: their stage may have ended with them, and their registers are free.
        if (step && step % STAGE_STEPS == 0) leave_stage(*place, STAGE_STEPS == 2 ? 2 : 1);
        u32 *next = a[(step / 2 + 1) % 2];
        if (step + 2 < UNIT * BIT_STEPS) make_bits(next, z, step + 2, skip);
        else make_bytes(next, z, 0, skip);
    }
    wait_products<0>();  // products of two kinds are not ordered by themselves
    leave_stage(*place, 1);
#pragma unroll
    for (int step = 0; step < UNIT * 4; step += 2) {
        const int number = UNIT * BIT_STEPS / 2 + step / 2;
        multiply_two<true>(acc, a[number % 2], step, place);
        wait_products<1>();
        if (step && step % STAGE_STEPS == 0) leave_stage(*place, STAGE_STEPS == 2 ? 2 : 1);
        if (step + 2 < UNIT * 4) make_bytes(a[(number + 1) % 2], z, step + 2, skip);
    }
    wait_products<0>();
    leave_stage(*place, 1);
}

static __device__ __forceinline__ void add_chunk(const float *scales_a, const float *scale_b, const float *factor_b, const int *acc, float *y) {
    const int t = threadIdx.x % 4;
#pragma unroll
    for (int group = 0; group < COLUMNS / 8; group++) {
        const float4 v = *(const float4 *)(scales_a + 2 * (8 * group + 2 * t));
        const float scale[2] = {v.x, v.z}, factor[2] = {v.y, v.w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float raw = __fmul_rn(__fadd_rn(__int_as_float(acc[4 * group + i]), -12582912.0f), LEVELS_OF_B ? factor_b[i / 2] : factor[i % 2]);
            y[4 * group + i] = __fadd_rn(y[4 * group + i], __fmul_rn(raw, __fmul_rn(scale[i % 2], scale_b[i / 2])));
        }
    }
}

// A tile of a warpgroup: outputs m and m + 8 of each lane, COLUMNS rows.
static __device__ __forceinline__ void multiply_tile(const Product &p, const Tile &tile, Place *stage, Place *slot) {
    const int warp = threadIdx.x / LANES, lane = threadIdx.x % LANES, t = lane % 4;
    const int m = (tile.of_b * GROUPS + warp / 4) * 64 + warp % 4 * 16 + lane / 4;
    const float *scales_b = p.sb + (i64)(p.shared_b ? 0 : tile.b) * p.C * p.M;
    float y[COLUMNS / 2];
    int acc[COLUMNS / 2];
#pragma unroll
    for (int i = 0; i < COLUMNS / 2; i++) y[i] = 0.0f;
#pragma unroll 1
    for (int c = 0; c < p.C; c++) {
#pragma unroll
        for (int i = 0; i < COLUMNS / 2; i++) acc[i] = BEGIN;
        float scale_b[2], factor_b[2] = {0.0f, 0.0f};
#pragma unroll
        for (int i = 0; i < 2; i++) {
            if (LEVELS_OF_B && m + 8 * i < p.M) factor_b[i] = __ldg(p.factors + level_of(p, tile.b, m + 8 * i, c));
            scale_b[i] = m + 8 * i < p.M ? __ldg(scales_b + (i64)c * p.M + m + 8 * i) : 0.0f;
        }
#pragma unroll 1
        for (int unit = 0; unit < p.per_chunk / UNIT; unit++) {
            wait_until_turned(SLOT_HAS_COME(slot->slot), slot->odd);
            const u8 *own = (const u8 *)shared + SLOT_AT(slot->slot);
            uint4 z[UNIT][2];
#pragma unroll
            for (int i = 0; i < 2 * UNIT; i++)
                z[i / 2][i % 2] = *(const uint4 *)(own + (warp / 4 * UNIT + i / 2) * TILE_BYTES + ((warp % 4 * 2 + i % 2) * LANES + lane) * 16);
            multiply_unit(acc, z, p.skip, stage);
            if (unit + 1 == p.per_chunk / UNIT) add_chunk((const float *)(own + CODES_BYTES), scale_b, factor_b, acc, y);
            leave(SLOT_IS_READ(slot->slot)), go_on(slot, SLOTS);
        }
    }
#pragma unroll
    for (int group = 0; group < COLUMNS / 8; group++)
#pragma unroll
        for (int j = 0; j < 2; j++) {
            const int n = tile.of_a * COLUMNS + 8 * group + 2 * t + j;
            if (n >= p.N) continue;
            float *row = p.y + ((i64)tile.b * p.N + row_of(p, tile.b, n)) * p.M;
            if (m < p.M) row[m] = y[4 * group + j];
            if (m + 8 < p.M) row[m + 8] = y[4 * group + 2 + j];
        }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) stochastic_wide_bits(const Product p) {
    const int warp = threadIdx.x / LANES, tiles = p.tiles_b / GROUPS * p.tiles_a * p.batch;
    if (threadIdx.x == 0) {
        for (int i = 0; i < DEPTH; i++) begin_barrier(HAS_COME(i), 1), begin_barrier(IS_READ(i), CONSUMERS);
        for (int i = 0; i < SLOTS; i++) begin_barrier(SLOT_HAS_COME(i), SLOT_COPIES), begin_barrier(SLOT_IS_READ(i), CONSUMERS);
        barriers_have_begun();
    }
    __syncthreads();
    if (warp >= CONSUMERS) {
        give_registers<24>();
        if (threadIdx.x == CONSUMERS * LANES) fetch_all(p, tiles);
        return;
    }
    take_registers<240>();
    Place stage = {0, 0}, slot = {0, 0};
    for (int number = blockIdx.x; number < tiles; number += gridDim.x) {
        const Tile tile = tile_of(p, number);
        if (is_own(p, tile.b, tile.of_a)) multiply_tile(p, tile, &stage, &slot);
    }
}
