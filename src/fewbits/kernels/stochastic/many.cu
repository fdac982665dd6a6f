// Products of prepared stochastic operands with many rows: counts looked up in shared memory, 16 rows at a time, and added
// by matrix units. codes.py defines the result.
//
// The idea is that of lookup.cu, whose head explains it: the count of two codes follows from the codes and the dimension, so
// a product is the reading of a table. With many rows of a, a single reading can serve several of them:
//
// 1. Tables. A block serves 16 rows of a and up to 8 TILES outputs a warp (32 threads). For 16 inner dimensions at a time (a
//    slice), shared memory holds for each of the 256 codes of a weight the counts with all 16 rows: 16 bytes, one load.
// 2. Banks. Shared memory is divided into 32 banks of 4 bytes, and threads that read different words of one bank at the same
//    time wait for each other. 8 threads read at once; each reads another of 8 dimensions, whose tables lie in 4 banks of
//    their own, so no two ever meet. The other 8 dimensions of the slice are a second plane, read next.
// 3. Sums. Adding 16 bytes one by one would cost more than reading them. Instead the bytes that a thread has looked up are its
//    part of the first operand of an 8-bit matrix product; the second operand is a constant that adds those of the 4
//    threads that look up one output:
//
//        row l / 4 of D, for thread l's output:      rows 0 ... 7 of a     (the first and third word)
//        row l / 4 + 8, for the same output:         rows 8 ... 15 of a    (the other two)
//
//    so one instruction adds for 8 outputs, 16 rows and 4 dimensions, in 32-bit accumulators, a chunk at a time.
// 4. Counts above 127 do not fit a signed byte. A byte of the table is MIDDLE + T - k |w| with a whole slope k for each (row,
//    dimension), as in lookup.cu; the sum of all k w is one more matrix product, of the weights' own bytes (LINEAR; counts
//    below 128 need none).
// 5. Time. While one slice is looked up, the rows of tables of the next one arrive by asynchronous copies and are transposed
//    into the other of two tables. Weights lie in the order in which threads read them (pack_b), and rows of a as places in
//    the tables (pack_a). A thread's outputs of 4 tiles are neighbours, so y is read and written in whole lines.
//
// Compiled at run time with TILES (a multiple of 4), LINEAR, MIDDLE (of lookup.cu) and THREADS defined.

typedef unsigned int u32;
typedef unsigned char u8;
typedef signed char s8;
typedef long long i64;
typedef unsigned long long u64;

#define LANES 32
#define WARPS (THREADS / LANES)
#define ROWS 16
#define SLICE 16
#define PLANE (256 * LANES * 4)      // bytes: 16 for each code and 8 dimensions
#define UNITS (512 / THREADS)        // parts of a table that a thread builds: 4 rows, 16 codes
#define COPIES (2048 / THREADS)      // of 16 bytes that a thread makes
#define STRIDE 144                   // bytes of a row that has arrived: neighbours in different banks
#define ARRIVED (4 * PLANE)          // where they are, after both tables
#define TWICE (MIDDLE * 0x02020202u) // a word of it less one of counts is that of the negative counts
#define GROUPS (TILES / 4)           // of 4 tiles of 8 outputs

