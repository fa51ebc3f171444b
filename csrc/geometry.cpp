#include "geometry.h"

#include <algorithm>
#include <numeric>
#include <stdexcept>

#include "transpose.h"

namespace grpo {

namespace {

struct Raw16 {
    uint64_t low, high;
};

// Calls f(T{}) for the unsigned type of `item` bytes.
template <typename F>
void with_type(size_t item, F f) {
    switch (item) {
        case 1: return f(uint8_t{});
        case 2: return f(uint16_t{});
        case 4: return f(uint32_t{});
        case 8: return f(uint64_t{});
        default: return f(Raw16{});
    }
}

// Walks row-major positions [first, first + count) in steps that are simple in memory. Each step is handed on as
// visit(offset, rows, run, done): `rows` whole rows of the last two dimensions, or one part of a row of `run` elements.
template <typename Visit>
void walk(const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides, int64_t first, int64_t count, Visit visit) {
    const size_t rank = sizes.size(), last = rank - 1;
    int64_t index[64];
    int64_t offset = 0;
    for (size_t d = rank; d-- > 0;) {
        index[d] = first % sizes[d];
        first /= sizes[d];
        offset += index[d] * strides[d];
    }
    for (int64_t done = 0; done < count;) {
        const int64_t row = sizes[last];
        int64_t rows = rank > 1 && index[last] == 0 ? std::min((count - done) / row, sizes[last - 1] - index[last - 1]) : 0;
        const int64_t run = rows > 0 ? row : std::min(count - done, row - index[last]);
        rows = std::max(rows, int64_t{1});
        visit(offset, rows, run, done);
        done += rows * run;
        // Step over what was visited, then carry.
        index[last] += run;
        offset += run * strides[last];
        if (rank > 1 && rows > 1) {
            index[last - 1] += rows - 1;
            offset += (rows - 1) * strides[last - 1];
        }
        for (size_t d = last; d > 0 && index[d] == sizes[d]; --d) {
            offset += strides[d - 1] - sizes[d] * strides[d];
            index[d] = 0;
            ++index[d - 1];
        }
    }
}

}  // namespace

Geometry::Geometry(const std::vector<int64_t>& shape, const std::vector<int64_t>& strides) {
    if (shape.size() != strides.size() || shape.size() > 64) throw std::invalid_argument("shape and strides must have one length, at most 64");
    for (size_t d = 0; d < shape.size(); ++d) {
        if (shape[d] < 0 || strides[d] < 0) throw std::invalid_argument("negative size or stride");
        if (__builtin_mul_overflow(count_, shape[d], &count_)) throw std::invalid_argument("element count overflows 64 bits");
    }
    if (count_ == 0) return;
    for (size_t d = 0; d < shape.size(); ++d) {
        if (shape[d] == 1) continue;
        int64_t reach;
        if (__builtin_mul_overflow(shape[d] - 1, strides[d], &reach) || __builtin_add_overflow(last_offset_, reach, &last_offset_))
            throw std::invalid_argument("strides overflow 64 bits");
        if (!sizes_.empty() && strides[d] <= INT64_MAX / shape[d] && strides_.back() == strides[d] * shape[d]) {
            sizes_.back() *= shape[d];
            strides_.back() = strides[d];
        } else {
            sizes_.push_back(shape[d]);
            strides_.push_back(strides[d]);
        }
    }
    if (sizes_.empty()) {
        sizes_.push_back(1);
        strides_.push_back(1);
    }
    contiguous_ = sizes_.size() == 1 && strides_[0] == 1;
}

bool Geometry::writable() const {
    if (count_ == 0) return true;
    std::vector<size_t> order(sizes_.size());
    std::iota(order.begin(), order.end(), size_t{0});
    std::sort(order.begin(), order.end(), [this](size_t a, size_t b) { return strides_[a] < strides_[b]; });
    int64_t reach = 0;  // farthest offset of the dimensions so far
    for (size_t d : order) {
        if (strides_[d] <= reach) return false;
        reach += (sizes_[d] - 1) * strides_[d];
    }
    return true;
}

void Geometry::gather(const uint8_t* base, size_t item, int64_t first, int64_t count, uint8_t* out) const {
    const int64_t step = strides_.back(), row_step = row_stride();
    with_type(item, [&](auto zero) {
        using T = decltype(zero);
        const T* from = reinterpret_cast<const T*>(base);
        T* to = reinterpret_cast<T*>(out);
        walk(sizes_, strides_, first, count, [&](int64_t offset, int64_t rows, int64_t run, int64_t done) {
            if constexpr (sizeof(T) <= 8)
                if (row_step == 1 && rows > 1) return transpose(from + offset, step, run, rows, to + done, run);
            for (int64_t row = 0; row < rows; ++row, offset += row_step, done += run) {
                if (step == 1) memcpy(to + done, from + offset, static_cast<size_t>(run) * sizeof(T));
                else for (int64_t i = 0; i < run; ++i) to[done + i] = from[offset + i * step];
            }
        });
    });
}

void Geometry::scatter(uint8_t* base, size_t item, int64_t first, int64_t count, const uint8_t* in) const {
    const int64_t step = strides_.back(), row_step = row_stride();
    with_type(item, [&](auto zero) {
        using T = decltype(zero);
        T* to = reinterpret_cast<T*>(base);
        const T* from = reinterpret_cast<const T*>(in);
        walk(sizes_, strides_, first, count, [&](int64_t offset, int64_t rows, int64_t run, int64_t done) {
            if constexpr (sizeof(T) <= 8)
                if (row_step == 1 && rows > 1) return transpose(from + done, run, rows, run, to + offset, step);
            for (int64_t row = 0; row < rows; ++row, offset += row_step, done += run) {
                if (step == 1) memcpy(to + offset, from + done, static_cast<size_t>(run) * sizeof(T));
                else for (int64_t i = 0; i < run; ++i) to[offset + i * step] = from[done + i];
            }
        });
    });
}

}  // namespace grpo
