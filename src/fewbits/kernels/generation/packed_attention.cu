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
#include "cluster.cu"
#define PITCH (D + 8)  // floats between two heads' sums: see store_sums
#include "packed_walk.cu"

#define MIN_PART (CLUSTER > 1 ? ROWS : 256)  // tokens: fewer are not worth a block
#define EIGHTS ((D + 63) / 64)               // of a value's numbers in 16 bits that a lane reads
#define EIGHTS_PAIRS ((EIGHTS + 1) / 2)
#define SLOTS (NEWEST + 1)

struct Range {
    i64 position, begin, low, packed;  // the new token; the first one; the first one in the window; the first packed one
    i64 from;                          // this block's first packed token
    int count, clusters;               // its packed tokens; clusters with something to do
};

// Blocks share packed tokens evenly, but the first one, which has the tokens in 16 bits, gets RECENT_WORTH fewer.
static __device__ __forceinline__ Range range_of(const Arguments &p, int b) {
    Range r;
    r.position = p.position[b], r.begin = p.first[b], r.low = r.begin;
    if (p.window && r.position + 1 - p.window > r.low) r.low = r.position + 1 - p.window;
    r.packed = r.begin + FIRST > r.low ? r.begin + FIRST : r.low;
    const i64 end = r.position - NEWEST;
    const int count = end > r.packed ? (int)(end - r.packed) : 0;
    const int blocks = CLUSTER > 1 && count <= FEW ? CLUSTER : (int)gridDim.x;
    int part = (count + RECENT_WORTH + blocks - 1) / blocks, in_first = part - RECENT_WORTH;
    if (in_first < 0) in_first = 0, part = blocks > 1 ? (count + blocks - 2) / (blocks - 1) : 0;
    if (part < MIN_PART) part = MIN_PART;
    if (blocks == 1) in_first = count;
    const int used = 1 + (count - in_first + part - 1) / part, block = (int)blockIdx.x;
    r.clusters = (used + CLUSTER - 1) / CLUSTER;
    const int before = block ? in_first + (block - 1) * part : 0, own = block ? part : in_first;
    r.from = r.packed + before;
    r.count = count - before < own ? count - before : own;
    if (r.count < 0) r.count = 0;
    return r;
}

struct Shared {
    float (*q)[D], (*scratch)[D], (*recent)[D], (*sums)[HEADS][PITCH], (*most)[HEADS], (*total)[HEADS];
    u32 (*words)[4][QUERY_PITCH];
    u16 (*fresh)[D];  // the new key and value
};

// The sums of a block's warps over one largest score, ``in_order`` or as store_sums leaves them; largest and total to ``row``.
static __device__ __forceinline__ void combine(const Shared &s, float (*to)[D], bool in_order, int row) {
    if (threadIdx.x < HEADS) {
        const int g = threadIdx.x;
        float largest = LOWEST, sum = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; w++) largest = fmaxf(largest, s.most[w][g]);
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            const float weight = s.most[w][g] == LOWEST ? 0.0f : power_of_two(s.most[w][g] - largest);
            sum += weight * s.total[w][g];
            s.most[w][g] = weight;
        }
        s.most[row][g] = largest, s.total[row][g] = sum;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < HEADS * D; i += THREADS) {
        const int g = i / D, place = i % D;
        float x = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; w++) x += s.most[w][g] * s.sums[w][g][place];
        to[g][in_order ? place : value_at(place)] = x;
    }
    __syncthreads();
}

// The tokens in 16 bits: the first ones, those of the ring, the new one, which lies in shared memory.
struct Recent {
    const u16 *keys, *values, *first_keys, *first_values;
    i64 from;
    int skipped, earlier, count;
};
static __device__ __forceinline__ Recent recent_of(const Arguments &p, const Range &r, i64 of_head) {
    Recent x = {p.newest_keys + of_head * SLOTS * D, p.newest_values + of_head * SLOTS * D,
                p.first_keys + of_head * FIRST * D, p.first_values + of_head * FIRST * D};
    x.skipped = r.low - r.begin < FIRST ? (int)(r.low - r.begin) : FIRST;
    const int firsts = (r.position - r.begin < FIRST ? (int)(r.position - r.begin) : FIRST) - x.skipped;
    x.from = r.position - NEWEST > r.packed ? r.position - NEWEST : r.packed;
    x.earlier = firsts > 0 ? firsts : 0;
    x.count = x.earlier + (r.position > x.from ? (int)(r.position - x.from) : 0) + 1;
    return x;
}
static __device__ __forceinline__ const u16 *row_in(const u16 *ring, const u16 *first, const Recent &x, int at) {
    return at < x.earlier ? first + (x.skipped + at) * D : ring + (u32)(x.from + at - x.earlier) % SLOTS * D;
}

