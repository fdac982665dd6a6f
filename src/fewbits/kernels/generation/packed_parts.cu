// What attention over packed keys and values does with single heads and single words: packed_attention.cu includes it.
// On a CPU the tests' emulation does what stands here under "what the hardware does" (EMULATED).

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;
typedef long long i64;
typedef unsigned long long u64;

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
static __device__ __forceinline__ float power_of_two(float x) {
    float out;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
    return out;
}
static __device__ __forceinline__ bool any_of_warp(bool x) { return __any_sync(0xffffffffu, x); }
static __device__ __forceinline__ u16 bfloat_of_float(float x) {
    u32 out;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(x), "f"(x));
    return (u16)out;
}
// m16n8k16 in float16, sums in float32: d = a b + c.
static __device__ __forceinline__ void multiply_add(float *d, const u32 *a, u32 b0, u32 b1, const float *c) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%10, %11, %12, %13};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
}
// The same in the model's own 16 bits, added to d.
static __device__ __forceinline__ void multiply_add_16(float *d, const u32 *a, u32 b0, u32 b1) {
#if HALF == 1
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
    multiply_add(d, a, b0, b1, d);
#endif
}
static __device__ __forceinline__ u32 turned(u32 matrix) {
    u32 out;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(matrix));
    return out;
}
static __device__ __forceinline__ void load_any(u32 *to, const void *at) {  // 16 bytes of either memory
    const uint4 x = *(const uint4 *)at;
    to[0] = x.x, to[1] = x.y, to[2] = x.z, to[3] = x.w;
}
// Bytes 0 and 1, or 2 and 3, of a word of E4M3; FP8_UNIT: what is missing.
#if __CUDA_ARCH__ >= 890
#define FP8_UNIT 1.0f
static __device__ __forceinline__ u32 pair_of_e4m3(u32 word, int i) {
    u32 out;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(out) : "h"((u16)(i ? word >> 16 : word)));
    return out;
}
#endif
// To shared memory, without waiting; zeros where ``there`` does not hold. SHARED: a neighbour is going to ask for the other half of
// these 32 bytes, so that the first cache should keep them.
extern __shared__ __align__(16) u8 shared_bytes[];
template <int BYTES, bool SHARED = false> static __device__ __forceinline__ void copy(u32 to, const void *from, bool there) {
    if constexpr (BYTES == 16 && !SHARED)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(there ? 16 : 0) : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(from), "n"(BYTES), "r"(there ? BYTES : 0) : "memory");
}
static __device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LEFT> static __device__ __forceinline__ void wait_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}
template <int N> static __device__ __forceinline__ void read_shared(u32 *to, u32 at) {
    if constexpr (N == 4)
        asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(at) : "memory");
    else if constexpr (N == 2)
        asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(to[0]), "=r"(to[1]) : "r"(at) : "memory");
    else
        asm volatile("ld.shared.u32 %0, [%1];" : "=r"(to[0]) : "r"(at) : "memory");
}
static __device__ __forceinline__ u16 read_shared_16(u32 at) {
    u16 out;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(out) : "r"(at) : "memory");
    return out;
}
// Where a new value is read by a block that another one may have written: past the first cache.
static __device__ __forceinline__ float load_fresh(const float *at) { return __ldcg(at); }
#endif
#ifndef FP8_UNIT
#define FP8_UNIT 256.0f
static __device__ __forceinline__ u32 pair_of_e4m3(u32 word, int i) {
    const u32 high = __byte_perm(word, 0, i ? 0x3424 : 0x1404);
    return (high & 0x80008000u) | (high >> 1 & 0x3fff3fffu);
}
#endif

// 2. Numbers of 16 bits as the model has them.

static __device__ __forceinline__ u16 to_16(float x) { return HALF == 1 ? bfloat_of_float(x) : half_of_float(x); }
static __device__ __forceinline__ float from_16(u32 x) {
    return HALF == 1 ? __uint_as_float(x << 16) : float_of_half((u16)x);
}
static __device__ __forceinline__ float largest_of_warp(float x) {
#pragma unroll
    for (int d = 16; d; d /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, d));
    return x;
}

// 3. Codes to pairs of float16, exact.
//
// Below 2^-14 float16 has the whole multiples of 2^-24: the bits of a code, alone in a half, are such a number. An operation of
// bits makes two of them. So that codes are not negative they are kept with half of their range added (8 or 128); sums
// of products are rid of that once, by the sum of the other factors. Four-bit codes in the odd places stand four bits
// higher: 16 times as much.

