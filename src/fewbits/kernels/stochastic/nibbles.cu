// Products of prepared stochastic operands with many rows, with tables of 4 bits in place of 8. codes.py defines the result;
// read the head of many.cu first, which works the same way with whole bytes.
//
// The idea. Reading shared memory bounds the time of many.cu, so a table entry of half the size means twice the rows for each
// reading. A count as a function of the weight's magnitude is close to a straight line. Four slopes, chosen when tables are
// made, and a remainder v of 3 bits give it exactly, for each (mask, code of a):
//
//     T(|w|) = sum over k = 1, 2, 4, 6 of g_k (floor(|w| / 2^k) + 1/2) + v(|w|) - 7/2,       0 <= v <= 7
//
// with whole numbers g_k whose sum is odd. The lines are computed, only v is looked up:
//
// 1. Signs. Weights are in ones' complement, u = w or ~|w|. Then floor(u / 2^k) + 1/2 changes its sign with w, and a negative
//    weight has 7 - v in place of v, so tables need magnitudes only.
// 2. Lines. Everything is counted in 64ths: 2^k (floor(u / 2^k) + 1/2) is u's byte with its low bits replaced by a one and
//    zeros, and its coefficient is g_k 2^(6 - k). Two 8-bit matrix products add all four terms for 16 dimensions.
// 3. Tables. A block serves 32 rows of a and up to 8 TILES outputs a warp (32 threads). For 8 inner dimensions (a plane, half
//    of a slice) shared memory holds v of all rows for each of 256 codes: 16 bytes, 2 rows in each, one load. Banks are
//    shared out as in many.cu, so threads never wait for each other.
// 4. Sums. The values found for 2 dimensions are added as bytes first: two v fit 4 bits. The sums of 2 outputs, and these with
//    the high halves of their bytes masked out, are the first operand of 8-bit matrix products. The second, a constant,
//    sends each row's 4 bits to a column of its own (high halves as bytes less their low halves) and adds over the 4
//    threads that look up one output:
//
//        rows l / 4 and l / 4 + 8 of D, for thread l's outputs of tiles t and t + 1:     8 rows of a (an octet)
//
// 5. Time. While one plane is looked up, the next one's table is built from rows that have arrived, and the rows of the one
//    after it are on their way: one barrier a plane.
//
// Compiled at run time with TILES (a multiple of 4), THREADS (128, 256 or 512) and KEEP (1: y stays in shared memory
// until its last chunk) defined.

typedef unsigned int u32;
typedef unsigned char u8;
typedef signed char s8;
typedef long long i64;
typedef unsigned long long u64;

#define LANES 32
#define WARPS (THREADS / LANES)
#define ROWS 32
#define SLICE 16
#define TABLE (256 * LANES * 4)              // bytes of a plane's: 16 for each code and 8 dimensions
#define PLACES (ROWS * SLICE / 2)            // rows of tables of a plane, 64 bytes each
#define ARRIVED (2 * TABLE)                  // where they are, after both tables
#define LINES (ARRIVED + 2 * PLACES * 64)    // coefficients of a slice
#define KEPT (LINES + 2048)
#define UNITS ((16 + WARPS - 1) / WARPS)     // parts of a table that a warp builds: 8 dimensions, 16 codes
#define OWN (PLACES / WARPS)                 // rows of a plane that a warp fetches
#define FETCHES (2 * OWN / LANES)
#define GROUPS (TILES / 4)
#define SCALE 64
#define START (-7 * SCALE / 2 * SLICE)       // of a slice

