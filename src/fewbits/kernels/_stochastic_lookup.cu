// Products of prepared stochastic operands with few rows: counts looked up in shared memory, sums made by matrix
// units; see stochastic_codes.py.
//
// A block serves ROWS rows of a. For a slice of 128 inner dimensions it builds, once for many outputs, the counts
// T_d(|qa|, .) of every (row, dimension): a byte for each of the 256 codes of a weight, sign included. Where there are
// more such items than blocks that run at once, a block takes one after the other.
//
// A warp takes 16 outputs and a slice at a time. The 4 lanes of a quarter (lane / 4) have 2 outputs, and lane
// t = lane % 4 of them the dimensions 64 h + 16 t ... 64 h + 16 t + 15, h = 0 and 1: 16 bytes twice an output. Weights
// come by way of shared memory (RING): each warp has STAGES tiles under way there, in asynchronous copies of whole
// lines, the first before there is a table.
//
// A lane's weights are 4 pairs of words, 8 dimensions each; dimension e of a pair is in bank 8 t + e of the tables. In
// step s a lane looks up dimension (s + lane / 4) % 8 of each pair, so that 32 lanes never meet in a bank.
//
// Sums: 4 words that were looked up are the first operand of an 8-bit matrix product over 16 outputs, and the second
// one, a constant, sends byte r to column r: the counts of row r, added over the 4 lanes. They stay in its 32-bit
// accumulators for the slice.
//
// A byte is MIDDLE + T - k |w| with a whole slope k for each (row, dimension): what is left of counts up to 256 fits
// 8 bits, and the sum of k w is one more matrix product, of the weights' own bytes (LINEAR). Counts below 128 need
// none, and those of 128 steps only for codes of 127: most of these products are skipped.
//
// Out come whole counts per slice; a kernel of _stochastic_adding.cu adds them in the order of the chunks.
// Where there is but one slice (ONLY), out comes y.
//
// With X the block makes its codes itself, of the rows of x (quantize_stochastic.py has the definition): a slice is a
// whole chunk then, and the first block of each slice writes the scales.
//
// Compiled at run time with X (0: codes are given; 1: x is float32, 2: bfloat16), SMOOTH (x is divided by smooth
// scales), OUT (of y: 1 float32, 2 bfloat16), ROWS (1, 2, 4), COMBINED, STAGES, RING, MIDDLE, LINEAR,
// WIDE (counts of a slice need more than 16 bits), ONLY, ALIGNED (16, 4, 1: bytes that can be loaded at once), THREADS
// and MIN_BLOCKS defined.

typedef unsigned int u32;
typedef unsigned char u8;
typedef signed char s8;
typedef long long i64;

#define LANES 32
#define WARPS (THREADS / LANES)
#define SLICE 128                  // inner dimensions of a table
#define PLANE (256 * LANES * 4)    // bytes: a word for each code and bank
#define PLANES ROWS                // a word holds the bytes of ROWS rows and 4 / ROWS pairs
#define TILE 16                    // outputs of a warp
#define BIAS (MIDDLE * SLICE)      // what the bytes of a count of 0 add up to
#define TWICE (MIDDLE * 0x02020202u)  // a word of them less one of counts is that of the negative counts
#define ROUNDS ((ROWS + WARPS - 1) / WARPS)  // in which a warp has a row of a
#define SLOPE_ROUNDS ((ROWS + WARPS) / WARPS)
#define SLOPES 36  // words of a row: 32 slopes, then the constant operand's two; the same words of rows in other banks
#define SLOT (TILE * SLICE)  // bytes of a tile in shared memory
// Rows of p.tables come to shared memory in whole lines and are turned from there: to the last slots of the ring.
#define STAGED (RING && ROWS == 1 && STAGES > 1 && WARPS * TILE >= SLICE)

#if WIDE
typedef int Count;
#else
typedef short Count;
#endif

