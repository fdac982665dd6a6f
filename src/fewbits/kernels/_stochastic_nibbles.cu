// Products of prepared stochastic operands with many rows, counts looked up 4 bits at a time; see stochastic_codes.py
// and, for what this has in common with it, _stochastic_many.cu.
//
// A stream's count is close to a straight line in the weight, so of each (mask, code of a) two slopes and 4 bits say
// it all:
//
//     T(|w|) = g (floor(|w| / 2) + 1/2) + h (floor(|w| / 16) + 1/2) + v(|w|) - 15/2,       0 <= v <= 15
//
// with whole g and h whose sum is odd. Weights are in ones' complement, u = w or ~|w|: floor(u / 2^k) + 1/2 changes
// its sign with w, so a negative count is the same with 15 - v, which are v's inverted bits. Sums are in sixteenths:
// 16 (floor(u / 16) + 1/2) is u's byte with its low half set to 8, 2 (floor(u / 2) + 1/2) the byte with its lowest bit
// set, and the coefficients h and 8 g belong to them. One 8-bit matrix product adds both for 16 dimensions.
//
// A block serves 32 rows of a and up to 8 TILES outputs a warp. For 16 inner dimensions (a slice) shared memory holds
// v of all rows for each of 128 magnitudes: 16 bytes, of 2 rows each, read by one load. A quarter of a warp reads at
// once; its 8 lanes own 8 dimensions, each 4 banks, so they never meet. The other 8 dimensions are a second plane.
//
// The bytes found for 2 outputs, with either half masked, are the first operand of 8-bit matrix products whose second,
// a constant, sends each row's byte to its own column and adds over the 4 lanes that look up one output:
//
//     rows l / 4 and l / 4 + 8 of D, for lane l's outputs of tiles t and t + 1:       8 rows of a (an octet)
//
// Compiled at run time with TILES (a multiple of 4), THREADS, KEEP (1: y stays in shared memory until its last chunk)
// and ARRIVALS (places for rows of tables on their way: with 2 one barrier a slice is enough) defined.

typedef unsigned int u32;
typedef unsigned char u8;
typedef signed char s8;
typedef long long i64;
typedef unsigned long long u64;

#define LANES 32
#define WARPS (THREADS / LANES)
#define ROWS 32
#define SLICE 16
#define PLANE (128 * LANES * 4)              // bytes: 16 for each magnitude and 8 dimensions
#define TABLE (2 * PLANE)
#define PLACES (ROWS * SLICE)                // rows of tables of a slice, 64 bytes each
#define ARRIVED (2 * TABLE)                  // where they are, after both tables
#define KEPT (ARRIVED + ARRIVALS * PLACES * 64)
#define UNITS ((16 + WARPS - 1) / WARPS)     // parts of a table that a warp builds: 8 dimensions, 16 codes
#define FETCHES ((PLACES + THREADS - 1) / THREADS)
#define GROUPS (TILES / 4)
#define START (-120 * SLICE)                 // of a slice, in sixteenths

struct Product {
    const s8 *qa;          // (B, N, D)
    const float *sa;       // (B, N, C)
    const s8 *qb;          // (B or 1, M, D)
    const float *sb;       // (B or 1, C, M)
    const u8 *levels;      // (B or 1, N or 1, C or 1), or null
    const u8 *tables;      // (levels, masks, 256, 64): v by codes of a, 16 magnitudes in 8 bytes
    const s8 *slopes;      // (levels, masks, 256, 2): 8 g, h
    const u8 *masks;       // (dimensions of a chunk,): which mask
    const float *factors;  // (levels,): Q^2 / L
    u32 *weights;          // (B or 1, slices, quads, 32 lanes, 4 tiles): 4 codes each
    u32 *places;           // (B, row groups, slices, 512): rows of the tables, see pack_a
    u32 *linear;           // (B, row groups, slices, 32 lanes, 4 octets, 2): 8 g and h of 4 dimensions
    float *y;              // (B, N, M)
    int N, M, D, C;
    int chunk;             // inner dimensions of a chunk
    int per_chunk;         // slices of a chunk
    int num_masks;
    int shared_b;          // 1: b has one entry for all of the batch
    int level_b, level_n, level_c;  // strides of levels; 0 broadcasts
    int quads;             // of tiles, 32 outputs each: of whole blocks
};

static __device__ __forceinline__ int level_of(const Product &p, int b, int n, int c) {
    return p.levels ? p.levels[(i64)b * p.level_b + (i64)n * p.level_n + (i64)c * p.level_c] : 0;
}