template <int KIND> struct Codes {
    static constexpr bool shifted = KIND != FP8;                               // whether half of the range is added
    static constexpr float unit = KIND == FP8 ? FP8_UNIT : 16777216.0f;        // what a number must be multiplied by
    static constexpr u32 zero = KIND == 4 ? 0x00080008u : 0x00800080u;         // the code 0, in even places
    static constexpr u32 odd_zero = 0x00800080u;                               // in odd places
    static constexpr float odd_times = KIND == 4 ? 16.0f : 1.0f;
};
static __device__ __forceinline__ u32 low_nibbles(u32 x) { return x & 0x000f000fu; }
static __device__ __forceinline__ u32 high_nibbles(u32 x) { return x & 0x00f000f0u; }
static __device__ __forceinline__ u32 low_bytes(u32 x) { return x & 0x00ff00ffu; }

// Pair P of a lane's codes of a key: neighbours in the order in which the query is read.
template <int KIND> static __device__ __forceinline__ u32 key_pair(const u32 *words, int P) {
    if (KIND == FP8) return pair_of_e4m3(words[P / 2], P % 2);
    if (KIND == 8) return __byte_perm(words[P / 2], 0, P % 2 ? 0x4341 : 0x4240);
    const u32 word = words[P / 4] >> (P % 4 / 2 * 8);
    return P % 2 ? high_nibbles(word) : low_nibbles(word);
}
// Places of that pair's two numbers among the lane's.
template <int KIND> static __device__ __forceinline__ int place_in_key(int P, int second) {
    return KIND == 4 ? P / 4 * 8 + P % 4 + 4 * second : KIND == 8 ? P / 2 * 4 + P % 2 + 2 * second : 2 * P + second;
}
// Numbers 2 q and 2 q + 1 of a lane's codes of values, each of two tokens side by side.
template <int KIND> static __device__ __forceinline__ void value_pairs(u32 &even, u32 &odd, const u32 *token,
                                                                       const u32 *next, int q) {
    if (KIND == 4) {
        const u32 both = __byte_perm(token[q / 4], next[q / 4], 0x0400 + q % 4 * 0x0101);
        even = low_nibbles(both), odd = high_nibbles(both);
    } else if (KIND == 8) {
        even = low_bytes(__byte_perm(token[q / 2], next[q / 2], q % 2 ? 0x0602 : 0x0400));
        odd = low_bytes(__byte_perm(token[q / 2], next[q / 2], q % 2 ? 0x0703 : 0x0501));
    } else {
        const u32 both = __byte_perm(token[q / 2], next[q / 2], q % 2 ? 0x7362 : 0x5140);
        even = pair_of_e4m3(both, 0), odd = pair_of_e4m3(both, 1);
    }
}

// 4. One head by one warp, in shared memory.

#include "heads.cu"

// Times the orthonormal Hadamard matrix, in blocks: of numbers lane, lane + 32, ... of a head.
template <int BLOCK> static __device__ __forceinline__ void spread_own(float (&own)[D / 32]) {
    if (BLOCK == 0) return;
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int h = 1; h < BLOCK; h *= 2) {
        float other[D / 32];
#pragma unroll
        for (int j = 0; j < D / 32; j++) other[j] = h < 32 ? __shfl_xor_sync(0xffffffffu, own[j], h) : own[j ^ h / 32];
#pragma unroll
        for (int j = 0; j < D / 32; j++) own[j] = (j * 32 + lane) & h ? other[j] - own[j] : own[j] + other[j];
    }