struct Product {
    const s8 *qa;          // (B, N, D)
    const float *sa;       // (B, N, C)
    const s8 *qb;          // (B or 1, M, D)
    const float *sb;       // (B or 1, C, M)
    const u8 *levels;      // (B or 1, N or 1, C or 1), or null
    const u8 *tables;      // (levels, masks, 256, 64): v by codes of a, 8 magnitudes in 4 bytes
    const s8 *slopes;      // (levels, masks, 256, 4): coefficients of the four k
    const u8 *masks;       // (dimensions of a chunk,): which mask
    const float *factors;  // (levels,): Q^2 / L
    u32 *weights;          // (B or 1, slices, quads, 32 lanes, 4 tiles): 4 codes each
    u32 *places;           // (B, row groups, slices, 2 planes, 256): rows of the tables, see pack_a
    u32 *linear;           // (B, row groups, slices, 4 octets, 32 lanes, 4 k): coefficients of 4 dimensions
    float *y;              // (B, N, M)
    int N, M, D, C;
    int chunk;             // inner dimensions of a chunk
    int per_chunk;         // slices of a chunk
    int num_masks;
    int shared_b;          // 1: b has one entry for all of the batch
    int level_b, level_n, level_c;  // strides of levels; 0 broadcasts
    int quads;             // of tiles, 32 outputs each: of whole blocks
};

#include "slices.cu"
#include "outputs.cu"
#include "byte_products.cu"
#include "copies.cu"

extern "C" __global__ void __launch_bounds__(256) stochastic_pack_b(const Product p) { pack_weights<true>(p); }

// Thread (row, dimension) of half a slice's rows.
extern "C" __global__ void __launch_bounds__(256) stochastic_pack_a(const Product p) {
    const int i = threadIdx.x % SLICE, row = threadIdx.x / SLICE + blockIdx.x % 2 * 16, s = blockIdx.x / 2;
    const int b = blockIdx.z, slices = p.per_chunk * p.C, n = blockIdx.y * ROWS + row;
    i64 first;
    const int length = length_of(p, s, &first), c = s / p.per_chunk, offset = (s - c * p.per_chunk) * SLICE;
    const int plane = i / 2 % 2, owner = i / 4 + i % 2 * 4;
    const int word = row / 8, nth = row % 8 ^ 4;  // of a word's 8 rows: those of low halves first
    const i64 block = ((i64)b * gridDim.y + blockIdx.y) * slices + s;
    int code = 0;
    if (n < p.N && i < length) code = p.qa[((i64)b * p.N + n) * p.D + first + i];
    u32 place = 0;  // all tables' first rows are alike
    if (code) place = ((u32)level_of(p, b, n, c) * p.num_masks + p.masks[offset + i]) * 256 + (code & 255);
    p.places[(block * 2 + plane) * PLACES + nth * LANES + owner * 4 + word] = place;
    s8 *linear = (s8 *)(p.linear + block * 512) + (row / 8 * LANES + row % 8 * 4 + i / 4) * 16 + i % 4;
#pragma unroll
    for (int k = 0; k < 4; k++) linear[4 * k] = p.slopes[place * 4 + k];
}

#ifndef EMULATED
// x where the mask has ones and y elsewhere, in one instruction.
static __device__ __forceinline__ u32 either(u32 mask, u32 x, u32 y) {
    u32 v;
    asm("lop3.b32 %0, %1, %2, %3, 0xca;" : "=r"(v) : "r"(mask), "r"(x), "r"(y));
    return v;
}

extern __shared__ u32 shared[];
#endif

// Where in the tables a warp's rows of a slice's two planes are: a lane has FETCHES of them.
static __device__ __forceinline__ void places_of(const u32 *places, u32 *place) {
    const int lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;
#pragma unroll
    for (int i = 0; i < FETCHES; i++) {
        const int at = i * LANES + lane;
        place[i] = __ldg(places + at / OWN * PLACES + warp * OWN + at % OWN);
    }
}

// Start the copies of a plane's rows: 4 threads a row, neighbours' parts in other banks.
static __device__ __forceinline__ void fetch(const Product &p, const u32 *place, int plane, u32 base) {
    const int lane = threadIdx.x % LANES, part = lane % 4;
#pragma unroll
    for (int j = 0; j < OWN / 8; j++) {
        const int nth = 8 * j + lane / 4, row = threadIdx.x / LANES * OWN + nth;
        const u32 from = __shfl_sync(0xffffffffu, place[(plane * OWN + 8 * j) / LANES], (plane * OWN + nth) % LANES);
        copy_16(base + ARRIVED + plane * (PLACES * 64) + row * 64 + (part ^ row / 2 % 4) * 16,
                p.tables + (u64)from * 64 + part * 16);
    }
}

