// Runs decoder/gated_lora_backward.cu on a CPU; built by emulated.py with the kernel's macros and EARLY defined.
#include "tensor_core_emulation.h"
#define EMULATED 1
#include SOURCE

static Arguments arguments;
static void backward_block() { gated_lora_backward(arguments); }
static void sum_block() { gated_lora_sum(arguments); }

extern "C" int shared_bytes() { return SHARED_BYTES; }

extern "C" void run(const Arguments *p, int blocks, int sum_blocks) {
    arguments = *p;
    emulation::launch(backward_block, {(unsigned)blocks, 1, 1}, THREADS, SHARED_BYTES);
    emulation::launch(sum_block, {(unsigned)sum_blocks, 1, 1}, THREADS, 0);
}
