// Runs stochastic/nibbles.cu on a CPU; built by emulated.py with the kernels' macros defined.
#include "cuda_emulation.h"
#define shared ((u32 *)emulation::memory.data())
#define EMULATED 1
static inline void mma_u8_s8(int *d, unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
    emulation::mma(d, {a0, a1, a2, a3, b0, b1}, emulation::bytes<unsigned char, signed char>);
}
static inline void mma_s8(int *d, unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
    emulation::mma(d, {a0, a1, a2, a3, b0, b1}, emulation::bytes<signed char>);
}
static inline uint4 load_16(unsigned at) {
    if (at % 16) abort();
    return *(const uint4 *)__cvta_shared_to_generic(at);
}
static inline unsigned either(unsigned mask, unsigned x, unsigned y) { return mask & x | ~mask & y; }
#include SOURCE

static Product product;
static void nibbles() { stochastic_nibbles(product); }
static void pack_a() { stochastic_pack_a(product); }
static void pack_b() { stochastic_pack_b(product); }

extern "C" void run(const Product *p, const char *name, const int *grid, int threads, int shared_bytes) {
    product = *p;
    const bool a = !strcmp(name, "stochastic_pack_a"), b = !strcmp(name, "stochastic_pack_b");
    emulation::launch(a ? pack_a : b ? pack_b : nibbles, {(unsigned)grid[0], (unsigned)grid[1], (unsigned)grid[2]},
                      threads, shared_bytes);
}
