// Attention of one new token a sequence over a cache of keys and values; decode_attention.py says what is computed.
//
// The floor is the cache: each key and value is read once. A block has one key head of one sequence, all GROUP query
// heads that share it, and a part of the positions; there are as many parts as fill the GPU. How a block works:
//
// 1. It normalises and turns (rotary) the query heads, every block for itself: a few hundred values. The block whose part
//    ends with the new position does the same to the new key, writes key and value to the cache and takes them from there.
// 2. Where tensor cores can do it (at most 8 query heads of 64, 96 or 128 values), each warp walks over its positions alone:
//    attention_walk.cu. Elsewhere TILE positions at a time: a row of D values lies over LANES lanes (8 values, 16 bytes,
//    each), so a warp reads 32 / LANES positions at once, and several such reads before it multiplies. Scores go to shared
//    memory, their maximum and sum of exponentials are those of an online softmax, and the same walk over the values adds
//    them up.
// 3. CLUSTER blocks of one head run side by side and read each other's shared memory: each adds a share of their sums, in
//    their order. Up to FEW positions one cluster does everything. Beyond, each leaves its sums, maximum and denominator
//    in global memory; the block that comes last (a counter) adds these, in their order, and writes the result. Through
//    global memory that takes 5 us, fences included. Equal calls give equal bits.
//
// 4. Where the product that reads the result has low-rank branches, a block multiplies its share of the outputs by their columns of
//    A and leaves the sums (inner_parts.cu says what for): of each head as many parts as its cluster has blocks.
//
// Compiled at run time with GROUP, D, LANES (a power of two, at least D / 8), HALF (1: bfloat16, 2: float16), HEAD_NORM,
// CAPPED, EARLY, CLUSTER (a power of two, at most 16; 1 before compute capability 9.0), WALKS (on tensor cores), WARPS
// (of a block) and NEXT (rows of that A, a multiple of 4; 0: none) defined. A walk takes 180 registers a thread, so that its blocks have four warps: blocks of eight would keep
// those of the next kernel from starting early, which costs 4 us (7.1 us with 128 tokens became 12.4, with four 5.8).

typedef unsigned int u32;
typedef unsigned short u16;
typedef long long i64;

#define THREADS (32 * WARPS)
#define TILE 128                    // positions
#define MOST_PARTS 64               // clusters of one head, as the launcher knows
#define AT_ONCE (32 / LANES)        // positions that a warp reads with one instruction
#define AHEAD 4                     // such reads before the first is used
#define MIN_PART (CLUSTER > 1 ? 16 : 64)  // positions: fewer are not worth a block
#define FEW (CLUSTER * 256)         // positions: more are worth several clusters
#define LOWEST __int_as_float((int)0xff800000)  // minus infinity
#define PARTIAL (D + 2)             // floats of a head and part: sums, maximum, denominator

struct Arguments {
    const float *qkv;               // (B, (heads + 2 kv_heads) D)
    u16 *keys, *values;             // (B, kv_heads, room, D)
    u16 *out;                       // (B, heads D)
    const u16 *q_norm, *k_norm;     // (D,)
    const float *cosines, *sines;   // (room, rotary)
    const i64 *position, *first;    // (B,): where the new token goes; the first position that is seen
    float *parts;                   // (B, kv_heads, splits, GROUP, PARTIAL)
    u32 *arrived;                   // (B, kv_heads), zeros
    const u16 *next_a;              // (heads D / 8, NEXT, 8)
    float *next_sums;               // (kv_heads * CLUSTER, B, NEXT)
    i64 qkv_pitch, out_pitch, key_pitch, value_pitch;  // of a sequence, values; a head has room * D
    float scale, cap, eps, norm_offset;
    int kv_heads, room, rotary, window;
};

