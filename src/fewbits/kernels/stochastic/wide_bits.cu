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
// 4. Time. One more warp asks for the rows' steps, DEPTH stages of STAGE_STEPS ahead. While a product runs, the next one's bits
//    are made. y stays in registers; a chunk's counts are added to it while other warpgroups multiply.
//
// Compiled at run time with WORDS (of 32 steps, a code's: 1, 2 or 4), SHARE (codes in a word: 1, or 2 or 4 where WORDS is 1), COLUMNS
// (32, 64 or 128), GROUPS (warpgroups of a block), STAGE_STEPS and DEPTH defined.

typedef unsigned int u32;
typedef unsigned char u8;
typedef signed char s8;
typedef long long i64;
typedef unsigned long long u64;

#define LANES 32
#define CONSUMERS (4 * GROUPS)                       // warps that multiply
#define THREADS (CONSUMERS * LANES + LANES)
#define VISIT 64                                     // inner dimensions
#define BIT_STEPS (8 * WORDS / SHARE)
#define STEPS (BIT_STEPS + 4)
#define STEP_BYTES (COLUMNS * 32)
#define STAGE_BYTES (STAGE_STEPS * STEP_BYTES)
#define HAS_COME(slot) (DEPTH * STAGE_BYTES + (slot) * 8)            // barriers: a stage is there; all warps have read it
#define IS_READ(slot) (DEPTH * STAGE_BYTES + (DEPTH + (slot)) * 8)
#define LENGTH (32 * WORDS / SHARE)                  // L
#define SHIFT_OF_G (LENGTH == 128 ? -64 : 0)         // k

struct Product {
    const s8 *qa;          // (B, N, D)
    const float *sa;       // (B, N, C)
    const s8 *qb;          // (B or 1, M, D)
    const float *sb;       // (B or 1, C, M)
    const u8 *levels;      // (B or 1, N or 1, C or 1), or null
    const u32 *words_a;    // (levels, masks, 128, WORDS): the ones of a's codes, in b's order
    const s8 *ones_b;      // (masks, 128): w, less one from p.skip on
    const u8 *masks;       // (dimensions of a chunk,): which mask
    const float *factors;  // (levels,): Q^2 / L
    u8 *bits_a;            // (B, tiles of COLUMNS rows, visits, STEPS, COLUMNS / 8, 2, 8, 16)
    s8 *codes_b;           // (B or 1, M, D): w with b's sign
    float *scales_a;       // (B, tiles of COLUMNS rows, C, COLUMNS, 2): of a row, its scale and its factor
    float *y;              // (B, N, M)
    int N, M, D, C;
    int chunk;             // inner dimensions of a chunk
    int per_chunk;         // visits of a chunk
    int num_masks;
    int shared_b;          // 1: b has one entry for all of the batch
    int level_b, level_n, level_c;  // strides of levels; 0 broadcasts
    int tiles_a;           // of COLUMNS rows
    int skip;              // w from here on are kept as w - 1: codes are bytes
};

#include "slices.cu"

#ifndef EMULATED
extern __shared__ __align__(128) u32 shared[];
#endif
#include "bit_products.cu"

// The codes of b as w with their sign, 16 at a time. A block has a part of the rows; D is a multiple of 16.
extern "C" __global__ void __launch_bounds__(256) stochastic_wide_b(const Product p) {
    for (int i = threadIdx.x; i < p.num_masks * 32; i += 256) shared[i] = ((const u32 *)p.ones_b)[i];
    __syncthreads();
    const s8 *ones = (const s8 *)shared;
    const int pieces = p.D / 16;
    const i64 rows = (i64)p.M * (p.shared_b ? 1 : gridDim.z);
    for (i64 at = (i64)blockIdx.x * 256 + threadIdx.x; at < rows * pieces; at += (i64)gridDim.x * 256) {
        uint4 v = ((const uint4 *)p.qb)[at];
        u32 *word = &v.x;
        const int first = (int)(at % pieces) * 16 % p.chunk;
#pragma unroll
        for (int i = 0; i < 16; i++) {
            const int code = (s8)(word[i / 4] >> 8 * (i % 4)), at_d = first + i < p.chunk ? first + i : first + i - p.chunk;
            const int w = ones[(int)p.masks[at_d] * 128 + (code < 0 ? -code : code)];
            word[i / 4] = (word[i / 4] & ~(255u << 8 * (i % 4))) | (u32)((code < 0 ? -w : w) & 255) << 8 * (i % 4);
        }
        ((uint4 *)p.codes_b)[at] = v;
    }
}

