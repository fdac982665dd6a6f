// x <- the sum of x over the GPUs of one host, in the ranks' order; see rank_sum.py for what it computes.
//
// Each rank has an inbox in its own memory, which the others map. A rank writes its x into all of them and reads the others'
// from its own, so that a value travels once over the wire and nobody asks for anything. What says that a value is there lies in
// the same 8 bytes, which arrive together: the number of the turn. So no barrier is needed, and none of the fences that one takes.
//
// Turns have two halves of an inbox in turn. A rank writes into a half again when its kernel of the turn between has ended, thus has
// read something from each other rank that wrote it after the end of its kernel of the turn before: nobody reads that half any more.
//
// A block has the same values, and its own count of turns, in every launch: all launches with one inbox have one grid.
//
// EARLY: the next kernel's blocks may start, and ask for their weights, while this one waits for the other ranks.
//
// Compiled at run time with these defined: RANKS, THREADS, EARLY.

#pragma once

typedef unsigned int u32;
typedef long long i64;

struct Arguments {
    float *x;
    uint4 *inboxes[RANKS];  // (2, RANKS, pairs) of 16 bytes each: value, turn, value, turn
    u32 *turns;             // of each block
    i64 pairs;
    int rank;
};

#ifndef EMULATED
#define PATIENCE (1u << 27)  // looks at one's own memory, most of a microsecond each: a minute or two
static __device__ __forceinline__ void send(uint4 *to, uint4 letter) {
    asm volatile("st.volatile.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(letter.x), "r"(letter.y), "r"(letter.z),
                 "r"(letter.w) : "memory");
}
static __device__ __forceinline__ uint4 await(const uint4 *at, u32 turn) {
    uint4 letter;
    for (u32 looks = 0;; looks++) {
        asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(letter.x), "=r"(letter.y), "=r"(letter.z), "=r"(letter.w) : "l"(at) : "memory");
        if (letter.y == turn && letter.w == turn) return letter;
        if (looks == PATIENCE) asm volatile("trap;");  // a rank that is gone: an error, and no process that waits for ever
    }
}
#endif

#define FOR_OWN_PAIRS(i) for (i64 i = (i64)blockIdx.x * THREADS + threadIdx.x; i < p.pairs; i += (i64)gridDim.x * THREADS)

static __device__ __forceinline__ void send_all(const Arguments &p, u32 turn) {
    FOR_OWN_PAIRS(i) {
        const float x = p.x[2 * i], y = p.x[2 * i + 1];
        const uint4 letter = {__float_as_uint(x), turn, __float_as_uint(y), turn};
#pragma unroll
        for (int other = 0; other < RANKS; other++)
            if (other != p.rank) send(p.inboxes[other] + ((turn & 1) * RANKS + p.rank) * p.pairs + i, letter);
    }
}

static __device__ __forceinline__ void add_all(const Arguments &p, u32 turn) {
    FOR_OWN_PAIRS(i) {
        float x = 0.0f, y = 0.0f;
#pragma unroll
        for (int from = 0; from < RANKS; from++) {
            float a = p.x[2 * i], b = p.x[2 * i + 1];
            if (from != p.rank) {
                const uint4 letter = await(p.inboxes[p.rank] + ((turn & 1) * RANKS + from) * p.pairs + i, turn);
                a = __uint_as_float(letter.x), b = __uint_as_float(letter.z);
            }
            x = from ? x + a : a, y = from ? y + b : b;
        }
        p.x[2 * i] = x, p.x[2 * i + 1] = y;
    }
}

#ifndef EMULATED
extern "C" __global__ void __launch_bounds__(THREADS) rank_sum(const __grid_constant__ Arguments p) {
#if EARLY
    asm volatile("griddepcontrol.wait; griddepcontrol.launch_dependents;" ::: "memory");
#endif
    const u32 turn = p.turns[blockIdx.x] + 1;
    send_all(p, turn);
    add_all(p, turn);
    __syncthreads();  // all have read the count
    if (threadIdx.x == 0) p.turns[blockIdx.x] = turn;
}
#endif
