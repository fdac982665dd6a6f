// Runs _stochastic_lookup.cu on a CPU; built by emulated.py with the kernel's macros defined.
#include "cuda_emulation.h"
#define shared ((u32 *)emulation::memory.data())
#define EMULATED 1
#include SOURCE

static Product product;
static void look_up_block() { stochastic_lookup(product); }
static void combine_block() { stochastic_combine(product); }

extern "C" void run(const Product *p, const int *grid, int shared_bytes) {
    product = *p;
    emulation::launch(look_up_block, {(unsigned)grid[0], (unsigned)grid[1], (unsigned)grid[2]}, THREADS, shared_bytes);
}

extern "C" void combine(const Product *p, const int *grid) {
    product = *p;
    emulation::launch(combine_block, {(unsigned)grid[0], (unsigned)grid[1], (unsigned)grid[2]}, 256, 0);
}
