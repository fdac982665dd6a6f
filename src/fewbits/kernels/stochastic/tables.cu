// What kernels that look counts up have in common; a kernel's source includes it, after its LANES and TWICE.

#pragma once

// The bytes of 16 codes of 4 columns of a word, to 16 words; then the same for the negative codes.
static __device__ __forceinline__ void store_codes(u32 *plane, const uint4 *v, int first, int lane) {
    const u32 words[4][4] = {{v[0].x, v[1].x, v[2].x, v[3].x},
                             {v[0].y, v[1].y, v[2].y, v[3].y},
                             {v[0].z, v[1].z, v[2].z, v[3].z},
                             {v[0].w, v[1].w, v[2].w, v[3].w}};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        u32 low01 = __byte_perm(words[i][0], words[i][1], 0x5140);
        u32 high01 = __byte_perm(words[i][0], words[i][1], 0x7362);
        u32 low23 = __byte_perm(words[i][2], words[i][3], 0x5140);
        u32 high23 = __byte_perm(words[i][2], words[i][3], 0x7362);
        u32 of_code[4] = {__byte_perm(low01, low23, 0x5410), __byte_perm(low01, low23, 0x7632),
                          __byte_perm(high01, high23, 0x5410), __byte_perm(high01, high23, 0x7632)};
#pragma unroll
        for (int j = 0; j < 4; j++) {
            int code = first + 4 * i + j;
            plane[code * LANES + lane] = of_code[j];
            if (code) plane[(256 - code) * LANES + lane] = TWICE - of_code[j];
        }
    }
}