#ifndef EMULATED
static __device__ __forceinline__ void wait_for_the_kernel_before() {
#if EARLY
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
static __device__ __forceinline__ u16 to_16(float x) {
    u32 out;
#if HALF == 1
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(x), "f"(x));
#else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(x), "f"(x));
#endif
    return (u16)out;
}
static __device__ __forceinline__ float from_16(u32 x) {
#if HALF == 1
    return __uint_as_float(x << 16);
#else
    float out;
    asm("cvt.f32.f16 %0, %1;" : "=f"(out) : "h"((u16)x));
    return out;
#endif
}
static __device__ __forceinline__ uint4 load_16(const u16 *at) {
    uint4 v;
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at) : "memory");
    return v;
}
// Where a new value is read by a block that another one may have written: past the first cache.
static __device__ __forceinline__ float load_fresh(const float *at) { return __ldcg(at); }
static __device__ __forceinline__ void ask_for(const void *at) {  // a line of memory, for the second cache
    asm volatile("prefetch.global.L2 [%0];" ::"l"(at));
}
#endif

#include "cluster.cu"

struct Eight {
    float x[8];
};
static __device__ __forceinline__ Eight eight_of(const uint4 &v) {
    return {from_16(v.x & 0xffff), from_16(v.x >> 16), from_16(v.y & 0xffff), from_16(v.y >> 16),
            from_16(v.z & 0xffff), from_16(v.z >> 16), from_16(v.w & 0xffff), from_16(v.w >> 16)};
}

#include "heads.cu"
#if WALKS
#include "attention_walk.cu"
#endif

#if NEXT
#define RANK_LANES (NEXT <= 4 ? 4 : NEXT <= 8 ? 8 : NEXT <= 16 ? 16 : NEXT <= 32 ? 32 : NEXT <= 64 ? 64 : THREADS)
#define SHARE_ROWS (THREADS / RANK_LANES)

// The products of outputs ``from`` to ``to`` (eights) of a head, which ``x`` has, with their columns of A: a part. All threads.
// ``asked``: what a thread needs first, if it has asked for it.
static __device__ __forceinline__ void begin_next(const Arguments &p, int b, int head, int rank, int from, int to, const float *x,
                                                  float *scratch, const uint4 *asked) {
    const int r = threadIdx.x % RANK_LANES, row = threadIdx.x / RANK_LANES;
    const u16 *a_of_head = p.next_a + (i64)head * (GROUP * D) * NEXT;
    float *sums = p.next_sums + ((i64)(head * CLUSTER + rank) * gridDim.z + b) * NEXT;
    for (int begin = 0; begin < NEXT; begin += RANK_LANES) {
        float sum = 0.0f;
        if (begin + r < NEXT)
            for (int o = from / 8 + row; o < to / 8; o += SHARE_ROWS) {
                const bool is_first = asked && begin == 0 && o == from / 8 + row;
                const Eight a = eight_of(is_first ? *asked : __ldg((const uint4 *)(a_of_head + ((i64)o * NEXT + begin + r) * 8)));
#pragma unroll
                for (int e = 0; e < 8; e++) sum += a.x[e] * x[o * 8 + e];
            }
        scratch[threadIdx.x] = sum;
        __syncthreads();
        if (row == 0 && begin + r < NEXT) {
            float all = 0.0f;
#pragma unroll
            for (int i = 0; i < SHARE_ROWS; i++) all += scratch[i * RANK_LANES + r];
            sums[begin + r] = all;
        }
        __syncthreads();
    }
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS) decode_attention(const __grid_constant__ Arguments p) {
    __shared__ __align__(16) float q[GROUP][D], scratch[WARPS][D], scores[GROUP][TILE], sums[WARPS][GROUP][D];
    __shared__ float largest[GROUP], total[GROUP], rescale[GROUP];
    __shared__ u32 last;
    const int b = blockIdx.z, head = blockIdx.y, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int row = lane / LANES, column = lane % LANES * 8;
    const i64 position = p.position[b], begin = p.first[b];
    i64 first = begin;
    if (p.window && position + 1 - p.window > first) first = position + 1 - p.window;
    const int count = (int)(position + 1 - first);
    const int blocks = CLUSTER > 1 && count <= FEW ? CLUSTER : (int)gridDim.x;
    int part = (count + blocks - 1) / blocks;
    if (part < MIN_PART) part = MIN_PART;
    const int clusters = ((count + part - 1) / part + CLUSTER - 1) / CLUSTER;
    if ((int)blockIdx.x >= clusters * CLUSTER) return;
    const i64 end = position + 1, begin_of_part = first + (i64)blockIdx.x * part, from = begin_of_part < end ? begin_of_part : end;
    const i64 to = from + part < end ? from + part : end;  // a cluster's last blocks may have none
    u16 *keys = p.keys + b * p.key_pitch + (i64)head * p.room * D, *values = p.values + b * p.value_pitch + (i64)head * p.room * D;
    // What earlier steps wrote can be asked for before this step's queries are there: the first keys and values.
    const bool has_new = to == end && from < end;
    const Angles angles = angles_at(p, position - begin);
#if WALKS
    __shared__ float largest_of[WARPS][8], total_of[WARPS][8];
    i64 at = from + warp * STEP;
    Keys step_keys = load_keys(keys, at, to - has_new);
    Values step_values = load_values(values, at, to - has_new);
#else
    uint4 key[AHEAD], value[AHEAD];
    const int until = (int)(to - from < TILE ? to - from : TILE) - (has_new && to - from <= TILE);
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
        const int at = (warp + i * WARPS) * AT_ONCE + row;
        const bool there = at < until && column < D;
        key[i] = there ? load_16(keys + (from + at) * D + column) : uint4{0, 0, 0, 0};
        value[i] = there ? load_16(values + (from + at) * D + column) : uint4{0, 0, 0, 0};
    }
