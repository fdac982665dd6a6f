// Products of prepared stochastic operands by lookups in shared memory; see stochastic_codes.py.
//
// A block serves ROWS rows of a. For a slice of 128 inner dimensions it builds, once for all outputs, the vector
// of counts T_d(|qa|, .) of every (row, dimension): a byte for each of the 256 codes of a weight, sign included.
// Lane l of a warp owns dimensions 4l ... 4l+3 of the slice and bank l of the tables, so 32 lanes that look up
// 32 different codes never meet in a bank. An output is one weight word a lane, 4 lookups, one sum over the warp.
//
// A byte is MIDDLE + T - k |w| with a whole slope k for each (row, dimension): what is left of counts up to 256
// fits 8 bits, and the sum of k w is one dot product of bytes (LINEAR; counts below 128 need none). Bytes are
// added in 16-bit fields, two to a word; those of short streams first in 8 bits, ADDED words at a time. WIDE:
// streams of 256 steps, whose sums can need 17 bits.
//
// Out come whole counts per slice (DIRECT 0; stochastic_combine adds them in the order of the chunks), or, from
// a block that runs through all slices, y itself (DIRECT 1).
//
// 8 rows are for many: entries of 8 bytes, a slice of 64 dimensions, and each half of a warp has outputs of its
// own. There sums go through shuffles that leave each lane with two rows' counts of one output.
//
// Compiled at run time with ROWS, ADDED, LINEAR, WIDE, DIRECT, ALIGNED, THREADS and MIN_BLOCKS defined.

typedef unsigned int u32;
typedef unsigned char u8;
typedef signed char s8;
typedef long long i64;

#define LANES 32
#define SLICE (ROWS == 8 ? 64 : 128)   // inner dimensions of a table
#define PLANE (256 * LANES * 4)        // bytes: a word for each code and lane
#define PLANES (ROWS == 8 ? 4 : ROWS)  // a word holds the 4 bytes of up to 4 rows and 4 / ROWS dimensions
#define TILE 16                        // outputs that a warp has in flight
#define MIDDLE (128 / ADDED)           // the byte of a count of 0
#define HALVES (ROWS == 8 ? 2 : 1)     // outputs that a warp looks up at once
#define BIAS (MIDDLE * SLICE)          // what that adds up to
#define TWICE (MIDDLE * 0x02020202u)   // a word of it less one of counts is that of the negative counts

struct Product {
    const s8 *qa;          // (B, N, D)
    const float *sa;       // (B, N, C)
    const s8 *qb;          // (B or 1, M, D)
    const float *sb;       // (B or 1, M, C)
    const u8 *levels;      // (B or 1, N or 1, C or 1), or null
    const u8 *tables;      // (levels, masks, 128, 128): MIDDLE + T - k w
    const s8 *slopes;      // (levels, masks, 128): k
    const u8 *masks;       // (dimensions of a chunk,): which mask
    const float *factors;  // (levels,): Q^2 / L
    int *counts;           // (B, slices, N, M); DIRECT: (B, N, M), or null where a slice is a chunk
    float *y;              // (B, N, M)
    int N, M, D, C;
    int chunk;             // inner dimensions of a chunk
    int per_chunk;         // slices of a chunk
    int num_masks;
    int shared_b;          // 1: b has one entry for all of the batch
    int level_b, level_n, level_c;  // strides of levels; 0 broadcasts
    int outputs;           // of a block: a multiple of TILE
};

struct Slice {
    int chunk;   // which
    int offset;  // of its first dimension in the chunk
    i64 first;   // its first dimension
    int length;  // 1 ... 128
};

static __device__ __forceinline__ Slice slice_of(const Product &p, int s) {
    Slice slice;
    slice.chunk = s / p.per_chunk;
    slice.offset = (s - slice.chunk * p.per_chunk) * SLICE;
    slice.first = (i64)slice.chunk * p.chunk + slice.offset;
    int left = p.chunk - slice.offset;
    if (p.D - slice.first < left) left = (int)(p.D - slice.first);
    slice.length = left < SLICE ? left : SLICE;
    return slice;
}