struct Product {
    const s8 *qa;          // (B, N, D)
    const float *sa;       // (B, N, C)
    const s8 *qb;          // (B or 1, M, D)
    const float *sb;       // (B or 1, C, M)
    const u8 *levels;      // (B or 1, N or 1, C or 1), or null
    const u8 *tables;      // (levels, masks, 128, 128): MIDDLE + T - k w
    const s8 *slopes;      // (levels, masks, 128): k
    const u8 *masks;       // (dimensions of a chunk,): which mask
    const float *factors;  // (levels,): Q^2 / L
    u32 *weights;          // (B or 1, slices, quads, 32 lanes, 4 tiles): 4 codes each
    u32 *places;           // (B, row groups, slices, 256): rows of the tables, see pack_a
    u8 *signs;             // (B, row groups, slices, 64): bit k if the code of the k-th of 4 rows is negative
    u32 *linear;           // (B, row groups, slices, 16 rows, 4): k of 4 dimensions, signed
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

extern "C" __global__ void __launch_bounds__(256) stochastic_pack_b(const Product p) { pack_weights<false>(p); }

// Thread (slice, dimension, 4 rows) of a block of 16 rows.
extern "C" __global__ void __launch_bounds__(256) stochastic_pack_a(const Product p) {
    const int i = threadIdx.x % SLICE, four = threadIdx.x / SLICE % 4, s = blockIdx.x * 4 + threadIdx.x / 64;
    const int b = blockIdx.z, slices = p.per_chunk * p.C;
    if (s >= slices) return;
    i64 first;
    const int length = length_of(p, s, &first), c = s / p.per_chunk, offset = (s - c * p.per_chunk) * SLICE;
    const int plane = i / 2 % 2, owner = i / 4 + i % 2 * 4;  // lanes 4 owner ... 4 owner + 3 build its tables
    const int lane = owner * 4 + four % 2 * 2 + four / 2;    // words of the 16 bytes: rows 0-3, 8-11, 4-7, 12-15
    const i64 block = ((i64)b * gridDim.y + blockIdx.y) * slices + s;
    u32 negative = 0;
#pragma unroll
    for (int k = 0; k < 4; k++) {
        const int row = four * 4 + k, n = blockIdx.y * ROWS + row;
        int code = 0;
        if (n < p.N && i < length) code = p.qa[((i64)b * p.N + n) * p.D + first + i];
        u32 place = 0;  // all tables' first rows are alike
        if (code) {
            const u32 table = (u32)level_of(p, b, n, c) * p.num_masks + p.masks[offset + i];
            place = table * 128 + (code < 0 ? -code : code);
        }
        negative |= (u32)(code < 0) << k;
        p.places[block * 256 + (plane * 4 + k) * LANES + lane] = place;
#if LINEAR
        const int slope = p.slopes[place];
        ((s8 *)p.linear)[block * 256 + row * SLICE + i] = (s8)(code < 0 ? -slope : slope);
#endif
    }
    p.signs[block * 64 + plane * LANES + lane] = (u8)negative;
}

#include "tables.cu"

#ifndef EMULATED
#endif

// Start the copies of a slice's rows: 8 threads a row.
static __device__ __forceinline__ void fetch(const Product &p, const u32 *place, u32 arrived) {
#pragma unroll
    for (int i = 0; i < COPIES; i++) {
        const int row = threadIdx.x / 8 + i * (THREADS / 8), part = threadIdx.x % 8;
        copy_16(arrived + row * STRIDE + part * 16, p.tables + (u64)place[i] * 128 + part * 16);
    }
}

static __device__ __forceinline__ void places_of(const u32 *places, u32 *place) {
#pragma unroll
    for (int i = 0; i < COPIES; i++) place[i] = __ldg(places + threadIdx.x / 8 + i * (THREADS / 8));
}

// Of this thread's units: all have the same plane and lane.
static __device__ __forceinline__ u32 signs_of(const u8 *signs) { return __ldg(signs + threadIdx.x % (2 * LANES)); }

static __device__ __forceinline__ uint4 with_sign(uint4 v, bool negative) {
    if (negative) {
        v.x = TWICE - v.x;
        v.y = TWICE - v.y;
        v.z = TWICE - v.z;
        v.w = TWICE - v.w;
    }
    return v;
}

// A table of the rows that have arrived. A warp has one plane and 16 codes, a lane one dimension (its 4 banks) and
// 4 rows (one of the banks).
static __device__ __forceinline__ void build(u32 *table, const u8 *arrived, u32 signs) {
#pragma unroll
    for (int i = 0; i < UNITS; i++) {
        const int unit = threadIdx.x + i * THREADS, lane = unit % LANES, plane = unit / LANES % 2;
        const int part = unit / (2 * LANES);
        uint4 v[4];
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const u8 *row = arrived + ((plane * 4 + k) * LANES + lane) * STRIDE;
            v[k] = with_sign(*(const uint4 *)(row + part * 16), signs >> k & 1);
        }
        store_codes(table + plane * (PLANE / 4), v, 16 * part, lane);
    }
}

#ifndef EMULATED
extern __shared__ u32 shared[];
#endif

// The counts of 16 rows with one code of each of 2 outputs.
static __device__ __forceinline__ void look_up(u32 w0, u32 w1, u32 select, u32 own, uint4 *x) {
    x[0] = load_16(__dp4a(w0, select, own));
    x[1] = load_16(__dp4a(w1, select, own));
}

