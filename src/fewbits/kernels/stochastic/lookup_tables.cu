// The table of a slice in shared memory, and its slopes. Part of lookup.cu, with its macros and types.

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
