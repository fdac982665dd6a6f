// The walk of one warp over packed tokens, ROWS at a time: packed_attention.cu includes it and says which lane has what.
//
// What a tile of 16 tokens, 128 values and 4 bits costs a warp is about 210 instructions: 76 cut codes out of words, 18
// multiply. The rest is kept small: keys' scales multiply sums of products; values' scales multiply weights; what has been
// summed is rescaled only where a score is 2^SLACK above the largest one so far, as all lanes ask in one vote. Memory
// answers after more than a microsecond when all ask, so a warp asks for STAGES - 1 tiles ahead, copied to shared memory
// past its registers: 100 KB are under way to a multiprocessor. A lane reads back what itself has copied, but for scales.

#define NT ((HEADS + 7) / 8)
#define HALVES (KEY_KIND == 4 && VALUE_KIND == 4 && D <= 128 ? 2 : 1)
#define ROWS (16 * HALVES)
#define STEP (WARPS * ROWS)
#define PRODUCTS (D / 16)
#define KEY_BYTES (KEY_KIND == 4 ? D / 2 : D)
#define VALUE_BYTES (VALUE_KIND == 4 ? D / 2 : D)
#define KEY_WORDS (KEY_BYTES / 16)      // of a lane: a quarter of a head
#define VALUE_WORDS (VALUE_BYTES / 32)  // an eighth
#define SCALE_WORDS ((SCALES + 1) / 2)
#define SMALLEST 1e-8f
#define SLACK 4.0f       // powers of two
#define HEADROOM 11.0f   // weights times scales stay below 2^(HEADROOM + SLACK): float16's largest number is 2^16

#define KEYS_SIZE (HALVES * 2 * KEY_WORDS * 128)       // bytes of a tile in shared memory
#define VALUES_SIZE (HALVES * 4 * VALUE_WORDS * 128)
#define SCALES_SIZE ((ROWS * SCALES * 2 + (SCALES % 2 ? 4 : 0) + 15) / 16 * 16)
#define STAGE_SIZE (KEYS_SIZE + VALUES_SIZE + 2 * SCALES_SIZE)

// Where a lane's share of a tile's first token of its own lies (token g, for values token 2 c), and the tile's scales. Found
// anew for each tile from its first token's number among all tokens of all heads: pointers would take registers.
struct Rows {
    const u8 *key, *value;
    const u16 *key_scale, *value_scale;
};
static __device__ __forceinline__ Rows rows_at(const Arguments &p, u32 token) {
    const u32 lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
    return {p.key_codes + (u64)(token * 4 + lane) * (KEY_BYTES / 4), p.value_codes + (u64)((token + 2 * c) * 8 + g) * (VALUE_BYTES / 8),
            p.key_scales + (u64)token * SCALES, p.value_scales + (u64)token * SCALES};
}

// N words of a lane, side by side in global memory; in shared memory lanes lie side by side.
template <int N> struct Piece {
    static constexpr int bytes = N % 4 == 0 ? 16 : N % 2 == 0 ? 8 : 4, count = 4 * N / bytes;
};
template <int N> static __device__ __forceinline__ void ask_words(u32 to, const u8 *from, bool there) {
    typedef Piece<N> P;
#pragma unroll
    for (int j = 0; j < P::count; j++) copy<P::bytes, (P::count > 1)>(to + (j * 32 + threadIdx.x % 32) * P::bytes, from + j * P::bytes, there);
}
template <int N> static __device__ __forceinline__ void read_words(u32 *to, u32 from) {
    typedef Piece<N> P;
#pragma unroll
    for (int j = 0; j < P::count; j++) read_shared<P::bytes / 4>(to + j * P::bytes / 4, from + (j * 32 + threadIdx.x % 32) * P::bytes);
}

