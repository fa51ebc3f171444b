// Plain C++: runs anywhere; on AArch64 the baseline compiler vectorises it with NEON.
#include "kernels.h"
#include "xxh3.h"

namespace grpo::plain {

struct Lane {
    uint64_t acc[xxh3::kLanes];
    void load(const uint64_t* from) { memcpy(acc, from, sizeof acc); }
    void store(uint64_t* to) const { memcpy(to, acc, sizeof acc); }
    void fold(const uint8_t* from, const uint8_t* secret) {
        for (size_t i = 0; i < xxh3::kLanes; ++i) {
            const uint64_t word = xxh3::read64(from + 8 * i);
            acc[i ^ 1] += word;
            acc[i] += xxh3::word_product(word, xxh3::read64(secret + 8 * i));
        }
    }
    using Stripe = const uint8_t*;  // the compiler's business
    static Stripe stripe(const uint8_t* from) { return from; }
    template <bool kHash, bool kStream>
    void put(uint8_t* to, Stripe from, const uint8_t* secret) {
        memcpy(to, from, xxh3::kStripe);
        if (kHash) fold(from, secret);
    }
    void scramble() {
        for (size_t i = 0; i < xxh3::kLanes; ++i) acc[i] = xxh3::scramble_lane(acc[i], i);
    }
};

#include "kernels_impl.h"

void fence() {}

#ifdef __aarch64__
extern const Kernels kernels = {"neon", copy_blocks, cast_blocks_staged, fold_stripes, fold_blocks, copy, move_blocks, convert, fence};
#else
extern const Kernels kernels = {"plain", copy_blocks, cast_blocks_staged, fold_stripes, fold_blocks, copy, move_blocks, convert, fence};
#endif

}  // namespace grpo::plain