struct Product {
    const void *qa;        // (B, N, D): codes, or x
    const float *smooth;   // (D,), or null
    float *sa;             // (B, N, C)
    const s8 *qb;          // (B or 1, M, D)
    const float *sb;       // (B or 1, M, C)
    const u8 *levels;      // (B or 1, N or 1, C or 1), or null
    const u8 *tables;      // (levels, masks, 128, 128): MIDDLE + T - k w
    const s8 *slopes;      // (levels, masks, 128): k
    const u8 *masks;       // (dimensions of a chunk,): which mask
    const float *factors;  // (levels,): Q^2 / L
    Count *counts;         // (B, slices, N, stride)
    void *y;               // (B, N, M)
    int N, M, D, C;
    int chunk;             // inner dimensions of a chunk
    int per_chunk;         // slices of a chunk
    int num_masks;
    int shared_b;          // 1: b has one entry for all of the batch
    int level_b, level_n, level_c;  // strides of levels; 0 broadcasts
    int outputs;           // of a table: a multiple of TILE
    int splits;            // of all outputs into such parts
    int row_groups;        // N / ROWS, up
    int items;             // tables to build: one after the other by a block
    int stride;            // of a row of counts: M and up to a multiple of TILE
    int rows_added;        // of a block of stochastic_combine; of one of stochastic_add_row, outputs
    int at_once;           // chunks whose terms a block that adds has in shared memory; 0: few chunks of many slices
    float max_code;        // Q
};

#ifndef EMULATED
static __device__ __forceinline__ void mma_u8(int *d, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k32.row.col.s32.u8.u8.s32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// The first of a sum.
static __device__ __forceinline__ void mma_u8_first(int *d, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k32.row.col.s32.u8.u8.s32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%10,%10,%10,%10};"
        : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "r"(0));
}

static __device__ __forceinline__ void mma_s8(int *d, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Weights are read once: they need not stay in the first cache.
static __device__ __forceinline__ uint4 load_once(const void *at) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(at));
    return v;
}

// Stays in its register: the compiler would work it out again for each tile.
static __device__ __forceinline__ u32 kept(u32 x) {
    u32 same;
    asm volatile("mov.b32 %0, %1;" : "=r"(same) : "r"(x));
    return same;
}

// 16 bytes to shared memory, without a register; each thread's copies in groups.
static __device__ __forceinline__ void copy_16(u32 to, const void *from) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

static __device__ __forceinline__ void copy_4(u32 to, const void *from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}

static __device__ __forceinline__ void end_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int newer>
static __device__ __forceinline__ void await_groups() {
    asm volatile("cp.async.wait_group %0;" ::"n"(newer) : "memory");
}

// Brings a line into the second cache, which all that is written passes: it never shows what was there before.
static __device__ __forceinline__ void prefetch(const void *at) { asm volatile("prefetch.global.L2 [%0];" ::"l"(at)); }

// From here on the next kernel's blocks may start; and what the kernels before this one wrote is there.
static __device__ __forceinline__ void let_next_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

static __device__ __forceinline__ void await_previous() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

extern __shared__ u32 shared[];
#endif

struct Slice {
    int offset;  // of its first dimension in the chunk
    int chunk;   // which
    i64 first;   // its first dimension
    int length;  // 1 ... 128; 0 and less: the last chunk is shorter
};

static __device__ __forceinline__ Slice slice_of(const Product &p, int s) {
    Slice slice;
    slice.chunk = p.per_chunk == 1 ? s : s / p.per_chunk;
    slice.offset = (s - slice.chunk * p.per_chunk) * SLICE;
    slice.first = (i64)slice.chunk * p.chunk + slice.offset;
    int left = p.chunk - slice.offset;
    if (p.D - slice.first < left) left = (int)(p.D - slice.first);
    slice.length = left < SLICE ? left : SLICE;
    return slice;
}

// A table, and what is looked up in it.
struct Item {
    int b, n, s;     // entry of the batch, first row, slice
    int begin, end;  // outputs
};

static __device__ __forceinline__ Item item_of(const Product &p, int index) {
    const int slices = p.per_chunk * p.C, of_groups = index / p.row_groups, of_slices = of_groups / slices;
    Item item;
    item.n = (index - of_groups * p.row_groups) * ROWS;
    item.s = of_groups - of_slices * slices;
    item.b = of_slices / p.splits;
    item.begin = (of_slices - item.b * p.splits) * p.outputs;
    item.end = item.begin + p.outputs < p.M ? item.begin + p.outputs : p.M;
    return item;
}

static __device__ __forceinline__ int level_of(const Product &p, int b, int n, int c) {
    return p.levels ? p.levels[(i64)b * p.level_b + (i64)n * p.level_n + (i64)c * p.level_c] : 0;
}