#endif
    const int share = (GROUP * D + CLUSTER - 1) / CLUSTER, own = (int)(blockIdx.x % CLUSTER) * share;
#if NEXT
    uint4 first_of_a = {0, 0, 0, 0};
    if (clusters == 1) {
        const int r = threadIdx.x % RANK_LANES, octet = threadIdx.x / RANK_LANES;
        const u16 *from_a = p.next_a + ((i64)head * (GROUP * D) + own) * NEXT;
        if (r < NEXT && octet < share / 8) first_of_a = __ldg((const uint4 *)(from_a + (octet * NEXT + r) * 8));
        for (int i = 8 * RANK_LANES * SHARE_ROWS + 16 * (int)threadIdx.x; i < share * NEXT; i += 16 * THREADS) ask_for(from_a + i);
    }
#endif
    wait_for_the_kernel_before();
    const float *mine = p.qkv + b * p.qkv_pitch;
    const int heads = p.kv_heads * GROUP;
    for (int g = warp; g < GROUP; g += WARPS)
        turn_head(p, mine + (head * GROUP + g) * D, p.q_norm, angles, WALKS ? 1.0f : p.scale, scratch[warp], q[g]);
    if (has_new && warp == WARPS - 1) {
        float *key = sums[0][0];
        turn_head(p, mine + (heads + head) * D, p.k_norm, angles, 1.0f, scratch[warp], key);
        for (int d = lane; d < D; d += 32) {
            keys[position * D + d] = to_16(key[d]);
            values[position * D + d] = to_16(mine[(heads + p.kv_heads + head) * D + d]);
        }
    }
    if (threadIdx.x < GROUP) largest[threadIdx.x] = LOWEST, total[threadIdx.x] = 0.0f;
    __syncthreads();  // the new key and value too are there for all threads of the block
#if WALKS
    const Queries queries = queries_of(q);
    Tally tally = {{LOWEST, LOWEST}};
    if (has_new && at < end && at + STEP >= end) step_keys = load_keys(keys, at, to), step_values = load_values(values, at, to);
    while (at < to) {
        const i64 next = at + WARPS * STEP;
        u32 weights[2][2];
        take_step(p, step_keys, queries, at, to, &tally, weights);
        step_keys = load_keys(keys, next, to);
        add_values(step_values, weights, &tally);
        step_values = load_values(values, next, to);
        at = next;
    }
    join(tally, largest_of, total_of, sums, largest, total);
#else
    Eight own_q[GROUP];
    float sum[GROUP][8] = {};
#pragma unroll
    for (int g = 0; g < GROUP; g++)
