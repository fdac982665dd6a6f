// The second step of lookup.cu: adds the counts of all slices of the inner dimension and multiplies by the scales. lookup.cu
// includes this source, with its macros and COMBINED (1 or 2: rows at a time).
//
// Counts of the slices of one chunk are whole numbers, so they may be added in any order; chunks, which have scales, are
// added in ascending order, so that every device gives the same bits. stochastic_add_row serves one row whose slices are
// whole chunks (decoding), stochastic_combine everything else.

#pragma once

// Counts of two outputs, as they are stored.
#if WIDE
typedef int2 Stored;
#else
typedef u32 Stored;
#endif

struct Pair {
    int x, y;
};

static __device__ __forceinline__ Pair pair_of(const Stored &v) {
#if WIDE
    return {v.x, v.y};
#else
    return {(int)(v << 16) >> 16, (int)v >> 16};
#endif
}

// y of the slices' counts, chunks in ascending order. A block has 32 outputs of some rows, COMBINED of which and some
// chunks at a time: half a warp has a chunk, a lane two outputs, and what it reads next is under way before it makes
// terms of what it has. Terms go to shared memory, where a warp adds those of a row.
#define WIDTH (LANES + 1)  // of an array there
#define OWN 4              // chunks of a thread at a time
#define ROWS_ADDED 16      // of a block, at most

// Scales of b, to (chunks, outputs): read along the chunks.
static __device__ __forceinline__ void copy_scales(const Product &p, int b, int first, float *scales) {
    const int lane = threadIdx.x % LANES, chunks = p.C - first < p.at_once ? p.C - first : p.at_once;
    const u32 to = (u32)__cvta_generic_to_shared(scales);
    for (int i = threadIdx.x / LANES; i < LANES; i += blockDim.x / LANES) {
        const int output = blockIdx.x * LANES + i < p.M ? blockIdx.x * LANES + i : p.M - 1;
        const float *from = p.sb + ((i64)(p.shared_b ? 0 : b) * p.M + output) * p.C + first;
        for (int c = lane; c < chunks; c += LANES) copy_4(to + (c * WIDTH + i) * 4, from + c);
    }
    end_group();
}

struct Terms {
    Stored count[OWN][COMBINED];  // of a chunk's first slice
    float scale_a[OWN][COMBINED], factor[OWN][COMBINED];
};

// Of a thread's chunks from ``first`` on and COMBINED rows from n on, of which ``last`` is the block's last one. What
// is not there reads what is, so that all is asked for at once.
static __device__ __forceinline__ void load_terms(const Product &p, int b, int n, int last, int first, float whole,
                                                  Terms *t) {
    const int lane = threadIdx.x % LANES, m = blockIdx.x * LANES + lane % 16 * 2;
    const int own = first + threadIdx.x / LANES * 2 + lane / 16, step = blockDim.x / LANES * 2;
    const Count *counts = p.counts + (m < p.stride ? m : p.stride - 2);
#pragma unroll
    for (int j = 0; j < OWN; j++)
#pragma unroll
        for (int r = 0; r < COMBINED; r++) {
            const int c = own + j * step < p.C ? own + j * step : p.C - 1, row = n + r < last ? n + r : last;
            const i64 chunk = (i64)b * p.C + c;
            t->count[j][r] = *(const Stored *)(counts + (chunk * p.per_chunk * p.N + row) * p.stride);
            t->scale_a[j][r] = p.sa[((i64)b * p.N + row) * p.C + c];
            t->factor[j][r] = whole;
        }
    if (!p.levels) return;
#pragma unroll
    for (int j = 0; j < OWN; j++)
#pragma unroll
        for (int r = 0; r < COMBINED; r++) {
            const int c = own + j * step < p.C ? own + j * step : p.C - 1, row = n + r < last ? n + r : last;
            t->factor[j][r] = p.factors[level_of(p, b, row, c)];
        }
}

// To (rows, chunks, outputs).
static __device__ __forceinline__ void make_terms(const Product &p, const Terms &t, int b, int n, int last, int first,
                                                  const float *scales, float *terms) {
    const int lane = threadIdx.x % LANES, x = lane % 16 * 2, m = blockIdx.x * LANES + x;
    const int own = threadIdx.x / LANES * 2 + lane / 16, step = blockDim.x / LANES * 2;
#pragma unroll
    for (int j = 0; j < OWN; j++) {
        const int c = own + j * step;
        if (c >= p.at_once || first + c >= p.C) continue;
        const float *scale_b = scales + c * WIDTH + x;
#pragma unroll
        for (int r = 0; r < COMBINED; r++) {
            Pair count = pair_of(t.count[j][r]);
            for (int s = 1; s < p.per_chunk && n + r <= last && m < p.stride; s++) {
                const i64 slice = ((i64)b * p.C + first + c) * p.per_chunk + s;
                const Pair found = pair_of(*(const Stored *)(p.counts + (slice * p.N + n + r) * p.stride + m));
                count.x += found.x;
                count.y += found.y;
            }
            float *term = terms + (r * p.at_once + c) * WIDTH + x;
            term[0] = term_of(count.x, t.factor[j][r], t.scale_a[j][r], scale_b[0]);
            term[1] = term_of(count.y, t.factor[j][r], t.scale_a[j][r], scale_b[1]);
        }
    }
}

