// Tells whether tensors changed since they were bound: memory, shape, strides or dtype.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <vector>

namespace grpo {

// What DLPack 1.x (dmlc/dlpack, include/dlpack/dlpack.h) lets a framework tell of a tensor without owning it.
struct DlpackTensor {
    void* data;
    int32_t device_type, device_id;
    int32_t rank;
    uint8_t type_code, type_bits;
    uint16_t type_lanes;
    int64_t *shape, *strides;
    uint64_t byte_offset;
};

// One C call a tensor, which makes no Python object: with tens of thousands of tiny tensors, looking at them costs as
// much as packing them. All functions need the GIL.
class Watch {
  public:
    // `type` is the tensors' class and has `__dlpack_c_exchange_api__`. `near` holds two addresses for each tensor, of
    // its own object and its storage's (0: none). They are only prefetched, never read: a stale one does no harm.
    // Throws std::invalid_argument for anything that is no such tensor, or if the class describes its tensors in no
    // way that is known here.
    Watch(pybind11::tuple tensors, const pybind11::type& type, const pybind11::buffer& near);

    size_t size() const { return seen_.size(); }
    // True if one of tensors [begin, end) is not as it was when this was made. Throws std::invalid_argument for
    // tensors that there are not, and what the framework throws if it cannot describe one any more.
    bool changed(size_t begin, size_t end) const;

  private:
    struct Seen {
        uint64_t address;
        size_t dims;  // where its shape and then its strides begin in dims_
        int32_t rank, device_type;
        uint8_t type_code, type_bits;
    };
    DlpackTensor look(size_t index) const;
    void prefetch(size_t index) const;

    pybind11::tuple tensors_;
    int (*describe_)(void*, DlpackTensor*) = nullptr;
    std::vector<uint64_t> near_;
    std::vector<Seen> seen_;
    std::vector<int64_t> dims_;
};

}  // namespace grpo