// float32 rounded to nearest even as bfloat16, and a value of that type.
static __device__ __forceinline__ float rounded(float x) {
    const u32 bits = __float_as_uint(x);
    return x == x ? __uint_as_float((bits + 32767 + (bits >> 16 & 1)) & 0xffff0000u) : x;
}

static __device__ __forceinline__ float value_at(const void *x, i64 at) {
#if X == 2
    return __uint_as_float((u32)((const unsigned short *)x)[at] << 16);
#else
    return ((const float *)x)[at];
#endif
}

// What a lane reads of one row of a in a slice, for the dimensions lane, lane + 32, ...
struct Row {
    float x[4];  // with X values, else codes
    int mask[4];
};

static __device__ __forceinline__ Row load_row(const Product &p, const Slice &slice, int b, int n) {
    Row row;
#pragma unroll
    for (int j = 0; j < 4; j++) {
        const int i = LANES * j + threadIdx.x % LANES;
        const bool exists = n < p.N && i < slice.length;
        const i64 at = ((i64)b * p.N + n) * p.D + slice.first + i;
        row.mask[j] = exists ? p.masks[slice.offset + i] : 0;
#if X
        row.x[j] = exists ? value_at(p.qa, at) : 0.0f;
#else
        row.x[j] = exists ? ((const s8 *)p.qa)[at] : 0;
#endif
    }
    return row;
}

// Values to codes; their scale.
static __device__ __forceinline__ float quantize(const Product &p, const Slice &slice, Row *row) {
    u32 largest = 0;
#pragma unroll
    for (int j = 0; j < 4; j++) {
#if SMOOTH
        const int i = LANES * j + threadIdx.x % LANES;
        const float smooth = i < slice.length ? p.smooth[slice.first + i] : 1.0f;
        row->x[j] = X == 2 ? rounded(__fdiv_rn(row->x[j], rounded(smooth))) : __fdiv_rn(row->x[j], smooth);
#endif
        const u32 bits = __float_as_uint(row->x[j]) & 0x7fffffffu;
        largest = bits > largest ? bits : largest;
    }
    largest = __reduce_max_sync(0xffffffffu, largest);
    const bool finite = largest < 0x7f800000u;
    const float scale = __fdiv_rn(fmaxf(__uint_as_float(largest), 1e-5f), p.max_code);
    const float inverse = __fdiv_rn(1.0f, scale);
#pragma unroll
    for (int j = 0; j < 4; j++) {
        const float code = rintf(p.C > 1 ? __fmul_rn(row->x[j], inverse) : __fdiv_rn(row->x[j], scale));
        row->x[j] = finite ? fminf(fmaxf(code, -p.max_code), p.max_code) : 0.0f;
    }
    return finite ? scale : __uint_as_float(0x7fc00000u);
}

// Where the counts of a row's codes are: the row of the tables, and the highest bit for a negative code. All tables'
// first rows are alike, so that 0 serves what is not there.
static __device__ __forceinline__ void place_row(const Product &p, const Slice &slice, int b, int n, const Row &row,
                                                 u32 *places) {
    const u32 level = n < p.N && slice.length > 0 ? level_of(p, b, n, slice.chunk) : 0;
#pragma unroll
    for (int j = 0; j < 4; j++) {
        const int code = (int)row.x[j];
        const u32 magnitude = code < 0 ? -code : code;
        const u32 place = (level * p.num_masks + row.mask[j]) * 128 + magnitude;
        places[LANES * j + threadIdx.x % LANES] = magnitude ? place | (code < 0 ? 1u << 31 : 0) : 0;
    }
}

#include "_stochastic_tables.cu"

// What a lane reads of the tables for one plane of a slice and 16 codes: four columns, and their places.
struct Columns {
    uint4 v[4];
    u32 place[4];
};

static __device__ __forceinline__ Columns load_columns(const Product &p, const u32 *places, int task) {
    const int lane = threadIdx.x % LANES, plane = task % PLANES;
    Columns columns;
#pragma unroll
    for (int k = 0; k < 4; k++) {
        const int pair = plane * (4 / ROWS) + k / ROWS;
        const int i = 64 * (pair / 2) + 16 * (lane / 8) + 8 * (pair % 2) + lane % 8;
        columns.place[k] = places[k % ROWS * SLICE + i];
    }
#pragma unroll
    for (int k = 0; k < 4; k++)
        columns.v[k] = ((const uint4 *)p.tables)[(columns.place[k] & 0x7fffffffu) * 8 + task / PLANES];
    return columns;
}