// Words that hold the scales of ``left`` tokens, which may begin in the middle of one.
static __device__ __forceinline__ void ask_scales(u32 to, const u16 *from, int left) {
    const int skipped = SCALES % 2 ? (int)((u64)from / 2 % 2) : 0, tokens = left < ROWS ? left : ROWS;
    const int words = (skipped + tokens * SCALES + 1) / 2;
#pragma unroll
    for (int i = 0; i < (ROWS * SCALES / 2 + SCALES % 2 + 31) / 32; i++) {
        const int word = i * 32 + threadIdx.x % 32;
        if (word < words) copy<4>(to + 4 * word, (const u8 *)(from - skipped) + 4 * word, true);
    }
}
static __device__ __forceinline__ float scale_at(u32 scales, const u16 *from, int token, int j) {
    const int skipped = SCALES % 2 ? (int)((u64)from / 2 % 2) : 0;
    return float_of_half(read_shared_16(scales + 2 * (skipped + token * SCALES + j)));
}

// Asks for the tile at ``rows``; zeros are what codes beyond ``left`` tokens become.
template <bool WHOLE> static __device__ __forceinline__ void ask_tile(u32 to, const Rows &rows, int left) {
    const int lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
#pragma unroll
    for (int half = 0; half < HALVES; half++) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int row = half * 16 + i * 8;
            ask_words<KEY_WORDS>(to + (half * 2 + i) * KEY_WORDS * 128, rows.key + row * KEY_BYTES, WHOLE || row + g < left);
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int row = half * 16 + i / 2 * 8 + i % 2;
            ask_words<VALUE_WORDS>(to + KEYS_SIZE + (half * 4 + i) * VALUE_WORDS * 128, rows.value + row * VALUE_BYTES,
                                   WHOLE || row + 2 * c < left);
        }
    }
    ask_scales(to + KEYS_SIZE + VALUES_SIZE, rows.key_scale, WHOLE ? ROWS : left);
    ask_scales(to + KEYS_SIZE + VALUES_SIZE + SCALES_SIZE, rows.value_scale, WHOLE ? ROWS : left);
}
// Asks for a tile, if there is one, as a group of copies of its own.
static __device__ __forceinline__ void ask_next(u32 to, const Arguments &p, u32 token, int left) {
    if (left >= ROWS)
        ask_tile<true>(to, rows_at(p, token), left);
    else if (left > 0)
        ask_tile<false>(to, rows_at(p, token), left);
    commit_copies();
}

// The first STAGES - 1 tiles of a warp.
static __device__ __forceinline__ void begin_walk(u32 memory, const Arguments &p, u32 token, int left) {
#pragma unroll 1
    for (int i = 0; i < STAGES - 1; i++) ask_next(memory + i * STAGE_SIZE, p, token + i * STEP, left - i * STEP);
}

// The query as the tensor cores' second operand, divided by its largest number; what its scores are multiplied by; and
// what the codes' offsets add to a score before that.
struct Query {
    u32 of[NT][PRODUCTS][2];
    float factor[NT][2], offset[NT][SCALES][2];
};

// What makes a score one in powers of two; where scores have a cap, they are already.
static __device__ __forceinline__ float factor_of(const Query &query, int n, int e) { return CAPPED ? 1.0f : query.factor[n][e]; }

// One head by one warp: its words as lanes will want them, side by side. Pitches between lanes keep banks apart.
#define QUERY_PITCH (2 * PRODUCTS + 4)
static __device__ __forceinline__ void order_query(const float *q, u32 (*words)[QUERY_PITCH], float *largest) {
    const int lane = threadIdx.x % 32, size = D / SCALES;
    float most = 0.0f;
#pragma unroll
    for (int d = lane; d < D; d += 32) most = fmaxf(most, fabsf(q[d]));
    most = largest_of_warp(most);
    if (lane == 0) *largest = most;
    const float inverse = most > 0.0f ? 1.0f / most : 0.0f;
#pragma unroll
    for (int i = lane; i < D / 2; i += 32) {
        const int c = i / (2 * PRODUCTS), pair = i % (2 * PRODUCTS);
        float x[2];
#pragma unroll
        for (int second = 0; second < 2; second++) {
            const int place = place_in_key<KEY_KIND>(pair, second);
            x[second] = q[place / (size / 4) * size + c * (size / 4) + place % (size / 4)] * inverse;
        }
        const float times = pair % 2 ? 1.0f / Codes<KEY_KIND>::odd_times : 1.0f;
        words[c][pair] = half_pair(x[0] * times, x[1] * times);
    }
}

