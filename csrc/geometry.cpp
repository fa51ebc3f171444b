#include "geometry.h"

#include <algorithm>
#include <numeric>
#include <stdexcept>

namespace grpo {

namespace {

template <typename T>
void gather_row(const uint8_t* from, int64_t stride, int64_t count, uint8_t* out) {
    auto* in = reinterpret_cast<const T*>(from);
    auto* to = reinterpret_cast<T*>(out);
    for (int64_t i = 0; i < count; ++i) to[i] = in[i * stride];
}

template <typename T>
void scatter_row(uint8_t* to, int64_t stride, int64_t count, const uint8_t* in) {
    auto* from = reinterpret_cast<const T*>(in);
    auto* out = reinterpret_cast<T*>(to);
    for (int64_t i = 0; i < count; ++i) out[i * stride] = from[i];
}

struct Raw16 {
    uint64_t low, high;
};

// Calls visit(offset_elements, stride, run, done) for each maximal run along the last dimension.
template <typename Visit>
void for_each_run(const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides, int64_t first, int64_t count, Visit visit) {
    const size_t rank = sizes.size();
    int64_t index[64];
    int64_t offset = 0;
    for (size_t d = rank; d-- > 0;) {
        index[d] = first % sizes[d];
        first /= sizes[d];
        offset += index[d] * strides[d];
    }
    for (int64_t done = 0; done < count;) {
        const int64_t run = std::min(count - done, sizes[rank - 1] - index[rank - 1]);
        visit(offset, strides[rank - 1], run, done);
        done += run;
        index[rank - 1] += run;
        offset += run * strides[rank - 1];
        for (size_t d = rank - 1; d > 0 && index[d] == sizes[d]; --d) {
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
    for_each_run(sizes_, strides_, first, count, [&](int64_t offset, int64_t stride, int64_t run, int64_t done) {
        const uint8_t* from = base + offset * static_cast<int64_t>(item);
        uint8_t* to = out + done * static_cast<int64_t>(item);
        if (stride == 1) memcpy(to, from, static_cast<size_t>(run) * item);
        else switch (item) {
            case 1: gather_row<uint8_t>(from, stride, run, to); break;
            case 2: gather_row<uint16_t>(from, stride, run, to); break;
            case 4: gather_row<uint32_t>(from, stride, run, to); break;
            case 8: gather_row<uint64_t>(from, stride, run, to); break;
            default: gather_row<Raw16>(from, stride, run, to); break;
        }
    });
}

void Geometry::scatter(uint8_t* base, size_t item, int64_t first, int64_t count, const uint8_t* in) const {
    for_each_run(sizes_, strides_, first, count, [&](int64_t offset, int64_t stride, int64_t run, int64_t done) {
        uint8_t* to = base + offset * static_cast<int64_t>(item);
        const uint8_t* from = in + done * static_cast<int64_t>(item);
        if (stride == 1) memcpy(to, from, static_cast<size_t>(run) * item);
        else switch (item) {
            case 1: scatter_row<uint8_t>(to, stride, run, from); break;
            case 2: scatter_row<uint16_t>(to, stride, run, from); break;
            case 4: scatter_row<uint32_t>(to, stride, run, from); break;
            case 8: scatter_row<uint64_t>(to, stride, run, from); break;
            default: scatter_row<Raw16>(to, stride, run, from); break;
        }
    });
}

}  // namespace grpo
