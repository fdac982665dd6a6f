// Attention of one new token a sequence over packed keys and values; packed_attention.py says what is computed.
//
// The floor is the cache: its codes and scales are read once. Blocks of one key head of one sequence:
//
// * Block 0 has the tokens in 16 bits: the first ones, the newest ones (a ring) and the new token. It packs the oldest of
//   the ring, which the next step finds packed, and writes the new one to a place that no token of this step has: a step
//   that is run twice gives the same. Its sums stay as the model has its values.
// * Each other block has a part of the packed tokens and all HEADS query heads that share the key head. Every warp walks
//   over tiles of ROWS tokens by itself, with a softmax of its own: codes become float16 in registers (exact), tensor
//   cores multiply them, scales of keys are applied to the products' sums and scales of values to the weights. The
//   query is turned by the Hadamard matrix once, the sums of values are turned back once, at the end of the block.
//
// Tensor cores take 16 tokens times 8 queries for the scores: lane 4 g + c has a quarter of the keys of tokens g and
// g + 8. For the sums they take 16 numbers of a head times 8 queries: lane 4 g + c has an eighth of the values of tokens
// 2 c, 2 c + 1, 2 c + 8 and 2 c + 9. Codes lie in the order in which such lanes read them, so each reads neighbours.
//
// Parts are added in their order by the block that comes last, so equal calls give equal bits.
//
// Compiled at run time with HEADS (query heads of a key head), D, SCALES (groups of a head), KEY_KIND and VALUE_KIND (4, 8,
// 1: E4M3), KEY_TURN and VALUE_TURN (block of the Hadamard matrix, 0: none), NEWEST, FIRST, HALF (1: bfloat16, 2:
// float16), HEAD_NORM, CAPPED, EARLY defined.

struct Arguments {
    const float *qkv;                           // (B, (heads + 2 kv_heads) D)
    unsigned char *key_codes, *value_codes;     // (B, kv_heads, room, bytes of a head)
    unsigned short *key_scales, *value_scales;  // (B, kv_heads, room, SCALES) float16
    unsigned short *newest_keys, *newest_values;  // (B, kv_heads, SLOTS, D): token n at n % SLOTS
    unsigned short *first_keys, *first_values;  // (B, kv_heads, FIRST, D)
    unsigned short *out;                        // (B, heads D)
    const unsigned short *q_norm, *k_norm;      // (D,)
    const float *cosines, *sines;               // (room, rotary)
    const long long *position, *first;          // (B,): where the new token goes; the first position that is seen
    float *parts;                               // (B, kv_heads, splits, HEADS, PARTIAL)
    unsigned int *arrived;                      // (B, kv_heads), zeros
    long long qkv_pitch, out_pitch;             // of a sequence, values
    float scale, cap, eps, norm_offset;
    int kv_heads, room, rotary, window;
};
#include "packed_parts.cu"

#define MIN_PART 256    // tokens: fewer are not worth a block
#define NT ((HEADS + 7) / 8)
#define HALVES (KEY_KIND == 4 && VALUE_KIND == 4 && D <= 128 ? 2 : 1)
#define ROWS (16 * HALVES)
#define PRODUCTS (D / 16)
#define KEY_BYTES (KEY_KIND == 4 ? D / 2 : D)
#define VALUE_BYTES (VALUE_KIND == 4 ? D / 2 : D)
#define KEY_WORDS (KEY_BYTES / 16)      // of a lane: a quarter of a head
#define VALUE_WORDS (VALUE_BYTES / 32)  // an eighth
#define SCALE_WORDS ((SCALES + 1) / 2)
#define SMALLEST 1e-8f
#define WEIGHT 4096.0f  // weights of values are at most this: float16 keeps what is 2^-26 of it
#define LANES (D <= 32 ? 4 : D <= 64 ? 8 : D <= 128 ? 16 : 32)  // of a row in 16 bits, 8 numbers each
#define AT_ONCE (32 / LANES)
#define RECENT (FIRST + NEWEST + 1)
#define SLOTS (NEWEST + 1)

struct Range {
    i64 position, begin, low, packed;  // the new token; the first one; the first one in the window; the first packed one
    int count, part, parts;            // packed tokens, of them in one block, blocks with something to do
};

