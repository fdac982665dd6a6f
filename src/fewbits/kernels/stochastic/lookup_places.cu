// A row of a in a slice: read, quantised where the block makes its own codes, and its places in the tables.
// Part of lookup.cu, with its macros and types.

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