// Words of 4 codes of 4 bytes, to 4 codes' words; and the negative codes, of which words are 7 - v.
static __device__ __forceinline__ void store_turned(u32 *to, u32 *negative, const u32 *v) {
    const u32 low01 = __byte_perm(v[0], v[1], 0x5140), high01 = __byte_perm(v[0], v[1], 0x7362);
    const u32 low23 = __byte_perm(v[2], v[3], 0x5140), high23 = __byte_perm(v[2], v[3], 0x7362);
    const u32 turned[4] = {__byte_perm(low01, low23, 0x5410), __byte_perm(low01, low23, 0x7632),
                           __byte_perm(high01, high23, 0x5410), __byte_perm(high01, high23, 0x7632)};
#pragma unroll
    for (int j = 0; j < 4; j++) {
        to[j * LANES] = turned[j];
        negative[-j * LANES] = 0x77777777u - turned[j];
    }
}

// A plane's table of the rows that have arrived. A warp has 8 magnitudes, a lane one dimension (its 4 banks) and
// 8 rows (one of the banks).
static __device__ __forceinline__ void build(int plane) {
    const int lane = threadIdx.x % LANES;
#pragma unroll
    for (int i = 0; i < UNITS; i++) {
        const int unit = threadIdx.x / LANES + i * WARPS, part = unit ^ lane / 8;
        const u32 *from = shared + (ARRIVED + plane * (PLACES * 64)) / 4 + lane * 16;
        from += (unit / 4 ^ lane / 2 % 4) * 4 + part % 4;
        u32 v[8];
#pragma unroll
        for (int k = 0; k < 8; k++) v[k] = from[k * LANES * 16];
        u32 *to = shared + plane * (TABLE / 4) + 8 * part * LANES + lane;
        u32 *negative = shared + plane * (TABLE / 4) + (255 - 8 * part) * LANES + lane;
        u32 first[4], second[4];  // a byte of 2 rows for each code
#pragma unroll
        for (int k = 0; k < 4; k++) {
            first[k] = either(0x0f0f0f0fu, v[k], v[k + 4] << 4);
            second[k] = either(0x0f0f0f0fu, v[k] >> 4, v[k + 4]);
        }
        store_turned(to, negative, first);
        store_turned(to + 4 * LANES, negative - 4 * LANES, second);
    }
}

// Where a thread keeps its part of y: for 8 rows and its groups of 4 outputs.
static __device__ __forceinline__ float4 *kept_of(int row, int group) {
    return (float4 *)(shared + KEPT / 4) + (row * GROUPS + group) * THREADS + threadIdx.x;
}

// A lane's i-th row of a block.
static __device__ __forceinline__ int row_of(int i) { return i / 2 * 8 + threadIdx.x % 4 * 2 + i % 2; }

// The terms of a chunk for one warp's outputs, added to y.
static __device__ __forceinline__ void add_chunk(const Product &p, int c, int b, int n, int tile, int (*acc)[4][4]) {
    const int m = 8 * tile + threadIdx.x % LANES / 4 * 4;
    const float *scales_a = p.sa + (i64)b * p.N * p.C + c;
    float scale_b[GROUPS][4];
#pragma unroll
    for (int g = 0; g < GROUPS; g++)
        load_4(p, p.sb + ((i64)(p.shared_b ? 0 : b) * p.C + c) * p.M, m + 32 * g, scale_b[g]);
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const int row = n + row_of(i), at = row < p.N ? row : p.N - 1;
        const float scale = __ldg(scales_a + (i64)at * p.C);
        const float factor = p.factors[level_of(p, b, at, c)] * (1.0f / SCALE);  // exact, as is the sum in 64ths
        float *y = p.y + ((i64)b * p.N + at) * p.M;
        float sum[GROUPS][4];
#pragma unroll
        for (int g = 0; g < GROUPS; g++) {  // all of a row's loads, then its sums
            if (KEEP) {
                const float4 v = *kept_of(i, g);
                sum[g][0] = v.x, sum[g][1] = v.y, sum[g][2] = v.z, sum[g][3] = v.w;
            } else {
                sum[g][0] = sum[g][1] = sum[g][2] = sum[g][3] = 0.0f;
                if (c) load_4(p, y, m + 32 * g, sum[g]);
            }
        }
#pragma unroll
        for (int g = 0; g < GROUPS; g++) {
#pragma unroll
            for (int t = 0; t < 4; t++) {
                const float raw = __fmul_rn((float)acc[2 * g + t / 2][i / 2][i % 2 + t % 2 * 2], factor);
                sum[g][t] = __fadd_rn(sum[g][t], __fmul_rn(raw, __fmul_rn(scale, scale_b[g][t])));
            }
            if (KEEP)
                *kept_of(i, g) = float4{sum[g][0], sum[g][1], sum[g][2], sum[g][3]};
            else if (row < p.N)
                store_4(p, y, m + 32 * g, sum[g]);
        }
    }
}