static __device__ __forceinline__ void store_columns(Columns columns, int task, u32 *table) {
    const int plane = task % PLANES;
#pragma unroll
    for (int k = 0; k < 4; k++)
        if ((int)columns.place[k] < 0) {
            uint4 &v = columns.v[k];
            v.x = TWICE - v.x;
            v.y = TWICE - v.y;
            v.z = TWICE - v.z;
            v.w = TWICE - v.w;
        }
    store_codes(table + plane * (PLANE / 4), columns.v, 16 * (task / PLANES), threadIdx.x % LANES);
}

#if STAGED
// Where the counts of a dimension's code arrive; pieces of 16 bytes stand in an order of the dimension's own, so that
// lanes which read the same piece of dimensions side by side do so from different banks.
static __device__ __forceinline__ u32 *staged(u32 *ring, int d, int piece) {
    const int slot = d / TILE * STAGES + STAGES - 1;
    return ring + slot * (SLOT / 4) + d % TILE * 32 + (piece ^ d % 8) * 4;
}

static __device__ __forceinline__ void fetch_rows(const Product &p, const u32 *places, u32 *ring) {
    const int lane = threadIdx.x % LANES;
    for (int d = threadIdx.x / 8; d < SLICE; d += THREADS / 8)
        copy_16((u32)__cvta_generic_to_shared(staged(ring, d, lane % 8)),
                p.tables + (i64)(places[d] & 0x7fffffffu) * 128 + lane % 8 * 16);
    end_group();
}

static __device__ __forceinline__ void turn_rows(const u32 *places, u32 *ring, u32 *table) {
    const int lane = threadIdx.x % LANES;
    for (int piece = threadIdx.x / LANES; piece < 8; piece += WARPS) {
        Columns columns;
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const int d = 64 * (k / 2) + 16 * (lane / 8) + 8 * (k % 2) + lane % 8;
            columns.place[k] = places[d];
            columns.v[k] = *(const uint4 *)staged(ring, d, piece);
        }
        store_columns(columns, piece, table);
    }
}
#endif

// The table of a slice, from its places (ROWS, 128), where rows are not staged; and its slopes. All that a warp reads
// is under way before it writes, but for blocks of fewer threads than usual; ``then`` comes in between.
template <class Then>
static __device__ __forceinline__ void build(const Product &p, const u32 *places, u32 *table, u32 *slopes, Then then) {
    const int lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;
#if LINEAR
    u32 slope[SLOPE_ROUNDS][4];
#pragma unroll
    for (int i = 0; i < SLOPE_ROUNDS; i++) {
        const int r = warp + i * WARPS;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            slope[i][j] = 0;  // of the columns without a row, too
            if (r >= ROWS) continue;
            const u32 place = places[r * SLICE + 4 * lane + j];
            slope[i][j] = (u8)p.slopes[place & 0x7fffffffu] | (place & 1u << 31);  // and the code's sign
        }
    }
#endif
    // No weight has the code -128. What stands beyond a slice's dimensions in a tile is any byte, this one too: there,
    // whatever is looked up counts nothing.
    for (int plane = warp; plane < PLANES; plane += WARPS)
        table[plane * (PLANE / 4) + 128 * LANES + lane] = MIDDLE * 0x01010101u;
#if STAGED
    then();
#else
    if (warp >= PLANES * 8) then();
    for (int task = warp; task < PLANES * 8; task += 2 * WARPS) {
        const int other = task + WARPS;
        Columns columns[2];
        columns[0] = load_columns(p, places, task);
        if (other < PLANES * 8) columns[1] = load_columns(p, places, other);
        if (task == warp) then();
        store_columns(columns[0], task, table);
        if (other < PLANES * 8) store_columns(columns[1], other, table);
    }
