// Runs stochastic/bits.cu on a CPU; built by emulated.py with the kernels' macros defined.
#include "cuda_emulation.h"
#define shared ((u32 *)emulation::memory.data())
#define EMULATED 1
static inline void mma_b1(int *d, const unsigned *a, unsigned b0, unsigned b1) {
    emulation::mma(d, {a[0], a[1], a[2], a[3], b0, b1}, emulation::bits);
}
#include SOURCE

static Product product;
static void product_of_bits() { stochastic_bits(product); }
static void bits_a() { stochastic_bits_a(product); }
static void bits_b() { stochastic_bits_b(product); }

extern "C" void run(const Product *p, const char *name, const int *grid, int threads, int shared_bytes) {
    product = *p;
    const bool a = !strcmp(name, "stochastic_bits_a"), b = !strcmp(name, "stochastic_bits_b");
    emulation::launch(a ? bits_a : b ? bits_b : product_of_bits,
                      {(unsigned)grid[0], (unsigned)grid[1], (unsigned)grid[2]}, threads, shared_bytes);
}