// A block has a visit's steps of a tile of rows; each thread 16 bytes at a time: 4 words of a row.
extern "C" __global__ void __launch_bounds__(256) stochastic_wide_a(const Product p) {
    const int visit = blockIdx.x, c = visit / p.per_chunk, offset = (visit - c * p.per_chunk) * VISIT, b = blockIdx.z;
    const i64 first = (i64)c * p.chunk + offset;
    int left = p.chunk - offset;  // real dimensions of the visit
    if (p.D - first < left) left = (int)(p.D - first);
    const i64 tile = (i64)b * p.tiles_a + blockIdx.y;
    uint4 *out = (uint4 *)(p.bits_a + (tile * p.per_chunk * p.C + visit) * (STEPS * STEP_BYTES));
    for (int unit = threadIdx.x; unit < STEPS * COLUMNS * 2; unit += 256) {
        const int column = unit / 16 % (COLUMNS / 8) * 8 + unit % 8, h = unit / 8 % 2, step = unit / (2 * COLUMNS);
        const int n = blockIdx.y * COLUMNS + column;
        u32 word[4] = {0, 0, 0, 0};
        if (n < p.N) {
            const int level = level_of(p, b, n, c);
            const s8 *codes = p.qa + ((i64)b * p.N + n) * p.D + first;
            const u32 *table = p.words_a + (i64)level * p.num_masks * (128 * WORDS);
#pragma unroll
            for (int t = 0; t < 4; t++) {
                if (step < BIT_STEPS) {
                    const int j = 2 * step + h;
#pragma unroll
                    for (int i = 0; i < SHARE; i++) {
                        const int d = 16 * t + j * SHARE / WORDS + i;
                        if (d >= left) continue;
                        const int code = codes[d], entry = (int)p.masks[offset + d] * 128 + (code < 0 ? -code : code);
                        const u32 ones = __ldg(table + entry * WORDS + j % WORDS);
                        word[t] |= (code < 0 ? ~ones & 0xffffffffu >> (32 - 32 / SHARE) : ones) << i * (32 / SHARE);
                    }
                } else {
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        const int d = 16 * t + 4 * (step - BIT_STEPS) + i;
                        if (d >= left) continue;
                        const int code = codes[d], entry = (int)p.masks[offset + d] * 128 + (code < 0 ? -code : code);
                        int u = 0;
#pragma unroll
                        for (int k = 0; k < WORDS; k++) u += __popc(__ldg(table + entry * WORDS + k));
                        const int g = code < 0 ? LENGTH - u + SHIFT_OF_G : u, s = SHIFT_OF_G ? code < 0 : -(code < 0);
                        word[t] |= (u32)((h ? s : -g) & 255) << 8 * i;
                    }
                }
            }
        }
        out[unit] = uint4{word[0], word[1], word[2], word[3]};
    }
    if (offset) return;
    float *scales = p.scales_a + (tile * p.C + c) * (2 * COLUMNS);
    for (int i = threadIdx.x; i < COLUMNS; i += 256) {
        const int n = blockIdx.y * COLUMNS + i;
        scales[2 * i] = n < p.N ? p.sa[((i64)b * p.N + n) * p.C + c] : 0.0f;
        scales[2 * i + 1] = n < p.N ? p.factors[level_of(p, b, n, c)] : 0.0f;
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

// What the copying warp does: ask for stage after stage, as soon as all have read what was in its place.
static __device__ __forceinline__ void fetch_all(const Product &p, const u8 *from, int stages) {
    if (threadIdx.x % LANES) return;
    for (int stage = 0; stage < stages; stage++) {
        const int slot = stage % DEPTH;
        if (stage >= DEPTH) wait_until_turned(IS_READ(slot), (stage / DEPTH - 1) % 2);
        copy_bulk(slot * STAGE_BYTES, from + (i64)stage * STAGE_BYTES, STAGE_BYTES, HAS_COME(slot));
    }
}

struct Place {
    int slot;
    u32 odd;
};

static __device__ __forceinline__ void leave(int slot) {
    if (threadIdx.x % LANES == 0) come_to(IS_READ(slot));
}

static __device__ __forceinline__ void go_on(Place *place) {
    if (++place->slot == DEPTH) place->slot = 0, place->odd ^= 1;
}

// A lane's codes of a visit, of one output.
static __device__ __forceinline__ uint4 load_codes_of(const Product &p, const s8 *codes, i64 d) {
    return d + 16 <= p.D ? __ldg((const uint4 *)(codes + d)) : uint4{0, 0, 0, 0};
}

static __device__ __forceinline__ void add_chunk(const Product &p, const float *scales_a, const float *scale_b, const int *acc, float *y) {
    const int t = threadIdx.x % 4;
#pragma unroll
    for (int group = 0; group < COLUMNS / 8; group++) {
        const float4 v = __ldg((const float4 *)(scales_a + 2 * (8 * group + 2 * t)));
        const float scale[2] = {v.x, v.z}, factor[2] = {v.y, v.w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float raw = __fmul_rn((float)acc[4 * group + i], factor[i % 2]);
            y[4 * group + i] = __fadd_rn(y[4 * group + i], __fmul_rn(raw, __fmul_rn(scale[i % 2], scale_b[i / 2])));
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) stochastic_wide_bits(const Product p) {
    const int warp = threadIdx.x / LANES, lane = threadIdx.x % LANES, g = lane / 4, t = lane % 4;
    const int b = blockIdx.z, visits = p.per_chunk * p.C;
    const i64 tile = (i64)b * p.tiles_a + blockIdx.y;
    if (threadIdx.x == 0) {
        for (int i = 0; i < DEPTH; i++) begin_barrier(HAS_COME(i), 1), begin_barrier(IS_READ(i), CONSUMERS);
        barriers_have_begun();
    }
    __syncthreads();
    if (warp == CONSUMERS) {
        fetch_all(p, p.bits_a + tile * visits * (STEPS * STEP_BYTES), visits * (STEPS / STAGE_STEPS));
        return;
    }
    const int m = (blockIdx.x * GROUPS + warp / 4) * 64 + warp % 4 * 16 + g, of_b = p.shared_b ? 0 : b;
    const s8 *codes[2];
#pragma unroll
    for (int i = 0; i < 2; i++) codes[i] = p.codes_b + ((i64)of_b * p.M + (m + 8 * i < p.M ? m + 8 * i : p.M - 1)) * p.D;
    const float *scales_a = p.scales_a + tile * p.C * (2 * COLUMNS), *scales_b = p.sb + (i64)of_b * p.C * p.M;
    float y[COLUMNS / 2];
    int acc[COLUMNS / 2];
#pragma unroll
    for (int i = 0; i < COLUMNS / 2; i++) y[i] = 0.0f;
    Place place = {0, 0};
    uint4 z[2], next[2];
#pragma unroll
    for (int i = 0; i < 2; i++) z[i] = load_codes_of(p, codes[i], 16 * t);
#pragma unroll 1
    for (int c = 0; c < p.C; c++) {
#pragma unroll
        for (int i = 0; i < COLUMNS / 2; i++) acc[i] = 0;
        float scale_b[2];
#pragma unroll
        for (int i = 0; i < 2; i++) scale_b[i] = m + 8 * i < p.M ? __ldg(scales_b + (i64)c * p.M + m + 8 * i) : 0.0f;
#pragma unroll 1
        for (int visit = 0; visit < p.per_chunk; visit++) {
            const i64 after = visit + 1 < p.per_chunk ? (i64)c * p.chunk + (visit + 1) * VISIT : (i64)(c + 1) * p.chunk;
#pragma unroll
            for (int i = 0; i < 2; i++) next[i] = load_codes_of(p, codes[i], after + 16 * t);
            u32 a[2][4];
#pragma unroll
            for (int step = 0; step < BIT_STEPS; step++) {
                u32 *own = a[step % 2];
#pragma unroll
                for (int i = 0; i < 4; i++) own[i] = word_of(z[i % 2], 2 * step + i / 2, p.skip);
                if (step % STAGE_STEPS == 0) wait_until_turned(HAS_COME(place.slot), place.odd);
                registers_are_written();
                multiply_bits(acc, own, description_of(place.slot * STAGE_BYTES + step % STAGE_STEPS * STEP_BYTES));
                commit_products();
                wait_products<1>();  // of the step before: its registers, and maybe its stage, are free
                if (step && step % STAGE_STEPS == 0) leave(place.slot ? place.slot - 1 : DEPTH - 1);
                if (step % STAGE_STEPS == STAGE_STEPS - 1 && step + 1 < BIT_STEPS) go_on(&place);
            }
            wait_products<0>();  // products of two kinds are not ordered by themselves
            if (BIT_STEPS % STAGE_STEPS == 0) leave(place.slot), go_on(&place);
            u32 s[4][4];
#pragma unroll
            for (int step = 0; step < 4; step++) {
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    const u32 four = step == 0 ? z[i].x : step == 1 ? z[i].y : step == 2 ? z[i].z : z[i].w;
                    s[step][i] = signs_of(four), s[step][2 + i] = bytes_of(four, p.skip);
                }
                const int at = (BIT_STEPS + step) % STAGE_STEPS;
                if (at == 0) wait_until_turned(HAS_COME(place.slot), place.odd);
                registers_are_written();
                multiply_bytes(acc, s[step], description_of(place.slot * STAGE_BYTES + at * STEP_BYTES));
                commit_products();
            }
            wait_products<0>();
            leave(place.slot), go_on(&place);
#pragma unroll
            for (int i = 0; i < 2; i++) z[i] = next[i];
        }
        add_chunk(p, scales_a + c * (2 * COLUMNS), scale_b, acc, y);
    }
#pragma unroll
    for (int group = 0; group < COLUMNS / 8; group++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int n = blockIdx.y * COLUMNS + 8 * group + 2 * t + i % 2, output = m + i / 2 * 8;
            if (n < p.N && output < p.M) p.y[((i64)b * p.N + n) * p.M + output] = y[4 * group + i];
        }
}