static __device__ __forceinline__ Range range_of(const Arguments &p, int b, int splits) {
    Range r;
    r.position = p.position[b], r.begin = p.first[b], r.low = r.begin;
    if (p.window && r.position + 1 - p.window > r.low) r.low = r.position + 1 - p.window;
    r.packed = r.begin + FIRST > r.low ? r.begin + FIRST : r.low;
    const i64 end = r.position - NEWEST;
    r.count = end > r.packed ? (int)(end - r.packed) : 0;
    r.part = (r.count + splits - 2) / (splits - 1);
    if (r.part < MIN_PART) r.part = MIN_PART;
    r.parts = 1 + (r.count + r.part - 1) / r.part;
    return r;
}

struct Shared {
    float (*q)[D], (*scratch)[D], (*sums)[HEADS][D], (*most)[HEADS], (*total)[HEADS];
};

// The tokens in 16 bits: their scores lie where the sums will.
static __device__ __forceinline__ void attend_recent(const Arguments &p, const Range &r, const Shared &s, int b, int head) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = lane / LANES, column = lane % LANES * 8;
    const i64 of_head = (i64)b * p.kv_heads + head;
    const u16 *keys = p.newest_keys + of_head * SLOTS * D, *values = p.newest_values + of_head * SLOTS * D;
    const u16 *first_keys = p.first_keys + of_head * FIRST * D, *first_values = p.first_values + of_head * FIRST * D;
    const int skipped = r.low - r.begin < FIRST ? (int)(r.low - r.begin) : FIRST;
    const int firsts = (r.position - r.begin < FIRST ? (int)(r.position - r.begin) : FIRST) - skipped;
    i64 from = r.position - NEWEST > r.packed ? r.position - NEWEST : r.packed;
    const int in_ring = r.position > from ? (int)(r.position - from) : 0, earlier = firsts > 0 ? firsts : 0;
    const int count = earlier + in_ring + 1;
    const float *new_key = s.scratch[WARPS - 1], *new_value = s.scratch[WARPS - 2];
    float (*scores)[RECENT] = (float (*)[RECENT])s.sums;
    for (int n = warp * AT_ONCE; n < count; n += WARPS * AT_ONCE) {
        const int at = n + row;
        const bool there = at < count - 1 && column < D;
        const u16 *key = at < earlier ? first_keys + (skipped + at) * D : keys + (from + at - earlier) % SLOTS * D;
        Eight k = there ? load_eight(key + column) : Eight{};
        if (at == count - 1 && column < D)
            for (int e = 0; e < 8; e++) k.x[e] = new_key[column + e];
#pragma unroll
        for (int g = 0; g < HEADS; g++) {
            float score = 0.0f;
#pragma unroll
            for (int e = 0; e < 8; e++) score += (column < D ? s.q[g][column + e] : 0.0f) * k.x[e];
#pragma unroll
            for (int d = LANES / 2; d; d /= 2) score += __shfl_xor_sync(0xffffffffu, score, d);
            if (lane % LANES == 0 && at < count) scores[g][at] = score_of(p, score);
        }
    }
    __syncthreads();
    for (int g = warp; g < HEADS; g += WARPS) {
        float most = LOWEST, total = 0.0f;
        for (int n = lane; n < count; n += 32) most = fmaxf(most, scores[g][n]);
        most = largest_of_warp(most);
        for (int n = lane; n < count; n += 32) total += scores[g][n] = exp2f(scores[g][n] - most);
        total = sum_of_warp(total);
        if (lane < WARPS) s.most[lane][g] = most, s.total[lane][g] = lane ? 0.0f : total;
    }
    __syncthreads();
    float sum[HEADS][8] = {};
    for (int n = warp * AT_ONCE; n < count; n += WARPS * AT_ONCE) {
        const int at = n + row;
        const bool there = at < count - 1 && column < D;
        const u16 *value = at < earlier ? first_values + (skipped + at) * D : values + (from + at - earlier) % SLOTS * D;
        Eight v = there ? load_eight(value + column) : Eight{};
        if (at == count - 1 && column < D)
            for (int e = 0; e < 8; e++) v.x[e] = new_value[column + e];
#pragma unroll
        for (int g = 0; g < HEADS; g++) {
            const float weight = at < count ? scores[g][at] : 0.0f;
#pragma unroll
            for (int e = 0; e < 8; e++) sum[g][e] += weight * v.x[e];
        }
    }
    __syncthreads();  // all scores have been read: their place is free
