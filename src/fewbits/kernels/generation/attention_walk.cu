// The walk over keys and values on tensor cores; included by decode_attention.cu where a group has at most 8 query heads of 64,
// 96 or 128 values.
//
// A warp takes STEP = 16 positions at a time, and its lanes 4 g + t hold what m16n8k16 wants, straight from memory:
//
//   scores^T (16 positions, 8 heads) = K (16, D) q^T: lane (g, t) reads 16 bytes of keys g and g + 8 at a time. Which of a key's
//     values stand where in a product does not matter as long as q agrees, so these bytes are its share of two products.
//   weights = exp(scores - the largest so far), two heads a lane; sums and the largest so far are kept by the warp alone.
//   out^T (D, 8 heads) += V^T (D, 16) weights^T (16, 8): lane (g, t) reads 16 bytes of the values of positions 2 t, 2 t + 1, 2 t + 8,
//     2 t + 9. A byte permutation pairs two positions; the j-th of its values g * 8 + j is row g of the j-th product. Weights
//     come from the lane (position, heads) to the lane (head, positions) by movmatrix.
//
// Weights go in as two numbers of 16 bits whose sum holds 16 bits and more, so that only the result is rounded. Between two
// steps no thread waits for another warp; the next step's keys are asked for as soon as this one's are used.

#define STEP 16
#define PIECES (D / 32)            // of 64 bytes of a key, 16 a lane
#define HALVES ((D + 63) / 64)     // of 128 bytes of a value's 64 numbers, 16 a lane
#define LOG2_E 1.4426950408889634f

#ifndef EMULATED
static __device__ __forceinline__ void multiply_add(float *c, const u32 *a, u32 b0, u32 b1) {
#if HALF == 1
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
#else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
#endif
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
static __device__ __forceinline__ u32 turned(u32 matrix) {  // a matrix of 8 x 8 numbers over the warp, transposed
    u32 out;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(matrix));
    return out;
}
static __device__ __forceinline__ u32 bytes_of(u32 low, u32 high, u32 selector) {  // four of eight bytes
    u32 out;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(out) : "r"(low), "r"(high), "r"(selector));
    return out;
}
#endif

static __device__ __forceinline__ u32 pair_of(float low, float high) { return (u32)to_16(low) | (u32)to_16(high) << 16; }
static __device__ __forceinline__ u32 word_of(const uint4 &v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

struct Keys {
    uint4 piece[2][PIECES];  // of positions g and g + 8
};
struct Values {
    uint4 piece[4][HALVES];  // of positions 2 t, 2 t + 1, 2 t + 8, 2 t + 9
};

// Those of positions from ``at`` on that stand before ``to``; zeros beyond.
static __device__ __forceinline__ Keys load_keys(const u16 *keys, i64 at, i64 to) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    Keys k;
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
        for (int j = 0; j < PIECES; j++) {
            const i64 position = at + g + 8 * half;
            k.piece[half][j] = position < to ? load_16(keys + position * D + j * 32 + t * 8) : uint4{0, 0, 0, 0};
        }
    return k;
}
static __device__ __forceinline__ Values load_values(const u16 *values, i64 at, i64 to) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    Values v;
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
        for (int half = 0; half < HALVES; half++) {
            const i64 position = at + 2 * t + i % 2 + i / 2 * 8;
            const int d = half * 64 + g * 8;
            v.piece[i][half] = position < to && d < D ? load_16(values + position * D + d) : uint4{0, 0, 0, 0};
        }
    return v;
}

// Query heads as the second operand: lane (g, t) has of head g what its keys' bytes meet.
struct Queries {
    u32 word[2 * PIECES][2];
};
static __device__ __forceinline__ Queries queries_of(const float (*q)[D]) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    Queries out;
#pragma unroll
    for (int i = 0; i < 4 * PIECES; i++) {
        const int d = i / 4 * 32 + t * 8 + i % 4 * 2;
        out.word[i / 2][i % 2] = g < GROUP ? pair_of(q[g][d], q[g][d + 1]) : 0;
    }
    return out;
}

// What a warp has gathered: of the lane's heads 2 t and 2 t + 1 the largest score and the sum of its own positions' weights; of dimensions
// g * 8 + j and 64 + g * 8 + j the sums of weighted values.
struct Tally {
    float largest[2], total[2], sum[8][4];
};

