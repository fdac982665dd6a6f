// Products of a warpgroup, the four warps that Hopper's tensor cores take together (compute capability 9.0 and no other):
// 64 outputs of W from registers times the rows of x in shared memory. Included by wide_rows.cu.
//
// mma.sync wants both operands in registers, so each warp reads all rows of x for its own 16 outputs. A warpgroup's
// product reads x from shared memory by itself, once for 64 outputs, and runs while the warps decode the next weights.
//
// In shared memory the 16 dimensions of one product are, for each 8 rows of x, two blocks of 8 rows of 16 bytes:
// dimensions 0 to 7, then 8 to 15. Lane 4 g + t of a warp has weights 2 t, 2 t + 1, 2 t + 8 and 2 t + 9 of outputs g and g + 8, in
// the order of mma.sync, and gets what mma.sync would give it: of output g, then g + 8, rows 2 t and 2 t + 1 of each 8.

#pragma once

#define BLOCK_OF_X 128              // bytes: 8 rows of 8 dimensions
#define PRODUCT_OF_X (ROWS * 32)    // of 16 dimensions

#ifndef EMULATED
// Where a product's x begins, and how far its blocks are apart along the dimensions and along the rows, in 16 bytes.
static __device__ __forceinline__ u64 description_of_x(int at) {
    return (u64)((shared_address() + at) >> 4) | (u64)(BLOCK_OF_X >> 4) << 16 | (u64)(2 * BLOCK_OF_X >> 4) << 32;
}
#include "launch/hopper.cu"
#if KIND == 5
#define NUMBERS ".f32.bf16.bf16 "
#else
#define NUMBERS ".f32.f16.f16 "
#endif
#define YES "{ .reg .pred p; setp.ne.b32 p, "
#define NAME(columns) ", 0; wgmma.mma_async.sync.aligned.m64n" columns "k16" NUMBERS
#define FOUR(i) "+f"(y[i]), "+f"(y[i + 1]), "+f"(y[i + 2]), "+f"(y[i + 3])
#define OPERANDS "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(x), "r"(1)

// y += a x of 64 outputs and ROWS rows; y's and a's registers are in use until the product has been waited for.
static __device__ __forceinline__ void multiply_wide(float *y, const u32 *a, u64 x) {
#if GROUPS == 1
    asm volatile(YES "%9" NAME("8") "{%0, %1, %2, %3}, {%4, %5, %6, %7}, %8, p, 1, 1, 0; }" : FOUR(0) : OPERANDS);
#elif GROUPS == 2
    asm volatile(YES "%13" NAME("16") "{%0, %1, %2, %3, %4, %5, %6, %7}, {%8, %9, %10, %11}, %12, p, 1, 1, 0; }"
                 : FOUR(0), FOUR(4) : OPERANDS);
#elif GROUPS == 4
    asm volatile(YES "%21" NAME("32") "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
                 "{%16, %17, %18, %19}, %20, p, 1, 1, 0; }"
                 : FOUR(0), FOUR(4), FOUR(8), FOUR(12) : OPERANDS);
#elif GROUPS == 8
    asm volatile(YES "%37" NAME("64") "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, "
                 "%19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, {%32, %33, %34, %35}, %36, p, 1, 1, 0; }"
                 : FOUR(0), FOUR(4), FOUR(8), FOUR(12), FOUR(16), FOUR(20), FOUR(24), FOUR(28) : OPERANDS);
#else
#error "a warpgroup takes 8, 16, 32 or 64 rows of x here"
#endif
}
#endif
