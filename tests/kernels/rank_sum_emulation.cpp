// Runs generation/rank_sum.cu on a CPU for all ranks: first they all send, then they all add. Built by emulated.py.
#undef EARLY
#define EARLY 0
#define EMULATED 1
#include "cuda_emulation.h"
inline unsigned __float_as_uint(float x) { unsigned y; memcpy(&y, &x, 4); return y; }
inline float __uint_as_float(unsigned x) { float y; memcpy(&y, &x, 4); return y; }
static inline void send(uint4 *to, uint4 letter) { *to = letter; }
static inline uint4 await(const uint4 *at, unsigned turn) {
    if (at->y != turn || at->w != turn) { fprintf(stderr, "no letter of turn %u\n", turn); abort(); }
    return *at;
}
#include SOURCE

static Arguments arguments;
static void sending() { send_all(arguments, arguments.turns[blockIdx.x] + 1); }
static void adding() {
    const unsigned turn = arguments.turns[blockIdx.x] + 1;
    add_all(arguments, turn);
    __syncthreads();
    if (threadIdx.x == 0) arguments.turns[blockIdx.x] = turn;
}

extern "C" void run(const Arguments *of_ranks, int blocks) {
    for (int rank = 0; rank < RANKS; rank++) {
        arguments = of_ranks[rank];
        emulation::launch(sending, {(unsigned)blocks, 1, 1}, THREADS, 0);
    }
    for (int rank = 0; rank < RANKS; rank++) {
        arguments = of_ranks[rank];
        emulation::launch(adding, {(unsigned)blocks, 1, 1}, THREADS, 0);
    }
}