static __device__ __forceinline__ void take_step(const Arguments &p, const Keys &k, const Queries &q, i64 at, i64 to, Tally *tally, u32 (*weights)[2]) {
    const int g = threadIdx.x % 32 / 4;
    float score[4] = {};
#pragma unroll
    for (int step = 0; step < 2 * PIECES; step++) {
        const uint4 &low = k.piece[0][step / 2], &other = k.piece[1][step / 2];
        const int word = step % 2 * 2;
        const u32 a[4] = {word_of(low, word), word_of(other, word), word_of(low, word + 1), word_of(other, word + 1)};
        multiply_add(score, a, q.word[step][0], q.word[step][1]);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float x = score[i] * p.scale;
#if CAPPED
        x = p.cap * tanhf(x / p.cap);
#endif
        score[i] = at + g + i / 2 * 8 < to ? x : LOWEST;
    }
    u32 low_part[2], high_part[2];
    float weight[4];
#pragma unroll
    for (int head = 0; head < 2; head++) {
        float most = fmaxf(score[head], score[2 + head]);
#pragma unroll
        for (int d = 4; d < 32; d *= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, d));
        most = fmaxf(most, tally->largest[head]);
        const float before = exp2f((tally->largest[head] - most) * LOG2_E);
        weight[head] = exp2f((score[head] - most) * LOG2_E), weight[2 + head] = exp2f((score[2 + head] - most) * LOG2_E);
        tally->total[head] = tally->total[head] * before + weight[head] + weight[2 + head];
        tally->largest[head] = most;
#pragma unroll
        for (int j = 0; j < 8; j++) tally->sum[j][head] *= before, tally->sum[j][2 + head] *= before;
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const float x = weight[2 * half], y = weight[2 * half + 1];
        high_part[half] = pair_of(x, y);
        low_part[half] = pair_of(x - from_16(high_part[half] & 0xffff), y - from_16(high_part[half] >> 16));
        weights[0][half] = turned(high_part[half]), weights[1][half] = turned(low_part[half]);
    }
}

static __device__ __forceinline__ void add_values(const Values &v, const u32 (*weights)[2], Tally *tally) {
#pragma unroll
    for (int j = 0; j < 8; j++) {
        const u32 selector = j % 2 ? 0x7632 : 0x5410;
        u32 a[4] = {};
#pragma unroll
        for (int half = 0; half < HALVES; half++) {
            a[half] = bytes_of(word_of(v.piece[0][half], j / 2), word_of(v.piece[1][half], j / 2), selector);
            a[2 + half] = bytes_of(word_of(v.piece[2][half], j / 2), word_of(v.piece[3][half], j / 2), selector);
        }
        multiply_add(tally->sum[j], a, weights[0][0], weights[0][1]);
        multiply_add(tally->sum[j], a, weights[1][0], weights[1][1]);
    }
}

// What all warps of a block have gathered, over one largest score: sums of each warp to ``sums``, the block's largest and total.
static __device__ __forceinline__ void join(const Tally &tally, float (*largest_of)[8], float (*total_of)[8], float (*sums)[GROUP][D],
                                            float *largest, float *total) {
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int head = 0; head < 2; head++) {
        float all = tally.total[head];
#pragma unroll
        for (int d = 4; d < 32; d *= 2) all += __shfl_xor_sync(0xffffffffu, all, d);
        if (g == 0) largest_of[warp][2 * t + head] = tally.largest[head], total_of[warp][2 * t + head] = all;
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int head = 2 * t + i;
        if (head >= GROUP) break;
        float most = LOWEST, all = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; w++) most = fmaxf(most, largest_of[w][head]);
#pragma unroll
        for (int w = 0; w < WARPS; w++)
            if (total_of[w][head] != 0.0f) all += total_of[w][head] * exp2f((largest_of[w][head] - most) * LOG2_E);
        if (warp == 0 && g == 0) largest[head] = most, total[head] = all;
        const float factor = tally.total[i] == 0.0f && tally.largest[i] == LOWEST ? 0.0f : exp2f((tally.largest[i] - most) * LOG2_E);
#pragma unroll
        for (int j = 0; j < 8; j++) {
            sums[warp][head][g * 8 + j] = tally.sum[j][i] * factor;
            if (HALVES > 1 && 64 + g * 8 < D) sums[warp][head][64 + g * 8 + j] = tally.sum[j][2 + i] * factor;
        }
    }
}