#endif
#pragma unroll
    for (int i = 0; i < SLOPE_ROUNDS; i++) {
        const int r = warp + i * WARPS;
        if (r > ROWS) continue;
        if (lane < 2) slopes[r * SLOPES + LANES + lane] = r < ROWS ? 1u << (8 * r) : 0;
#if LINEAR
        u32 k[4];
#pragma unroll
        for (int j = 0; j < 4; j++) k[j] = ((int)slope[i][j] < 0 ? -slope[i][j] : slope[i][j]) & 255;
        slopes[r * SLOPES + lane] = k[0] | k[1] << 8 | k[2] << 16 | k[3] << 24;
#endif
    }
}

// 16 codes of one output, of which the first ``left`` exist (the others are not read and may be any).
static __device__ __forceinline__ void load_16(const s8 *at, int left, uint4 *w) {
#if ALIGNED == 16
    if (left > 0) *w = load_once(at);
#else
    u32 word[4] = {0, 0, 0, 0};
#pragma unroll
    for (int j = 0; j < 4; j++) {
#if ALIGNED == 4
        if (4 * j < left) word[j] = __ldg((const u32 *)at + j);
#else
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (4 * j + i < left) word[j] |= (u32)(__ldg(at + 4 * j + i) & 255) << (8 * i);
#endif
    }
    *w = {word[0], word[1], word[2], word[3]};
#endif
}

struct Weights {
    uint4 of[2][2];  // output, half of the slice
};

// The codes of a lane's outputs m and m + 1 for its dimensions of a slice; outputs beyond the last read the last.
static __device__ __forceinline__ void load_tile(const Product &p, const s8 *weights, int left, int m, Weights *w) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int output = m + i < p.M ? m + i : p.M - 1;
        const s8 *at = weights + (i64)output * p.D;
#pragma unroll
        for (int h = 0; h < 2; h++) load_16(at + 64 * h, left - 64 * h, &w->of[i][h]);
    }
}

static __device__ __forceinline__ u32 word_of(const uint4 &v, int i) {
    return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

// What a lane needs for each tile.
struct Lane {
    u32 own[8];     // addresses of its banks, in the order in which it looks up
    u32 turn[2];    // bytes of a pair of words in that order
    u32 slopes;     // addresses: of its row of slopes;
    u32 put;        // of its piece of a slot to copy to;
    u32 take[2];    // and of its pieces to read, of the first slot
};

static __device__ __forceinline__ Lane make_lane(const u32 *table, const u32 *ring, const u32 *slopes) {
    const int i = threadIdx.x % LANES, quarter = i / 4, row = i / 8;
    const u32 turn = 0x11111111u * quarter + 0x76543210u;  // bytes quarter ... quarter + 7, modulo 8
    const u32 slots = (u32)__cvta_generic_to_shared(ring) + threadIdx.x / LANES * STAGES * SLOT;
    Lane lane;
#pragma unroll
    for (int s = 0; s < 8; s++)
        lane.own[s] = kept((u32)__cvta_generic_to_shared(table) + 4 * (i % 4 * 8 + (s + quarter) % 8));
    lane.turn[0] = kept(turn & 0x7777u);
    lane.turn[1] = kept(turn >> 16 & 0x7777u);
    lane.slopes = kept((u32)__cvta_generic_to_shared(slopes) + 4 * SLOPES * (quarter < ROWS ? quarter : ROWS));
    // Rows whose number has the second bit set have their halves exchanged, so that lanes that read side by side
    // do so from different banks.
    lane.put = kept(slots + row * SLICE + (i % 8 ^ (row & 2) * 2) * 16);
#pragma unroll
    for (int h = 0; h < 2; h++) lane.take[h] = kept(slots + quarter * 2 * SLICE + i % 4 * 16 + 64 * (h ^ quarter % 2));
    return lane;
}

// A tile's codes to a slot, in whole lines: 8 lanes a row. ``from`` is the lane's piece of the first output's.
static __device__ __forceinline__ void copy_tile(const Product &p, const s8 *from, int length, int m, u32 to) {
    const int row = threadIdx.x % LANES / 8;
    if (16 * (int)(threadIdx.x % 8) >= length) return;
    if (m + TILE <= p.M) {
        from += (i64)m * p.D;
#pragma unroll
        for (int j = 0; j < 4; j++) copy_16(to + j * 4 * SLICE, from + j * 4 * (i64)p.D);
    } else {
#pragma unroll 1
        for (int j = 0; j < 4; j++)
            copy_16(to + j * 4 * SLICE, from + (i64)(m + row + 4 * j < p.M ? m + 4 * j : p.M - 1 - row) * p.D);
    }
}

static __device__ __forceinline__ void read_tile(const Lane &lane, u32 slot, Weights *w) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const u8 *at = (const u8 *)__cvta_shared_to_generic(lane.take[h] + slot);
#pragma unroll
        for (int i = 0; i < 2; i++) w->of[i][h] = *(const uint4 *)(at + i * SLICE);
    }
}

