// What wide_rows.cu asks of Hopper, on a CPU: barriers in shared memory, bulk copies that arrive when they are waited for, and
// products of four warps. A product's sums are written when it is waited for, so that using them before shows.
#pragma once

typedef unsigned long long u64;
struct Bulk { const void *from; int to, bytes; };
struct Turning { int needed = 1, came = 0, turned = 0; std::vector<Bulk> copies; };
static std::map<int, Turning> turnings;
static int turnings_block = -1;

inline void begin_barrier(int at, int threads) {
    const int block = blockIdx.x * 1000003 + blockIdx.y;
    if (turnings_block != block) turnings.clear(), turnings_block = block;
    if (at % 8) abort();
    turnings[at] = {};
    turnings[at].needed = threads;
}
inline void barriers_have_begun() {}
inline void turn_if_all_came(Turning &barrier) {
    if (barrier.came == barrier.needed && barrier.copies.empty()) barrier.came = 0, barrier.turned++;
}
inline void come_to(int at) {
    Turning &barrier = turnings.at(at);
    barrier.came++;
    turn_if_all_came(barrier);
}
inline void copy_bulk(int to, const u8 *from, int bytes, int at) {
    if (to % 16 || (size_t)from % 16 || bytes % 16) abort();
    Turning &barrier = turnings.at(at);
    barrier.copies.push_back({from, to, bytes});
    barrier.came++;
    memset(emulation::memory.data() + to / 4, 0xfe, bytes);  // nobody may read what stood there any more
}
inline void wait_until_turned(int at, u32 odd) {
    Turning &barrier = turnings.at(at);
    while ((u32)(barrier.turned & 1) == odd) {
        if (!barrier.copies.empty()) {
            for (const Bulk &copy : barrier.copies) memcpy((char *)emulation::memory.data() + copy.to, copy.from, copy.bytes);
            barrier.copies.clear();
            turn_if_all_came(barrier);
        } else emulation::yield();
    }
}

struct Waiting { std::vector<std::vector<std::function<void()>>> groups{1}; };
static std::vector<Waiting> waiting;  // of each thread
inline Waiting &own_products() {
    if (waiting.size() != emulation::threads.size()) waiting.assign(emulation::threads.size(), {});
    return waiting[threadIdx.x];
}
inline void registers_are_written() {}
inline void commit_products() { own_products().groups.emplace_back(); }
template <int LEFT> inline void wait_products() {
    auto &groups = own_products().groups;
    while (groups.size() > LEFT + 1) {
        for (auto &product : groups.front()) product();
        groups.erase(groups.begin());
    }
}
inline u64 description_of_x(int at) { if (at % 16) abort(); return at >> 4; }
inline float of_16(u32 pair, int i) {
    const u16 x = pair >> 16 * i & 0xffff;
    return KIND == 5 ? __uint_as_float((u32)x << 16) : from_half(x);
}
inline void multiply_wide(float *y, const u32 *a, u64 x) {
    const u32 own[4] = {a[0], a[1], a[2], a[3]};
    const auto *of = emulation::exchanged(own, 4);
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    std::array<float, 2 * 16> weights;  // of outputs g and g + 8
    for (int half = 0; half < 2; half++)
        for (int k = 0; k < 16; k++) weights[half * 16 + k] = of_16(of[g * 4 + k % 8 / 2][half + k / 8 * 2], k % 2);
    own_products().groups.back().push_back([=] {
        for (int group = 0; group < GROUPS; group++)
            for (int i = 0; i < 4; i++) {
                double sum = y[4 * group + i];
                for (int k = 0; k < 16; k++) {
                    const int row = 2 * t + i % 2, at = (int)(x << 4) + group * 256 + k / 8 * 128 + row * 16 + k % 8 * 2;
                    const float w = weights[i / 2 * 16 + k];
                    if (w != 0.0f) sum += (double)w * of_16(SHARED(u16, at), 0);
                }
                y[4 * group + i] = (float)sum;
            }
    });
}
