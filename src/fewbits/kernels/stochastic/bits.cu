// Products of prepared stochastic operands with many rows and short streams, by running the streams:
// as bits, on matrix units that multiply bits. codes.py defines the result.
//
// The idea. Stochastic hardware multiplies two magnitudes by counting the steps in which both streams have a 1. The tensor
// cores of Ampere to Hopper have an instruction for exactly this on many streams at once: AND two rows of bits and count the
// ones (popc). So the streams themselves become the operands.
//
// 1. Signs. Streams have magnitudes only, so positive and negative codes become separate bits. With |A|, |B| the bits of all
//    codes, A0, B0 those of positive and A1, B1 those of negative ones, the signed count of two rows is
//
//        popc(|A| & |B|) - 2 (popc(A0 & B1) + popc(A1 & B0)):
//
//    three products of bits, the last two into one sum.
// 2. Streams as words. A code is WORDS words of 32 steps: a code of a has a 1 for each step in which it is enabled, a code of b
//    a 1 where its sequence's number lies below its boundary. Streams of at most 16 steps (or 8) would leave half (or three
//    quarters) of a word empty, so SHARE = 2 (or 4) neighbouring inner dimensions share one: the ones are added up anyway.
// 3. Two kernels, stochastic_bits_a and _b, first write all words in the order in which the threads of stochastic_bits read
//    them: a record is 16 rows and 32 words of each, in 4 steps of the matrix units; for each step a thread's 4 words of
//    positive codes, then those of negative ones. In the main loop only |A| and |B| are put together, because every other
//    instruction takes time from the matrix units.
// 4. A block of threads computes 128 rows by 128 outputs, a warp (32 threads) 32 rows by 16 PAIRS outputs; y stays in shared
//    memory until the last chunk.
//
// Compiled at run time with WORDS (a power of 2), SHARE (1, or 2 or 4 where WORDS is 1) and PAIRS (of tiles of 8 outputs, a
// warp's: 2 or 4) defined.

typedef unsigned int u32;
typedef unsigned char u8;
typedef signed char s8;
typedef long long i64;

#define LANES 32
#define THREADS (1024 / PAIRS)
#define STEPS 4                  // of the matrix units, a record's
#define RECORD (STEPS * LANES * 32)  // bytes
#define STAGE (16 * RECORD)      // 8 records of a, 8 of b
#define SUMS (2 * STAGE)         // where y is, after both stages

struct Product {
    const s8 *qa;          // (B, N, D)
    const float *sa;       // (B, N, C)
    const s8 *qb;          // (B or 1, M, D)
    const float *sb;       // (B or 1, C, M)
    const u8 *levels;      // (B or 1, N or 1, C or 1), or null
    const u32 *words_a;    // (levels, masks, 128, WORDS)
    const u32 *words_b;    // (masks, 128, WORDS)
    const u8 *masks;       // (dimensions of a chunk,): which mask
    const float *factors;  // (levels,): Q^2 / L
    u32 *bits_a;           // (B, tiles of 16 rows, stages, RECORD bytes)
    u32 *bits_b;           // (B or 1, tiles of 16 outputs, stages, RECORD bytes)
    float *y;              // (B, N, M)
    int N, M, D, C;
    int chunk;             // inner dimensions of a chunk
    int per_chunk;         // stages of a chunk
    int num_masks;
    int shared_b;          // 1: b has one entry for all of the batch
    int level_b, level_n, level_c;  // strides of levels; 0 broadcasts
    int tiles_a, tiles_b;  // of 16 rows, in whole blocks
};

#include "slices.cu"