static __device__ __forceinline__ int level_of(const Product &p, int b, int n, int c) {
    return p.levels ? p.levels[(i64)b * p.level_b + (i64)n * p.level_n + (i64)c * p.level_c] : 0;
}

// The code of row n in the slice's dimension i, 0 outside of it, and the row of its table.
static __device__ __forceinline__ int code_of(const Product &p, const Slice &slice, int b, int n, int i) {
    if (n >= p.N || i >= slice.length) return 0;
    return p.qa[((i64)b * p.N + n) * p.D + slice.first + i];
}

static __device__ __forceinline__ i64 row_of(const Product &p, const Slice &slice, int b, int n, int i, int code) {
    if (code == 0) return 0;  // all tables' first rows are alike
    int level = level_of(p, b, n, slice.chunk);
    return ((i64)level * p.num_masks + p.masks[slice.offset + i]) * 128 + (code < 0 ? -code : code);
}

// The bytes of 16 codes of 4 columns of a word, to 16 words; then the same for the negative codes.
static __device__ __forceinline__ void store_columns(u32 *plane, const uint4 *v, int first, int lane) {
    const u32 words[4][4] = {{v[0].x, v[1].x, v[2].x, v[3].x},
                             {v[0].y, v[1].y, v[2].y, v[3].y},
                             {v[0].z, v[1].z, v[2].z, v[3].z},
                             {v[0].w, v[1].w, v[2].w, v[3].w}};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        u32 low01 = __byte_perm(words[i][0], words[i][1], 0x5140);
        u32 high01 = __byte_perm(words[i][0], words[i][1], 0x7362);
        u32 low23 = __byte_perm(words[i][2], words[i][3], 0x5140);
        u32 high23 = __byte_perm(words[i][2], words[i][3], 0x7362);
        u32 of_code[4] = {__byte_perm(low01, low23, 0x5410), __byte_perm(low01, low23, 0x7632),
                          __byte_perm(high01, high23, 0x5410), __byte_perm(high01, high23, 0x7632)};
#pragma unroll
        for (int j = 0; j < 4; j++) {
            int code = first + 4 * i + j;
            plane[code * LANES + lane] = of_code[j];
            if (code) plane[(256 - code) * LANES + lane] = TWICE - of_code[j];
        }
    }
}

// With 8 rows, the row in the first byte of a lane's entries, byte i being that of row i ^ first_row: a lane sends
// half of its sums to another one, then half of the rest, and so on; this way it is always the latter half.
static __device__ __forceinline__ int first_row(int group) { return group / 8 * 4 + group / 4 % 2; }

// The tables of a slice for rows n ... n + ROWS - 1, and the slopes of each lane's dimensions.
static __device__ __forceinline__ void build(const Product &p, const Slice &slice, int b, int n, u32 *table,
                                             u32 *slopes) {
    const int lane = threadIdx.x % LANES, warp = threadIdx.x / LANES, warps = THREADS / LANES;
    for (int task = warp; task < PLANES * 8; task += warps) {
        const int plane = task % PLANES, group = task / PLANES;
        uint4 v[4];
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const int row = n + (ROWS == 8 ? (4 * (lane % 2) + k) ^ first_row(lane / 2) : k % ROWS);
            const int i = ROWS == 8 ? 4 * (lane / 2) + plane : 4 * lane + plane * (4 / ROWS) + k / ROWS;
            const int code = code_of(p, slice, b, row, i);
            v[k] = ((const uint4 *)(p.tables + row_of(p, slice, b, row, i, code) * 128))[group];
            if (code < 0) {
                v[k].x = TWICE - v[k].x;
                v[k].y = TWICE - v[k].y;
                v[k].z = TWICE - v[k].z;
                v[k].w = TWICE - v[k].w;
            }
        }
        store_columns(table + plane * (PLANE / 4), v, 16 * group, lane);
    }