#pragma unroll
    for (int g = 0; g < HEADS; g++)
#pragma unroll
        for (int e = 0; e < 8; e++) {
#pragma unroll
            for (int d = LANES; d < 32; d *= 2) sum[g][e] += __shfl_xor_sync(0xffffffffu, sum[g][e], d);
            if (row == 0 && column < D) s.sums[warp][g][column + e] = sum[g][e];
        }
}

// The oldest token of the ring is packed, the new one takes its own place.
static __device__ __forceinline__ void append(const Arguments &p, const Range &r, const Shared &s, int b, int head) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (warp > 1) return;
    const i64 of_head = (i64)b * p.kv_heads + head, leaves = r.position - NEWEST, place = of_head * p.room + leaves;
    const float *fresh = s.scratch[warp ? WARPS - 2 : WARPS - 1];
    u16 *ring = (warp ? p.newest_values : p.newest_keys) + of_head * SLOTS * D;
    if (leaves >= r.begin + FIRST) {
        const u16 *oldest = ring + leaves % SLOTS * D;
        if (warp == 0)
            pack_head<KEY_KIND, KEY_TURN, 4>(oldest, s.scratch[0], p.key_codes + place * KEY_BYTES,
                                             p.key_scales + place * SCALES);
        else
            pack_head<VALUE_KIND, VALUE_TURN, 8>(oldest, s.scratch[1], p.value_codes + place * VALUE_BYTES,
                                                 p.value_scales + place * SCALES);
    }
    const i64 since = r.position - r.begin;
    u16 *first = (warp ? p.first_values : p.first_keys) + (of_head * FIRST + since) * D;
    for (int d = lane; d < D; d += 32) {
        ring[r.position % SLOTS * D + d] = to_16(fresh[d]);
        if (since < FIRST) first[d] = to_16(fresh[d]);
    }
}

// What a warp keeps of a tile: a quarter of the keys of two tokens a half, an eighth of the values of four.
struct Tile {
    u32 key[HALVES][2][KEY_WORDS], value[HALVES][4][VALUE_WORDS];
    u32 key_scale[HALVES][2][SCALE_WORDS], value_scale[HALVES][2][SCALE_WORDS];
};

struct Rows {
    const u8 *key, *value;
    const u16 *key_scale, *value_scale;
};

static __device__ __forceinline__ void load_scales(u32 *to, const u16 *at, bool there) {
#pragma unroll
    for (int w = 0; w < SCALE_WORDS; w++) to[w] = 0;
    if (!there) return;
    if constexpr (SCALES % 2) {
#pragma unroll
        for (int j = 0; j < SCALES; j++) to[j / 2] |= (u32)at[j] << (16 * (j % 2));
    } else {
        load_words<SCALE_WORDS>(to, at);
    }
}
static __device__ __forceinline__ float scale_in(const u32 *words, int j) {
    return float_of_half((u16)(words[j / 2] >> (16 * (j % 2))));
}

static __device__ __forceinline__ void load_keys(Tile &t, const Rows &rows, i64 tile, i64 to) {
    const int lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
#pragma unroll
    for (int half = 0; half < HALVES; half++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const i64 token = tile + half * 16 + i * 8 + g;
            const bool there = token < to;
#pragma unroll
            for (int w = 0; w < KEY_WORDS; w++) t.key[half][i][w] = 0;
            if (there) load_words<KEY_WORDS>(t.key[half][i], rows.key + token * KEY_BYTES + c * (KEY_BYTES / 4));
            load_scales(t.key_scale[half][i], rows.key_scale + token * SCALES, there);
        }
}

static __device__ __forceinline__ void load_values(Tile &t, const Rows &rows, i64 tile, i64 to) {
    const int lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
#pragma unroll
    for (int half = 0; half < HALVES; half++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const i64 token = tile + half * 16 + i / 2 * 8 + 2 * c + i % 2;
#pragma unroll
            for (int w = 0; w < VALUE_WORDS; w++) t.value[half][i][w] = 0;
            if (token < to) load_words<VALUE_WORDS>(t.value[half][i], rows.value + token * VALUE_BYTES + g * (VALUE_BYTES / 8));
        }
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const i64 token = tile + half * 16 + i * 8 + g;
            load_scales(t.value_scale[half][i], rows.value_scale + token * SCALES, token < to);
        }
    }
}