static __device__ __forceinline__ void clear(int (*acc)[4][4], int start) {
#pragma unroll
    for (int i = 0; i < TILES * 8; i++) acc[i / 16][i / 4 % 4][i % 4] = start;
}

// What is found for a plane's 2 dimensions of an output.
static __device__ __forceinline__ void look_up(u32 w, int plane, const u32 *own, uint4 *x) {
#pragma unroll
    for (int i = 0; i < 2; i++) x[i] = load_16(__dp4a(w, 128u << 8 * (2 * plane + i), own[i]) + plane * TABLE);
}

// Start the copies of a slice's coefficients.
static __device__ __forceinline__ void fetch_lines(const u32 *linear, u32 base) {
    if (threadIdx.x < 128) copy_16(base + LINES + 16 * threadIdx.x, linear + 4 * threadIdx.x);
}

// The straight parts of a slice for one warp's outputs.
static __device__ __forceinline__ void add_lines(const u32 *w, int (*acc)[4][4]) {
    uint4 slopes[4];
#pragma unroll
    for (int o = 0; o < 4; o++) slopes[o] = ((const uint4 *)(shared + LINES / 4))[o * LANES + threadIdx.x % LANES];
    const u32 order = threadIdx.x / 4 % 2 ? 0x2301 : 0x3210;
#pragma unroll
    for (int pair = 0; pair < TILES / 2; pair++) {
        const u32 w0 = __byte_perm(w[2 * pair], 0, order), w1 = __byte_perm(w[2 * pair + 1], 0, order);
        const u32 a[4][2] = {{w0 | 0x01010101u, w1 | 0x01010101u},
                             {either(0xfcfcfcfcu, w0, 0x02020202u), either(0xfcfcfcfcu, w1, 0x02020202u)},
                             {either(0xf0f0f0f0u, w0, 0x08080808u), either(0xf0f0f0f0u, w1, 0x08080808u)},
                             {either(0xc0c0c0c0u, w0, 0x20202020u), either(0xc0c0c0c0u, w1, 0x20202020u)}};
#pragma unroll
        for (int o = 0; o < 4; o++) {
            mma_s8(acc[pair][o], a[0][0], a[0][1], a[1][0], a[1][1], slopes[o].x, slopes[o].y);
            mma_s8(acc[pair][o], a[2][0], a[2][1], a[3][0], a[3][1], slopes[o].z, slopes[o].w);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) stochastic_nibbles(const Product p) {
    const int lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;
    const int b = blockIdx.z, slices = p.per_chunk * p.C;
    const int tile = (blockIdx.y * WARPS + warp) * TILES;
    const int odd = lane / 4 % 2;
    const u32 base = (u32)__cvta_generic_to_shared(shared);
    const u32 own[2] = {base + 16 * (lane % 4) + 64 * odd, base + 16 * (lane % 4) + 64 * (1 - odd)};
    const int column = lane / 4;  // high halves, then low ones
    const u32 bytes0 = column < 4 ? SCALE / 16 << (8 * column) : 0;
    const u32 bytes1 = (column < 4 ? 256 - SCALE / 16 : SCALE) << (8 * (column % 4));
    const i64 block = ((i64)b * gridDim.x + blockIdx.x) * slices;
    const uint4 *weights = (const uint4 *)p.weights +
                           ((i64)(p.shared_b ? 0 : b) * slices * p.quads + tile / 4) * LANES + lane;

    const int start = START * p.per_chunk;
    int acc[TILES / 2][4][4];  // of pairs of tiles and octets
    clear(acc, start);
    if (KEEP)
#pragma unroll
        for (int i = 0; i < 8 * GROUPS; i++) *kept_of(i / GROUPS, i % GROUPS) = float4{0.0f, 0.0f, 0.0f, 0.0f};

    u32 place[FETCHES];
    places_of(p.places + block * 2 * PLACES, place);
    fetch(p, place, 0, base);
    fetch(p, place, 1, base);
    fetch_lines(p.linear + block * 512, base);
    if (slices > 1) places_of(p.places + (block + 1) * 2 * PLACES, place);
    u32 w[TILES];
#pragma unroll
    for (int g = 0; g < GROUPS; g++) {
        const uint4 v = __ldg(weights + g * LANES);
        w[4 * g] = v.x, w[4 * g + 1] = v.y, w[4 * g + 2] = v.z, w[4 * g + 3] = v.w;
    }
    wait_for_copies();
    __syncthreads();
    build(0);
    __syncthreads();
    int c = 0, part = 0;
    for (int s = 0; s < slices; s++) {
        const bool more = s + 1 < slices;
        if (more) weights += (i64)p.quads * LANES;
#pragma unroll
        for (int plane = 0; plane < 2; plane++) {
            if (more) fetch(p, place, plane, base);
            if (plane == 1 && s + 2 < slices) places_of(p.places + (block + s + 2) * 2 * PLACES, place);
            if (plane == 1 && more) fetch_lines(p.linear + (block + s + 1) * 512, base);
            if (plane == 0) add_lines(w, acc);
            uint4 x[2][2];  // what is found for one output, while another's is added up
            u32 sum[2][4];
            look_up(w[0], plane, own, x[0]);
#pragma unroll
            for (int t = 0; t < TILES; t++) {
                if (t + 1 < TILES) look_up(w[t + 1], plane, own, x[(t + 1) % 2]);
                const uint4 *v = x[t % 2];
                sum[t % 2][0] = v[0].x + v[1].x, sum[t % 2][1] = v[0].y + v[1].y;
                sum[t % 2][2] = v[0].z + v[1].z, sum[t % 2][3] = v[0].w + v[1].w;
                if (t % 2 == 0) continue;
#pragma unroll
                for (int o = 0; o < 4; o++) {
                    const u32 low0 = sum[0][o] & 0x0f0f0f0fu, low1 = sum[1][o] & 0x0f0f0f0fu;
                    mma_u8_s8(acc[t / 2][o], sum[0][o], sum[1][o], low0, low1, bytes0, bytes1);
                }
                if (plane == 1 && t % 4 == 3) {  // these words have done
                    const uint4 next = __ldg(weights + t / 4 * LANES);
                    w[t - 3] = next.x, w[t - 2] = next.y, w[t - 1] = next.z, w[t] = next.w;
                }
            }
            if (plane == 0 || more) build(1 - plane);
            if (plane == 1 && ++part == p.per_chunk) {
                add_chunk(p, c, b, blockIdx.x * ROWS, tile, acc);
                clear(acc, start);
                part = 0;
                c++;
            }
            wait_for_copies();
            __syncthreads();
        }
    }
    if (KEEP)
#pragma unroll
        for (int i = 0; i < 8 * GROUPS; i++) {
            const int row = blockIdx.x * ROWS + row_of(i / GROUPS);
            const float4 v = *kept_of(i / GROUPS, i % GROUPS);
            const float value[4] = {v.x, v.y, v.z, v.w};
            if (row < p.N)
                store_4(p, p.y + ((i64)b * p.N + row) * p.M, 8 * tile + lane / 4 * 4 + i % GROUPS * 32, value);
        }
}