// The word of a code's counts: byte ``shift`` of w is the code, own the address of its bank in the first table.
static __device__ __forceinline__ u32 look_up(u32 own, u32 w, int shift, int pair) {
    // code * 128 + the bank, by a dot product of bytes: the units that add are the busier ones.
    const u8 *at = (const u8 *)__cvta_shared_to_generic(__dp4a(w, 128u << (8 * shift), own));
    at += pair * ROWS / 4 * PLANE + pair * ROWS % 4;
#if ROWS == 4
    return *(const u32 *)at;
#elif ROWS == 2
    return *(const unsigned short *)at;
#else
    return *at;
#endif
}

// Which of a slice's four products with slopes have one that is not 0: most are, where counts hardly exceed 127.
static __device__ __forceinline__ u32 used_slopes(const u32 *slopes) {
    const int lane = threadIdx.x % LANES;
    u32 any = 0;
#pragma unroll
    for (int r = 0; r < ROWS; r++) any |= slopes[r * SLOPES + lane];
    return __reduce_or_sync(0xffffffffu, any ? 1u << (lane / 16 * 2 + lane % 4 / 2) : 0);
}

// Counts of 16 outputs in a slice: acc[0] is row 2 t of the lane's first output, acc[1] row 2 t + 1, then the second.
static __device__ __forceinline__ void count(const Lane &lane, const u32 *ones, u32 used, const Weights &w, int *acc) {
    int sum[2][4];  // in turn: a product need not await the one before it
#pragma unroll
    for (int pair = 0; pair < 4; pair++) {
        u32 codes[2][2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const u32 low = word_of(w.of[i][pair / 2], pair % 2 * 2);
            const u32 high = word_of(w.of[i][pair / 2], pair % 2 * 2 + 1);
            codes[i][0] = __byte_perm(low, high, lane.turn[0]);
            codes[i][1] = __byte_perm(low, high, lane.turn[1]);
        }
#pragma unroll
        for (int s = 0; s < 8; s += 2) {
            u32 x[2][2];
#pragma unroll
            for (int i = 0; i < 4; i++)
                x[i % 2][i / 2] = look_up(lane.own[s + i / 2], codes[i % 2][s / 4], s % 4 + i / 2, pair);
            if (pair == 0 && s < 4)
                mma_u8_first(sum[s / 2], x[0][0], x[1][0], x[0][1], x[1][1], ones[0], ones[1]);
            else
                mma_u8(sum[s / 2 % 2], x[0][0], x[1][0], x[0][1], x[1][1], ones[0], ones[1]);
        }
    }
#if LINEAR
#pragma unroll
    for (int i = 0; i < 4; i++)
        if (used >> i & 1) {
            const int h = i / 2, j = i % 2 * 2;
            const u32 word = 16 * h + 4 * (threadIdx.x % 4) + j;
            const uint2 k = *(const uint2 *)__cvta_shared_to_generic(lane.slopes + 4 * word);
            mma_s8(sum[i % 2], word_of(w.of[0][h], j), word_of(w.of[1][h], j), word_of(w.of[0][h], j + 1),
                   word_of(w.of[1][h], j + 1), k.x, k.y);
        }
#endif
#pragma unroll
    for (int i = 0; i < 4; i++) acc[i] = sum[0][i] + sum[1][i] - BIAS;
}

static __device__ __forceinline__ float term_of(int count, float factor, float scale_a, float scale_b) {
    return __fmul_rn(__fmul_rn((float)count, factor), __fmul_rn(scale_a, scale_b));
}

static __device__ __forceinline__ void store(const Product &p, i64 at, float y) {
#if OUT == 2
    ((unsigned short *)p.y)[at] = y == y ? __float_as_uint(rounded(y)) >> 16 : 0x7fc0;
#else
    ((float *)p.y)[at] = y;
#endif
}

