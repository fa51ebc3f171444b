#include "watch.h"

#include <cstring>
#include <stdexcept>

namespace py = pybind11;

namespace grpo {

namespace {

struct ExchangeTable {  // DLPackExchangeAPI of DLPack 1.3
    uint32_t major, minor;
    void* previous;
    void* functions_not_used_here[3];
    int (*describe)(void* tensor, DlpackTensor* out);
    void* current_work_stream;
};

// Inlined by force: GCC takes a function that only prefetches for one without effect, and drops calls to it.
__attribute__((always_inline)) inline void prefetch_lines(uint64_t address, uint64_t lines) {
    for (uint64_t line = 0; line < lines; ++line) __builtin_prefetch(reinterpret_cast<const void*>(address + 64 * line));
}

uint64_t address_of(const DlpackTensor& tensor) { return reinterpret_cast<uint64_t>(tensor.data) + tensor.byte_offset; }

}  // namespace

Watch::Watch(py::tuple tensors, const py::type& type, const py::buffer& near) : tensors_(std::move(tensors)) {
    const py::object capsule = py::getattr(type, "__dlpack_c_exchange_api__", py::none());
    if (!PyCapsule_IsValid(capsule.ptr(), "dlpack_exchange_api")) throw std::invalid_argument("the class has no DLPack exchange table");
    const auto* table = static_cast<const ExchangeTable*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
    if (table->major != 1 || !table->describe) throw std::invalid_argument("the class has a DLPack exchange table of another version");
    describe_ = table->describe;
    const py::buffer_info hints = near.request();
    if (hints.ndim != 1 || hints.itemsize != 8 || static_cast<size_t>(hints.size) != 2 * tensors_.size()) throw std::invalid_argument("two addresses for each tensor");
    near_.assign(static_cast<const uint64_t*>(hints.ptr), static_cast<const uint64_t*>(hints.ptr) + hints.size);
    for (const py::handle tensor : tensors_)
        if (!PyObject_TypeCheck(tensor.ptr(), reinterpret_cast<PyTypeObject*>(type.ptr()))) throw std::invalid_argument("not a tensor");
    for (size_t i = 0; i < tensors_.size(); ++i) {
        const DlpackTensor tensor = look(i);
        seen_.push_back({address_of(tensor), dims_.size(), tensor.rank, tensor.device_type, tensor.type_code, tensor.type_bits});
        dims_.insert(dims_.end(), tensor.shape, tensor.shape + tensor.rank);
        dims_.insert(dims_.end(), tensor.strides, tensor.strides + tensor.rank);
    }
}

DlpackTensor Watch::look(size_t index) const {
    DlpackTensor found;
    if (describe_(PyTuple_GET_ITEM(tensors_.ptr(), static_cast<py::ssize_t>(index)), &found) != 0) throw py::error_already_set();
    return found;
}

__attribute__((always_inline)) inline void Watch::prefetch(size_t index) const {
    // A Python object, the tensor's fields and those of its storage: so many lines of each, at any alignment.
    prefetch_lines(reinterpret_cast<uint64_t>(PyTuple_GET_ITEM(tensors_.ptr(), static_cast<py::ssize_t>(index))), 1);
    prefetch_lines(near_[2 * index], 4);
    prefetch_lines(near_[2 * index + 1], 2);
}

bool Watch::changed(size_t begin, size_t end) const {
    constexpr size_t kAhead = 16;
    if (begin > end || end > seen_.size()) throw std::invalid_argument("no such tensors");
    for (size_t i = begin; i < end; ++i) {
        if (i + kAhead < seen_.size()) prefetch(i + kAhead);
        const DlpackTensor now = look(i);
        const Seen& then = seen_[i];
        if (address_of(now) != then.address || now.rank != then.rank || now.device_type != then.device_type || now.type_code != then.type_code ||
            now.type_bits != then.type_bits)
            return true;
        const int64_t* dims = dims_.data() + then.dims;
        for (int32_t d = 0; d < now.rank; ++d)
            if (now.shape[d] != dims[d] || now.strides[d] != dims[now.rank + d]) return true;
    }
    return false;
}

}  // namespace grpo
