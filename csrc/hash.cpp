#include "hash.h"

#include "packer.h"

namespace grpo {

uint64_t finish_leaf(uint64_t acc[xxh3::kLanes], const uint8_t* from, size_t rest, size_t length, const Kernels& kernels) {
    kernels.fold_stripes(acc, from, (rest - 1) / xxh3::kStripe, 0);
    kernels.fold_stripes(acc, from + rest - xxh3::kStripe, 1, xxh3::kLastSecret);
    return xxh3::merge(acc, length);
}

uint64_t padded_xxh3(const uint8_t* from, size_t bytes, const Kernels& kernels) {
    uint8_t padded[xxh3::kPadded] = {};
    if (bytes <= xxh3::kShort) {
        if (bytes) memcpy(padded, from, bytes);
        from = padded;
        bytes = sizeof padded;
    }
    uint64_t acc[xxh3::kLanes];
    xxh3::init(acc);
    const size_t blocks = (bytes - 1) / xxh3::kBlock;
    kernels.fold_blocks(acc, from, blocks);
    return finish_leaf(acc, from + blocks * xxh3::kBlock, bytes - blocks * xxh3::kBlock, bytes, kernels);
}

uint64_t root_hash(std::vector<uint64_t>& leaves, size_t length, const Kernels& kernels) {
    leaves.push_back(length);
    return padded_xxh3(reinterpret_cast<const uint8_t*>(leaves.data()), leaves.size() * sizeof(uint64_t), kernels);
}

uint64_t tree_hash(const uint8_t* from, size_t bytes, Pool& pool, const Kernels& kernels) {
    std::vector<uint64_t> leaves((bytes + xxh3::kLeaf - 1) / xxh3::kLeaf);
    pool.run(leaves.size(), [&](size_t leaf, Scratch&) {
        const size_t begin = leaf * xxh3::kLeaf;
        leaves[leaf] = padded_xxh3(from + begin, std::min(xxh3::kLeaf, bytes - begin), kernels);
    });
    return root_hash(leaves, bytes, kernels);
}

}  // namespace grpo