#pragma unroll
        for (int i = 0; i < 8; i++) own_q[g].x[i] = column < D ? q[g][column + i] : 0.0f;
    for (i64 tile = from; tile < to; tile += TILE) {
        const int here = to - tile < TILE ? (int)(to - tile) : TILE;
        for (int n = warp * AT_ONCE; n < here; n += WARPS * AT_ONCE * AHEAD) {
#pragma unroll
            for (int i = 0; i < AHEAD; i++) {
                const int at = n + i * WARPS * AT_ONCE + row;
                if (tile == from && n == warp * AT_ONCE && at < until) continue;  // asked for already
                key[i] = at < here && column < D ? load_16(keys + (tile + at) * D + column) : uint4{0, 0, 0, 0};
            }
#pragma unroll
            for (int i = 0; i < AHEAD; i++) {
                const int at = n + i * WARPS * AT_ONCE + row;
                const Eight k = eight_of(key[i]);
#pragma unroll
                for (int g = 0; g < GROUP; g++) {
                    float score = 0.0f;
#pragma unroll
                    for (int e = 0; e < 8; e++) score += own_q[g].x[e] * k.x[e];
#pragma unroll
                    for (int d = LANES / 2; d; d /= 2) score += __shfl_xor_sync(0xffffffffu, score, d);
#if CAPPED
                    score = p.cap * tanhf(score / p.cap);
#endif
                    if (lane % LANES == 0 && at < here) scores[g][at] = score;
                }
            }
        }
        __syncthreads();
        for (int g = warp; g < GROUP; g += WARPS) {
            float most = largest[g];
            for (int n = lane; n < here; n += 32) most = fmaxf(most, scores[g][n]);
#pragma unroll
            for (int d = 16; d; d /= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, d));
            float weights = 0.0f;
            for (int n = lane; n < here; n += 32) {
                const float weight = exp2f((scores[g][n] - most) * 1.4426950408889634f);
                scores[g][n] = weight;
                weights += weight;
            }
            weights = sum_of_warp(weights);
            if (lane == 0) {
                rescale[g] = exp2f((largest[g] - most) * 1.4426950408889634f);
                total[g] = total[g] * rescale[g] + weights;
                largest[g] = most;
            }
        }
        __syncthreads();
        if (tile > from) {
#pragma unroll
            for (int g = 0; g < GROUP; g++)
#pragma unroll
                for (int i = 0; i < 8; i++) sum[g][i] *= rescale[g];
        }
        for (int n = warp * AT_ONCE; n < here; n += WARPS * AT_ONCE * AHEAD) {
#pragma unroll
            for (int i = 0; i < AHEAD; i++) {
                const int at = n + i * WARPS * AT_ONCE + row;
                if (tile == from && n == warp * AT_ONCE && at < until) continue;
                value[i] = at < here && column < D ? load_16(values + (tile + at) * D + column) : uint4{0, 0, 0, 0};
            }
#pragma unroll
            for (int i = 0; i < AHEAD; i++) {
                const int at = n + i * WARPS * AT_ONCE + row;
                const Eight v = eight_of(value[i]);
#pragma unroll
                for (int g = 0; g < GROUP; g++) {
                    const float weight = at < here ? scores[g][at] : 0.0f;
#pragma unroll
                    for (int e = 0; e < 8; e++) sum[g][e] += weight * v.x[e];
                }
            }
        }
        __syncthreads();  // scores are written again
    }
#pragma unroll
    for (int g = 0; g < GROUP; g++)
#pragma unroll
        for (int e = 0; e < 8; e++) {
#pragma unroll
            for (int d = LANES; d < 32; d *= 2) sum[g][e] += __shfl_xor_sync(0xffffffffu, sum[g][e], d);
            if (row == 0 && column < D) sums[warp][g][column + e] = sum[g][e];
        }
