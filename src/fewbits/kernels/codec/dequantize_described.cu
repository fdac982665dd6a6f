// A packed weight to a dense one, generated from a format's description (fewbits/formats/description.py); the macros below
// say what that file's fields say, and dequantize_described.py writes them.
//
// A thread makes eight neighbouring values of a row and writes them at once, 16 bytes of bfloat16. Eight values share one
// scale in every format, so a thread reads it once. Their codes lie in as many bytes as a code has bits where codes follow
// each other; in a block of bytes, each piece of them lies in eight neighbouring bytes (runs of 8 and more) or in one to
// four (runs of one). Bytes are read by the widest loads that their place allows. A block of threads makes ITEMS
// stretches of 256 threads, so that several loads are under way at once. Where sub-blocks have scales of their own, a
// block of threads makes them first, each once, in shared memory (IS_STAGED).
//
// Hopper has 64 lanes of whole numbers to 128 of floats, and a copy takes the time of 14 instructions a value: so codes
// are cut four to a word, become floats by their place in one, and two are rounded at once.
//
// Floor: the bytes of the weight read once, those of the dense one written once.

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;
typedef unsigned long long u64;
typedef long long i64;

#define THREADS 256
enum { WHOLE, FLOAT, TABLE, DIGIT, TRELLIS };                             // KIND
enum { FLOAT32, E8M0, E4M3, E4M3_DIVIDED, HALF, EXPONENT };               // STORED

struct Arguments {
    const u8 *codes;       // rows of `pitch` bytes
    const void *scales;    // beside the codes; rows of `scale_pitch`
    const signed char *zero_points;
    const float *whole;    // the tensor's scale
    void *out;             // rows of `stride` values
    int N, K, pitch, scale_pitch, stride;
    u32 multiplier, shift; // (x * multiplier >> 32) >> shift is x over a row's eights, where all of them are below 2 ** 31
    float table[16];
};

#ifndef EMULATED
// Two numbers of 16 bits, the first in the lower half, each to nearest even.
static __device__ __forceinline__ u32 pair_of(float low, float high) {
    u32 pair;
#if IS_HALF
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
#else
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
#endif
    return pair;
}

static __device__ __forceinline__ float of_half(u32 h) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"((u16)h));
    return x;
}
#endif

struct Piece { int stop, at, run, count, step, bits, into, start, first; };
static __device__ constexpr Piece CODES[] = {CODE_PIECES};
#define PIECES (int)(sizeof(CODES) / sizeof(Piece))
static __device__ constexpr Piece SCALES[] = {SCALE_PIECES};
static __device__ constexpr Piece MINIMA[] = {MINIMUM_PIECES};

static __device__ __forceinline__ float float_of(u32 bits) { return __uint_as_float(bits); }

// 2 ** (e - 127); 255 is NaN.
static __device__ __forceinline__ float of_exponent(u32 e) {
    return e == 255 ? float_of(0x7fc00000u) : float_of(e ? e << 23 : 0x400000u);
}

// A number of `mantissa` bits below the exponent, which counts from `bias`; `sign` is its highest bit's place. Its bits
// go to their places in a float32 (the sign's copies between are masked), and a power of two makes up for the bias.
static __device__ __forceinline__ float of_float(u32 code, int sign, int mantissa, int bias, u32 largest) {
    const u32 ones = (1u << sign) - 1;
    const u32 placed = (u32)((int)(code << (31 - sign)) >> (8 - sign + mantissa)) & (0x80000000u | ones << (23 - mantissa));
    const float scaled = __fmul_rn(float_of(placed), float_of((u32)(254 - bias) << 23));
    return largest < ones && (code & ones) > largest ? float_of(0x7fc00000u) : scaled;
}

