// What decoding's products (few_rows.cu, columns.cu) ask of the hardware, on a CPU: named barriers, float16, and copies that
// arrive when they are waited for.
#pragma once

struct Barrier { unsigned arrived = 0, generation = 0; };
static Barrier barriers[16];
inline unsigned arrive_at(int id, int threads) {
    Barrier &barrier = barriers[id];
    const unsigned mine = barrier.generation;
    if ((int)++barrier.arrived == threads) barrier.arrived = 0, barrier.generation++;
    return mine;
}
inline void wait_at(int id, int threads) {
    const unsigned mine = arrive_at(id, threads);
    while (barriers[id].generation == mine) emulation::yield();
}
inline uint4 load_once(const u8 *at) { uint4 v; memcpy(&v, at, 16); return v; }

// float16 and back, to nearest even.
inline float from_half(u16 h) {
    const int exponent = h >> 10 & 31, mantissa = h & 1023;
    const float size = exponent == 31 ? (mantissa ? NAN : INFINITY)
                     : exponent ? ldexpf(1024 + mantissa, exponent - 25) : ldexpf(mantissa, -24);
    return h >> 15 ? -size : size;
}
inline u32 to_half(float x) {
    const u32 sign = __float_as_uint(x) >> 31 << 15;
    const float size = fabsf(x);
    if (size != size) return 0x7fff;
    if (size >= 65520.0f) return sign | 0x7c00;
    if (size < 0.00006103515625f) return sign | (u32)nearbyintf(ldexpf(size, 24));
    u32 bits = __float_as_uint(size);
    bits += 0xfff + (bits >> 13 & 1);
    return sign | ((bits >> 13) - (112 << 10));
}
inline u32 half_pair(float low, float high) { return to_half(low) | to_half(high) << 16; }
template <class Of> inline u32 of_pairs(u32 x, u32 y, Of of) {
    u32 out = 0;
    for (int i = 0; i < 32; i += 16) out |= to_half(of(from_half(x >> i & 0xffff), from_half(y >> i & 0xffff))) << i;
    return out;
}
inline u32 times_pair(u32 x, u32 y) { return of_pairs(x, y, [](float a, float b) { return a * b; }); }
inline u32 less_pair(u32 x, u32 y) { return of_pairs(x, y, [](float a, float b) { return a - b; }); }
inline float load_from_others(const float *at) { return *at; }
inline float4 load_four_from_others(const float *at) { return {at[0], at[1], at[2], at[3]}; }
inline void ask_for(const void *) {}
inline void multiply_float16(float *c, const u32 *a, u32 b0, u32 b1) {
    const u32 own[6] = {a[0], a[1], a[2], a[3], b0, b1};
    const auto *of = emulation::exchanged(own, 6);
    const int g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
    for (int i = 0; i < 4; i++) {
        const int row = g + i / 2 * 8, column = 2 * q + i % 2;
        double sum = c[i];
        for (int k = 0; k < 16; k++) {
            const float x = from_half(of[row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2] >> (16 * (k % 2)) & 0xffff);
            const float y = from_half(of[column * 4 + k % 8 / 2][4 + k / 8] >> (16 * (k % 2)) & 0xffff);
            if (x != 0.0f) sum += (double)x * y;  // a column that nobody reads may hold anything
        }
        c[i] = (float)sum;
    }
}
inline void multiply_add(float *c, const u32 *a, u32 b0, u32 b1) {
    if (KIND == 5) multiply_bfloat16(c, a, b0, b1); else multiply_float16(c, a, b0, b1);
}
inline void multiply_add_16(float *c, const u32 *a, u32 b0, u32 b1) {
    if (HALF == 1) multiply_bfloat16(c, a, b0, b1); else multiply_float16(c, a, b0, b1);
}
inline float __shfl_xor_sync(unsigned mask, float value, int bits) {
    return __uint_as_float(__shfl_xor_sync(mask, __float_as_uint(value), bits));
}
inline float __expf(float x) { return expf(x); }
inline void wait_for_the_kernel_before() {}
inline void copy_16(u32 to, const void *from, bool there) {
    emulation::own_copies().groups.back().push_back({to, from, there});
}
template <int BYTES> inline void copy_few(u32 to, const void *from) { memcpy(emulation::shared_at(to, BYTES), from, BYTES); }
template <class T> inline T &shared_of(size_t at) {
    if (at % alignof(T) || at + sizeof(T) > emulation::memory.size() * 4) {
        fprintf(stderr, "shared memory: %zu bytes at %zu\n", sizeof(T), at);
        abort();
    }
    return *(T *)((u8 *)emulation::memory.data() + at);
}
#define SHARED(type, at) (shared_of<type>(at))
template <int TABLE> inline u32 word_at(u32 offset) { return SHARED(u32, TABLE + offset); }
inline u32 bank_after_tables(u32 bank) { return bank; }
inline void check_base() {}
