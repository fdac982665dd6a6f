// Codes that a lane has in registers, 16 bytes of one output, to pairs of float16; included with the macros KIND, TABLE_AT.

#pragma once

// Four weights of a lane's chunk, those of product ``step``, as two pairs of float16.
static __device__ __forceinline__ void decode(const uint4 &four, int step, u32 lane_bank, u32 *first, u32 *second) {
    const u32 w[4] = {four.x, four.y, four.z, four.w};
#if KIND == 0
    const u32 word = w[step / 2], byte = step % 2 * 2;
    *first = word_at<TABLE_AT>(bytes_of(word, lane_bank, 0x5504 | byte << 4));
    *second = word_at<TABLE_AT>(bytes_of(word, lane_bank, 0x5504 | (byte + 1) << 4));
#elif KIND == 1  // pairs (0, 4), (1, 5) 16 times as large, then (2, 6), (3, 7): x lies and is scaled likewise
    const u32 word = w[step / 2] >> (step % 2 * 8);
    *first = (word & 0x000f000f) ^ 0x00080008;
    *second = (word & 0x00f000f0) ^ 0x00800080;
#elif KIND == 2  // pairs (0, 2), (1, 3)
    *first = (w[step] & 0x00ff00ff) ^ 0x00800080;
    *second = (w[step] >> 8 & 0x00ff00ff) ^ 0x00800080;
#elif KIND == 3  // the same pairs; sign, 4 and 3 bits to sign, 5 and 10
    *first = (w[step] << 8 & 0x80008000) | (w[step] << 7 & 0x3f803f80);
    *second = (w[step] & 0x80008000) | (w[step] >> 1 & 0x3f803f80);
#else
    *first = w[step] << 8 & 0xff00ff00;
    *second = w[step] & 0xff00ff00;
#endif
}

// The table of a 4-bit codebook: pairs of values, 256 bytes apart.
static __device__ __forceinline__ void fill_pairs(const float *values) {
#if KIND == 0
    check_base();
    // Each pair 32 times, one for each lane's bank; threads begin at different ones so that their banks differ.
    for (int i = threadIdx.x; i < 256; i += THREADS) {
        const u32 pair = half_pair(values[i & 15], values[i >> 4]);
#pragma unroll
        for (int part = 0; part < 8; part++)
            SHARED(uint4, TABLE_AT + i * 256 + (part + i) % 8 * 16) = uint4{pair, pair, pair, pair};
    }
#endif
}
