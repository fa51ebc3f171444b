// Tells whether tensors changed since they were bound: memory, shape, strides or dtype.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <vector>

namespace grpo {

// What torch's stable C interface tells of a tensor without owning it.
struct Described {
    void* data;
    int64_t rank;
    const int64_t *sizes, *strides;
    int32_t dtype;
};

// A few small C calls a tensor, which make no Python object and count no reference: with tens of thousands of tiny
// tensors, looking at them costs as much as packing them. All functions need the GIL.
class Watch {
  public:
    // `type` is the tensors' class. Throws std::invalid_argument for anything that is no such tensor, and Python's
    // NotImplementedError if the torch in this process keeps its tensors in no way that is known here.
    Watch(pybind11::tuple tensors, const pybind11::type& type);

    size_t size() const { return seen_.size(); }
    // True if one of tensors [begin, end) is not as it was when this was made, or cannot be described any more. Throws
    // std::invalid_argument for tensors that there are not.
    bool changed(size_t begin, size_t end) const;

  private:
    struct Seen {
        const void* data;
        uint32_t dims;  // where its shape and then its strides begin in dims_
        int16_t rank, dtype;
    };
    struct Near {  // the tensor's fields and its storage's: only prefetched, so a stale address does no harm
        uint64_t tensor, storage;
    };
    bool look(size_t index, Described& found) const;
    void prefetch(size_t index) const;

    pybind11::tuple tensors_;
    size_t handle_offset_ = 0;  // of the C++ tensor in its Python object
    std::vector<Near> near_;
    std::vector<Seen> seen_;
    std::vector<int64_t> dims_;
};

}  // namespace grpo