// A whole number below 2 ** 23 less `center`, without a conversion: beside the bits of 2 ** 23 it is its own mantissa.
static __device__ __forceinline__ float of_whole(u32 code, int center) {
    return __fadd_rn(float_of(0x4b000000u | code), -(float)(0x800000 + center));
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
#define HALF_OF_CODES (SIGNED ? 1 << (CODE_BITS - 1) : 0)  // turning the sign's bit adds it
#define BLOCKS_AT common(NBYTES, CODES_AT)  // what blocks of bytes begin at multiples of

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

#if BITS == 0
// Digit `place` of each of four bytes in base three, the leading one first: 81, 27, 9, 3 and 1 lie in the bytes of a word.
static __device__ __forceinline__ u32 digits(u32 bytes, int place) {
    const u32 power = place == 4 ? 81 : 0x1b090301u >> (8 * place) & 255;
    const u32 even = ((bytes & 0xff00ffu) * power & 0xff00ffu) * 3, odd = ((bytes >> 8 & 0xff00ffu) * power & 0xff00ffu) * 3;
    return (even >> 8 & 0x30003u) | (odd & 0x3000300u);
}

static __device__ constexpr int log2_of(int x) { return x > 1 ? 1 + log2_of(x / 2) : 0; }

#if KIND == 3  // DIGIT
// The digits of eight values from value `i` of a block, a multiple of 8: a byte each. Threads of a warp meet different
// pieces, so that a piece is chosen by numbers and not by a branch.
static __device__ __forceinline__ void digits_of(const u8 *block, int i, u32 *codes) {
    int start = 0, at = CODES[0].at, log_run = log2_of(CODES[0].run);
#pragma unroll
    for (int n = 1; n < PIECES; n++) {
        if (i >= CODES[n].start) start = CODES[n].start, at = CODES[n].at, log_run = log2_of(CODES[n].run);
    }
#pragma unroll
    for (int w = 0; w < 2; w++) {
        const int k = i - start + 4 * w;
        const u8 *four = block + at + (k & ((1 << log_run) - 1));
        codes[w] = digits((u32)bytes_at<4, common(BLOCKS_AT, 4)>(four), k >> log_run);
    }
}
#else

// The codes of eight values from value `i` of a block, a multiple of 8, where they are those of piece N: a byte each.
template <int N> static __device__ __forceinline__ void add_piece(const u8 *block, int i, u32 *codes) {
    constexpr Piece p = CODES[N];
    if (i < p.start || i >= p.stop) return;
    const int k = i - p.start;
    if constexpr (p.run == 1 && p.count == 8) {  // neighbours' bits in one byte: a bit for each multiple of 7
        const u32 byte = __ldg(block + p.at + k / 8);
        codes[0] |= ((byte & 15) * 0x204081u & 0x1010101u) << p.into;
        codes[1] |= ((byte >> 4) * 0x204081u & 0x1010101u) << p.into;
    } else {  // in neighbouring bytes, of as many as a run has
        constexpr int run = p.run == 1 ? SIZE : p.run;
        static_assert(run % 8 == 0 && (p.run > 1 || p.count == 1), "no type has such bytes");
        const u64 word = bytes_at<8, common(common(BLOCKS_AT, p.at), 8)>(block + p.at + k / (run * p.count) * run + k % run);
        const int shift = p.first + p.step * (k / run % p.count);
        codes[0] |= ((u32)word >> shift & ((1u << p.bits) - 1) * 0x1010101u) << p.into;
        codes[1] |= ((u32)(word >> 32) >> shift & ((1u << p.bits) - 1) * 0x1010101u) << p.into;
    }
}
#endif
#endif

// A whole number of at most 510 over 147.8, the nearest float32: the quotient by the inverse, mended by what it leaves.
static __device__ __forceinline__ float over_147_8(float x) {
    constexpr float inverse = 1.0f / 147.8f;
    const float quotient = __fmul_rn(x, inverse);
    return __fmaf_rn(__fmaf_rn(-147.8f, quotient, x), inverse, quotient);
}

#if BITS == 0
// Number j of the codes of four bytes.
static __device__ __forceinline__ float value_of(const float *table, u32 bytes, int j) {
    if (KIND == FLOAT) return of_float(bytes >> (8 * j), CODE_BITS - 1, MANTISSA, BIAS, LARGEST);
    if (KIND == TABLE) return table[bytes >> (8 * j) & 15];
    return __fadd_rn(float_of(__byte_perm(bytes, 0x4b000000u, 0x7650 + j)), -(float)(0x800000 + HALF_OF_CODES + CENTER));
}

// The scale of sub-block `sub`, and what is added to its values.
static __device__ __forceinline__ float2 scales_of(const u8 *block, int sub) {
    float scale = STORED == EXPONENT ? of_exponent(__ldg(block)) : of_half((u32)bytes_at<2, common(BLOCKS_AT, 2)>(block + HALF_AT));
    if (SCALES[0].stop) {
        const u32 half = SCALE_SIGNED ? 128 : 0;
        scale = __fmul_rn(scale, of_whole(number(SCALES, block, sub) ^ half, (int)half + SCALE_CENTER));
    }
    float low = 0.0f;
    if (LOW_AT >= 0) {
        low = of_half((u32)bytes_at<2, common(BLOCKS_AT, 2)>(block + LOW_AT));
        if (!ADDS_LOW) low = float_of(__float_as_uint(low) ^ 0x80000000u);
        if (MINIMA[0].stop) low = __fmul_rn(low, of_whole(number(MINIMA, block, sub), 0));
    }
    return {scale, low};
}
#else
// The bits of two's complement's signs, turned in all codes of eight at once.
static __device__ constexpr u64 signs() {
    u64 word = 0;
    for (int j = 0; j < 8; j++) word |= (u64)1 << (j * BITS + BITS - 1);
    return word;
}

#if KIND == 4
// Sixteen codes whose first is lowest, with their last lowest: all bits turned round, then those of each code.
static __device__ __forceinline__ u64 newest_lowest(u64 codes) {
    constexpr u64 ones = (~0ull >> 64 % BITS) / ((1ull << BITS) - 1);  // the lowest bit of each code
    u64 x = __brevll(codes) >> (64 - 16 * BITS);
    if (BITS == 2) return x >> 1 & ones | (x & ones) << 1;
    if (BITS == 3) return x >> 2 & ones | x & ones << 1 | (x & ones) << 2;
    if (BITS == 4) x = x >> 2 & ones * 3 | (x & ones * 3) << 2, x = x >> 1 & ones * 5 | (x & ones * 5) << 1;
    return x;
}
#endif

static __device__ __forceinline__ float value_of(u32 code) {
    if (KIND == FLOAT) return of_float(code, BITS - 1, MANTISSA, BIAS, LARGEST);
    return of_whole(code, HALF_OF_CODES + CENTER);
}
#endif

#if BITS != 0
// Bytes of eight codes of a row, `left` of which are there.
static __device__ __forceinline__ u64 codes_at(const Arguments &p, u32 row, u32 column, int left) {
    const u8 *at = p.codes + (u64)row * (u32)p.pitch + column / 8 * BITS;
    if (!HAS_REST || left >= 8) return bytes_at<BITS, common(BITS, CODES_AT)>(at);
    u64 word = 0;
    for (int i = 0; i < (left * BITS + 7) / 8; i++) word |= (u64)__ldg(at + i) << (8 * i);
    return word;
}

static __device__ __forceinline__ float scale_at(const Arguments &p, u64 block) {
    if (STORED == FLOAT32) return __ldg((const float *)p.scales + block);
    const u32 byte = __ldg((const u8 *)p.scales + block);
    if (STORED == E8M0) return of_exponent(byte);
    const float scale = of_float(byte, 7, 3, 7, 0x7e), whole = __ldg(p.whole);
    return STORED == E4M3 ? __fmul_rn(scale, whole) : __fdiv_rn(scale, whole);
}
#endif

// Eight values of a row from `column`, a multiple of 8, `left` of which are there; `ready` has scales of blocks of bytes.
static __device__ __forceinline__ void eight_of(const Arguments &p, const float *table, const float2 *ready, u32 row,
                                                u32 column, int left, float *w) {
#if BITS == 0
    const u8 *block = p.codes + (u64)row * (u32)p.pitch + column / SIZE * NBYTES;
    const int i = (int)(column % SIZE);
    u32 codes[2] = {0, 0};
#if KIND == 3  // DIGIT
    digits_of(block, i, codes);
#else
    static_assert(PIECES <= 2, "no type has its codes in more places");
    add_piece<0>(block, i, codes);
    if (PIECES > 1) add_piece<(PIECES > 1)>(block, i, codes);
#endif
    if (KIND == WHOLE && SIGNED) codes[0] ^= HALF_OF_CODES * 0x1010101u, codes[1] ^= HALF_OF_CODES * 0x1010101u;
    const float2 s = IS_STAGED ? *ready : scales_of(block, i / SUB);
#pragma unroll
    for (int j = 0; j < 8; j++) {
        w[j] = __fmul_rn(s.x, value_of(table, codes[j / 4], j % 4));
        if (LOW_AT >= 0) w[j] = __fadd_rn(w[j], s.y);
    }
#else
    const u64 block = (u64)(ROWS ? row / (ROWS ? ROWS : 1) : 0) * (u32)p.scale_pitch + (COLUMNS ? column / (COLUMNS ? COLUMNS : 1) : 0);
    const float scale = scale_at(p, block);
    u64 word = codes_at(p, row, column, left);
    if (KIND == WHOLE && SIGNED) word ^= signs();
    const float zero = ZERO_POINT ? (float)-(int)__ldg(p.zero_points + block) : 0.0f;
#if KIND == 4  // TRELLIS
    // The eight codes before, of the same block, which closes upon itself; then a state is bits that follow each other.
    const u32 start = column / COLUMNS * COLUMNS, end = min(start + COLUMNS, (u32)p.K);
    const u64 stream = newest_lowest(codes_at(p, row, column == start ? end - 8 : column - 8, 8) | word << (8 * BITS));
#endif
#pragma unroll
    for (int j = 0; j < 8; j++) {
#if KIND == 4
        const u32 state = (u32)(stream >> ((7 - j) * BITS)) & ((1u << STATE) - 1);
        const u32 sum = __dp4a(34038481u * state + 76625530u, 0x01010101u, 0x4b000000u);
        const float value = over_147_8(__fadd_rn(float_of(sum), -(float)(0x800000 + 510)));
#else
        const u32 code = (u32)(word >> (j * BITS)) & (KIND == FLOAT ? ~0u : (1u << BITS) - 1);  // what is above a sign goes
        float value = value_of(code);
        if (INVERSE_UNIT != 1) value = __fmul_rn(value, 1.0f / INVERSE_UNIT);
#endif
        w[j] = __fmul_rn(ZERO_POINT ? __fadd_rn(value, zero) : value, scale);
    }
#endif
}

static __device__ __forceinline__ u32 eights_of_a_row(const Arguments &p) { return (u32)(p.K + 7) / 8; }

static __device__ __forceinline__ u32 row_of(const Arguments &p, u64 eight) {
    return IS_LARGE ? (u32)(eight / eights_of_a_row(p)) : __umulhi((u32)eight, p.multiplier) >> p.shift;
}

// Item `own` of a block of threads, whose first one is eight values from `first` on.
static __device__ __forceinline__ void write_eight(const Arguments &p, const float *table, const float2 *ready, u64 first,
                                                   u32 own) {
    const u64 at = first + own;
    const u32 row = row_of(p, at), column = (u32)(at - (u64)row * eights_of_a_row(p)) * 8;
    const int left = (int)(p.K - column);
    float w[8];
    eight_of(p, table, ready + (IS_STAGED ? own * 8 / (SUB ? SUB : 8) : 0), row, column, left, w);
#if WIDTH == 4
    float *out = (float *)p.out + (u64)row * (u32)p.stride + column;
    if (OUT_AT == 16 && (!HAS_REST || left >= 8)) {
        ((float4 *)out)[0] = {w[0], w[1], w[2], w[3]};
        ((float4 *)out)[1] = {w[4], w[5], w[6], w[7]};
    } else {
#pragma unroll
        for (int j = 0; j < 8; j++) if (j < left) out[j] = w[j];
    }
#else
    u16 *out = (u16 *)p.out + (u64)row * (u32)p.stride + column;
    u32 pairs[4];
#pragma unroll
    for (int j = 0; j < 4; j++) pairs[j] = pair_of(w[2 * j], w[2 * j + 1]);
    if (OUT_AT == 16 && (!HAS_REST || left >= 8)) {
        *(uint4 *)out = {pairs[0], pairs[1], pairs[2], pairs[3]};
    } else {
#pragma unroll
        for (int j = 0; j < 8; j++) if (j < left) out[j] = (u16)(pairs[j / 2] >> (16 * (j % 2)));
    }
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS) dequantize_described(const Arguments p) {
    __shared__ float table[16];
    if (KIND == TABLE) {
        if (threadIdx.x < 16) table[threadIdx.x] = p.table[threadIdx.x];
        __syncthreads();
    }
    const u64 all = (u64)p.N * eights_of_a_row(p), first = (u64)blockIdx.x * (THREADS * ITEMS);
#if IS_STAGED
    __shared__ float2 ready[THREADS * ITEMS * 8 / SUB];
    for (u32 n = threadIdx.x; n < THREADS * ITEMS * 8 / SUB; n += THREADS) {
        const u64 at = first + n * (SUB / 8);
        if (at >= all) break;
        const u32 row = row_of(p, at), column = (u32)(at - (u64)row * eights_of_a_row(p)) * 8;
        ready[n] = scales_of(p.codes + (u64)row * (u32)p.pitch + column / SIZE * NBYTES, column % SIZE / SUB);
    }
    __syncthreads();
#else
    const float2 *const ready = nullptr;
#endif
    // Blocks that are full have no branch between their items, so that all loads can be under way at once.
    if (first + THREADS * ITEMS <= all) {
#pragma unroll
        for (int item = 0; item < ITEMS; item++) write_eight(p, table, ready, first, threadIdx.x + item * THREADS);
    } else {
        for (u32 own = threadIdx.x; own < (u32)(all - first); own += THREADS) write_eight(p, table, ready, first, own);
    }
}