#if LINEAR
    for (int r = warp; r < ROWS; r += warps) {
        u32 word = 0;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const int code = code_of(p, slice, b, n + r, 4 * lane + j);
            int k = p.slopes[row_of(p, slice, b, n + r, 4 * lane + j, code)];
            word |= (u32)((code < 0 ? -k : k) & 255) << (8 * j);
        }
        slopes[r * LANES + lane] = word;
    }
#endif
}

// Four codes of one output for a lane's dimensions. Lanes beyond the slice and outputs beyond the last read codes
// of others: the former look up bytes that are MIDDLE for every code, the latter are not written.
static __device__ __forceinline__ u32 weights_at(const s8 *at, int length) {
#if ALIGNED
    return __ldg((const u32 *)at);
#else
    const int group = threadIdx.x % (LANES / HALVES);
    u32 word = 0;
#pragma unroll
    for (int j = 0; j < 4; j++)
        if (4 * group + j < length) word |= (u32)(at[j] & 255) << (8 * j);
    return word;
#endif
}

// The place in a tile of a lane's i-th output: with 8 rows each half of the warp has every second one, and lanes
// begin with different ones, see look_up_four.
static __device__ __forceinline__ int place_of(int i) {
    return ROWS == 8 ? 2 * (i ^ threadIdx.x % 4) + threadIdx.x / 16 % 2 : i;
}

// The weights of a tile's outputs, from m on.
static __device__ __forceinline__ void load_tile(const Product &p, const s8 *weights, int length, int m, u32 *w) {
    if (m + TILE <= p.M) {
        const s8 *row = weights + (i64)m * p.D;
#pragma unroll
        for (int i = 0; i < TILE / HALVES; i++)
            w[i] = weights_at(row + (unsigned long long)(u32)place_of(i) * (u32)p.D, length);
    } else {
#pragma unroll
        for (int i = 0; i < TILE / HALVES; i++) {
            const int output = m + place_of(i);
            w[i] = weights_at(weights + (i64)(output < p.M ? output : p.M - 1) * p.D, length);
        }
    }
}

// The second and fourth bytes of 4 words, added in 16-bit fields: as many words as their bytes' sums allow are
// added before these bytes are set apart.
static __device__ __forceinline__ u32 odd_bytes(const u32 *x) {
    if (ADDED == 4) return __byte_perm(x[0] + x[1] + x[2] + x[3], 0, 0x4341);
    if (ADDED == 3) return __byte_perm(x[0] + x[1] + x[2], 0, 0x4341) + __byte_perm(x[3], 0, 0x4341);
    if (ADDED == 2) return __byte_perm(x[0] + x[1], 0, 0x4341) + __byte_perm(x[2] + x[3], 0, 0x4341);
    return __byte_perm(x[0], 0, 0x4341) + __byte_perm(x[1], 0, 0x4341) + __byte_perm(x[2], 0, 0x4341) +
           __byte_perm(x[3], 0, 0x4341);
}

#if ROWS == 8
// The counts of one output for 8 rows, this lane's 4 dimensions: rows 0 and 2, 1 and 3, 4 and 6, 5 and 7.
static __device__ __forceinline__ void look_up(u32 own, const u32 *k, u32 w, u32 *pair) {
    uint2 x[4];
#pragma unroll
    for (int j = 0; j < 4; j++)
        x[j] = *(const uint2 *)((const u8 *)__cvta_shared_to_generic(__dp4a(w, 128u << (8 * j), own)) + j * PLANE);
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const u32 word[4] = {i ? x[0].y : x[0].x, i ? x[1].y : x[1].x, i ? x[2].y : x[2].x, i ? x[3].y : x[3].x};
        const u32 all = word[0] + word[1] + word[2] + word[3];
        const u32 odd = odd_bytes(word);
        pair[2 * i] = all - (odd << 8);
        pair[2 * i + 1] = odd;
    }