// A tile of 16 of them in 16 bits: a lane's eights of keys g and g + 8, and of values 2 c, 2 c + 1, 2 c + 8 and 2 c + 9.
struct Plain {
    u32 key[2][D / 32][4], value[4][EIGHTS][4];
};
// All rows, or only the new token's, which is in shared memory.
template <bool NEW> static __device__ __forceinline__ void load_plain(Plain &t, const Recent &x, int tile, const u16 (*fresh)[D]) {
    const int lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int at = tile * 16 + i * 8 + g;
        if (NEW ? at != x.count - 1 : at >= x.count - 1) continue;
        const u16 *from = NEW ? fresh[0] : row_in(x.keys, x.first_keys, x, at);
#pragma unroll
        for (int j = 0; j < D / 32; j++) load_any(t.key[i][j], from + j * 32 + c * 8);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int at = tile * 16 + i / 2 * 8 + 2 * c + i % 2;
        if (NEW ? at != x.count - 1 : at >= x.count - 1) continue;
        const u16 *from = NEW ? fresh[1] : row_in(x.values, x.first_values, x, at);
#pragma unroll
        for (int j = 0; j < EIGHTS; j++)
            if (j * 64 + g * 8 < D) load_any(t.value[i][j], from + j * 64 + g * 8);
    }
}

// By tensor cores, a tile a warp: as packed_walk.cu's walk, but for weights in two numbers of 16 bits, whose sum holds 16 bits
// and more. ``t`` has the warp's first tile without the new token.
static __device__ __forceinline__ void attend_recent(const Arguments &p, const Recent &x, const Shared &s, Plain &t) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
    u32 query[NT][D / 16][2];
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
        for (int k = 0; k < D / 16; k += 2) {
            const uint4 y = n * 8 + g < HEADS ? *(const uint4 *)&s.words[n * 8 + g][c][2 * k] : uint4{0, 0, 0, 0};
            query[n][k][0] = y.x, query[n][k][1] = y.y, query[n][k + 1][0] = y.z, query[n][k + 1][1] = y.w;
        }
    float sum[NT][EIGHTS_PAIRS][8][4] = {}, most[NT][2], total[NT][2];
#pragma unroll
    for (int n = 0; n < NT; n++) most[n][0] = most[n][1] = LOWEST, total[n][0] = total[n][1] = 0.0f;
#pragma unroll 1
    for (int tile = warp; tile * 16 < x.count; tile += WARPS) {
        if (tile > warp) t = {}, load_plain<false>(t, x, tile, s.fresh);
        if (tile * 16 + 16 >= x.count) load_plain<true>(t, x, tile, s.fresh);
        u32 weights[NT][2][2];
#pragma unroll
        for (int n = 0; n < NT; n++) {
            float score[4] = {};
#pragma unroll
            for (int k = 0; k < D / 16; k++) {
                const u32 (*key)[D / 32][4] = t.key;
                const int j = k / 2, w = k % 2 * 2;
                const u32 a[4] = {key[0][j][w], key[1][j][w], key[0][j][w + 1], key[1][j][w + 1]};
                multiply_add_16(score, a, query[n][k][0], query[n][k][1]);
            }
#pragma unroll
            for (int e = 0; e < 4; e++)
                score[e] = tile * 16 + e / 2 * 8 + g < x.count ? score_of(p, score[e] * p.scale) : LOWEST;
#pragma unroll
            for (int e = 0; e < 2; e++) {
                float largest = fmaxf(score[e], score[e + 2]);
#pragma unroll
                for (int d = 4; d < 32; d *= 2) largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, d));
                largest = fmaxf(most[n][e], largest);
                const float before = power_of_two(most[n][e] - largest);
                most[n][e] = largest;
                score[e] = power_of_two(score[e] - largest), score[e + 2] = power_of_two(score[e + 2] - largest);
                total[n][e] = total[n][e] * before + score[e] + score[e + 2];
#pragma unroll
                for (int i = 0; i < EIGHTS_PAIRS * 8; i++) (&sum[n][0][0][0])[4 * i + e] *= before, (&sum[n][0][0][0])[4 * i + e + 2] *= before;
            }
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const u32 low = to_16(score[2 * i]), high = to_16(score[2 * i + 1]);
                const float rest[2] = {score[2 * i] - from_16(low), score[2 * i + 1] - from_16(high)};
                weights[n][0][i] = turned(low | high << 16);
                weights[n][1][i] = turned((u32)to_16(rest[0]) | (u32)to_16(rest[1]) << 16);
            }
        }