// How many inner dimensions a slice has, and which is its first.
static __device__ __forceinline__ int length_of(const Product &p, int s, i64 *first) {
    const int c = s / p.per_chunk, offset = (s - c * p.per_chunk) * SLICE;
    *first = (i64)c * p.chunk + offset;
    int left = p.chunk - offset;
    if (p.D - *first < left) left = (int)(p.D - *first);
    return left < SLICE ? left : SLICE;
}

// Thread (slice, lane) of a block: the words of 4 tiles, in ones' complement.
extern "C" __global__ void __launch_bounds__(256) stochastic_pack_b(const Product p) {
    const int lane = threadIdx.x % LANES, s = blockIdx.x * 8 + threadIdx.x / LANES;
    const int quad = blockIdx.y, b = blockIdx.z, slices = p.per_chunk * p.C;
    if (s >= slices) return;
    i64 first;
    const int length = length_of(p, s, &first), at = 4 * (lane % 4);
    u32 word[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int m = 32 * quad + 4 * (lane / 4) + i;
        word[i] = 0;
        if (m >= p.M) continue;
        const s8 *codes = p.qb + ((i64)b * p.M + m) * p.D + first + at;
        if (at + 4 <= length && (i64)codes % 4 == 0) {
            word[i] = *(const u32 *)codes;
        } else {
            for (int j = 0; j < 4 && at + j < length; j++) word[i] |= (u32)(codes[j] & 255) << (8 * j);
        }
        word[i] -= word[i] >> 7 & 0x01010101u;
    }
    ((uint4 *)p.weights)[(((i64)b * slices + s) * p.quads + quad) * LANES + lane] =
        uint4{word[0], word[1], word[2], word[3]};
}

// Thread (row, dimension) of half a slice's rows.
extern "C" __global__ void __launch_bounds__(256) stochastic_pack_a(const Product p) {
    const int i = threadIdx.x % SLICE, row = threadIdx.x / SLICE + blockIdx.x % 2 * 16, s = blockIdx.x / 2;
    const int b = blockIdx.z, slices = p.per_chunk * p.C, n = blockIdx.y * ROWS + row;
    i64 first;
    const int length = length_of(p, s, &first), c = s / p.per_chunk, offset = (s - c * p.per_chunk) * SLICE;
    const int plane = i / 2 % 2, owner = i / 4 + i % 2 * 4;
    const int word = row / 4 % 4, nth = row / 16 * 4 + row % 4;  // of a word's 8 rows
    const i64 block = ((i64)b * gridDim.y + blockIdx.y) * slices + s;
    int code = 0;
    if (n < p.N && i < length) code = p.qa[((i64)b * p.N + n) * p.D + first + i];
    u32 place = 0;  // all tables' first rows are alike
    if (code) place = ((u32)level_of(p, b, n, c) * p.num_masks + p.masks[offset + i]) * 256 + (code & 255);
    p.places[block * PLACES + (plane * 8 + nth) * LANES + owner * 4 + word] = place;
    s8 *linear = (s8 *)(p.linear + block * 256) + (row % 8 * 4 + i / 4) * 32 + row / 8 * 8 + i % 4;
    linear[0] = p.slopes[place * 2];
    linear[4] = p.slopes[place * 2 + 1];
}

#ifndef EMULATED
static __device__ __forceinline__ void copy_16(u32 to, const void *from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

static __device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Of bytes without signs, then with them.
static __device__ __forceinline__ void mma_u8(int *d, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k32.row.col.s32.u8.u8.s32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

static __device__ __forceinline__ void mma_s8(int *d, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

static __device__ __forceinline__ uint4 load_16(u32 at) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at));
    return v;
}

// With a selector's high bit set a byte's sign, eight times.
static __device__ __forceinline__ u32 bytes_of(u32 x, u32 selector) {
    u32 v;
    asm("prmt.b32 %0, %1, %1, %2;" : "=r"(v) : "r"(x), "r"(selector));
    return v;
}

// (x ^ sign) & mask in one instruction, also where another mask of the same is wanted.
static __device__ __forceinline__ u32 signed_part(u32 x, u32 sign, u32 mask) {
    u32 v;
    asm("lop3.b32 %0, %1, %2, %3, 0x28;" : "=r"(v) : "r"(x), "r"(sign), "r"(mask));
    return v;
}

extern __shared__ u32 shared[];
#endif