#pragma unroll
    for (int i = 0; LINEAR && i < 4; i++) {
        const int r = i / 2 * 4 + i % 2;
        pair[i] = (u32)__dp4a((int)w, (int)k[r], (int)pair[i]);
        pair[i] += (u32)__dp4a((int)w, (int)k[r + 2], 0) << 16;
    }
}

static __device__ __forceinline__ u32 exchanged(u32 kept, u32 sent, int bit) {
    return kept + __shfl_xor_sync(0xffffffffu, sent, bit);
}

// Of 4 outputs a half of the warp, w[j] of output j ^ (lane % 4): a lane ends with the sums over the half of rows
// first_row and first_row ^ 2 for output lane % 4.
static __device__ __forceinline__ u32 look_up_four(u32 own, const u32 *k, const u32 *w) {
    u32 of_output[4];
#pragma unroll
    for (int j = 0; j < 4; j++) {
        u32 pair[4];
        look_up(own, k, w[j], pair);
        of_output[j] = exchanged(exchanged(pair[0], pair[2], 8), exchanged(pair[1], pair[3], 8), 4);
    }
    return exchanged(exchanged(of_output[0], of_output[2], 2), exchanged(of_output[1], of_output[3], 2), 1);
}
#else
struct Sums {
    u32 word[WIDE ? ROWS : (ROWS + 1) / 2];  // of the whole warp: a row each, or two rows in 16-bit fields
};

// The counts of one output for ROWS rows, over the slice's 128 dimensions.
static __device__ __forceinline__ Sums look_up(u32 own, const u32 *k, u32 w) {
    u32 x[4];
#pragma unroll
    for (int j = 0; j < 4; j++) {
        // code * 128 + the lane's own words, by a dot product of bytes: the units that add are the busier ones.
        const u8 *at = (const u8 *)__cvta_shared_to_generic(__dp4a(w, 128u << (8 * j), own));
        if (ROWS == 4) x[j] = *(const u32 *)(at + j * PLANE);
        if (ROWS == 2) x[j] = __byte_perm(*(const unsigned short *)(at + (j / 2) * PLANE + 2 * (j % 2)), 0, 0x4140);
        if (ROWS == 1) x[j] = at[j];
    }
    const u32 all = x[0] + x[1] + x[2] + x[3];
    u32 odd = 0, even = all;
    if (ROWS == 4) {
        odd = odd_bytes(x);
        even = all - (odd << 8);
    }
    u32 pair[2] = {even, odd};  // rows 0 and 2, 1 and 3; with two rows 0 and 1
    Sums sums;
#if WIDE
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        u32 field = ROWS == 1 ? pair[0] : ROWS == 2 ? pair[0] >> (16 * r) : pair[r % 2] >> (16 * (r / 2));
        if (ROWS > 1) field &= 0xffffu;
        if (LINEAR) field += (u32)__dp4a((int)w, (int)k[r], 0);
        sums.word[r] = __reduce_add_sync(0xffffffffu, field);
    }
#else
#pragma unroll
    for (int i = 0; i < (ROWS + 1) / 2; i++) {
        if (LINEAR) {
            const int low = ROWS == 4 ? i : 0, high = ROWS == 4 ? i + 2 : 1;
            pair[i] = (u32)__dp4a((int)w, (int)k[low], (int)pair[i]);
            if (ROWS > 1) pair[i] += (u32)__dp4a((int)w, (int)k[high % ROWS], 0) << 16;
        }
        sums.word[i] = __reduce_add_sync(0xffffffffu, pair[i]);
    }
#endif
    return sums;
}

