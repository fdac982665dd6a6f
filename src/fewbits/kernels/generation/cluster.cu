// Blocks that run side by side and read each other's shared memory: attention of one new token adds up its parts so.
// CLUSTER: how many blocks; 1 where the GPU has no clusters.

#if CLUSTER > 1
static __device__ __forceinline__ void meet_cluster() {
    asm volatile("barrier.cluster.arrive.release.aligned;\n\tbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// A number in the shared memory of the cluster's block ``rank``, which stands where ``own`` stands in this one's.
static __device__ __forceinline__ float load_from_block(const float *own, u32 rank) {
    u32 at = (u32)__cvta_generic_to_shared(own);
    float x;
    asm("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(at) : "r"(rank));
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(x) : "r"(at) : "memory");
    return x;
}
#else
static __device__ __forceinline__ void meet_cluster() { __syncthreads(); }
static __device__ __forceinline__ float load_from_block(const float *own, u32) { return *own; }
#endif