// Where in its tables a thread's rows of a slice are: of a warp's 32 rows one each.
static __device__ __forceinline__ void places_of(const u32 *places, u32 *place) {
#pragma unroll
    for (int i = 0; i < FETCHES; i++) {
        const int row = threadIdx.x + i * THREADS;
        place[i] = PLACES % THREADS == 0 || row < PLACES ? __ldg(places + row) : 0;
    }
}

// Start the copies of a slice's rows: 4 threads a row, neighbours' parts in other banks.
static __device__ __forceinline__ void fetch(const Product &p, const u32 *place, u32 arrived) {
    const int lane = threadIdx.x % LANES, part = lane % 4;
#pragma unroll
    for (int i = 0; i < FETCHES; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const int nth = lane / 4 + 8 * j, row = threadIdx.x / LANES * LANES + i * THREADS + nth;
            const u32 from = __shfl_sync(0xffffffffu, place[i], nth);
            if (PLACES % THREADS == 0 || row < PLACES)
                copy_16(arrived + row * 64 + (part ^ row / 2 % 4) * 16, p.tables + (u64)from * 64 + part * 16);
        }
}

static __device__ __forceinline__ void store_turned(u32 *to, u32 a, u32 b, u32 c, u32 d) {
    const u32 low01 = __byte_perm(a, b, 0x5140), high01 = __byte_perm(a, b, 0x7362);
    const u32 low23 = __byte_perm(c, d, 0x5140), high23 = __byte_perm(c, d, 0x7362);
    to[0 * LANES] = __byte_perm(low01, low23, 0x5410);
    to[1 * LANES] = __byte_perm(low01, low23, 0x7632);
    to[2 * LANES] = __byte_perm(high01, high23, 0x5410);
    to[3 * LANES] = __byte_perm(high01, high23, 0x7632);
}

// A table of the rows that have arrived. A warp has one plane and 16 codes, a lane one dimension (its 4 banks) and
// 8 rows (one of the banks).
static __device__ __forceinline__ void build(u32 *table, const u8 *arrived) {
    const int lane = threadIdx.x % LANES;
#pragma unroll
    for (int i = 0; i < UNITS; i++) {
        const int unit = threadIdx.x / LANES + i * WARPS;
        if (16 % WARPS && unit >= 16) break;
        const int plane = unit % 2, part = unit / 2 ^ lane / 8 % 2;
        const u8 *from = arrived + (plane * 8 * LANES + lane) * 64 + (part / 2 ^ lane / 2 % 4) * 16 + part % 2 * 8;
        u32 v[8][2];
#pragma unroll
        for (int k = 0; k < 8; k++) {
            const uint2 word = *(const uint2 *)(from + k * LANES * 64);
            v[k][0] = word.x, v[k][1] = word.y;
        }
        u32 *to = table + plane * (PLANE / 4) + 16 * part * LANES + lane;
#pragma unroll
        for (int e = 0; e < 2; e++) {
            u32 first[4], second[4];  // a byte of 2 rows for each code
#pragma unroll
            for (int k = 0; k < 4; k++) {
                first[k] = v[k][e] & 0x0f0f0f0fu | v[k + 4][e] << 4 & 0xf0f0f0f0u;
                second[k] = v[k][e] >> 4 & 0x0f0f0f0fu | v[k + 4][e] & 0xf0f0f0f0u;
            }
            store_turned(to + 8 * e * LANES, first[0], first[1], first[2], first[3]);
            store_turned(to + (8 * e + 4) * LANES, second[0], second[1], second[2], second[3]);
        }
    }
}

// What 2 outputs' codes find, and these codes' signs in all bits.
struct Found {
    uint4 x[2];
    u32 sign[2];
};

// Values m ... m + 3 of a row of p.M, 0 beyond it; and the other way round.
static __device__ __forceinline__ void load_4(const Product &p, const float *row, int m, float *value) {
    if (p.M % 4 == 0 && m < p.M) {
        const float4 v = *(const float4 *)(row + m);
        value[0] = v.x, value[1] = v.y, value[2] = v.z, value[3] = v.w;
    } else {
#pragma unroll
        for (int t = 0; t < 4; t++) value[t] = m + t < p.M ? row[m + t] : 0.0f;
    }
}

static __device__ __forceinline__ void store_4(const Product &p, float *row, int m, const float *value) {
    if (p.M % 4 == 0 && m < p.M) {
        *(float4 *)(row + m) = float4{value[0], value[1], value[2], value[3]};
    } else {
#pragma unroll
        for (int t = 0; t < 4; t++)
            if (m + t < p.M) row[m + t] = value[t];
    }
}

