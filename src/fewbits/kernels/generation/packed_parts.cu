// What attention over packed keys and values does with single heads and single words: packed_attention.cu includes it.
// On a CPU the tests' emulation does what stands here under "what the hardware does" (EMULATED).

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;
typedef long long i64;

#define WARPS 8
#define THREADS (32 * WARPS)
#define LOWEST __int_as_float((int)0xff800000)  // minus infinity
#define LOG2E 1.4426950408889634f
#define MOST_PARTS 64    // blocks of one head, as the launcher knows
#define PARTIAL (D + 2)  // floats of a head and part: sums, maximum, denominator
#define FP8 1  // kinds: E4M3; 4 and 8: whole numbers of so many bits

// 1. What the hardware does.

#ifndef EMULATED
static __device__ __forceinline__ void wait_for_the_kernel_before() {
#if EARLY
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
static __device__ __forceinline__ u16 half_of_float(float x) {
    u16 out;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(out) : "f"(x));
    return out;
}
static __device__ __forceinline__ float float_of_half(u16 x) {
    float out;
    asm("cvt.f32.f16 %0, %1;" : "=f"(out) : "h"(x));
    return out;
}
static __device__ __forceinline__ u32 half_pair(float low, float high) {
    u32 out;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
    return out;
}
static __device__ __forceinline__ u32 subtract_pairs(u32 a, u32 b) {
    u32 out;
    asm("sub.f16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
    return out;
}
static __device__ __forceinline__ u32 multiply_add_pairs(u32 a, u32 b, u32 c) {
    u32 out;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "r"(c));
    return out;
}
static __device__ __forceinline__ u16 bfloat_of_float(float x) {
    u32 out;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(x), "f"(x));
    return (u16)out;
}
// m16n8k16 in float16, sums in float32.
static __device__ __forceinline__ void multiply_add(float *c, const u32 *a, u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
                 "{%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
static __device__ __forceinline__ u32 turned(u32 matrix) {
    u32 out;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(matrix));
    return out;
}
// N words that lie at a multiple of their size, or of 16 bytes.
template <int N> static __device__ __forceinline__ void load_words(u32 *to, const void *at) {
    const char *from = (const char *)at;
    if constexpr (N % 4 == 0) {
#pragma unroll
        for (int i = 0; i < N; i += 4)
            asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(to[i]), "=r"(to[i + 1]), "=r"(to[i + 2]), "=r"(to[i + 3]) : "l"(from + 4 * i));
    } else if constexpr (N % 2 == 0) {
#pragma unroll
        for (int i = 0; i < N; i += 2)
            asm volatile("ld.global.v2.u32 {%0, %1}, [%2];" : "=r"(to[i]), "=r"(to[i + 1]) : "l"(from + 4 * i));
    } else {
#pragma unroll
        for (int i = 0; i < N; i++) asm volatile("ld.global.u32 %0, [%1];" : "=r"(to[i]) : "l"(from + 4 * i));
    }
}
// Where a new value is read by a block that another one may have written: past the first cache.
static __device__ __forceinline__ float load_fresh(const float *at) { return __ldcg(at); }
#endif

// 2. Numbers of 16 bits as the model has them.

static __device__ __forceinline__ u16 to_16(float x) { return HALF == 1 ? bfloat_of_float(x) : half_of_float(x); }
static __device__ __forceinline__ float from_16(u32 x) {
    return HALF == 1 ? __uint_as_float(x << 16) : float_of_half((u16)x);
}
struct Eight {
    float x[8];
};
static __device__ __forceinline__ Eight load_eight(const u16 *at) {
    u32 v[4];
    load_words<4>(v, at);
    return {from_16(v[0] & 0xffff), from_16(v[0] >> 16), from_16(v[1] & 0xffff), from_16(v[1] >> 16),
            from_16(v[2] & 0xffff), from_16(v[2] >> 16), from_16(v[3] & 0xffff), from_16(v[3] >> 16)};
}

