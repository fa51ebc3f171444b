// Leaves and root of the tree hash (xxh3.h) over the kernels.
#pragma once

#include <vector>

#include "kernels.h"
#include "xxh3.h"

namespace grpo {

// XXH3-64 of one run of bytes, zero-padded to 256 if it is no longer than 240.
uint64_t padded_xxh3(const uint8_t* from, size_t bytes, const Kernels& kernels);

// Ends a long leaf: its last `rest` bytes (1 to 1024) end at `from + rest`, and at least 64 bytes before that end can be read.
uint64_t finish_leaf(uint64_t acc[xxh3::kLanes], const uint8_t* from, size_t rest, size_t length, const Kernels& kernels);

// Appends the length to the leaf hashes and hashes them.
uint64_t root_hash(std::vector<uint64_t>& leaves, size_t length, const Kernels& kernels);

}  // namespace grpo
