// Words, what follows from a weight's kind, and what decoding's products ask of the hardware; included with the macros KIND,
// VALUES, WARPS, SCALES, HALF and EARLY.

#pragma once

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;
typedef long long i64;
typedef unsigned long long u64;

#define THREADS (32 * WARPS)
#define BITS (KIND == 0 || KIND == 1 ? 4 : KIND <= 4 ? 8 : 16)
#define CHUNK (4 * VALUES)
#define CHUNK_BYTES (CHUNK * BITS / 8)
#define STEPS (VALUES / 4)           // products of 16 dimensions that a chunk takes
#define POSITIVE (KIND == 1 || KIND == 2)  // integers, made positive by adding HALF_RANGE
#define HALF_RANGE (KIND == 1 ? 8.0f : 128.0f)
// What a product of the bits has to be multiplied by: integers stand for 2**-24 times themselves, E4M3 for 2**-8 times.
#define BITS_FACTOR (POSITIVE ? 16777216.0f : KIND == 3 ? 256.0f : 1.0f)
#define MAP_BYTES (SCALES == 2 ? 1024 : 0)

// What the hardware does; on a CPU the tests' emulation does it.

#ifndef EMULATED
extern __shared__ __align__(16) u8 shared_bytes[];
// 16 bytes to shared memory, without waiting; zeros where ``there`` does not hold. Then of 4 or 8 bytes.
static __device__ __forceinline__ void copy_16(u32 to, const void *from, bool there) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(there ? 16 : 0) : "memory");
}
template <int BYTES> static __device__ __forceinline__ void copy_few(u32 to, const void *from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(from), "n"(BYTES) : "memory");
}
static __device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LEFT> static __device__ __forceinline__ void wait_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}
// 16 bytes of a weight, which nobody reads again: past the first cache.
static __device__ __forceinline__ uint4 load_once(const u8 *at) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at));
    return v;
}
// A named barrier of so many threads: to say that one is there, and to wait until all have said so.
static __device__ __forceinline__ void arrive_at(int barrier, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
static __device__ __forceinline__ void wait_at(int barrier, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
static __device__ __forceinline__ u32 bytes_of(u32 low, u32 high, u32 selector) {  // four of eight bytes
    u32 out;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(out) : "r"(low), "r"(high), "r"(selector));
    return out;
}
static __device__ __forceinline__ u32 shared_address() { return (u32)__cvta_generic_to_shared(shared_bytes); }
static __device__ __forceinline__ void wait_for_the_kernel_before() {
#if EARLY
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
static __device__ __forceinline__ void multiply_add(float *c, const u32 *a, u32 b0, u32 b1) {
#if KIND == 5
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
#else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
#endif
                 "{%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// The same of other operands, whose 16 bits are of the kind that HALF says.
static __device__ __forceinline__ void multiply_add_16(float *c, const u32 *a, u32 b0, u32 b1) {
#if HALF == 2
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
#else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
#endif
                 "{%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
static __device__ __forceinline__ u32 half_pair(float low, float high) {  // float16, rounded to nearest
    u32 out;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
    return out;
}
static __device__ __forceinline__ u32 bf16_pair(float low, float high) {
    u32 out;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
    return out;
}
static __device__ __forceinline__ float from_half(u16 x) {
    float out;
    asm("cvt.f32.f16 %0, %1;" : "=f"(out) : "h"(x));
    return out;
}
static __device__ __forceinline__ u32 times_pair(u32 x, u32 y) {  // of two float16 each
    u32 out;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(out) : "r"(x), "r"(y));
    return out;
}
static __device__ __forceinline__ u32 less_pair(u32 x, u32 y) {
    u32 out;
    asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(out) : "r"(x), "r"(y));
    return out;
}
static __device__ __forceinline__ float load_from_others(const float *at) {  // what other blocks wrote: not from the first cache
    return __ldcg(at);
}
static __device__ __forceinline__ float4 load_four_from_others(const float *at) { return __ldcg((const float4 *)at); }
static __device__ __forceinline__ void ask_for(const void *at) {  // a line of memory, for the second cache
    asm volatile("prefetch.global.L2 [%0];" ::"l"(at));
}
#define SHARED(type, at) (*(type *)(shared_bytes + (at)))
// A word of a table in shared memory. The compiler does not know where a block's shared memory begins, and adds that to every
// address that is not a constant: a third of the instructions of a look-up. All GPUs so far keep SHARED_BASE bytes in front of
// it for themselves; on one that does not the kernel stops.
#define SHARED_BASE 1024
template <int TABLE> static __device__ __forceinline__ u32 word_at(u32 offset) {
    u32 word;
    asm("ld.shared.u32 %0, [%1 + %2];" : "=r"(word) : "r"(offset), "n"(SHARED_BASE + TABLE));
    return word;
}
static __device__ __forceinline__ void check_base() {
    if (shared_address() != SHARED_BASE) asm volatile("trap;");
}
// What the offsets are made of, once the table is written: no look-up comes before.
static __device__ __forceinline__ u32 bank_after_tables(u32 bank) {
    u32 same;
    asm volatile("mov.u32 %0, %1;" : "=r"(same) : "r"(bank) : "memory");
    return same;
}
#endif

static __device__ __forceinline__ float from_bf16(u32 x) { return __uint_as_float(x << 16); }
static __device__ __forceinline__ float from_16(u16 x) {
#if HALF == 2
    return from_half(x);
#else
    return from_bf16(x);
#endif
}