// Sums of a warp: queries 2 c and 2 c + 1 of each eight; numbers 2 q and 2 q + 1 of lane g's eighth of a head.
struct Sums {
    float of[NT][PRODUCTS][4], most[NT][2], total[NT][2], largest;
};

static __device__ __forceinline__ void scores_of(float (&score)[NT][HALVES][4], const Arguments &p, const Tile &t,
                                                 const u32 (&query)[NT][PRODUCTS][2], const float (&factor)[NT][2],
                                                 i64 left) {
    const int g = threadIdx.x % 32 / 4;
#pragma unroll
    for (int half = 0; half < HALVES; half++) {
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) score[n][half][e] = 0.0f;
#pragma unroll
        for (int j = 0; j < SCALES; j++) {
            float product[NT][4] = {};
#pragma unroll
            for (int m = 0; m < PRODUCTS / SCALES; m++) {
                const int k = j * (PRODUCTS / SCALES) + m;
                u32 a[4];
#pragma unroll
                for (int i = 0; i < 4; i++) a[i] = key_pair<KEY_KIND>(t.key[half][i % 2], 2 * k + i / 2);
#pragma unroll
                for (int n = 0; n < NT; n++) multiply_add(product[n], a, query[n][k][0], query[n][k][1]);
            }
#pragma unroll
            for (int n = 0; n < NT; n++)
#pragma unroll
                for (int e = 0; e < 4; e++) score[n][half][e] += product[n][e] * scale_in(t.key_scale[half][e / 2], j);
        }
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                score[n][half][e] = half * 16 + e / 2 * 8 + g < left ? score_of(p, score[n][half][e] * factor[n][e % 2]) : LOWEST;
    }
}

// Scores become weights, and what was summed before is rescaled; so that float16 holds weights times scales of values,
// these are divided by the largest scale so far.
static __device__ __forceinline__ void rescale(Sums &s, float (&score)[NT][HALVES][4], const Tile &t) {
    float largest = s.largest;
#pragma unroll
    for (int half = 0; half < HALVES; half++)
#pragma unroll
        for (int i = 0; i < 2 * SCALES; i++) largest = fmaxf(largest, scale_in(t.value_scale[half][i / SCALES], i % SCALES));
#pragma unroll
    for (int d = 4; d < 32; d *= 2) largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, d));
    const float shrink = s.largest / largest;
    s.largest = largest;
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            float most = s.most[n][e];
#pragma unroll
            for (int half = 0; half < HALVES; half++) most = fmaxf(most, fmaxf(score[n][half][e], score[n][half][e + 2]));
#pragma unroll
            for (int d = 4; d < 32; d *= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, d));
            const float before = exp2f(s.most[n][e] - most);
            s.most[n][e] = most;
            s.total[n][e] *= before;
#pragma unroll
            for (int half = 0; half < HALVES; half++)
#pragma unroll
                for (int i = 0; i < 2; i++) s.total[n][e] += score[n][half][e + 2 * i] = exp2f(score[n][half][e + 2 * i] - most);
#pragma unroll
            for (int q = 0; q < PRODUCTS; q++) s.of[n][q][e] *= before * shrink, s.of[n][q][e + 2] *= before * shrink;
        }
}

static __device__ __forceinline__ void add_values(Sums &s, const float (&weight)[NT][HALVES][4], const Tile &t) {
    const float factor = WEIGHT / s.largest;
#pragma unroll
    for (int half = 0; half < HALVES; half++)
#pragma unroll
        for (int j = 0; j < SCALES; j++) {
            const float low = scale_in(t.value_scale[half][0], j) * factor, high = scale_in(t.value_scale[half][1], j) * factor;
            u32 b[NT][2];
#pragma unroll
            for (int n = 0; n < NT; n++) {
                b[n][0] = turned(half_pair(weight[n][half][0] * low, weight[n][half][1] * low));
                b[n][1] = turned(half_pair(weight[n][half][2] * high, weight[n][half][3] * high));
            }
#pragma unroll
            for (int i = 0; i < PRODUCTS / SCALES; i++) {
                const int q = j * (PRODUCTS / SCALES) + i;
                u32 a[4];
                value_pairs<VALUE_KIND>(a[0], a[1], t.value[half][0], t.value[half][1], q);
                value_pairs<VALUE_KIND>(a[2], a[3], t.value[half][2], t.value[half][3], q);
#pragma unroll
                for (int n = 0; n < NT; n++) multiply_add(s.of[n][q], a, b[n][0], b[n][1]);
            }
        }
}

