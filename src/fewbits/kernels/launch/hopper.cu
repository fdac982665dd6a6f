// Products of warpgroups, barriers in shared memory and bulk copies of Hopper (compute capability 9.0 and no other), as kernels
// of several folders use them. Who includes it has ``u8``, ``u32`` and ``shared_address()``, the beginning of shared memory;
// places there are in bytes behind it. On a CPU the tests' emulations have functions of the same names.

#pragma once

// What ordinary instructions wrote to registers is there for the products that follow.
static __device__ __forceinline__ void registers_are_written() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
static __device__ __forceinline__ void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// All but the last so many products are done.
template <int LEFT> static __device__ __forceinline__ void wait_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}
// Barriers of 8 bytes in shared memory: one turns when so many threads, and the bulk copy that it was told of, have come to it.
static __device__ __forceinline__ void begin_barrier(int at, int threads) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address() + at), "r"(threads) : "memory");
}
static __device__ __forceinline__ void barriers_have_begun() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
static __device__ __forceinline__ void come_to(int barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address() + barrier) : "memory");
}
static __device__ __forceinline__ void copy_bulk(int to, const u8 *from, int bytes, int barrier) {
    const u32 base = shared_address();
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(base + barrier), "r"(bytes) : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(base + to), "l"(from),
                 "r"(bytes), "r"(base + barrier) : "memory");
}
// Until the barrier has turned for the (2 n)-th time, counted from 0, with ``odd`` 0, or the (2 n + 1)-th with ``odd`` 1.
static __device__ __forceinline__ void wait_until_turned(int barrier, u32 odd) {
    asm volatile("{ .reg .pred p; again: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1; @!p bra again; }" ::"r"(shared_address() + barrier),
                 "r"(odd) : "memory");
}
// A warpgroup's registers for each thread from here on: all four warps ask for them, and what one gives another takes.
template <int COUNT> static __device__ __forceinline__ void give_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT)); }
template <int COUNT> static __device__ __forceinline__ void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT)); }