#pragma unroll
        for (int pair = 0; pair < EIGHTS_PAIRS; pair++)
#pragma unroll
            for (int j = 0; j < 8; j++) {
                u32 a[4] = {};
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const int eight = pair * 2 + half;
                    if (eight >= EIGHTS) continue;
                    const bool there = eight * 64 + g * 8 < D;  // values of rows that nobody has are not numbers
                    a[half] = there ? __byte_perm(t.value[0][eight][j / 2], t.value[1][eight][j / 2], j % 2 ? 0x7632 : 0x5410) : 0;
                    a[2 + half] = there ? __byte_perm(t.value[2][eight][j / 2], t.value[3][eight][j / 2], j % 2 ? 0x7632 : 0x5410) : 0;
                }
#pragma unroll
                for (int n = 0; n < NT; n++) {
                    multiply_add_16(sum[n][pair][j], a, weights[n][0][0], weights[n][0][1]);
                    multiply_add_16(sum[n][pair][j], a, weights[n][1][0], weights[n][1][1]);
                }
            }
    }
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const int of = n * 8 + 2 * c + e;
#pragma unroll
            for (int d = 4; d < 32; d *= 2) total[n][e] += __shfl_xor_sync(0xffffffffu, total[n][e], d);
            if (of >= HEADS) continue;
            if (g == 0) s.most[warp][of] = most[n][e], s.total[warp][of] = total[n][e];
#pragma unroll
            for (int i = 0; i < EIGHTS_PAIRS * 16; i++) {
                const int d = i / 8 * 64 + g * 8 + i % 8;
                if (d < D) s.sums[warp][of][d] = sum[n][i / 16][i % 8][e + i / 8 % 2 * 2];
            }
        }
    __syncthreads();
    combine(s, s.recent, true, WARPS);
}

// The oldest token of the ring is packed, by a warp for keys and one for values, which have no query to turn where there are
// few. Where blocks come in clusters it is the second one's work: the first has more than the others.
#define PACKING_BLOCK (CLUSTER > 1 ? 1 : 0)
#define PACKING_WARP (CLUSTER > 1 ? WARPS - 1 : WARPS - 3)  // for values; the one before it for keys
struct Oldest {
    u16 x[D / 32];
    i64 place;  // negative: nothing is packed by this warp
};
static __device__ __forceinline__ Oldest load_oldest(const Arguments &p, const Range &r, i64 of_head) {
    const int warp = threadIdx.x / 32;
    const i64 leaves = r.position - NEWEST;
    const bool packs = blockIdx.x == PACKING_BLOCK && (warp == PACKING_WARP || warp == PACKING_WARP - 1) && leaves >= r.begin + FIRST;
    Oldest oldest;
    oldest.place = packs ? of_head * p.room + leaves : -1;
    if (!packs) return oldest;
    const u16 *from = (warp == PACKING_WARP ? p.newest_values : p.newest_keys) + (of_head * SLOTS + (u32)leaves % SLOTS) * D + threadIdx.x % 32;
#pragma unroll
    for (int j = 0; j < D / 32; j++) oldest.x[j] = from[j * 32];
    return oldest;
}
static __device__ __forceinline__ void pack_oldest(const Arguments &p, const Oldest &oldest, const Shared &s) {
    const int warp = threadIdx.x / 32;
    const i64 place = oldest.place;
    if (place < 0) return;
    if (warp == PACKING_WARP)
        pack_head<VALUE_KIND, VALUE_TURN, 8>(oldest.x, s.scratch[warp], p.value_codes + place * VALUE_BYTES, p.value_scales + place * SCALES);
    else
        pack_head<KEY_KIND, KEY_TURN, 4>(oldest.x, s.scratch[warp], p.key_codes + place * KEY_BYTES, p.key_scales + place * SCALES);
}
// The new token takes a place of its own.
static __device__ __forceinline__ void keep_new(const Arguments &p, const Range &r, const Shared &s, i64 of_head) {
    const int warp = threadIdx.x / 32;
    if (warp > 1) return;
    const i64 since = r.position - r.begin;
    u16 *ring = (warp ? p.newest_values : p.newest_keys) + (of_head * SLOTS + (u32)r.position % SLOTS) * D;
    u16 *first = (warp ? p.first_values : p.first_keys) + (of_head * FIRST + since) * D;
    for (int d = threadIdx.x % 32; d < D; d += 32) {
        ring[d] = s.fresh[warp][d];
        if (since < FIRST) first[d] = s.fresh[warp][d];
    }
}

