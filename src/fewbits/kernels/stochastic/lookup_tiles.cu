// Tiles of weights: read, looked up in the table and counted. Part of lookup.cu, with its macros and types.

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
