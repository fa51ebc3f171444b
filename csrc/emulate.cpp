#include "emulate.h"

#include <algorithm>

namespace grpo::device {

namespace {

Vector load(const uint8_t* from, int64_t bytes) {
    Vector vector{0, 0};
    memcpy(&vector, from, static_cast<size_t>(std::min<int64_t>(bytes, kVector)));
    return vector;
}

uint64_t emulate_leaf(const Piece* pieces, int count, const Leaf& leaf, uint8_t* to) {
    uint64_t sums[kLeafBlocks * xxh3::kLanes] = {};
    uint8_t last[xxh3::kStripe] = {};
    const int low = find(pieces, 0, count, leaf.begin), high = std::min(count, find(pieces, low, count, leaf.end - 1) + 1);
    const int64_t length = leaf.length(), last_stripe = leaf.begin + length - static_cast<int64_t>(xxh3::kStripe);
    for (int block = 0; block < kLeafBlocks; ++block) {
        for (int index = 0; index < kBlockVectors; ++index) {
            const int64_t at = leaf.begin + block * static_cast<int64_t>(xxh3::kBlock) + index * kVector;
            if (at >= leaf.begin + length) continue;
            const Vector vector = assemble(pieces, find(pieces, low, high, at), count, at, leaf.end);
            auto* bytes = reinterpret_cast<const uint8_t*>(&vector);
            if (to && at < leaf.end) memcpy(to + at, bytes, static_cast<size_t>(std::min<int64_t>(kVector, leaf.end - at)));
            uint64_t* sum = sums + 8 * block + 2 * (index % 4);
            if (index / 4 < leaf.stripes(block)) fold(vector, index, sum[0], sum[1]);
            for (int i = 0; i < kVector; ++i)
                if (at + i >= last_stripe && at + i < last_stripe + static_cast<int64_t>(xxh3::kStripe)) last[at + i - last_stripe] = bytes[i];
        }
    }
    uint64_t lanes[xxh3::kLanes];
    for (int lane = 0; lane < static_cast<int>(xxh3::kLanes); ++lane)
        lanes[lane] = finish_lane(leaf, lane, sums, [&](int i) { return xxh3::read64(last + 8 * i); });
    return xxh3::merge(lanes, static_cast<uint64_t>(length));
}

}  // namespace

std::vector<uint64_t> emulate_pack(const Piece* pieces, int count, int64_t bytes, uint8_t* to) {
    std::vector<uint64_t> leaves;
    for (int64_t index = 0; index * static_cast<int64_t>(xxh3::kLeaf) < bytes; ++index)
        leaves.push_back(emulate_leaf(pieces, count, Leaf(index, bytes), to));
    return leaves;
}

void emulate_unpack(const Piece* pieces, int count, int64_t bytes, const uint8_t* from) {
    for (int64_t at = 0; at < bytes; at += kVector)
        deliver(pieces, find(pieces, 0, count, at), count, at, bytes, load(from + at, bytes - at));
}

}  // namespace grpo::device
