// A packed weight to a dense one, generated from a format's description (fewbits/formats/description.py); the macros below
// say what that file's fields say, and dequantize_described.py writes them.
//
// A thread makes eight neighbouring values of a row and writes them at once, 16 bytes of bfloat16. Eight values share one
// scale in every format, so a thread reads it once. Their codes lie in as many bytes as a code has bits where codes follow
// each other; in a block of bytes, each piece of them lies in eight neighbouring bytes (runs of 8 and more) or in one to
// four (runs of one). Bytes are read by the widest loads that their place allows. A block of threads makes ITEMS
// stretches of 256 threads, so that several loads are under way at once.
//
// Floor: the bytes of the weight read once, those of the dense one written once.

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;
typedef unsigned long long u64;
typedef long long i64;

#define THREADS 256
#define ITEMS 4
enum { WHOLE, FLOAT, TABLE, DIGIT, TRELLIS };                             // KIND
enum { FLOAT32, E8M0, E4M3, E4M3_DIVIDED, HALF, EXPONENT };               // STORED

struct Arguments {
    const u8 *codes;       // rows of `pitch` bytes
    const void *scales;    // beside the codes; rows of `scale_pitch`
    const signed char *zero_points;
    const float *whole;    // the tensor's scale
    void *out;             // rows of `stride` values
    int N, K, pitch, scale_pitch, stride;
    float table[16];
};

#ifndef EMULATED
static __device__ __forceinline__ u32 half_bits(float x) {
    u16 out;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(out) : "f"(x));
    return out;
}
#endif

struct Piece { int stop, at, run, count, step, bits, into, start, first; };
static __device__ constexpr Piece CODES[] = {CODE_PIECES};
static __device__ constexpr Piece SCALES[] = {SCALE_PIECES};
static __device__ constexpr Piece MINIMA[] = {MINIMUM_PIECES};

static __device__ __forceinline__ float float_of(u32 bits) { return __uint_as_float(bits); }

// A float16, subnormal numbers, infinities and NaN too: by a power of two, which is exact.
static __device__ __forceinline__ float of_half(u32 h) {
    const u32 size = h & 0x7fffu, sign = (h & 0x8000u) << 16;
    if (size >= 0x7c00u) return float_of(sign | 0x7f800000u | (size & 0x3ffu) << 13);
    return float_of(__float_as_uint(__fmul_rn(float_of(size << 13), float_of(239u << 23))) | sign);
}

// 2 ** (e - 127); 255 is NaN.
static __device__ __forceinline__ float of_exponent(u32 e) {
    return e == 255 ? float_of(0x7fc00000u) : float_of(e ? e << 23 : 0x400000u);
}

// A number of MANTISSA bits below the exponent, which counts from `bias`; `sign` is its highest bit's place.
static __device__ __forceinline__ float of_float(u32 code, int sign, int mantissa, int bias, u32 largest) {
    const u32 size = code & ((1u << sign) - 1), high = (code >> sign & 1) << 31;
    if (size > largest) return float_of(0x7fc00000u | high);
    const float scaled = __fmul_rn(float_of(size << (23 - mantissa)), float_of((u32)(254 - bias) << 23));
    return float_of(__float_as_uint(scaled) | high);
}

// `count` bytes from `at`, which is a multiple of `aligned`, in as few loads as that allows; the first is the lowest.
template <int COUNT, int ALIGNED> static __device__ __forceinline__ u64 bytes_at(const u8 *at) {
    u64 word = 0;
    if (COUNT % 8 == 0 && ALIGNED % 8 == 0) return __ldg((const u64 *)at);
    if (COUNT % 4 == 0 && ALIGNED % 4 == 0) {
#pragma unroll
        for (int i = 0; i < COUNT / 4; i++) word |= (u64)__ldg((const u32 *)at + i) << (32 * i);
    } else if (COUNT % 2 == 0 && ALIGNED % 2 == 0) {
#pragma unroll
        for (int i = 0; i < COUNT / 2; i++) word |= (u64)__ldg((const u16 *)at + i) << (16 * i);
    } else {
#pragma unroll
        for (int i = 0; i < COUNT; i++) word |= (u64)__ldg(at + i) << (8 * i);
    }
    return word;
}

static __device__ constexpr int common(int x, int y) { return y ? common(y, x % y) : x; }

// Number `i` of a block of bytes whose pieces are these: a sub-block's scale or minimum.
template <int COUNT> static __device__ __forceinline__ u32 number(const Piece (&pieces)[COUNT], const u8 *block, int i) {
    u32 value = 0;
#pragma unroll
    for (int n = 0; n < COUNT; n++) {
        const Piece p = pieces[n];
        if (p.stop == 0 || i < p.start || i >= p.stop) continue;
        const int k = i - p.start;
        const u32 byte = __ldg(block + p.at + k / (p.run * p.count) * p.run + k % p.run);
        value |= (byte >> (p.first + p.step * (k / p.run % p.count)) & ((1u << p.bits) - 1)) << p.into;
    }
    return value;
}