// Chunks of few slices.
static __device__ __forceinline__ void add_chunks(const Product &p, int b, int begin, int end) {
    __shared__ float sums[ROWS_ADDED][LANES];
    const int lane = threadIdx.x % LANES, warp = threadIdx.x / LANES, warps = blockDim.x / LANES;
    const int groups = (end - begin + COMBINED - 1) / COMBINED, items = (p.C + p.at_once - 1) / p.at_once * groups;
    const int kept = p.at_once * WIDTH, m = blockIdx.x * LANES + lane;
    float *scales = (float *)shared, *terms = scales + (items > groups ? 2 : 1) * kept;
    copy_scales(p, b, 0, scales);
    const float whole = p.levels ? 0.0f : p.factors[0];
    await_previous();
    Terms next;
    load_terms(p, b, begin, end - 1, 0, whole, &next);
    for (int item = 0, first = 0, n = begin; item < items; item++) {
        const bool last = p.C - first <= p.at_once;
        float *own = scales + first / p.at_once % 2 * kept, *made = terms + item % 2 * COMBINED * kept;
        const Terms t = next;
        if (n == begin) {
            await_groups<0>();
            __syncthreads();
            if (!last) copy_scales(p, b, first + p.at_once, scales + (first / p.at_once + 1) % 2 * kept);
        }
        const bool over = n + COMBINED >= end;
        const int row = over ? begin : n + COMBINED, chunk = over ? first + p.at_once : first;
        if (item + 1 < items) load_terms(p, b, row, end - 1, chunk, whole, &next);
        make_terms(p, t, b, n, end - 1, first, own, made);
        __syncthreads();
#pragma unroll
        for (int r = 0; r < COMBINED; r++)
            if (warp == (item * COMBINED + r) % warps && n + r < end) {
                const int chunks = last ? p.C - first : p.at_once;
                float y = first ? sums[n + r - begin][lane] : 0.0f;
#pragma unroll 16
                for (int c = 0; c < chunks; c++) y = __fadd_rn(y, made[(r * p.at_once + c) * WIDTH + lane]);
                sums[n + r - begin][lane] = y;
                if (last && m < p.M) store(p, ((i64)b * p.N + n + r) * p.M + m, y);
            }
        n = row;
        first = chunk;
    }
}

// Counts of a chunk of many slices: of half a warp's slices, to (rows, halves of warps, outputs).
static __device__ __forceinline__ void add_slices(const Product &p, int b, int n, int rows, int c, int *parts) {
    const int lane = threadIdx.x % LANES, x = lane % 16 * 2, m = blockIdx.x * LANES + x;
    const int own = threadIdx.x / LANES * 2 + lane / 16, step = blockDim.x / LANES * 2;
    Pair acc[COMBINED] = {};
    const Count *counts = p.counts + (((i64)b * p.C + c) * p.per_chunk * p.N + n) * p.stride + m;
#pragma unroll 4
    for (int s = own; s < p.per_chunk; s += step)
#pragma unroll
        for (int r = 0; r < COMBINED; r++)
            if (r < rows && m < p.stride) {
                const Pair found = pair_of(*(const Stored *)(counts + ((i64)s * p.N + r) * p.stride));
                acc[r].x += found.x;
                acc[r].y += found.y;
            }
#pragma unroll
    for (int r = 0; r < COMBINED; r++) {
        parts[(r * step + own) * WIDTH + x] = acc[r].x;
        parts[(r * step + own) * WIDTH + x + 1] = acc[r].y;
    }
}