// Where the lane's counts of an item's first output go.
static __device__ __forceinline__ Count *counts_of(const Product &p, const Item &item) {
    const i64 row = ((i64)item.b * p.per_chunk * p.C + item.s) * p.N + item.n + threadIdx.x % 4 * 2;
    return p.counts + row * p.stride + threadIdx.x % LANES / 4 * 2;
}

// Counts of a tile from output m on: to the slice's counts, or as y.
static __device__ __forceinline__ void write(const Product &p, const Item &item, Count *counts, int m,
                                             const float *scales, const int *acc) {
#pragma unroll
    for (int j = 0; j < 2 && j < ROWS; j++) {
        const int r = threadIdx.x % 4 * 2 + j;
        if (r >= ROWS || item.n + r >= p.N) continue;
#if ONLY
        const i64 row = (i64)item.b * p.N + item.n + r;
        const int first = m + threadIdx.x % LANES / 4 * 2;
#pragma unroll
        for (int i = 0; i < 2; i++)
            if (first + i < p.M) {
                const float scale_b = p.sb[(i64)(p.shared_b ? 0 : item.b) * p.M + first + i];
                const float factor = p.factors[level_of(p, item.b, item.n + r, 0)];
                const float scale_a = X ? scales[r] : p.sa[row];
                const float term = term_of(acc[2 * i + j], factor, scale_a, scale_b);
                store(p, row * p.M + first + i, __fadd_rn(0.0f, term));
            }
#else
        Count *at = counts + m + (j ? p.stride : 0);
#if WIDE
        *(int2 *)at = {acc[j], acc[2 + j]};
#else
        *(u32 *)at = __byte_perm(acc[j], acc[2 + j], 0x5410);
#endif
#endif
    }
}

// While the kernel before this one may still run: what the block reads first, and its share of the tables. A row that
// is not there yet passes the second cache when it is written. Weights are left out: a table's rows would wait behind.
static __device__ __forceinline__ void prefetch_all(const Product &p, const Slice &slice, const Item &item) {
    const int i = threadIdx.x % 64, r = threadIdx.x / 64, size = X == 1 ? 4 : X == 2 ? 2 : 1;
    if (slice.length <= 0) return;
    if (r < ROWS && item.n + r < p.N && 16 * i < slice.length * size)
        prefetch((const u8 *)p.qa + (((i64)item.b * p.N + item.n + r) * p.D + slice.first) * size + 16 * i);
    if (threadIdx.x == THREADS - 1) prefetch(p.masks + slice.offset);
    for (int line = blockIdx.x + gridDim.x * threadIdx.x; line < p.num_masks * 128; line += gridDim.x * THREADS)
        prefetch(p.tables + (i64)line * 128);
}

static __device__ __forceinline__ void load_rows(const Product &p, const Item &item, const Slice &slice, Row *rows) {
#pragma unroll
    for (int i = 0; i < ROUNDS; i++) {
        const int r = threadIdx.x / LANES + i * WARPS;
        if (r < ROWS) rows[i] = load_row(p, slice, item.b, item.n + r);
    }
}