// One record; a warp each. OF_A: word i of a lane is row 8 (i % 2) + lane / 4 and word 4 (i / 2) + lane % 4 of a step,
// else row 8 (i / 2) + lane / 4 and word 4 (i % 2) + lane % 4.
template <bool OF_A> static __device__ __forceinline__ void write_record(const Product &p) {
    const int lane = threadIdx.x % LANES, stage = blockIdx.x * 8 + threadIdx.x / LANES, stages = p.per_chunk * p.C;
    const int tile = blockIdx.y, b = blockIdx.z, rows = OF_A ? p.N : p.M, tiles = OF_A ? p.tiles_a : p.tiles_b;
    if (stage >= stages) return;
    const int c = stage / p.per_chunk, offset = (stage - c * p.per_chunk) * (8 * STEPS);
    const i64 first = (i64)c * p.chunk;
    const int left = (int)(p.D - first < p.chunk ? p.D - first : p.chunk);
    const s8 *codes = (OF_A ? p.qa : p.qb) + (i64)b * rows * p.D + first;
    u32 *record = (OF_A ? p.bits_a : p.bits_b) + (((i64)b * tiles + tile) * stages + stage) * (RECORD / 4);
    int row[2];
    const u32 *table[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
        row[h] = 16 * tile + 8 * h + lane / 4;
        table[h] = OF_A ? p.words_a : p.words_b;
        if (OF_A && row[h] < rows) table[h] += (i64)level_of(p, b, row[h], c) * p.num_masks * (128 * WORDS);
    }
#pragma unroll
    for (int k = 0; k < STEPS; k++) {
        u32 positive[4], negative[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int h = OF_A ? i % 2 : i / 2, at = offset + 8 * k + 4 * (OF_A ? i / 2 : i % 2) + lane % 4;
            positive[i] = negative[i] = 0;
#pragma unroll
            for (int s = 0; s < SHARE; s++) {
                const int d = at / WORDS * SHARE + s;
                if (row[h] < rows && d < left) {
                    const int code = codes[(i64)row[h] * p.D + d];
                    const int entry = (int)p.masks[d] * 128 + (code < 0 ? -code : code);
                    const u32 word = __ldg(table[h] + entry * WORDS + at % WORDS) << (s * (32 / SHARE));
                    positive[i] |= code < 0 ? 0 : word;
                    negative[i] |= code < 0 ? word : 0;
                }
            }
        }
        ((uint4 *)record)[2 * k * LANES + lane] = uint4{positive[0], positive[1], positive[2], positive[3]};
        ((uint4 *)record)[(2 * k + 1) * LANES + lane] = uint4{negative[0], negative[1], negative[2], negative[3]};
    }
}

extern "C" __global__ void __launch_bounds__(256) stochastic_bits_a(const Product p) { write_record<true>(p); }
extern "C" __global__ void __launch_bounds__(256) stochastic_bits_b(const Product p) { write_record<false>(p); }

#include "copies.cu"

