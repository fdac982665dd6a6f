// What warps do together on tensor cores, and copies that arrive later, on a CPU: for kernels that name these
// functions themselves. Addresses in shared memory are offsets into emulation::memory.
#pragma once
#include "cuda_emulation.h"

typedef uint32_t u32;
typedef uint16_t u16;
typedef uint8_t u8;

#define __noinline__
inline float __uint_as_float(u32 x) { float y; memcpy(&y, &x, 4); return y; }
inline u32 __float_as_uint(float x) { u32 y; memcpy(&y, &x, 4); return y; }
inline float __fmaf_rn(float x, float y, float z) { return fmaf(x, y, z); }
inline u32 max(u32 x, u32 y) { return x > y ? x : y; }
inline int atomicMax(int *at, int x) { const int old = *at; if (x > old) *at = x; return old; }

namespace emulation {
struct Copy { u32 to; const void *from; bool there; u32 bytes = 16; };
struct Copies { std::vector<std::vector<Copy>> groups{1}; };
inline std::vector<Copies> copies;  // of each thread
inline u8 *shared_at(u32 at, u32 bytes) {
    if (at % bytes || at + bytes > memory.size() * 4) { fprintf(stderr, "shared memory: %u bytes at %u\n", bytes, at); abort(); }
    return (u8 *)memory.data() + at;
}
inline void copy(const Copy &c) {
    u8 *to = shared_at(c.to, c.bytes);
    if (c.there) memcpy(to, c.from, c.bytes); else memset(to, 0, c.bytes);
}
inline Copies &own_copies() { if (copies.size() < threads.size()) copies.resize(threads.size()); return copies[threadIdx.x]; }

struct Exchange { u32 words[2][32][8]; };
inline std::vector<Exchange> exchanges;
// Every lane's words; all lanes of the warp call it.
inline const u32 (*exchanged(const u32 *own, int count))[8] {
    if (exchanges.size() < warps.size()) exchanges.resize(warps.size());
    const unsigned index = threadIdx.x / 32;
    const unsigned mine = warps[index].generation;
    memcpy(exchanges[index].words[mine & 1][threadIdx.x % 32], own, 4 * count);
    if (++warps[index].arrived == 32) { warps[index].arrived = 0; warps[index].generation++; }
    while (warps[index].generation == mine) yield();
    return exchanges[index].words[mine & 1];
}
inline float half_of(u32 pair, int i) { return __uint_as_float(i ? pair & 0xffff0000u : pair << 16); }
inline u32 to_bf16(float x) {
    u32 bits = __float_as_uint(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline u32 to_e4m3(float x) {  // nearest even, cut to 448
    const u32 sign = __float_as_uint(x) >> 31 << 7;
    if (x != x) return 0x7f;
    const float y = fminf(fabsf(x), 448.0f);
    if (y < 0.015625f) return sign | (u32)nearbyintf(y * 512.0f);
    u32 bits = __float_as_uint(y);
    bits += 0x7ffff + (bits >> 20 & 1);
    return sign | ((bits >> 20) - (120 << 3));
}
}  // namespace emulation

// prmt: four of eight bytes; with a selector's high bit the byte's sign, eight times.
inline u32 bytes_of(u32 low, u32 high, u32 selector) {
    u32 out = 0;
    for (int i = 0; i < 4; i++) {
        const u32 s = selector >> (4 * i) & 15, byte = ((uint64_t)high << 32 | low) >> (8 * (s & 7)) & 255;
        out |= (s & 8 ? (byte & 128 ? 255u : 0u) : byte) << (8 * i);
    }
    return out;
}

inline u32 shared_address() { return 0; }
// With EARLY a copy arrives at once, else only when it is waited for.
inline void copy_async(u32 to, const void *from, bool there) {
    if (EARLY) emulation::copy({to, from, there}); else emulation::own_copies().groups.back().push_back({to, from, there});
}
inline void commit_copies() { emulation::own_copies().groups.emplace_back(); }
template <int LEFT> inline void wait_copies() {  // all but the last groups that were committed
    auto &groups = emulation::own_copies().groups;
    while (groups.size() > LEFT + 1) {
        for (const auto &c : groups.front()) emulation::copy(c);
        groups.erase(groups.begin());
    }
}

inline void load_matrices_of(u32 *to, u32 at, bool turn) {
    const auto *of = emulation::exchanged(&at, 1);
    const int g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
    for (int i = 0; i < 4; i++) {
        u16 pair[2];
        for (int k = 0; k < 2; k++) {
            const int row = turn ? 2 * q + k : g, column = turn ? g : 2 * q + k;
            memcpy(&pair[k], emulation::shared_at(of[8 * i + row][0], 16) + 2 * column, 2);
        }
        to[i] = pair[0] | (u32)pair[1] << 16;
    }
}
inline void load_matrices(u32 *to, u32 at) { load_matrices_of(to, at, false); }
inline void load_turned(u32 *to, u32 at) { load_matrices_of(to, at, true); }
inline uint2 load_pair(u32 at) { uint2 x; memcpy(&x, emulation::shared_at(at, 8), 8); return x; }
inline void store_four(u32 at, const float *x) { memcpy(emulation::shared_at(at, 16), x, 16); }
inline void store_half(u32 at, u16 x) { memcpy(emulation::shared_at(at, 2), &x, 2); }

inline u32 turned(u32 matrix) {
    const auto *of = emulation::exchanged(&matrix, 1);
    const int g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
    u32 out = 0;
    for (int k = 0; k < 2; k++) out |= (of[4 * (2 * q + k) + g / 2][0] >> (16 * (g % 2)) & 0xffffu) << (16 * k);
    return out;
}

// m16n8k16: A (16, 16) and B (16, 8) in bfloat16, C in float32.
inline void multiply_add(float *c, const u32 *a, u32 b0, u32 b1) {
    const u32 own[6] = {a[0], a[1], a[2], a[3], b0, b1};
    const auto *of = emulation::exchanged(own, 6);
    const int g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
    for (int i = 0; i < 4; i++) {
        const int row = g + i / 2 * 8, column = 2 * q + i % 2;
        double sum = c[i];
        for (int k = 0; k < 16; k++) {
            const float x = emulation::half_of(of[row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2], k % 2);
            const float y = emulation::half_of(of[column * 4 + k % 8 / 2][4 + k / 8], k % 2);
            sum += (double)x * y;
        }
        c[i] = (float)sum;
    }
}

inline u32 bf16_pair(float low, float high) { return emulation::to_bf16(low) | emulation::to_bf16(high) << 16; }
inline u32 larger_pair(u32 a, u32 b) {
    u32 out = 0;
    for (int i = 0; i < 2; i++) {
        const float x = emulation::half_of(a, i), y = emulation::half_of(b, i);
        out |= (x != x || y != y ? 0x7fffu : __float_as_uint(x > y ? x : y) >> 16) << (16 * i);
    }
    return out;
}
inline u32 e4m3_pair(float low, float high) { return emulation::to_e4m3(low) | emulation::to_e4m3(high) << 8; }
inline float logistic(float z) { return 1.0f / (1.0f + exp2f(z * -1.4426950408889634f)); }
