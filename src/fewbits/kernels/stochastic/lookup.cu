// A few rows (1, 2 or 4 at a time) times a prepared weight, counted as stochastic-computing hardware counts: the kernel of
// decoding. codes.py defines the numbers; lookup.py makes the tables and plans the launch.
//
// The idea. The hardware multiplies two codes by running two streams of L bits and counting the steps in which both bits
// are 1. The streams are fixed sequences, so that count follows from the two magnitudes and from the mask of the dimension:
// a table T_d of 128 x 128 counts. To simulate the streams would cost L steps a product, and T_d for every dimension is far
// too large for fast memory. But a row of a (D,) meets all rows of the weight qb (M, D): in dimension d the M products share
// one a_d, so they need one row of T_d, with both signs 256 entries, and those fit shared memory. A product becomes
// the reading of one byte, with the weight's own byte as its address:
//
//     table_d[w] = sign(a_d) sign(w) T_d(|a_d|, |w|)      y[m] = sum over chunks of scales * (sum over d of table_d[qb[m, d]])
//
// All that follows serves two ends: that 32 lanes read 32 such bytes at once, and that no instruction is spent on
// adding each of them.
//
// 1. Tables. A block serves ROWS rows of a. For a slice of 128 inner dimensions it builds the tables of every (row,
//    dimension) once, for many outputs. Where there are more such items than blocks that run at once, a block takes one
//    after the other.
// 2. Weights. A warp takes 16 outputs and a slice at a time. The 4 lanes of a quarter (lane / 4) have 2 outputs, and lane
//    t = lane % 4 of them the dimensions 64 h + 16 t ... 64 h + 16 t + 15, h = 0 and 1: 16 bytes twice an output. Weights
//    come by way of shared memory (RING): each warp has STAGES tiles on their way there, in asynchronous copies of whole
//    lines, and asks for the first before there is a table.
// 3. Banks. A lane's weights are 4 pairs of words, 8 dimensions each; dimension e of a pair is in bank 8 t + e of the
//    tables. In step s a lane looks up dimension (s + lane / 4) % 8 of each pair, so that 32 lanes never meet in a bank.
// 4. Sums. 4 words that were looked up are the first operand of an 8-bit matrix product over 16 outputs. The second one, a
//    constant, sends byte r to column r: the product's column r is the count of row r, added over the 4 lanes. The
//    counts stay in its 32-bit accumulators for the whole slice.
// 5. Bytes. Counts go up to 256 and a byte does not, so a byte holds MIDDLE + T - k |w| with a whole slope k for each (row,
//    dimension), and the sum of k w is one more matrix product, of the weights' own bytes (LINEAR). Counts below 128 need
//    no slope, and those of 128 steps only for codes of 127: most of these products are skipped.
// 6. The end. Out come whole counts for each slice; a kernel of adding.cu adds them in the order of the chunks. Where there
//    is but one slice (ONLY), out comes y. With X the block makes its codes itself, of the rows of x (quantize.py has the
//    definition): a slice is a whole chunk then, and the first block of each slice writes the scales.
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
// Whether a block reads its rows of p.tables in whole lines: it copies them into the last slots of the ring, which weights
// will take later, and transposes them from there into the planes.
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

#include "byte_products.cu"

#ifndef EMULATED
// The first of a sum.
static __device__ __forceinline__ void mma_u8_first(int *d, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k32.row.col.s32.u8.u8.s32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%10,%10,%10,%10};"
        : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "r"(0));
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

#include "lookup_places.cu"
#include "tables.cu"
#include "lookup_tables.cu"
#include "lookup_tiles.cu"

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

#include "adding.cu"