#ifndef EMULATED
// d += popc(a & b) for 16 rows of a, 8 of b and 256 bits.
static __device__ __forceinline__ void mma_b1(int *d, const u32 *a, u32 b0, u32 b1) {
    asm(
        "mma.sync.aligned.m16n8k256.row.col.s32.b1.b1.s32.and.popc {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

extern __shared__ u32 shared[];
#endif

// Start the copies of a stage: a warp has one record or two.
static __device__ __forceinline__ void fetch(const Product &p, int stage, int stages, i64 tile_a, i64 tile_b, u32 to) {
    const int lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;
#pragma unroll
    for (int i = 0; i < 512 / THREADS; i++) {
        const int record = warp * (512 / THREADS) + i;
        const i64 tile = record < 8 ? tile_a + record : tile_b + record - 8;
        const u8 *from = (const u8 *)(record < 8 ? p.bits_a : p.bits_b) + (tile * stages + stage) * RECORD;
        for (int j = lane; j < RECORD / 16; j += LANES) copy_16(to + record * RECORD + j * 16, from + j * 16);
    }
}

// A lane's words of a step: of positive and negative codes, and both.
static __device__ __forceinline__ void words_of(const u32 *record, int k, u32 *positive, u32 *negative, u32 *both) {
    const int lane = threadIdx.x % LANES;
    const uint4 v = ((const uint4 *)record)[2 * k * LANES + lane];
    const uint4 w = ((const uint4 *)record)[(2 * k + 1) * LANES + lane];
    positive[0] = v.x, positive[1] = v.y, positive[2] = v.z, positive[3] = v.w;
    negative[0] = w.x, negative[1] = w.y, negative[2] = w.z, negative[3] = w.w;
#pragma unroll
    for (int i = 0; i < 4; i++) both[i] = positive[i] | negative[i];
}

// The terms of a chunk, added to y.
static __device__ __forceinline__ void add_chunk(const Product &p, int c, int b, int n, int m, int (*all)[2 * PAIRS][4],
                                                 int (*opposite)[2 * PAIRS][4], float *y) {
    const float *scales_b = p.sb + ((i64)(p.shared_b ? 0 : b) * p.C + c) * p.M;
    float scale[4], factor[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int at = n + 8 * i < p.N ? n + 8 * i : 0;
        scale[i] = p.sa[((i64)b * p.N + at) * p.C + c];
        factor[i] = p.factors[level_of(p, b, at, c)];
    }
#pragma unroll
    for (int j = 0; j < 2 * PAIRS; j++) {
        float scale_b[2];
#pragma unroll
        for (int h = 0; h < 2; h++) scale_b[h] = m + 8 * j + h < p.M ? __ldg(scales_b + m + 8 * j + h) : 0.0f;
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
            for (int r = 0; r < 4; r++) {
                const int count = all[i][j][r] - 2 * opposite[i][j][r], row = 2 * i + r / 2;
                const float raw = __fmul_rn((float)count, factor[row]);
                const float term = __fmul_rn(raw, __fmul_rn(scale[row], scale_b[r % 2]));
                float *sum = y + ((i * 2 * PAIRS + j) * 4 + r) * THREADS;
                *sum = __fadd_rn(*sum, term);
                all[i][j][r] = opposite[i][j][r] = 0;
            }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) stochastic_bits(const Product p) {
    const int lane = threadIdx.x % LANES, warp = threadIdx.x / LANES, wn = warp % 4, wm = warp / 4;
    const int b = blockIdx.z, stages = p.per_chunk * p.C;
    const i64 tile_a = (i64)b * p.tiles_a + 8 * blockIdx.x;
    const i64 tile_b = (p.shared_b ? 0 : (i64)b * p.tiles_b) + 8 * blockIdx.y;
    const u32 base = (u32)__cvta_generic_to_shared(shared);
    float *y = (float *)(shared + SUMS / 4) + threadIdx.x;
    const int n = 128 * blockIdx.x + 32 * wn + lane / 4, m = 128 * blockIdx.y + 16 * PAIRS * wm + 2 * (lane % 4);
    int all[2][2 * PAIRS][4], opposite[2][2 * PAIRS][4];
#pragma unroll
    for (int i = 0; i < 16 * PAIRS; i++) {
        (&all[0][0][0])[i] = (&opposite[0][0][0])[i] = 0;
        y[i * THREADS] = 0.0f;
    }
    fetch(p, 0, stages, tile_a, tile_b, base);
    int c = 0, part = 0;
    for (int stage = 0; stage < stages; stage++) {
        wait_for_copies();
        __syncthreads();
        if (stage + 1 < stages) fetch(p, stage + 1, stages, tile_a, tile_b, base + (stage + 1) % 2 * STAGE);
        const u32 *words = shared + stage % 2 * (STAGE / 4);
        const u32 *words_a = words + 2 * wn * (RECORD / 4), *words_b = words + (8 + PAIRS * wm) * (RECORD / 4);
#pragma unroll 2
        for (int k = 0; k < STEPS; k++) {
            u32 a[2][4], a0[2][4], a1[2][4];
#pragma unroll
            for (int i = 0; i < 2; i++) words_of(words_a + i * (RECORD / 4), k, a0[i], a1[i], a[i]);
#pragma unroll
            for (int j = 0; j < PAIRS; j++) {
                u32 w[4], w0[4], w1[4];
                words_of(words_b + j * (RECORD / 4), k, w0, w1, w);
#pragma unroll
                for (int product = 0; product < 3; product++)
#pragma unroll
                    for (int h = 0; h < 2; h++)
#pragma unroll
                        for (int i = 0; i < 2; i++) {
                            if (product == 0) mma_b1(opposite[i][2 * j + h], a0[i], w1[2 * h], w1[2 * h + 1]);
                            if (product == 1) mma_b1(all[i][2 * j + h], a[i], w[2 * h], w[2 * h + 1]);
                            if (product == 2) mma_b1(opposite[i][2 * j + h], a1[i], w0[2 * h], w0[2 * h + 1]);
                        }
            }
        }
        if (++part == p.per_chunk) {
            add_chunk(p, c, b, n, m, all, opposite, y);
            part = 0;
            c++;
        }
    }
#pragma unroll
    for (int j = 0; j < 2 * PAIRS; j++)
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
            for (int r = 0; r < 4; r++) {
                const int row = n + 16 * i + 8 * (r / 2), output = m + 8 * j + r % 2;
                if (row < p.N && output < p.M)
                    p.y[((i64)b * p.N + row) * p.M + output] = y[((i * 2 * PAIRS + j) * 4 + r) * THREADS];
            }
}