// The same for keys in 16 bits, neither divided nor turned.
static __device__ __forceinline__ void order_plain(const float *q, u32 (*words)[QUERY_PITCH]) {
#pragma unroll
    for (int i = threadIdx.x % 32; i < D / 2; i += 32) {
        const int c = i / (D / 8), word = i % (D / 8), d = word / 4 * 32 + c * 8 + word % 4 * 2;
        words[c][word] = (u32)to_16(q[d]) | (u32)to_16(q[d + 1]) << 16;
    }
    __syncwarp();
}

static __device__ __forceinline__ void load_query(Query &query, const Arguments &p, const u32 (*words)[4][QUERY_PITCH], const float *largest) {
    const int lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
#pragma unroll
    for (int n = 0; n < NT; n++) {
        const int own = n * 8 + g;
#pragma unroll
        for (int k = 0; k < PRODUCTS; k += 2) {
            const uint4 x = own < HEADS ? *(const uint4 *)&words[own][c][2 * k] : uint4{0, 0, 0, 0};
            query.of[n][k][0] = x.x, query.of[n][k][1] = x.y, query.of[n][k + 1][0] = x.z, query.of[n][k + 1][1] = x.w;
        }
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const int of = n * 8 + 2 * c + e;
            const float most = of < HEADS ? fmaxf(largest[of], 1e-30f) : 1.0f;  // never 0: minus infinity stays what it is
            query.factor[n][e] = most * p.scale * Codes<KEY_KIND>::unit * (CAPPED ? 1.0f : LOG2E);
        }
#pragma unroll
        for (int j = 0; j < SCALES; j++) {
            const u32 even = Codes<KEY_KIND>::zero, odd = Codes<KEY_KIND>::odd_zero, zeros[4] = {even, even, odd, odd};
            float product[4] = {};
            if (Codes<KEY_KIND>::shifted)
#pragma unroll
                for (int m = 0; m < PRODUCTS / SCALES; m++) {
                    const int k = j * (PRODUCTS / SCALES) + m;
                    multiply_add(product, zeros, query.of[n][k][0], query.of[n][k][1], product);
                }
            query.offset[n][j][0] = -product[0], query.offset[n][j][1] = -product[1];
        }
    }
}

// Sums of a warp: queries 2 c and 2 c + 1 of each eight; numbers 2 q and 2 q + 1 of lane g's eighth of a head. ``most``: what
// is subtracted from scores before they become powers of two; ``limit``: what is then too large.
struct Sums {
    float of[NT][PRODUCTS][4], offset[NT][SCALES][4], most[NT][2], total[NT][2], largest, limit;
};

static __device__ __forceinline__ void scores_of(float (&score)[NT][HALVES][4], u32 tile, const u16 *scales, const Query &query) {
    const int g = threadIdx.x % 32 / 4;
#pragma unroll
    for (int half = 0; half < HALVES; half++) {
        u32 key[2][KEY_WORDS];
#pragma unroll
        for (int i = 0; i < 2; i++) read_words<KEY_WORDS>(key[i], tile + (half * 2 + i) * KEY_WORDS * 128);
#pragma unroll
        for (int j = 0; j < SCALES; j++) {
            float product[NT][4];
#pragma unroll
            for (int m = 0; m < PRODUCTS / SCALES; m++) {
                const int k = j * (PRODUCTS / SCALES) + m;
                u32 a[4];
#pragma unroll
                for (int i = 0; i < 4; i++) a[i] = key_pair<KEY_KIND>(key[i % 2], 2 * k + i / 2);
#pragma unroll
                for (int n = 0; n < NT; n++) {
                    const float *of = query.offset[n][j], begin[4] = {of[0], of[1], of[0], of[1]};
                    multiply_add(product[n], a, query.of[n][k][0], query.of[n][k][1], m ? product[n] : begin);
                }
            }
#pragma unroll
            for (int row = 0; row < 2; row++) {
                const float scale = scale_at(tile + KEYS_SIZE + VALUES_SIZE, scales, half * 16 + row * 8 + g, j);
#pragma unroll
                for (int n = 0; n < NT; n++)
#pragma unroll
                    for (int e = 2 * row; e < 2 * row + 2; e++)
                        score[n][half][e] = j ? score[n][half][e] + product[n][e] * scale : product[n][e] * scale;
            }
        }
    }
}