static __device__ __forceinline__ void place_rows(const Product &p, const Item &item, const Slice &slice, Row *rows,
                                                  u32 *places, float *scales) {
#pragma unroll
    for (int i = 0; i < ROUNDS; i++) {
        const int r = threadIdx.x / LANES + i * WARPS, row = item.n + r;
        if (r >= ROWS) continue;
#if X
        const float scale = quantize(p, slice, rows + i);
        if (threadIdx.x % LANES == 0) scales[r] = scale;
        if (threadIdx.x % LANES == 0 && item.begin == 0 && row < p.N && slice.chunk < p.C)
            p.sa[((i64)item.b * p.N + row) * p.C + slice.chunk] = scale;
#endif
        place_row(p, slice, item.b, row, rows[i], places + r * SLICE);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) stochastic_lookup(const Product p) {
    u32 *ring = shared + PLANES * (PLANE / 4);
    u32 *slopes = ring + RING * WARPS * STAGES * (SLOT / 4);
    u32 *places = slopes + (ROWS + 1) * SLOPES;
    float *scales = (float *)(places + ROWS * SLICE);  // of two items
    const int warp = threadIdx.x / LANES;
    const Lane lane = make_lane(shared, ring, slopes);
    Item item = item_of(p, blockIdx.x);
    Slice slice = slice_of(p, item.s);
    const s8 *weights = p.qb + (p.shared_b ? 0 : (i64)item.b * p.M * p.D) + slice.first;
    prefetch_all(p, slice, item);
    await_previous();
    let_next_start();
    for (int index = blockIdx.x; index < p.items; scales += index / gridDim.x % 2 ? -ROWS : ROWS, index += gridDim.x) {
        Row rows[ROUNDS];  // first of all, for what is read later waits behind the weights
        load_rows(p, item, slice, rows);
        int m = item.begin + warp * TILE;
#if RING
        const s8 *from = weights + threadIdx.x % LANES / 8 * (i64)p.D + 16 * (threadIdx.x % 8);
        const auto load = [&](int i) {
            const int tile = m + i * WARPS * TILE;
            if (tile < item.end) copy_tile(p, from, slice.length, tile, lane.put + i * SLOT);
            end_group();
        };
#else
        const s8 *from = weights + 16 * (threadIdx.x % 4);
        const int left = slice.length - 16 * (int)(threadIdx.x % 4);  // of the dimensions from the lane's first one on
        Weights w[STAGES];                                            // a ring
        const auto load = [&](int i) {
            const int tile = m + i * WARPS * TILE;
            w[i] = {};
            if (tile < item.end) load_tile(p, from, left, tile + threadIdx.x % LANES / 4 * 2, w + i);
        };
#endif
#pragma unroll
        for (int i = 0; i < STAGES / 2; i++) load(i);
        place_rows(p, item, slice, rows, places, scales);
        __syncthreads();  // and all are done with the table before
#if STAGED
        fetch_rows(p, places, ring);
        build(p, places, shared, slopes, [&] {
#pragma unroll
            for (int i = STAGES / 2; i < STAGES - 1; i++) load(i);
        });
        await_groups<STAGES - 1 - STAGES / 2>();  // all but the tiles asked for since the rows
        __syncthreads();
        turn_rows(places, ring, shared);
        __syncthreads();
        load(STAGES - 1);
#else
        build(p, places, shared, slopes, [&] {  // tables first: they would wait behind so many weights
#pragma unroll
            for (int i = STAGES / 2; i < STAGES; i++) load(i);
        });
        __syncthreads();
#endif
        Count *counts = counts_of(p, item);
        const uint2 constant = *(const uint2 *)__cvta_shared_to_generic(lane.slopes + 4 * LANES);
        const u32 ones[2] = {kept(constant.x), kept(constant.y)};  // side by side, as a product wants them
        u32 used = 0;
#if LINEAR
        used = used_slopes(slopes);
#endif
#if RING
        for (u32 slot = 0; m < item.end; m += WARPS * TILE, slot = slot + SLOT < STAGES * SLOT ? slot + SLOT : 0) {
            Weights w;
            await_groups<STAGES - 1>();
            __syncwarp();  // other lanes' copies, too
            read_tile(lane, slot, &w);
            __syncwarp();
            const int later = m + STAGES * WARPS * TILE;
            if (later < item.end) copy_tile(p, from, slice.length, later, lane.put + slot);
            end_group();
            int acc[4];
            count(lane, ones, used, w, acc);
            write(p, item, counts, m, scales, acc);
        }
#else
        for (; m < item.end; m += STAGES * WARPS * TILE) {
#pragma unroll
            for (int i = 0; i < STAGES; i++) {
                const int tile = m + i * WARPS * TILE, later = tile + STAGES * WARPS * TILE;
                if (tile >= item.end) break;
                int acc[4];
                count(lane, ones, used, w[i], acc);
                if (later < item.end) load_tile(p, from, left, later + threadIdx.x % LANES / 4 * 2, w + i);
                write(p, item, counts, tile, scales, acc);
            }
        }
#endif
        item = item_of(p, index + gridDim.x);
        slice = slice_of(p, item.s);
        weights = p.qb + (p.shared_b ? 0 : (i64)item.b * p.M * p.D) + slice.first;
    }
}

#include "_stochastic_adding.cu"