// What a warp turns, as it comes: queries, and in the first block the new key or value. Where no kernel in front is still running they
// are asked for before the first tiles, behind which they would have to wait.
struct Raw {
    float x[(HEADS + WARPS - 1) / WARPS][D / 32], fresh[D / 32];
};
static __device__ __forceinline__ void load_raw(Raw &raw, const Arguments &p, int b, int head) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, heads = p.kv_heads * HEADS;
    const float *mine = p.qkv + b * p.qkv_pitch + lane;
#pragma unroll
    for (int i = 0; i < (HEADS + WARPS - 1) / WARPS; i++)
#pragma unroll
        for (int j = 0; j < D / 32; j++)
            if (i * WARPS + warp < HEADS) raw.x[i][j] = mine[(i64)(head * HEADS + i * WARPS + warp) * D + j * 32];
    if (blockIdx.x > 0 || warp < WARPS - 2) return;
#pragma unroll
    for (int j = 0; j < D / 32; j++) raw.fresh[j] = mine[(i64)(heads + (warp == WARPS - 1 ? 0 : p.kv_heads) + head) * D + j * 32];
}

// What this step brings, in shared memory: the queries, and in the first block the new key and value.
static __device__ __forceinline__ void turn_heads(const Arguments &p, const Shared &s, const Raw &raw, const Angles &angles) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll 1
    for (int i = 0; i < (HEADS + WARPS - 1) / WARPS + 1; i++) {
        const bool is_key = i == (HEADS + WARPS - 1) / WARPS;  // last: its code is the queries'
        const int g = i * WARPS + warp;
        if (is_key ? blockIdx.x > 0 || warp < WARPS - 1 : g >= HEADS) continue;
        float *to = is_key ? s.sums[warp][0] : s.q[g];
#pragma unroll
        for (int j = 0; j < D / 32; j++) {
            float x = raw.fresh[j];
#pragma unroll
            for (int k = 0; k < (HEADS + WARPS - 1) / WARPS; k++) x = i == k ? raw.x[k][j] : x;
            to[j * 32 + lane] = x;
        }
        turn_head(p, to, is_key ? p.k_norm : p.q_norm, angles, 1.0f, s.scratch[warp], to);
        if (is_key)
            for (int d = lane; d < D; d += 32) s.fresh[0][d] = to_16(to[d]);
    }
    if (blockIdx.x > 0) return;
    if (warp == WARPS - 2)
#pragma unroll
        for (int j = 0; j < D / 32; j++) s.fresh[1][j * 32 + lane] = to_16(raw.fresh[j]);
    for (int g = warp; g < HEADS; g += WARPS) order_plain(s.q[g], s.words[g]);
}

