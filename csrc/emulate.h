// The CUDA kernels' work on the CPU, one thread after the other: for tests of device.h where there is no GPU.
#pragma once

#include <vector>

#include "device.h"

namespace grpo::device {

// Fills `to` (null: hash only) and returns the leaf hashes.
std::vector<uint64_t> emulate_pack(const Piece* pieces, int count, int64_t bytes, uint8_t* to);
void emulate_unpack(const Piece* pieces, int count, int64_t bytes, const uint8_t* from);

}  // namespace grpo::device
