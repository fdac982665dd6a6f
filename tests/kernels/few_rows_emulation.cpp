// Runs generation/few_rows.cu or columns.cu on a CPU; built by emulated.py with the kernel's macros. Copies arrive only when they are waited for.
#undef EARLY
#define EARLY 0
#define multiply_add multiply_bfloat16
#include "tensor_core_emulation.h"
#undef multiply_add
#define EMULATED 1
#define __grid_constant__
#ifdef SLICES
#define KERNEL columns
#else
#define KERNEL few_rows
#endif
#include "half_emulation.h"
#include SOURCE

static Arguments arguments;
static void block() { KERNEL(arguments); }

extern "C" void run(const Arguments *p, int blocks, int shared_bytes) {
    arguments = *p;
    emulation::launch(block, {(unsigned)blocks, 1, 1}, THREADS, shared_bytes);
}