// The terms of a chunk for one warp's outputs, added to y.
static __device__ __forceinline__ void add_chunk(const Product &p, int c, int b, int n, int tile, int (*acc)[4]) {
    const int lane = threadIdx.x % LANES;
    const float *scales_b = p.sb + ((i64)(p.shared_b ? 0 : b) * p.C + c) * p.M;
#pragma unroll
    for (int r = 0; r < 4; r++) {
        const int row = n + 2 * (lane % 4) + r % 2 + 8 * (r / 2);
        if (row >= p.N) continue;
        const float scale = p.sa[((i64)b * p.N + row) * p.C + c], factor = p.factors[level_of(p, b, row, c)];
        float *y = p.y + ((i64)b * p.N + row) * p.M;
        float sum[GROUPS][4];
#pragma unroll
        for (int g = 0; g < GROUPS; g++) {  // all of a row's loads, then its sums
            sum[g][0] = sum[g][1] = sum[g][2] = sum[g][3] = 0.0f;
            if (c) load_4(p, y, 8 * (tile + 4 * g) + lane / 4 * 4, sum[g]);
        }
#pragma unroll
        for (int g = 0; g < GROUPS; g++) {
            const int m = 8 * (tile + 4 * g) + lane / 4 * 4;
            float scale_b[4];
            load_4(p, scales_b, m, scale_b);
#pragma unroll
            for (int t = 0; t < 4; t++) {
                const float raw = __fmul_rn((float)acc[4 * g + t][r], factor);
                sum[g][t] = __fadd_rn(sum[g][t], __fmul_rn(raw, __fmul_rn(scale, scale_b[t])));
            }
            store_4(p, y, m, sum[g]);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) stochastic_many(const Product p) {
    const int lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;
    const int b = blockIdx.z, slices = p.per_chunk * p.C;
    const int tile = (blockIdx.y * WARPS + warp) * TILES;
    // Step t of a lane looks up byte t of its word, with every second output byte t ^ 1: then 8 lanes have 8 owners.
    const int odd = lane / 4 % 2;
    const u32 base = (u32)__cvta_generic_to_shared(shared) + 16 * (lane % 4);
    const u32 own[2] = {base + 64 * odd, base + 64 * (1 - odd)};
    const u32 select[4] = {odd ? 128u << 8 : 128u, odd ? 128u : 128u << 8, odd ? 128u << 24 : 128u << 16,
                           odd ? 128u << 16 : 128u << 24};
    const int column = lane / 4;
    const u32 ones0 = column < 4 ? 1u << (8 * column) : 0, ones1 = column < 4 ? 0 : 1u << (8 * (column - 4));
    const i64 block = ((i64)b * gridDim.x + blockIdx.x) * slices;
    const uint4 *weights = (const uint4 *)p.weights +
                           ((i64)(p.shared_b ? 0 : b) * slices * p.quads + tile / 4) * LANES + lane;

    const int start = -MIDDLE * SLICE * p.per_chunk;
    int acc[TILES][4];
#pragma unroll
    for (int t = 0; t < TILES; t++)
#pragma unroll
        for (int r = 0; r < 4; r++) acc[t][r] = start;

    const u32 arrived = (u32)__cvta_generic_to_shared(shared) + ARRIVED;
    u32 place[COPIES];
    places_of(p.places + block * 256, place);
    fetch(p, place, arrived);
    u32 negative = signs_of(p.signs + block * 64);
    if (slices > 1) places_of(p.places + (block + 1) * 256, place);
    u32 w[4];
    uint4 next = __ldg(weights);
    wait_for_copies();
    __syncthreads();
    build(shared, (const u8 *)(shared + ARRIVED / 4), negative);
    __syncthreads();
    int c = 0, part = 0;
    for (int s = 0; s < slices; s++) {
        const bool more = s + 1 < slices;
        if (more) fetch(p, place, arrived);
        u32 k0 = 0, k1 = 0;
        if (LINEAR) k0 = __ldg(p.linear + (block + s) * 64 + lane), k1 = __ldg(p.linear + (block + s) * 64 + 32 + lane);
        const u32 own0 = own[0] + s % 2 * (2 * PLANE), own1 = own[1] + s % 2 * (2 * PLANE);
        const uint4 *after = more ? weights + (i64)p.quads * LANES : weights;
        uint4 x[2][2];  // what a code of 2 tiles finds: a step's sums are made while the next is looked up
        w[0] = next.x, w[1] = next.y, w[2] = next.z, w[3] = next.w;
        look_up(w[0], w[1], select[0], own0, x[0]);
#pragma unroll
        for (int g = 0; g < GROUPS; g++) {
            if (g == GROUPS - 1) {  // no later: who is done here first goes on to build the next tables
                wait_for_copies();
                __syncthreads();
            }
            next = __ldg(g + 1 < GROUPS ? weights + (g + 1) * LANES : after);
#pragma unroll
            for (int i = 0; i < 8; i++) {
                const int t = i / 4 * 2, j = i % 4;
                int (*d)[4] = acc + 4 * g + t;
                if (LINEAR && j == 0) {
                    mma_s8(d[0], w[t], 0, 0, w[t], k0, k1);
                    mma_s8(d[1], w[t + 1], 0, 0, w[t + 1], k0, k1);
                }
                if (j < 3) {
                    look_up(w[t], w[t + 1], select[j + 1], (j % 2 ? own0 : own1) + (j + 1) / 2 * PLANE, x[(j + 1) % 2]);
                } else if (t == 0) {
                    look_up(w[2], w[3], select[0], own0, x[0]);
                } else if (g + 1 < GROUPS) {
                    w[0] = next.x, w[1] = next.y, w[2] = next.z, w[3] = next.w;
                    look_up(w[0], w[1], select[0], own0, x[0]);
                }
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    const uint4 v = x[j % 2][h];
                    mma_u8(d[h], v.x, v.y, v.z, v.w, ones0, ones1);
                }
            }
        }
        weights = after;
        if (++part == p.per_chunk) {
            add_chunk(p, c, b, blockIdx.x * ROWS, tile, acc);
#pragma unroll
            for (int t = 0; t < TILES; t++)
#pragma unroll
                for (int r = 0; r < 4; r++) acc[t][r] = start;
            part = 0;
            c++;
        }
        if (more) {
            negative = signs_of(p.signs + (block + s + 1) * 64);
            if (s + 2 < slices) places_of(p.places + (block + s + 2) * 256, place);
            build(shared + (s + 1) % 2 * (2 * PLANE / 4), (const u8 *)(shared + ARRIVED / 4), negative);
            __syncthreads();
        }
    }
}