// Few chunks of many slices.
static __device__ __forceinline__ void add_whole(const Product &p, int b, int n, int end) {
    const int lane = threadIdx.x % LANES, r = threadIdx.x / LANES, halves = blockDim.x / LANES * 2;
    const int m = blockIdx.x * LANES + lane, rows = end - n;
    const float *from = p.sb + ((i64)(p.shared_b ? 0 : b) * p.M + (m < p.M ? m : p.M - 1)) * p.C;
    float y = 0.0f;
    await_previous();
    for (int c = 0; c < p.C; c++) {
        int *parts = (int *)shared + c % 2 * COMBINED * halves * WIDTH;
        add_slices(p, b, n, rows, c, parts);
        __syncthreads();
        if (r >= rows) continue;
        const float factor = p.factors[level_of(p, b, n + r, c)], scale_b = from[c];
        const float scale_a = p.sa[((i64)b * p.N + n + r) * p.C + c];
        int acc = 0;
#pragma unroll 8
        for (int i = 0; i < halves; i++) acc += parts[(r * halves + i) * WIDTH + lane];
        y = __fadd_rn(y, term_of(acc, factor, scale_a, scale_b));
    }
    if (r < rows && m < p.M) store(p, ((i64)b * p.N + n + r) * p.M + m, y);
}

extern "C" __global__ void __launch_bounds__(512, COMBINED == 1 ? 2 : 1) stochastic_combine(const Product p) {
    const int b = blockIdx.z, begin = blockIdx.y * p.rows_added;
    const int end = p.N - begin < p.rows_added ? p.N : begin + p.rows_added;
    let_next_start();
    if (p.at_once)
        add_chunks(p, b, begin, end);
    else
        add_whole(p, b, begin, end);
}

#define ADDERS 256  // threads of stochastic_add_row

// y of one row. There is a block for each multiprocessor, small enough to be there beside those that look up from
// their start on: it has b's scales in shared memory, (outputs, chunks), when these end. Terms take their place. Its
// code is short: what follows the wait comes from memory as counts do.
extern "C" __global__ void __launch_bounds__(ADDERS, 4) stochastic_add_row(const Product p) {
    const int b = blockIdx.y, begin = blockIdx.x * p.rows_added, width = p.at_once | 1;
    const int lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;
    const int outputs = p.M - begin < p.rows_added ? p.M - begin : p.rows_added;
    const int pieces = (p.stride - begin < p.rows_added ? p.stride - begin : p.rows_added) * (int)sizeof(Count) / 16;
    const int row_bytes = p.rows_added * (int)sizeof(Count) + 16;  // of counts: in other banks than the row before
    const float *scales_b = p.sb + ((i64)(p.shared_b ? 0 : b) * p.M + begin) * p.C;
    u8 *counts = (u8 *)shared;
    float *terms = (float *)(counts + p.at_once * row_bytes);
    float *scales_a = terms + p.rows_added * width, *factors = scales_a + p.at_once;
    float y = 0.0f;
    let_next_start();
    for (int first = 0; first < p.C; first += p.at_once) {
        const int chunks = p.C - first < p.at_once ? p.C - first : p.at_once;
        for (int c = lane; c < chunks; c += LANES)
#pragma unroll 8
            for (int o = warp; o < outputs; o += ADDERS / LANES)
                terms[o * width + c] = scales_b[(i64)o * p.C + first + c];
        for (int c = threadIdx.x; c < chunks; c += ADDERS) factors[c] = p.factors[level_of(p, b, 0, first + c)];
        if (!first) await_previous();
        const u8 *from = (const u8 *)(p.counts + ((i64)b * p.C + first) * p.stride + begin);
        for (int i = threadIdx.x; i < chunks * pieces; i += ADDERS) {
            const int c = i / pieces, piece = i - c * pieces;
            copy_16((u32)__cvta_generic_to_shared(counts) + c * row_bytes + piece * 16,
                    from + c * (i64)p.stride * sizeof(Count) + piece * 16);
        }
        end_group();
        for (int c = threadIdx.x; c < chunks; c += ADDERS) scales_a[c] = p.sa[(i64)b * p.C + first + c];
        await_groups<0>();
        __syncthreads();
        for (int c = lane; c < chunks; c += LANES) {
            const float factor = factors[c], scale_a = scales_a[c];
#pragma unroll 2
            for (int o = 2 * warp; o < outputs; o += 2 * ADDERS / LANES) {
                const Pair pair = pair_of(*(const Stored *)(counts + c * row_bytes + o * (int)sizeof(Count)));
                float *term = terms + o * width + c;
                term[0] = term_of(pair.x, factor, scale_a, term[0]);
                term[width] = term_of(pair.y, factor, scale_a, term[width]);
            }
        }
        __syncthreads();
        if (threadIdx.x < outputs)
#pragma unroll 8
            for (int c = 0; c < chunks; c++) y = __fadd_rn(y, terms[threadIdx.x * width + c]);
        __syncthreads();
    }
    if (threadIdx.x < outputs) store(p, (i64)b * p.M + begin + threadIdx.x, y);
}