// The terms of a chunk for one warp's outputs, added to y.
static __device__ __forceinline__ void add_chunk(const Product &p, int c, int b, int n, int tile, int (*acc)[4][4]) {
    const int lane = threadIdx.x % LANES, m = 8 * tile + lane / 4 * 4;
    float4 *kept = (float4 *)(shared + KEPT / 4) + threadIdx.x;  // a thread's own
    float scale_b[GROUPS][4];
#pragma unroll
    for (int g = 0; g < GROUPS; g++)
        load_4(p, p.sb + ((i64)(p.shared_b ? 0 : b) * p.C + c) * p.M, m + 32 * g, scale_b[g]);
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const int o = i / 2, r = i % 2, row = n + 8 * o + 2 * (lane % 4) + r;
        if (row >= p.N) continue;
        const float scale = p.sa[((i64)b * p.N + row) * p.C + c];
        const float factor = p.factors[level_of(p, b, row, c)] * 0.0625f;  // exact, and so is the sum as sixteenths
        float *y = p.y + ((i64)b * p.N + row) * p.M;
        float sum[GROUPS][4];
#pragma unroll
        for (int g = 0; g < GROUPS; g++) {  // all of a row's loads, then its sums
            sum[g][0] = sum[g][1] = sum[g][2] = sum[g][3] = 0.0f;
            if (c && KEEP) {
                const float4 v = kept[(i * GROUPS + g) * THREADS];
                sum[g][0] = v.x, sum[g][1] = v.y, sum[g][2] = v.z, sum[g][3] = v.w;
            } else if (c) {
                load_4(p, y, m + 32 * g, sum[g]);
            }
        }
#pragma unroll
        for (int g = 0; g < GROUPS; g++) {
#pragma unroll
            for (int t = 0; t < 4; t++) {
                const float raw = __fmul_rn((float)acc[2 * g + t / 2][o][r + t % 2 * 2], factor);
                sum[g][t] = __fadd_rn(sum[g][t], __fmul_rn(raw, __fmul_rn(scale, scale_b[g][t])));
            }
            if (KEEP && c + 1 < p.C)
                kept[(i * GROUPS + g) * THREADS] = float4{sum[g][0], sum[g][1], sum[g][2], sum[g][3]};
            else
                store_4(p, y, m + 32 * g, sum[g]);
        }
    }
}