// The query as the tensor cores' second operand, divided by its largest number; what its scores are multiplied by.
static __device__ __forceinline__ void load_query(u32 (&query)[NT][PRODUCTS][2], float (&factor)[NT][2], const Shared &s) {
    const int lane = threadIdx.x % 32, g = lane / 4, c = lane % 4, size = D / SCALES;
#pragma unroll
    for (int n = 0; n < NT; n++) {
        const int own = n * 8 + g;
        const float inverse = own < HEADS && s.most[0][own] > 0.0f ? 1.0f / s.most[0][own] : 0.0f;
#pragma unroll
        for (int k = 0; k < PRODUCTS; k++)
#pragma unroll
            for (int slot = 0; slot < 2; slot++) {
                float x[2];
#pragma unroll
                for (int second = 0; second < 2; second++) {
                    const int place = place_in_key<KEY_KIND>(2 * k + slot, second);
                    const int d = place / (size / 4) * size + c * (size / 4) + place % (size / 4);
                    x[second] = own < HEADS ? s.q[own < HEADS ? own : 0][d] * inverse : 0.0f;
                }
                query[n][k][slot] = half_pair(x[0], x[1]);
            }
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const int of = n * 8 + 2 * c + e;
            factor[n][e] = of < HEADS ? s.most[0][of] * (KEY_KIND == FP8 ? 256.0f : 1.0f) : 0.0f;
        }
    }
}

static __device__ __forceinline__ void store_sums(const Sums &sums, const Shared &s) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, c = lane % 4, size = D / SCALES;
    const float factor = sums.largest / WEIGHT * (VALUE_KIND == FP8 ? 256.0f : 1.0f);
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const int of = n * 8 + 2 * c + e;
            float total = sums.total[n][e];
#pragma unroll
            for (int d = 4; d < 32; d *= 2) total += __shfl_xor_sync(0xffffffffu, total, d);
            if (of >= HEADS) continue;
            if (g == 0) s.most[warp][of] = sums.most[n][e], s.total[warp][of] = total;
#pragma unroll
            for (int q = 0; q < PRODUCTS; q++)
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    const int place = 2 * q + i, d = place / (size / 8) * size + g * (size / 8) + place % (size / 8);
                    s.sums[warp][of][d] = sums.of[n][q][e + 2 * i] * factor;
                }
        }
}

// A part of the packed tokens.
static __device__ __forceinline__ void attend_packed(const Arguments &p, const Range &r, const Shared &s, int b, int head) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, heads = p.kv_heads * HEADS;
    const i64 row = ((i64)b * p.kv_heads + head) * p.room;
    const Rows rows = {p.key_codes + row * KEY_BYTES, p.value_codes + row * VALUE_BYTES, p.key_scales + row * SCALES,
                       p.value_scales + row * SCALES};
    const i64 from = r.packed + (i64)(blockIdx.x - 1) * r.part, end = r.packed + r.count;
    const i64 to = from + r.part < end ? from + r.part : end;
    Tile t;
    i64 tile = from + warp * ROWS;
    load_keys(t, rows, tile, to);  // earlier steps wrote them: they can be asked for before this step's queries are there
    const Angles angles = angles_at(p, r.position - r.begin);
    wait_for_the_kernel_before();
    const float *mine = p.qkv + b * p.qkv_pitch;
    for (int g = warp; g < HEADS; g += WARPS) {
        turn_head(p, mine + (i64)(head * HEADS + g) * D, p.q_norm, angles, p.scale, s.scratch[warp], s.q[g]);
        spread<KEY_TURN>(s.q[g]);
        float largest = 0.0f;
        for (int d = lane; d < D; d += 32) largest = fmaxf(largest, fabsf(s.q[g][d]));
        largest = largest_of_warp(largest);
        if (lane == 0) s.most[0][g] = largest;
    }
    __syncthreads();
    u32 query[NT][PRODUCTS][2];
    float factor[NT][2];
    load_query(query, factor, s);
    __syncthreads();  // the queries' largest numbers have been read: their place is the maxima's
    Sums sums = {};
    sums.largest = SMALLEST;