// Digit `place` of a byte in base three, the leading one first: 81, 27, 9, 3 and 1 lie in the bytes of a word.
static __device__ __forceinline__ u32 digit(u32 byte, int place) {
    const u32 power = place == 4 ? 81 : 0x1b090301u >> (8 * place) & 255;
    return (byte * power & 255) * 3 >> 8;
}

#if BITS == 0
// The codes of eight values from value `i` of a block, a multiple of 8: those of one piece.
template <int N> static __device__ __forceinline__ void add_piece(const u8 *block, int i, u32 *codes) {
    constexpr Piece p = CODES[N];
    if (i < p.start || i >= p.stop) return;
    const int k = i - p.start;
    if constexpr (p.run >= 8) {  // eight neighbouring bytes
        const u8 *at = block + p.at + k / (p.run * p.count) * p.run + k % p.run;
        const u64 word = bytes_at<8, common(common(NBYTES, p.at), 8)>(at);
        const int shift = p.first + p.step * (k / p.run % p.count);
#pragma unroll
        for (int j = 0; j < 8; j++) {
            const u32 byte = (u32)(word >> (8 * j)) & 255;
            if constexpr (KIND == DIGIT) {
                codes[j] = digit(byte, k / p.run % p.count);
            } else {
                codes[j] |= (byte >> shift & ((1u << p.bits) - 1)) << p.into;
            }
        }
    } else if constexpr (p.run == 1) {  // neighbours in one byte
        constexpr int count = 8 / p.count;
        const u64 word = bytes_at<count, common(common(NBYTES, p.at), count)>(block + p.at + k / p.count);
#pragma unroll
        for (int j = 0; j < 8; j++)
            codes[j] |= ((u32)(word >> (8 * (j / p.count) + p.step * (j % p.count))) & ((1u << p.bits) - 1)) << p.into;
    } else {  // runs of four: the ternary type's last sixteen
#pragma unroll
        for (int j = 0; j < 8; j++) {
            codes[j] = digit(__ldg(block + p.at + (k + j) % p.run), (k + j) / p.run % p.count);
        }
    }
}
#endif

static __device__ __forceinline__ float value_of(const Arguments &p, const float *table, u32 code) {
    if (KIND == FLOAT) return of_float(code, CODE_BITS - 1, MANTISSA, BIAS, LARGEST);
    if (KIND == TABLE) return table[code];
    if (KIND == DIGIT) return (float)((int)code - 1);
    const int half = SIGNED ? 1 << (CODE_BITS - 1) : 0;
    return (float)((int)(code ^ half) - half - CENTER);
}

#if BITS != 0
// Bytes of eight codes of a row, `left` of which are there.
static __device__ __forceinline__ u64 codes_at(const Arguments &p, i64 row, int column, int left) {
    const u8 *at = p.codes + row * p.pitch + column / 8 * BITS;
    if (left >= 8) {
        if (BITS % 8 == 0 && p.pitch % 8 == 0) return bytes_at<BITS, 8>(at);
        if (BITS % 4 == 0 && p.pitch % 4 == 0) return bytes_at<BITS, 4>(at);
        if (BITS % 2 == 0 && p.pitch % 2 == 0) return bytes_at<BITS, 2>(at);
        return bytes_at<BITS, 1>(at);
    }
    u64 word = 0;
    for (int i = 0; i < (left * BITS + 7) / 8; i++) word |= (u64)__ldg(at + i) << (8 * i);
    return word;
}

static __device__ __forceinline__ float scale_at(const Arguments &p, i64 block) {
    if (STORED == FLOAT32) return __ldg((const float *)p.scales + block);
    const u32 byte = __ldg((const u8 *)p.scales + block);
    if (STORED == E8M0) return of_exponent(byte);
    const float scale = of_float(byte, 7, 3, 7, 0x7e), whole = __ldg(p.whole);
    return STORED == E4M3 ? __fmul_rn(scale, whole) : __fdiv_rn(scale, whole);
}
#endif