static __device__ __forceinline__ float largest_of_warp(float x) {
#pragma unroll
    for (int d = 16; d; d /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, d));
    return x;
}

// 3. Codes to pairs of float16, exact.

// Numbers i and i + 4 of the 8 in a word of 4-bit codes (two's complement).
static __device__ __forceinline__ u32 pair_of_nibbles(u32 word, int i) {
    if (i >= 2) word >>= 8;
    if (i % 2 == 0) return subtract_pairs((word & 0x000f000fu) ^ 0x64086408u, 0x64086408u);  // 1024 + code + 8
    return multiply_add_pairs((word & 0x00f000f0u) ^ 0x64806480u, 0x2c002c00u, 0xd480d480u);  // 16 times that: / 16, - 72
}
// Bytes 0 and 1, or 2 and 3, of a word of 8-bit codes; E4M3's without the factor 256.
template <int KIND> static __device__ __forceinline__ u32 pair_of_bytes(u32 word, int i) {
    if (KIND == FP8) {
        const u32 high = __byte_perm(word, 0, i ? 0x3424 : 0x1404);
        return (high & 0x80008000u) | (high >> 1 & 0x3fff3fffu);
    }
    return subtract_pairs(__byte_perm(word ^ 0x80808080u, 0x64646464u, i ? 0x4342 : 0x4140), 0x64806480u);
}
// Pair P of a lane's codes of a key: neighbours in the order in which the query is read.
template <int KIND> static __device__ __forceinline__ u32 key_pair(const u32 *words, int P) {
    return KIND == 4 ? pair_of_nibbles(words[P / 4], P % 4) : pair_of_bytes<KIND>(words[P / 2], P % 2);
}
// Places of that pair's two numbers among the lane's.
template <int KIND> static __device__ __forceinline__ int place_in_key(int P, int second) {
    return KIND == 4 ? P / 4 * 8 + P % 4 + 4 * second : 2 * P + second;
}
// Numbers 2 q and 2 q + 1 of a lane's codes of values, each of two tokens side by side.
template <int KIND> static __device__ __forceinline__ void value_pairs(u32 &even, u32 &odd, const u32 *token,
                                                                       const u32 *next, int q) {
    if (KIND == 4) {
        const u32 both = __byte_perm(token[q / 4], next[q / 4], q % 4 < 2 ? 0x5410 : 0x7632);
        even = pair_of_nibbles(both, q % 2 * 2), odd = pair_of_nibbles(both, q % 2 * 2 + 1);
    } else {
        const u32 both = __byte_perm(token[q / 2], next[q / 2], q % 2 ? 0x7362 : 0x5140);
        even = pair_of_bytes<KIND>(both, 0), odd = pair_of_bytes<KIND>(both, 1);
    }
}

// 4. One head by one warp, in shared memory.

#include "heads.cu"

// Times the orthonormal Hadamard matrix, in blocks.
template <int BLOCK> static __device__ __forceinline__ void spread(float *x) {
    if (BLOCK == 0) return;
    for (int h = 1; h < BLOCK; h *= 2) {
        __syncwarp();
        for (int i = threadIdx.x % 32; i < D / 2; i += 32) {
            const int at = i / h * 2 * h + i % h;
            const float a = x[at], b = x[at + h];
            x[at] = a + b, x[at + h] = a - b;
        }
    }
    __syncwarp();
    for (int i = threadIdx.x % 32; i < D; i += 32) x[i] *= rsqrtf((float)BLOCK);
    __syncwarp();
}

// Scores in powers of two from here on.
static __device__ __forceinline__ float score_of(const Arguments &p, float score) {
#if CAPPED
    score = p.cap * tanhf(score / p.cap);
#endif
    return score * LOG2E;
}

static __device__ __forceinline__ u32 e4m3_of(float x) {  // to nearest, ties to even; x is at most 448
    const u32 sign = __float_as_uint(x) >> 31 << 7;
    const float y = fminf(fabsf(x), 448.0f);
    if (y < 0.015625f) return sign | (u32)rintf(y * 512.0f);
    u32 bits = __float_as_uint(y);
    bits += 0x7ffff + (bits >> 20 & 1);
    return sign | ((bits >> 20) - (120 << 3));
}