static __device__ __forceinline__ void clear(int (*acc)[4][4], int start) {
#pragma unroll
    for (int i = 0; i < TILES * 8; i++) acc[i / 16][i / 4 % 4][i % 4] = start;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) stochastic_nibbles(const Product p) {
    const int lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;
    const int b = blockIdx.z, slices = p.per_chunk * p.C;
    const int tile = (blockIdx.y * WARPS + warp) * TILES;
    // Step t of a lane looks up byte t of its word, with every second output byte t ^ 1: then 8 lanes have 8 owners.
    const int odd = lane / 4 % 2;
    const u32 base = (u32)__cvta_generic_to_shared(shared);
    const u32 own[2] = {base + 16 * (lane % 4) + 64 * odd, base + 16 * (lane % 4) + 64 * (1 - odd)};
    const u32 swap = odd ? 0x2301 : 0x3210;
    const int column = lane / 4;
    const u32 ones0 = column < 4 ? 1u << (8 * column) : 0, ones1 = column < 4 ? 0 : 1u << (8 * (column - 4));
    const i64 block = ((i64)b * gridDim.x + blockIdx.x) * slices;
    const uint4 *weights = (const uint4 *)p.weights +
                           ((i64)(p.shared_b ? 0 : b) * slices * p.quads + tile / 4) * LANES + lane;

    const int start = START * p.per_chunk;
    int acc[TILES / 2][4][4];  // of pairs of tiles and octets
    clear(acc, start);

    u32 place[FETCHES];
    places_of(p.places + block * PLACES, place);
    fetch(p, place, base + ARRIVED);
    if (slices > 1) places_of(p.places + (block + 1) * PLACES, place);
    uint4 next = __ldg(weights);
    wait_for_copies();
    __syncthreads();
    build(shared, (const u8 *)(shared + ARRIVED / 4));
    if (ARRIVALS == 2 && slices > 1) {
        fetch(p, place, base + ARRIVED + PLACES * 64);
        if (slices > 2) places_of(p.places + (block + 2) * PLACES, place);
        wait_for_copies();
    }
    __syncthreads();
    int c = 0, part = 0;
    for (int s = 0; s < slices; s++) {
        const bool more = s + 1 < slices;
        if (s + ARRIVALS < slices) {
            fetch(p, place, base + ARRIVED + (ARRIVALS == 2 ? s % 2 * (PLACES * 64) : 0));
            if (s + ARRIVALS + 1 < slices) places_of(p.places + (block + s + ARRIVALS + 1) * PLACES, place);
        }
        const uint4 *slopes = (const uint4 *)(p.linear + (block + s) * 256) + lane * 2;
        const uint4 slopes0 = __ldg(slopes), slopes1 = __ldg(slopes + 1);
        const u32 own0 = own[0] + s % 2 * TABLE, own1 = own[1] + s % 2 * TABLE;
        const uint4 *after = more ? weights + (i64)p.quads * LANES : weights;
        Found found[2];  // a step's sums are made while the next is looked up
#pragma unroll
        for (int g = 0; g < GROUPS; g++) {
            if (ARRIVALS == 1 && g == GROUPS - 1) {  // no later: who is done here first goes on to build
                wait_for_copies();
                __syncthreads();
            }
            const u32 w[4] = {next.x, next.y, next.z, next.w};
            next = __ldg(g + 1 < GROUPS ? weights + (g + 1) * LANES : after);
            if (ARRIVALS == 2 && g == 0 && more)
                build(shared + (s + 1) % 2 * (TABLE / 4), (const u8 *)(shared + (ARRIVED + (s + 1) % 2 * PLACES * 64) / 4));
#pragma unroll
            for (int i = 0; i < 9; i++) {  // steps of 2 pairs of tiles: look up i, add up i - 1
                if (i < 8) {
                    const int j = i % 4;
                    Found &f = found[i % 2];
#pragma unroll
                    for (int h = 0; h < 2; h++) {
                        const u32 turned = bytes_of(w[i / 4 * 2 + h], swap);
                        const u32 magnitudes = turned ^ bytes_of(turned, 0xba98);
                        f.x[h] = load_16(__dp4a(magnitudes, 128u << (8 * j), j % 2 ? own1 : own0) + j / 2 * PLANE);
                        f.sign[h] = bytes_of(turned, 0x8888 + 0x1111 * j);
                    }
                }
                if (i == 0) continue;
                const int pair = 2 * g + (i - 1) / 4;
                const Found &f = found[(i - 1) % 2];
                int (*d)[4] = acc[pair];
#pragma unroll
                for (int o = 0; o < 4; o++) {
                    const u32 mask = o < 2 ? 0x0f0f0f0fu : 0xf0f0f0f0u;
                    u32 first[2], second[2];
#pragma unroll
                    for (int h = 0; h < 2; h++) {
                        first[h] = signed_part(o % 2 ? f.x[h].z : f.x[h].x, f.sign[h], mask);
                        second[h] = signed_part(o % 2 ? f.x[h].w : f.x[h].y, f.sign[h], mask);
                    }
                    mma_u8(d[o], first[0], first[1], second[0], second[1], o < 2 ? ones0 << 4 : ones0,
                           o < 2 ? ones1 << 4 : ones1);
                }
                if (i % 4 == 0) {
                    const u32 w0 = w[i / 4 * 2 - 2], w1 = w[i / 4 * 2 - 1];
                    const u32 a0 = w0 | 0x01010101u, a1 = w1 | 0x01010101u;
                    const u32 a2 = w0 & 0xf0f0f0f0u | 0x08080808u, a3 = w1 & 0xf0f0f0f0u | 0x08080808u;
                    mma_s8(d[0], a0, a1, a2, a3, slopes0.x, slopes0.y);
                    mma_s8(d[1], a0, a1, a2, a3, slopes0.z, slopes0.w);
                    mma_s8(d[2], a0, a1, a2, a3, slopes1.x, slopes1.y);
                    mma_s8(d[3], a0, a1, a2, a3, slopes1.z, slopes1.w);
                }
            }
        }
        weights = after;
        if (++part == p.per_chunk) {
            add_chunk(p, c, b, blockIdx.x * ROWS, tile, acc);
            clear(acc, start);
            part = 0;
            c++;
        }
        if (ARRIVALS == 1 && more) {
            build(shared + (s + 1) % 2 * (TABLE / 4), (const u8 *)(shared + ARRIVED / 4));
            __syncthreads();
        }
        if (ARRIVALS == 2) {
            wait_for_copies();
            __syncthreads();
        }
    }
}