// Scales of the values of a lane's tokens.
struct ValueScales {
    float of[HALVES][2][SCALES];
};
static __device__ __forceinline__ float largest_in(const ValueScales &scales, float largest) {
#pragma unroll
    for (int i = 0; i < HALVES * 2 * SCALES; i++) largest = fmaxf(largest, fabsf((&scales.of[0][0][0])[i]));
    return largest;
}

// A larger score or scale than before: what was summed is rescaled, so that float16 holds weights times scales of values.
static __device__ __forceinline__ void rescale(Sums &s, const float (&score)[NT][HALVES][4], const Query &query, const ValueScales &scales) {
    float largest = largest_in(scales, s.largest);
#pragma unroll
    for (int d = 4; d < 32; d *= 2) largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, d));
    const float before = s.limit - SLACK, room = HEADROOM - log2f(largest);
    s.largest = largest, s.limit = room + SLACK;
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            float most = LOWEST;
#pragma unroll
            for (int half = 0; half < HALVES; half++)
                most = fmaxf(most, fmaxf(score[n][half][e], score[n][half][e + 2]) * factor_of(query, n, e));
#pragma unroll
            for (int d = 4; d < 32; d *= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, d));
            most = fmaxf(most, s.most[n][e] + before) - room;
            const float shrink = power_of_two(s.most[n][e] - most);
            s.most[n][e] = most, s.total[n][e] *= shrink;
#pragma unroll
            for (int q = 0; q < PRODUCTS; q++) s.of[n][q][e] *= shrink, s.of[n][q][e + 2] *= shrink;
#pragma unroll
            for (int j = 0; j < SCALES; j++) s.offset[n][j][e] *= shrink, s.offset[n][j][e + 2] *= shrink;
        }
}

// Scores become weights; those of tokens from ``left`` on are nothing.
static __device__ __forceinline__ void weights_of(float (&score)[NT][HALVES][4], const Arguments &p, Sums &s, const Query &query,
                                                  ValueScales &scales, int left) {
    const int g = threadIdx.x % 32 / 4;
#if CAPPED
#pragma unroll
    for (int i = 0; i < NT * HALVES * 4; i++) {
        float &x = (&score[0][0][0])[i];
        x = score_of(p, x * query.factor[i / (HALVES * 4)][i % 2]);
    }
#endif
    if (left < ROWS) {
#pragma unroll
        for (int i = 0; i < NT * HALVES * 4; i++)
            if (i / 4 % HALVES * 16 + i % 4 / 2 * 8 + g >= left) (&score[0][0][0])[i] = LOWEST;
#pragma unroll
        for (int i = 0; i < HALVES * 2 * SCALES; i++)
            if (i / SCALES * 8 + g >= left) (&scales.of[0][0][0])[i] = 0.0f;
    }
    float top = LOWEST;
#pragma unroll
    for (int i = 0; i < NT * HALVES * 4; i++) {
        const int n = i / (HALVES * 4), e = i % 2;
        top = fmaxf(top, __fmaf_rn((&score[0][0][0])[i], factor_of(query, n, e), -s.most[n][e]));
    }
    if (any_of_warp(top > s.limit || largest_in(scales, 0.0f) > s.largest)) rescale(s, score, query, scales);
#pragma unroll
    for (int i = 0; i < NT * HALVES * 4; i++) {
        const int n = i / (HALVES * 4), e = i % 2;
        float &x = (&score[0][0][0])[i];
        s.total[n][e] += x = power_of_two(__fmaf_rn(x, factor_of(query, n, e), -s.most[n][e]));
    }
}