static __device__ __forceinline__ int count_of(const Sums &sums, int r) {
#if WIDE
    return (int)sums.word[r] - BIAS;
#else
    if (ROWS == 1) return (int)sums.word[0] - BIAS;
    const u32 word = sums.word[ROWS == 4 ? r % 2 : 0];
    const int low = (short)((word & 0xffffu) - BIAS);
    if (ROWS == 4 ? r < 2 : r == 0) return low;
    return (short)(((word - (u32)(low + BIAS)) >> 16) - BIAS);
#endif
}

#endif

// Where one row's counts of a slice go, or its values.
struct Row {
    bool exists, first_chunk, first_part, last_part;  // of the chunk's slices
    int *counts;                                       // of output 0
    float *y;
    float scale, factor;
};

static __device__ __forceinline__ Row row_at(const Product &p, const Slice &slice, int s, int b, int n) {
    Row row;
    row.exists = n < p.N;
    const int at = row.exists ? n : 0;
    row.first_chunk = slice.chunk == 0;
    row.first_part = s == slice.chunk * p.per_chunk;
    row.last_part = s + 1 == (slice.chunk + 1) * p.per_chunk;
    row.counts = p.counts + ((DIRECT ? b : (i64)b * p.per_chunk * p.C + s) * p.N + at) * p.M;
    row.y = p.y + ((i64)b * p.N + at) * p.M;
    row.scale = DIRECT ? p.sa[((i64)b * p.N + at) * p.C + slice.chunk] : 0;
    row.factor = DIRECT ? p.factors[level_of(p, b, at, slice.chunk)] : 0;
    return row;
}

// The count of output m. DIRECT: added to those of the chunk's slices before; after the last one to y.
static __device__ __forceinline__ void write(const Row &row, int m, const float *scale_b, int count) {
    if (!row.exists) return;
#if DIRECT
    if (!row.first_part) count += row.counts[m];
    if (!row.last_part) {
        row.counts[m] = count;
        return;
    }
    const float raw = __fmul_rn((float)count, row.factor);
    const float term = __fmul_rn(raw, __fmul_rn(row.scale, *scale_b));
    row.y[m] = __fadd_rn(row.first_chunk ? 0.0f : row.y[m], term);
#else
    row.counts[m] = count;
#endif
}