#pragma unroll
    for (int n = 0; n < NT; n++) sums.most[n][0] = sums.most[n][1] = LOWEST;
    for (; tile < to; tile += WARPS * ROWS) {
        float score[NT][HALVES][4];
        load_values(t, rows, tile, to);
        scores_of(score, p, t, query, factor, to - tile);
        load_keys(t, rows, tile + WARPS * ROWS, to);
        rescale(sums, score, t);
        add_values(sums, score, t);
    }
    store_sums(sums, s);
}

extern "C" __global__ void __launch_bounds__(THREADS, D <= 128 && NT == 1 ? 2 : 1)
    packed_attention(const __grid_constant__ Arguments p) {
    __shared__ __align__(16) float q[HEADS][D], scratch[WARPS][D], sums[WARPS][HEADS][D];
    __shared__ float most[WARPS][HEADS], total[WARPS][HEADS];
    __shared__ u32 last;
    const Shared s = {q, scratch, sums, most, total};
    const int b = blockIdx.z, head = blockIdx.y, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const Range r = range_of(p, b, gridDim.x);
    if ((int)blockIdx.x >= r.parts) return;
    if (blockIdx.x == 0) {
        const Angles angles = angles_at(p, r.position - r.begin);
        wait_for_the_kernel_before();
        const float *mine = p.qkv + b * p.qkv_pitch;
        const int heads = p.kv_heads * HEADS;
        for (int g = warp; g < HEADS; g += WARPS)
            turn_head(p, mine + (i64)(head * HEADS + g) * D, p.q_norm, angles, p.scale, scratch[warp], q[g]);
        __syncthreads();
        if (warp == WARPS - 1)
            turn_head(p, mine + (i64)(heads + head) * D, p.k_norm, angles, 1.0f, scratch[0], scratch[WARPS - 1]);
        if (warp == WARPS - 2)
            for (int d = lane; d < D; d += 32)
                scratch[WARPS - 2][d] = from_16(to_16(mine[(i64)(heads + p.kv_heads + head) * D + d]));
        __syncthreads();
        attend_recent(p, r, s, b, head);
        append(p, r, s, b, head);
    } else {
        attend_packed(p, r, s, b, head);
    }
    __syncthreads();
    if (threadIdx.x < HEADS) {  // the warps' sums have maxima of their own
        const int g = threadIdx.x;
        float largest = LOWEST, sum = 0.0f;
        for (int w = 0; w < WARPS; w++) largest = fmaxf(largest, most[w][g]);
        for (int w = 0; w < WARPS; w++) {
            const float weight = exp2f(most[w][g] - largest);
            sum += weight * total[w][g];
            most[w][g] = weight;
        }
        total[0][g] = sum, total[1][g] = largest;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < HEADS * D; i += THREADS) {
        float x = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; w++) x += most[w][i / D] * sums[w][i / D][i % D];
        q[i / D][i % D] = x;
    }
    __syncthreads();
    if (blockIdx.x > 0)
        for (int g = warp; g < HEADS; g += WARPS) spread<VALUE_TURN>(q[g]);
    __syncthreads();
    float *parts = p.parts + ((i64)b * p.kv_heads + head) * gridDim.x * HEADS * PARTIAL;
    float *part = parts + (i64)blockIdx.x * HEADS * PARTIAL;
    u16 *out = p.out + b * p.out_pitch + (i64)head * HEADS * D;
    for (int i = threadIdx.x; i < HEADS * D; i += THREADS) {
        if (r.parts == 1)
            out[i] = to_16(q[i / D][i % D] / total[0][i / D]);
        else
            part[i / D * PARTIAL + i % D] = q[i / D][i % D];
    }
    if (r.parts == 1) return;
    if (threadIdx.x < HEADS) {
        part[threadIdx.x * PARTIAL + D] = total[1][threadIdx.x];
        part[threadIdx.x * PARTIAL + D + 1] = total[0][threadIdx.x];
    }
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) last = atomicAdd(p.arrived + b * p.kv_heads + head, 1u) == (u32)r.parts - 1;
    __syncthreads();
    if (!last) return;
    __threadfence();
    add_parts(out, parts, r.parts, &sums[0][0][0]);
    if (threadIdx.x == 0) p.arrived[b * p.kv_heads + head] = 0;
}