#pragma unroll
    for (int j = 0; j < D / 32; j++) own[j] *= rsqrtf((float)BLOCK);
}
template <int BLOCK> static __device__ __forceinline__ void spread(float *x) {
    if (BLOCK == 0) return;
    const int lane = threadIdx.x % 32;
    float own[D / 32];
#pragma unroll
    for (int j = 0; j < D / 32; j++) own[j] = x[j * 32 + lane];
    spread_own<BLOCK>(own);
#pragma unroll
    for (int j = 0; j < D / 32; j++) x[j * 32 + lane] = own[j];
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

// A head's scales: 4 bits try several, as formats/kv_cache.py says. All groups and scales side by side: nothing waits for nothing.
#define IN_GROUP (D / SCALES / 32)  // numbers of a lane
template <int KIND> static __device__ __forceinline__ void scales_of(float (&scale)[SCALES], const float (&own)[D / 32]) {
    float high[SCALES] = {}, low[SCALES] = {}, least[SCALES];
#pragma unroll
    for (int j = 0; j < D / 32; j++) high[j / IN_GROUP] = fmaxf(high[j / IN_GROUP], own[j]), low[j / IN_GROUP] = fmaxf(low[j / IN_GROUP], -own[j]);
#pragma unroll
    for (int d = 16; d; d /= 2)
#pragma unroll
        for (int i = 0; i < SCALES; i++) {
            high[i] = fmaxf(high[i], __shfl_xor_sync(0xffffffffu, high[i], d));
            low[i] = fmaxf(low[i], __shfl_xor_sync(0xffffffffu, low[i], d));
        }
    float tried[SCALES][4], error[SCALES][4] = {};
#pragma unroll
    for (int i = 0; i < SCALES; i++) {
        const float largest = fmaxf(high[i], low[i]);
        scale[i] = fmaxf(largest / (KIND == 8 ? 127.0f : 448.0f), 1.1754944e-38f);
        if (KIND != 4) continue;
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const float steps = k == 0 ? 8.0f : k == 1 ? 8.6f : k == 2 ? 9.3f : 7.4f;
            tried[i][k] = float_of_half(half_of_float(fminf(largest / steps, 65504.0f))) * (high[i] >= low[i] ? -1.0f : 1.0f);
        }
    }
    if (KIND != 4) return;
#pragma unroll
    for (int i = 0; i < SCALES; i++)
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const float x = tried[i][k], inverse = x == 0.0f ? 0.0f : 1.0f / x;
#pragma unroll
            for (int j = i * IN_GROUP; j < (i + 1) * IN_GROUP; j++) {
                const float away = fminf(fmaxf(rintf(own[j] * inverse), -8.0f), 7.0f) * x - own[j];
                error[i][k] += away * away;
            }
        }
#pragma unroll
    for (int d = 16; d; d /= 2)
#pragma unroll
        for (int i = 0; i < SCALES * 4; i++) error[i / 4][i % 4] += __shfl_xor_sync(0xffffffffu, error[i / 4][i % 4], d);
#pragma unroll
    for (int i = 0; i < SCALES; i++) {
        scale[i] = tried[i][0], least[i] = error[i][0];
#pragma unroll
        for (int k = 1; k < 4; k++)
            if (error[i][k] < least[i]) least[i] = error[i][k], scale[i] = tried[i][k];
    }
}

// A head of 16-bit numbers, lane, lane + 32, ... of a lane, to codes and scales, its codes in the order of LANES lanes; ``x``: D floats of its own.
template <int KIND, int BLOCK, int LANES>
static __device__ __forceinline__ void pack_head(const u16 (&from)[D / 32], float *x, u8 *codes, u16 *scales) {
    const int lane = threadIdx.x % 32, size = D / SCALES;
    float numbers[D / 32], scale[SCALES];
#pragma unroll
    for (int j = 0; j < D / 32; j++) numbers[j] = from_16(from[j]);
    spread_own<BLOCK>(numbers);
    scales_of<KIND>(scale, numbers);
    const float most = KIND == 8 ? 127.0f : 7.0f, least = KIND == 8 ? -127.0f : -8.0f;
#pragma unroll
    for (int i = 0; i < SCALES; i++) {
        bool finite = true;
#pragma unroll
        for (int j = i * IN_GROUP; j < (i + 1) * IN_GROUP; j++) finite = finite && fabsf(numbers[j]) <= 3.0e38f;
        finite = !any_of_warp(!finite);
        const float inverse = scale[i] == 0.0f ? 0.0f : 1.0f / scale[i];
#pragma unroll
        for (int j = i * IN_GROUP; j < (i + 1) * IN_GROUP; j++) {
            const float y = finite ? numbers[j] * inverse : 0.0f;
            x[j * 32 + lane] = KIND == FP8 ? y : fminf(fmaxf(rintf(y), least), most);
        }
        if (lane == 0) scales[i] = finite ? half_of_float(fminf(fmaxf(scale[i], -65504.0f), 65504.0f)) : (u16)0x7e00;
    }
    __syncwarp();
    const int each = size / LANES, own = D / LANES;  // neighbours of a group, and all numbers, of a reading lane
    const int in_byte = KIND == 4 ? 2 : 1;
    for (int i = lane; i < D / in_byte; i += 32) {
        u32 byte = 0;
        for (int k = 0; k < in_byte; k++) {
            const int place = i * in_byte + k, at = place % own;
            const float y = x[at / each * size + place / own * each + at % each];
            byte |= KIND == FP8 ? e4m3_of(y) : (u32)((int)y + (KIND == 4 ? 8 : 128)) << (4 * k);
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