// A head of 16-bit numbers to codes and scales, its codes in the order of LANES lanes; ``x``: D floats of its own.
template <int KIND, int BLOCK, int LANES>
static __device__ __forceinline__ void pack_head(const u16 *from, float *x, u8 *codes, u16 *scales) {
    const int lane = threadIdx.x % 32;
    for (int d = lane; d < D; d += 32) x[d] = from_16(from[d]);
    spread<BLOCK>(x);
    __syncwarp();
    const float most = KIND == 4 ? 7.0f : KIND == 8 ? 127.0f : 448.0f;
    const int size = D / SCALES;
    for (int group = 0; group < SCALES; group++) {
        float largest = 0.0f;
        bool finite = true;
        for (int d = lane; d < size; d += 32) {
            const float y = x[group * size + d];
            largest = fmaxf(largest, fabsf(y));
            finite = finite && fabsf(y) <= 3.0e38f;
        }
        finite = largest_of_warp(finite ? 0.0f : 1.0f) == 0.0f;
        const float scale = fmaxf(largest_of_warp(largest) / most, 1.1754944e-38f), inverse = 1.0f / scale;
        for (int d = lane; d < size; d += 32) {
            const float y = finite ? x[group * size + d] * inverse : 0.0f;
            x[group * size + d] = KIND == FP8 ? y : fminf(fmaxf(rintf(y), -most), most);
        }
        if (lane == 0) scales[group] = finite ? half_of_float(fminf(scale, 65504.0f)) : (u16)0x7e00;
    }
    __syncwarp();
    const int each = size / LANES, own = D / LANES;  // neighbours of a group, and all numbers, of a reading lane
    const int in_byte = KIND == 4 ? 2 : 1;
    for (int i = lane; i < D / in_byte; i += 32) {
        u32 byte = 0;
        for (int k = 0; k < in_byte; k++) {
            const int place = i * in_byte + k, at = place % own;
            const float y = x[at / each * size + place / own * each + at % each];
            byte |= KIND == FP8 ? e4m3_of(y) : (u32)(int)y << (4 * k) & (KIND == 4 ? 15u << (4 * k) : 255u);
        }
        codes[i] = (u8)byte;
    }
    __syncwarp();
}

// 5. Parts in global memory, added by the block that comes last.
static __device__ __forceinline__ void add_parts(u16 *out, const float *parts, int count, float *weights) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int g = warp; g < HEADS; g += WARPS) {  // first each part's weight, a lane a part: no load waits for another
        float most = LOWEST, total = 0.0f, own_most[MOST_PARTS / 32], own_total[MOST_PARTS / 32];
#pragma unroll
        for (int j = 0; j < MOST_PARTS / 32; j++) {
            const int i = j * 32 + lane;
            const float *of = parts + ((i64)i * HEADS + g) * PARTIAL + D;
            own_most[j] = i < count ? load_fresh(of) : LOWEST;
            own_total[j] = i < count ? load_fresh(of + 1) : 0.0f;
            most = fmaxf(most, own_most[j]);
        }
        most = largest_of_warp(most);
#pragma unroll
        for (int j = 0; j < MOST_PARTS / 32; j++) {
            own_most[j] = exp2f(own_most[j] - most);
            total += own_most[j] * own_total[j];
        }
        total = sum_of_warp(total);
#pragma unroll
        for (int j = 0; j < MOST_PARTS / 32; j++) weights[g * MOST_PARTS + j * 32 + lane] = own_most[j] / total;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < HEADS * D; i += THREADS) {
        float x = 0.0f;
#pragma unroll 8
        for (int n = 0; n < count; n++)
            x += weights[i / D * MOST_PARTS + n] * load_fresh(parts + ((i64)n * HEADS + i / D) * PARTIAL + i % D);
        out[i] = to_16(x);
    }
}