#ifndef EMULATED
extern __shared__ u32 shared[];
#endif

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) stochastic_lookup(const Product p) {
    u32 *slopes = shared + PLANES * (PLANE / 4);
    const int lane = threadIdx.x % LANES, group = lane % (LANES / HALVES);
    const u32 own = (u32)__cvta_generic_to_shared(shared) + 4 * HALVES * group;
    const int warp = threadIdx.x / LANES, warps = THREADS / LANES;
    const int b = blockIdx.z, n = blockIdx.x * ROWS;
    const int slices = p.per_chunk * p.C;
    const int first_slice = DIRECT ? 0 : blockIdx.y % slices, last_slice = DIRECT ? slices : first_slice + 1;
    const int part = DIRECT ? blockIdx.y : blockIdx.y / slices;
    const int begin = part * p.outputs, end = begin + p.outputs < p.M ? begin + p.outputs : p.M;

    for (int s = first_slice; s < last_slice; s++) {
        const Slice slice = slice_of(p, s);
        const float *scales_b = p.sb + (p.shared_b ? 0 : (i64)b * p.M * p.C) + slice.chunk;
        if (slice.length <= 0) {  // the last chunk is shorter: these slices count nothing
            for (int r = 0; r < ROWS; r++) {
                const Row row = row_at(p, slice, s, b, n + r);
                for (int m = begin + threadIdx.x; m < end; m += THREADS)
                    write(row, m, scales_b + (i64)m * p.C, 0);
            }
            continue;
        }
        const s8 *weights = p.qb + (p.shared_b ? 0 : (i64)b * p.M * p.D) + slice.first;
        if (4 * group < slice.length) weights += 4 * group;
        u32 next[TILE / HALVES];
        int m = begin + warp * TILE;
        load_tile(p, weights, slice.length, m, next);
        build(p, slice, b, n, shared, slopes);
        __syncthreads();
        u32 k[ROWS];
#pragma unroll
        for (int r = 0; r < ROWS; r++)
            k[r] = LINEAR ? slopes[(ROWS == 8 ? r ^ first_row(group) : r) * LANES + group] : 0;
#if ROWS == 8  // this lane ends with the counts of two rows: 0 and 2, 1 and 3, 4 and 6, 5 and 7
        const int r = first_row(group);
        const Row rows[2] = {row_at(p, slice, s, b, n + r), row_at(p, slice, s, b, n + r + 2)};
#else
        Row rows[ROWS];
#pragma unroll
        for (int r = 0; r < ROWS; r++) rows[r] = row_at(p, slice, s, b, n + r);
#endif
        for (; m < end; m += warps * TILE) {
            u32 w[TILE / HALVES];
#pragma unroll
            for (int i = 0; i < TILE / HALVES; i++) w[i] = next[i];
            load_tile(p, weights, slice.length, m + warps * TILE, next);
#if ROWS == 8
#pragma unroll
            for (int i = 0; i < TILE / 2; i += 4) {
                const u32 word = look_up_four(own, k, w + i);
                const int output = m + 2 * (i + lane % 4) + lane / 16;
                if (output < end) {
                    const int low = (short)((word & 0xffffu) - BIAS);
                    const int high = (short)(((word - (u32)(low + BIAS)) >> 16) - BIAS);
                    const float *scale_b = scales_b + (u32)output * (unsigned long long)(u32)p.C;
                    write(rows[0], output, scale_b, low);
                    write(rows[1], output, scale_b, high);
                }
            }
#else
            Sums mine;
#pragma unroll
            for (int i = 0; i < TILE; i++) {
                const Sums sums = look_up(own, k, w[i]);
                if (lane == i || i == 0) mine = sums;
            }
            if (lane < TILE && m + lane < end)
#pragma unroll
                for (int r = 0; r < ROWS; r++)
                    write(rows[r], m + lane, scales_b + (i64)(m + lane) * p.C, count_of(mine, r));
#endif
        }
        __syncthreads();
    }
}

// y of the slices' counts, chunks in ascending order: thread (x, y) makes the terms of output x.
#define COMBINED 64  // chunks whose terms are in shared memory at once

extern "C" __global__ void __launch_bounds__(256) stochastic_combine(const Product p) {
    __shared__ float terms[COMBINED][LANES];
    const int x = threadIdx.x % LANES, row_of_threads = threadIdx.x / LANES;
    const int m = blockIdx.x * LANES + x, n = blockIdx.y, b = blockIdx.z;
    const i64 row = (i64)b * p.N + n, slices = (i64)p.per_chunk * p.C;
    float y = 0.0f;
    for (int first = 0; first < p.C; first += COMBINED) {
        for (int i = row_of_threads; i < COMBINED && first + i < p.C && m < p.M; i += 8) {
            const int c = first + i;
            int acc = 0;
            for (int s = c * p.per_chunk; s < (c + 1) * p.per_chunk; s++)
                acc += p.counts[(((i64)b * slices + s) * p.N + n) * p.M + m];
            const float scale_b = p.sb[((i64)(p.shared_b ? 0 : b) * p.M + m) * p.C + c];
            const float scales = __fmul_rn(p.sa[row * p.C + c], scale_b);
            const float raw = __fmul_rn((float)acc, p.factors[level_of(p, b, n, c)]);
            terms[i][x] = __fmul_rn(raw, scales);
        }
        __syncthreads();
        if (row_of_threads == 0)
            for (int i = 0; i < COMBINED && first + i < p.C; i++) y = __fadd_rn(y, terms[i][x]);
        __syncthreads();
    }
    if (row_of_threads == 0 && m < p.M) p.y[row * p.M + m] = y;
}