#endif
    __syncthreads();
    for (int i = threadIdx.x; i < GROUP * D; i += THREADS) {
        float x = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; w++) x += sums[w][i / D][i % D];
        sums[0][i / D][i % D] = x;
    }
    meet_cluster();
    // The cluster's sums: each block adds its share of the outputs.
    float *parts_of_head = p.parts + ((i64)b * p.kv_heads + head) * (gridDim.x / CLUSTER) * GROUP * PARTIAL;
    float *part_of_cluster = parts_of_head + (i64)(blockIdx.x / CLUSTER) * GROUP * PARTIAL;
    for (int i = own + (int)threadIdx.x; i < own + share && i < GROUP * D; i += THREADS) {
        const int g = i / D;
        float most = LOWEST, all = 0.0f, x = 0.0f, largest_of[CLUSTER], total_of[CLUSTER], sum_of[CLUSTER];
#pragma unroll
        for (u32 s = 0; s < CLUSTER; s++) {
            largest_of[s] = load_from_block(&largest[g], s);
            total_of[s] = load_from_block(&total[g], s);
            sum_of[s] = load_from_block(&sums[0][g][i % D], s);
        }
#pragma unroll
        for (int s = 0; s < CLUSTER; s++) most = fmaxf(most, largest_of[s]);
#pragma unroll
        for (int s = 0; s < CLUSTER; s++) {
            const float weight = CLUSTER > 1 ? exp2f((largest_of[s] - most) * 1.4426950408889634f) : 1.0f;
            all += weight * total_of[s], x += weight * sum_of[s];
        }
        if (clusters == 1) {
            const u16 rounded = to_16(x / all);
            p.out[b * p.out_pitch + (i64)head * GROUP * D + i] = rounded;
            if (NEXT) q[g][i % D] = from_16(rounded);
        } else {
            part_of_cluster[g * PARTIAL + i % D] = x;
            if (i % D == 0) part_of_cluster[g * PARTIAL + D] = most, part_of_cluster[g * PARTIAL + D + 1] = all;
        }
    }
    meet_cluster();  // none ends while another reads from it
#if NEXT
    if (clusters == 1) begin_next(p, b, head, blockIdx.x % CLUSTER, own, own + share, q[0], sums[0][0], &first_of_a);
#endif
    if (clusters == 1) return;
    const int parts = clusters;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) last = atomicAdd(p.arrived + b * p.kv_heads + head, 1u) == (u32)(parts * CLUSTER) - 1;
    __syncthreads();
    if (!last) return;
    __threadfence();
    // First each part's weight, a lane a part, then the sums: no load waits for another.
    float *weights = &scores[0][0];  // (GROUP, MOST_PARTS)
    for (int g = warp; g < GROUP; g += WARPS) {
        float most = LOWEST, total_here = 0.0f, own_most[MOST_PARTS / 32], own_total[MOST_PARTS / 32];
#pragma unroll
        for (int j = 0; j < MOST_PARTS / 32; j++) {
            const int s = j * 32 + lane;
            const float *of = parts_of_head + ((i64)s * GROUP + g) * PARTIAL + D;
            own_most[j] = s < parts ? load_fresh(of) : LOWEST;
            own_total[j] = s < parts ? load_fresh(of + 1) : 0.0f;
            most = fmaxf(most, own_most[j]);
        }
#pragma unroll
        for (int d = 16; d; d /= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, d));
#pragma unroll
        for (int j = 0; j < MOST_PARTS / 32; j++) {
            own_most[j] = exp2f((own_most[j] - most) * 1.4426950408889634f);
            total_here += own_most[j] * own_total[j];
        }
        total_here = sum_of_warp(total_here);
#pragma unroll
        for (int j = 0; j < MOST_PARTS / 32; j++) weights[g * MOST_PARTS + j * 32 + lane] = own_most[j] / total_here;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < GROUP * D; i += THREADS) {
        float x = 0.0f;
#pragma unroll 8
        for (int s = 0; s < parts; s++)
            x += weights[i / D * MOST_PARTS + s] * load_fresh(parts_of_head + ((i64)s * GROUP + i / D) * PARTIAL + i % D);
        const u16 rounded = to_16(x);
        p.out[b * p.out_pitch + (i64)head * GROUP * D + i] = rounded;
        if (NEXT) q[i / D][i % D] = from_16(rounded);
    }
#if NEXT
    __syncthreads();
    begin_next(p, b, head, 0, 0, GROUP * D, q[0], sums[0][0], nullptr);
    for (int i = threadIdx.x; i < (CLUSTER - 1) * NEXT; i += THREADS)  // of blocks that have no share of these outputs
        p.next_sums[((i64)(head * CLUSTER + 1 + i / NEXT) * gridDim.z + b) * NEXT + i % NEXT] = 0.0f;
#endif
    if (threadIdx.x == 0) p.arrived[b * p.kv_heads + head] = 0;
}