// Eight values of a row from `column`, a multiple of 8, `left` of which are there.
static __device__ __forceinline__ void eight_of(const Arguments &p, const float *table, i64 row, int column, int left,
                                                float *w) {
#if BITS == 0
    const u8 *block = p.codes + row * p.pitch + (i64)(column / SIZE) * NBYTES;
    const int i = column % SIZE, sub = i / SUB;
    u32 codes[8] = {0, 0, 0, 0, 0, 0, 0, 0};
    add_piece<0>(block, i, codes);
    if constexpr (sizeof(CODES) / sizeof(Piece) > 1) add_piece<(sizeof(CODES) / sizeof(Piece) > 1)>(block, i, codes);
    if constexpr (sizeof(CODES) / sizeof(Piece) > 2)
        add_piece<(sizeof(CODES) / sizeof(Piece) > 2) * 2>(block, i, codes);
    float scale = STORED == EXPONENT ? of_exponent(__ldg(block)) : of_half((u32)bytes_at<2, common(NBYTES, 2)>(block + HALF_AT));
    if (SCALES[0].stop) {
        const u32 s = number(SCALES, block, sub);
        scale = __fmul_rn(scale, (float)(SCALE_SIGNED ? (int)(signed char)s : (int)s - SCALE_CENTER));
    }
    float low = 0.0f;
    if (LOW_AT >= 0) {
        low = of_half((u32)bytes_at<2, common(NBYTES, 2)>(block + LOW_AT));
        if (ADDS_LOW) low = float_of(__float_as_uint(low) ^ 0x80000000u);
        if (MINIMA[0].stop) low = __fmul_rn(low, (float)number(MINIMA, block, sub));
    }
#pragma unroll
    for (int j = 0; j < 8; j++) {
        w[j] = __fmul_rn(scale, value_of(p, table, codes[j]));
        w[j] = __fadd_rn(w[j], float_of(__float_as_uint(low) ^ 0x80000000u));
    }
#else
    const i64 block = (ROWS ? row / ROWS : 0) * p.scale_pitch + (COLUMNS ? column / COLUMNS : 0);
    const float scale = scale_at(p, block);
    const u64 word = codes_at(p, row, column, left);
    const float zero = ZERO_POINT ? (float)__ldg(p.zero_points + block) : 0.0f;
#if KIND == 4  // TRELLIS
    // The eight codes before, of the same block, which closes upon itself.
    const int start = column / COLUMNS * COLUMNS, end = min(start + COLUMNS, p.K);
    const u64 before = codes_at(p, row, column == start ? end - 8 : column - 8, 8);
    u32 state = 0;
#pragma unroll
    for (int j = 8 - STATE / BITS; j < 8; j++) state = state << BITS | ((u32)(before >> (j * BITS)) & ((1u << BITS) - 1));
#endif
#pragma unroll
    for (int j = 0; j < 8; j++) {
        const u32 code = (u32)(word >> (j * BITS)) & ((1u << BITS) - 1);
#if KIND == 4
        state = (state << BITS | code) & ((1u << STATE) - 1);
        const float value = __fdiv_rn((float)((int)__dp4a(34038481u * state + 76625530u, 0x01010101u, 0u) - 510), 147.8f);
#else
        const float value = __fmul_rn(value_of(p, table, code), 1.0f / INVERSE_UNIT);
#endif
        w[j] = __fmul_rn(ZERO_POINT ? __fadd_rn(value, -zero) : value, scale);
    }
#endif
}

#if WIDTH == 2
static __device__ __forceinline__ u32 of_float32(float x) {
#if IS_HALF
    return half_bits(x);
#else
    const u32 bits = __float_as_uint(x);
    return x != x ? 0x7fffu : (bits + 0x7fffu + (bits >> 16 & 1)) >> 16;
#endif
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS) dequantize_described(const Arguments p) {
    __shared__ float table[16];
    if (KIND == TABLE) {
        if (threadIdx.x < 16) table[threadIdx.x] = p.table[threadIdx.x];
        __syncthreads();
    }
    const u32 eights = (u32)(p.K + 7) / 8;
    const u64 all = (u64)p.N * eights, first = (u64)blockIdx.x * (THREADS * ITEMS) + threadIdx.x;
#pragma unroll
    for (int item = 0; item < ITEMS; item++) {
        const u64 at = first + item * THREADS;
        if (at >= all) break;
        const i64 row = all >> 32 ? at / eights : (u32)at / eights;
        const int column = (int)(at - row * eights) * 8, left = p.K - column;
        float w[8];
        eight_of(p, table, row, column, left, w);
#if WIDTH == 4
        float *out = (float *)p.out + row * p.stride + column;
        if (left >= 8 && p.stride % 4 == 0) {
            ((float4 *)out)[0] = {w[0], w[1], w[2], w[3]};
            ((float4 *)out)[1] = {w[4], w[5], w[6], w[7]};
        } else {
#pragma unroll
            for (int j = 0; j < 8; j++) if (j < left) out[j] = w[j];
        }
#else
        u16 *out = (u16 *)p.out + row * p.stride + column;
        if (left >= 8 && p.stride % 8 == 0) {
            u32 pairs[4];
#pragma unroll
            for (int j = 0; j < 4; j++) pairs[j] = of_float32(w[2 * j]) | of_float32(w[2 * j + 1]) << 16;
            *(uint4 *)out = {pairs[0], pairs[1], pairs[2], pairs[3]};
        } else {
#pragma unroll
            for (int j = 0; j < 8; j++) if (j < left) out[j] = (u16)of_float32(w[j]);
        }
#endif
    }
}