// What the block has: its packed tokens' sums, turned back, and those in 16 bits, over one largest score: to ``q``; largest and
// total to rows WARPS + 1.
static __device__ __forceinline__ void join(const Shared &s) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    combine(s, s.q, false, WARPS + 1);
    for (int g = warp; g < HEADS; g += WARPS) {
        spread<VALUE_TURN>(s.q[g]);
        if (blockIdx.x > 0) continue;
        const float packed = s.most[WARPS + 1][g], recent = s.most[WARPS][g], largest = fmaxf(packed, recent);
        const float of_packed = power_of_two(packed - largest), of_recent = power_of_two(recent - largest);
        for (int d = lane; d < D; d += 32) s.q[g][d] = of_packed * s.q[g][d] + of_recent * s.recent[g][d];
        __syncwarp();
        if (lane == 0) s.most[WARPS + 1][g] = largest, s.total[WARPS + 1][g] = of_packed * s.total[WARPS + 1][g] + of_recent * s.total[WARPS][g];
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, D <= 128 && NT == 1 ? BLOCKS : 1)
    packed_attention(const __grid_constant__ Arguments p) {
    __shared__ __align__(16) float q[HEADS][D], scratch[WARPS][D], recent[HEADS][D];
    __shared__ __align__(16) u32 words[HEADS][4][QUERY_PITCH];
    __shared__ float most[WARPS + 2][HEADS], total[WARPS + 2][HEADS], largest[HEADS];
    __shared__ __align__(16) u16 fresh[2][D];
    __shared__ u32 last;
    float (*sums)[HEADS][PITCH] = (float (*)[HEADS][PITCH])shared_bytes;  // where tiles were
    const Shared s = {q, scratch, recent, sums, most, total, words, fresh};
    const int b = blockIdx.z, head = blockIdx.y, warp = threadIdx.x / 32;
    const i64 of_head = (i64)b * p.kv_heads + head;
    const Range r = range_of(p, b);
    if ((int)blockIdx.x >= r.clusters * CLUSTER) return;
    // Earlier steps wrote it, so it can be asked for before this step's queries are there: the first tile, or what is in 16 bits.
    const u32 token = (u32)(of_head * p.room + r.from) + warp * ROWS;
    const int left = r.count - warp * ROWS;
    const Recent x = recent_of(p, r, of_head);
    const u32 memory = (u32)__cvta_generic_to_shared(shared_bytes) + warp * STAGES * STAGE_SIZE;
    const Angles angles = angles_at(p, r.position - r.begin);
    const Oldest oldest = load_oldest(p, r, of_head);
    Raw raw;
    if (!EARLY) load_raw(raw, p, b, head);
    Plain plain = {};
    if (blockIdx.x == 0)
        load_plain<false>(plain, x, warp, fresh);
    else
        begin_walk(memory, p, token, left);
    pack_oldest(p, oldest, s);
    wait_for_the_kernel_before();
    if (EARLY) load_raw(raw, p, b, head);
    turn_heads(p, s, raw, angles);
    if (blockIdx.x == 0) {
        __syncthreads();
        keep_new(p, r, s, of_head);
        attend_recent(p, x, s, plain);
        begin_walk(memory, p, token, left);
    }
    if (r.count > 0) {
        for (int g = warp; g < HEADS; g += WARPS) {
            spread<KEY_TURN>(q[g]);
            order_query(q[g], words[g], &largest[g]);
        }
        __syncthreads();
        Query query;
        load_query(query, p, words, largest);
        Sums walked;
        walk(walked, memory, p, token, left, query);
        __syncthreads();  // all tiles have been read
        store_sums(walked, sums[warp], most[warp], total[warp]);
        __syncthreads();
        join(s);
    } else {
        const bool has_recent = blockIdx.x == 0;
        __syncthreads();
        for (int i = threadIdx.x; i < HEADS * D; i += THREADS) q[i / D][i % D] = has_recent ? recent[i / D][i % D] : 0.0f;
        if (threadIdx.x < HEADS) {
            most[WARPS + 1][threadIdx.x] = has_recent ? most[WARPS][threadIdx.x] : LOWEST;
            total[WARPS + 1][threadIdx.x] = has_recent ? total[WARPS][threadIdx.x] : 0.0f;
        }
    }
    // The cluster's sums: each block adds its share of the outputs.
    meet_cluster();
    float *parts = p.parts + of_head * (gridDim.x / CLUSTER) * HEADS * PARTIAL, *part = parts + (i64)(blockIdx.x / CLUSTER) * HEADS * PARTIAL;
    u16 *out = p.out + b * p.out_pitch + (i64)head * HEADS * D;
    const int share = (HEADS * D + CLUSTER - 1) / CLUSTER, own = (int)(blockIdx.x % CLUSTER) * share;
    for (int i = own + (int)threadIdx.x; i < own + share && i < HEADS * D; i += THREADS) {
        const int g = i / D;
        float highest = LOWEST, all = 0.0f, sum = 0.0f, most_of[CLUSTER], total_of[CLUSTER], sum_of[CLUSTER];
#pragma unroll
        for (u32 k = 0; k < CLUSTER; k++) {
            total_of[k] = load_from_block(&total[WARPS + 1][g], k);
            most_of[k] = load_from_block(&most[WARPS + 1][g], k);
            sum_of[k] = load_from_block(&q[g][i % D], k);
        }
#pragma unroll
        for (int k = 0; k < CLUSTER; k++) highest = fmaxf(highest, most_of[k]);
#pragma unroll
        for (int k = 0; k < CLUSTER; k++) {
            const float weight = power_of_two(most_of[k] - highest);  // the first block has scores, so does one of each cluster
            all += weight * total_of[k], sum += weight * sum_of[k];
        }
        if (r.clusters == 1)
            out[i] = to_16(sum / all);
        else
            part[g * PARTIAL + i % D] = sum;
        if (r.clusters > 1 && i % D == 0) part[g * PARTIAL + D] = highest, part[g * PARTIAL + D + 1] = all;
    }
    meet_cluster();  // none ends while another reads from it
    if (r.clusters == 1) return;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) last = atomicAdd(p.arrived + of_head, 1u) == (u32)(r.clusters * CLUSTER) - 1;
    __syncthreads();
    if (!last) return;
    __threadfence();
    add_parts(out, parts, r.clusters, (float *)shared_bytes);
    if (threadIdx.x == 0) p.arrived[of_head] = 0;
}
