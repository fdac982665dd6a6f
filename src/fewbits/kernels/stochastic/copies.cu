// Shared memory filled by copies that arrive later, and read; on a CPU the tests have functions of the same names.

#pragma once

#ifndef EMULATED

static __device__ __forceinline__ void copy_16(u32 to, const void *from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

static __device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

static __device__ __forceinline__ uint4 load_16(u32 at) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at));
    return v;
}

#endif
