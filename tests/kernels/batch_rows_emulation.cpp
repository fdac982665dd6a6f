// Runs generation/batch_rows.cu, wide_rows.cu or batch_x.cu on a CPU; built by emulated.py with the kernel's macros. Copies arrive only when they are waited for.
#undef EARLY
#define EARLY 0
#define multiply_add multiply_bfloat16
#include "tensor_core_emulation.h"
#undef multiply_add
#define EMULATED 1
#define __grid_constant__
#include "half_emulation.h"
inline int atomicAdd(int *at, int x) { const int old = *at; *at += x; return old; }
inline void __threadfence() {}
#ifdef RING
#include "warpgroup_emulation.h"
#endif
#include SOURCE

#ifdef RING
#define KERNEL wide_rows
typedef BatchArguments Argument;
#elif defined(SPLIT)
#define KERNEL batch_rows
typedef BatchArguments Argument;
#else
#define KERNEL batch_x
typedef RowsOfX Argument;
#endif
static Argument argument;
static void block() { KERNEL(argument); }

extern "C" void run(const Argument *p, int blocks, int parts, int shared_bytes) {
    argument = *p;
    emulation::launch(block, {(unsigned)blocks, (unsigned)parts, 1}, THREADS, shared_bytes);
}