static __device__ __forceinline__ void add_values(Sums &s, const float (&weight)[NT][HALVES][4], u32 tile, const ValueScales &scales) {
#pragma unroll
    for (int half = 0; half < HALVES; half++) {
        u32 value[4][VALUE_WORDS];
#pragma unroll
        for (int i = 0; i < 4; i++) read_words<VALUE_WORDS>(value[i], tile + KEYS_SIZE + (half * 4 + i) * VALUE_WORDS * 128);
#pragma unroll
        for (int j = 0; j < SCALES; j++) {
            const float low = scales.of[half][0][j], high = scales.of[half][1][j];
            u32 b[NT][2];
#pragma unroll
            for (int n = 0; n < NT; n++) {
                b[n][0] = turned(half_pair(weight[n][half][0] * low, weight[n][half][1] * low));
                b[n][1] = turned(half_pair(weight[n][half][2] * high, weight[n][half][3] * high));
                const u32 even = Codes<VALUE_KIND>::zero, odd = Codes<VALUE_KIND>::odd_zero, zeros[4] = {even, odd, even, odd};
                if (Codes<VALUE_KIND>::shifted) multiply_add(s.offset[n][j], zeros, b[n][0], b[n][1], s.offset[n][j]);
            }
#pragma unroll
            for (int i = 0; i < PRODUCTS / SCALES; i++) {
                const int q = j * (PRODUCTS / SCALES) + i;
                u32 a[4];
                value_pairs<VALUE_KIND>(a[0], a[1], value[0], value[1], q);
                value_pairs<VALUE_KIND>(a[2], a[3], value[2], value[3], q);
#pragma unroll
                for (int n = 0; n < NT; n++) multiply_add(s.of[n][q], a, b[n][0], b[n][1], s.of[n][q]);
            }
        }
    }
}

// Sums of a warp lie as lanes have them, so that no two write to one bank: which value of a head stands at a place.
static __device__ __forceinline__ int value_at(int place) {
    const int size = D / SCALES, number = place / 8, g = place % 8;
    return number / (size / 8) * size + g * (size / 8) + number % (size / 8);
}
static __device__ __forceinline__ void store_sums(const Sums &sums, float (*to)[PITCH], float *most, float *all) {
    const int lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const int of = n * 8 + 2 * c + e;
            float total = sums.total[n][e];
#pragma unroll
            for (int d = 4; d < 32; d *= 2) total += __shfl_xor_sync(0xffffffffu, total, d);
            if (of >= HEADS) continue;
            if (g == 0) most[of] = sums.most[n][e], all[of] = total;
#pragma unroll
            for (int q = 0; q < PRODUCTS; q++)
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    const float x = sums.of[n][q][e + 2 * i] - sums.offset[n][q / (PRODUCTS / SCALES)][e + 2 * i];
                    to[of][(2 * q + i) * 8 + g] = x * (Codes<VALUE_KIND>::unit / (i ? Codes<VALUE_KIND>::odd_times : 1.0f));
                }
        }
}

// Over ``left`` tokens from this warp's first one on, of which it takes every WARPS-th tile. ``memory`` of the warp has, or
// is going to have, the first STAGES - 1 of them.
static __device__ __forceinline__ void walk(Sums &sums, u32 memory, const Arguments &p, u32 token, int left, const Query &query) {
    const int g = threadIdx.x % 32 / 4;
    sums = {};
    sums.largest = SMALLEST, sums.limit = 0.0f;
#pragma unroll
    for (int n = 0; n < NT; n++) sums.most[n][0] = sums.most[n][1] = LOWEST;
    u32 tile = memory, free = memory + (STAGES - 1) * STAGE_SIZE;
    for (; left > 0; left -= STEP) {
        float score[NT][HALVES][4];
        ValueScales scales;
        wait_copies<STAGES - 2>();
        __syncwarp();  // what other lanes have copied is there too, and nobody reads the tile before this any more
        ask_next(free, p, token + (STAGES - 1) * STEP, left - (STAGES - 1) * STEP);
        const Rows rows = rows_at(p, token);
        scores_of(score, tile, rows.key_scale, query);
#pragma unroll
        for (int i = 0; i < HALVES * 2 * SCALES; i++)
            (&scales.of[0][0][0])[i] = scale_at(tile + KEYS_SIZE + VALUES_SIZE + SCALES_SIZE, rows.value_scale, i / SCALES * 8 + g, i % SCALES);
        weights_of(score, p, sums, query, scales, left);
        add_values(sums, score, tile, scales);
        token += STEP;
        free = tile;
        tile += STAGE_SIZE;
        if (tile == memory + STAGES * STAGE_SIZE) tile = memory;
    }
}
