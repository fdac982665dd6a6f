// Runs codec/dequantize_transposed.cu on a CPU; built by emulated.py with the kernel's macros defined.
#define EARLY 1
#include "tensor_core_emulation.h"
#define EMULATED 1
#include SOURCE

static Arguments arguments;
static void block() { dequantize_turned(arguments); }

extern "C" void run(const Arguments *p, int x, int y) {
    arguments = *p;
    emulation::launch(block, {(unsigned)x, (unsigned)y, 1}, THREADS, 0);
}
