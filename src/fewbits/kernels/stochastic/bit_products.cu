// What wide_bits.cu asks of Hopper (compute capability 9.0 and no other) beside launch/hopper.cu: products of warpgroups in whole
// numbers. On a CPU the tests have functions of the same names.
//
// In shared memory a step of b is, for each 8 columns, two blocks of 8 columns of 16 bytes: the first half of the step's 32 bytes,
// then the second. Lane 4 g + t of a warp has words t and 4 + t of rows g and g + 8 of a, in the order of mma.sync, and gets what
// mma.sync would give it: of row g, then g + 8, columns 2 t and 2 t + 1 of each 8.

#pragma once

#ifndef EMULATED
static __device__ __forceinline__ u32 shared_address() { return (u32)__cvta_generic_to_shared(shared); }

// Where a step of b begins in shared memory, and how far its blocks are apart along the inner dimension and the columns.
static __device__ __forceinline__ u64 description_of(int at) {
    return (u64)((shared_address() + at) >> 4) | (u64)(128 >> 4) << 16 | (u64)(256 >> 4) << 32;
}
#include "launch/hopper.cu"
// x << by, 0 from 32 on.
static __device__ __forceinline__ u32 shifted(u32 x, int by) {
    u32 y;
    asm("shl.b32 %0, %1, %2;" : "=r"(y) : "r"(x), "r"(by));
    return y;
}

#define FOUR(i) "+r"(d[i]), "+r"(d[i + 1]), "+r"(d[i + 2]), "+r"(d[i + 3])
#define SIXTEEN(i) FOUR(i), FOUR(i + 4), FOUR(i + 8), FOUR(i + 12)
#define LIST16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define LIST32 LIST16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define LIST64                                                                                                                       \
    LIST32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, "    \
           "%55, %56, %57, %58, %59, %60, %61, %62, %63"
#if COLUMNS == 128
#define PRODUCT(kind) "{ .reg .pred p; setp.ne.b32 p, %69, 0; wgmma.mma_async.sync.aligned.m64n128" kind "{" LIST64 "}, {%64, %65, %66, %67}, %68, p; }"
#define SUMS SIXTEEN(0), SIXTEEN(16), SIXTEEN(32), SIXTEEN(48)
#elif COLUMNS == 64
#define PRODUCT(kind) "{ .reg .pred p; setp.ne.b32 p, %37, 0; wgmma.mma_async.sync.aligned.m64n64" kind "{" LIST32 "}, {%32, %33, %34, %35}, %36, p; }"
#define SUMS SIXTEEN(0), SIXTEEN(16)
#elif COLUMNS == 32
#define PRODUCT(kind) "{ .reg .pred p; setp.ne.b32 p, %21, 0; wgmma.mma_async.sync.aligned.m64n32" kind "{" LIST16 "}, {%16, %17, %18, %19}, %20, p; }"
#define SUMS SIXTEEN(0)
#else
#error "a warpgroup takes 32, 64 or 128 columns here"
#endif

// d += popc(a & b) over 256 bits, or the sum of 32 products of signed bytes, of 64 rows and COLUMNS columns; the registers are in
// use until the product has been waited for.
static __device__ __forceinline__ void multiply_bits(int *d, const u32 *a, u64 b) {
    asm volatile(PRODUCT("k256.s32.b1.b1.and.popc ") : SUMS : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(1));
}
static __device__ __forceinline__ void multiply_bytes(int *d, const u32 *a, u64 b) {
    asm volatile(PRODUCT("k32.s32.s8.s8 ") : SUMS : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(1));
}
#endif
