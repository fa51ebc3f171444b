// A tensor as a row-major sequence of elements over strided memory.
#pragma once

#include <cstdint>
#include <vector>

#include "elements.h"

namespace grpo {

// Dimensions of size 1 are gone and neighbours that walk memory evenly are merged, so a contiguous tensor has one
// dimension of stride 1. Sizes and strides count elements.
class Geometry {
  public:
    // Throws std::invalid_argument for negative sizes or strides, and where the element count overflows 64 bits.
    Geometry(const std::vector<int64_t>& shape, const std::vector<int64_t>& strides);

    int64_t count() const { return count_; }
    bool contiguous() const { return contiguous_; }
    int64_t last_offset() const { return last_offset_; }  // offset of the farthest element
    // True if no two elements share memory (sufficient, not necessary: as torch decides for in-place writes).
    bool writable() const;

    // `count` elements from row-major position `first`: from strided memory to `out`, or from `in` to strided memory.
    void gather(const uint8_t* base, size_t item, int64_t first, int64_t count, uint8_t* out) const;
    void scatter(uint8_t* base, size_t item, int64_t first, int64_t count, const uint8_t* in) const;

  private:
    int64_t row_stride() const { return strides_.size() > 1 ? strides_[strides_.size() - 2] : 0; }
    std::vector<int64_t> sizes_, strides_;
    int64_t count_ = 1, last_offset_ = 0;
    bool contiguous_ = true;
};

}  // namespace grpo
