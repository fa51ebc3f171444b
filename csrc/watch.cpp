#include "watch.h"

#include <dlfcn.h>

#include <cstring>
#include <stdexcept>

namespace py = pybind11;

namespace grpo {

namespace {

// torch's stable C interface (torch/csrc/inductor/aoti_torch/c/shim.h): a handle is the address of an at::Tensor, all
// pointers are borrowed, and 0 means that all is well.
struct Torch {
    int32_t (*get_data_ptr)(const void* handle, void** data);
    int32_t (*get_dim)(const void* handle, int64_t* rank);
    int32_t (*get_sizes)(const void* handle, const int64_t** sizes);
    int32_t (*get_strides)(const void* handle, const int64_t** strides);
    int32_t (*get_dtype)(const void* handle, int32_t* dtype);
    bool found = false;

    Torch() {
        void* const library = dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD);  // the one that Python loaded, or none
        if (!library) return;
        found = load(library, "aoti_torch_get_data_ptr", get_data_ptr) && load(library, "aoti_torch_get_dim", get_dim) &&
                load(library, "aoti_torch_get_sizes", get_sizes) && load(library, "aoti_torch_get_strides", get_strides) &&
                load(library, "aoti_torch_get_dtype", get_dtype);
    }

  private:
    template <typename F>
    static bool load(void* library, const char* name, F& function) {
        function = reinterpret_cast<F>(dlsym(library, name));
        return function != nullptr;
    }
};

const Torch& torch() {
    static const Torch torch;
    return torch;
}

// Inlined by force: GCC takes a function that only prefetches for one without effect, and drops calls to it.
__attribute__((always_inline)) inline void prefetch_lines(uint64_t address, uint64_t lines) {
    for (uint64_t line = 0; line < lines; ++line) __builtin_prefetch(reinterpret_cast<const void*>(address + 64 * line));
}

// The torch here is not as this file knows it: the caller must look in another way.
[[noreturn]] void not_known(const char* why) {
    PyErr_SetString(PyExc_NotImplementedError, why);
    throw py::error_already_set();
}

uint64_t word_at(const py::handle& object, size_t offset) {
    uint64_t word;
    memcpy(&word, reinterpret_cast<const uint8_t*>(object.ptr()) + offset, sizeof word);
    return word;
}

// A Python tensor holds its at::Tensor, which is one pointer: the one that it shows as `_cdata`. Where it lies in the
// object depends on torch's version. 0 if it is nowhere.
size_t handle_offset_in(const py::handle& tensor, uint64_t cdata) {
    const auto bytes = static_cast<size_t>(Py_TYPE(tensor.ptr())->tp_basicsize);
    for (size_t offset = sizeof(PyObject); offset + sizeof cdata <= bytes; offset += sizeof cdata)
        if (word_at(tensor, offset) == cdata) return offset;
    return 0;
}

}  // namespace

Watch::Watch(py::tuple tensors, const py::type& type) : tensors_(std::move(tensors)) {
    if (!torch().found) not_known("no torch with a stable C interface in this process");
    for (const py::handle tensor : tensors_) {
        if (!PyObject_TypeCheck(tensor.ptr(), reinterpret_cast<PyTypeObject*>(type.ptr()))) throw std::invalid_argument("not a tensor");
        if (!py::hasattr(tensor, "_cdata")) not_known("the class is not torch's");
        near_.push_back({py::cast<uint64_t>(tensor.attr("_cdata")), py::cast<uint64_t>(tensor.attr("untyped_storage")().attr("_cdata"))});
        const size_t offset = handle_offset_in(tensor, near_.back().tensor);
        if (!handle_offset_) handle_offset_ = offset;
        if (offset == 0 || offset != handle_offset_) not_known("the tensor's object is of another kind");
    }
    for (size_t i = 0; i < tensors_.size(); ++i) {
        Described found;
        if (!look(i, found) || found.rank > INT16_MAX || dims_.size() > UINT32_MAX) not_known("the tensor cannot be described");
        seen_.push_back({found.data, static_cast<uint32_t>(dims_.size()), static_cast<int16_t>(found.rank), static_cast<int16_t>(found.dtype)});
        dims_.insert(dims_.end(), found.sizes, found.sizes + found.rank);
        dims_.insert(dims_.end(), found.strides, found.strides + found.rank);
    }
}

inline bool Watch::look(size_t index, Described& found) const {
    const Torch& of = torch();
    const void* const handle = reinterpret_cast<const uint8_t*>(PyTuple_GET_ITEM(tensors_.ptr(), static_cast<py::ssize_t>(index))) + handle_offset_;
    return of.get_dim(handle, &found.rank) == 0 && of.get_sizes(handle, &found.sizes) == 0 && of.get_strides(handle, &found.strides) == 0 &&
           of.get_dtype(handle, &found.dtype) == 0 && of.get_data_ptr(handle, &found.data) == 0;
}

__attribute__((always_inline)) inline void Watch::prefetch(size_t index) const {
    // A Python object, the tensor's fields and those of its storage: so many lines of each, at any alignment.
    prefetch_lines(reinterpret_cast<uint64_t>(PyTuple_GET_ITEM(tensors_.ptr(), static_cast<py::ssize_t>(index))), 1);
    prefetch_lines(near_[index].tensor, 4);
    prefetch_lines(near_[index].storage, 2);
}

bool Watch::changed(size_t begin, size_t end) const {
    constexpr size_t kAhead = 16;
    if (begin > end || end > seen_.size()) throw std::invalid_argument("no such tensors");
    for (size_t i = begin; i < end; ++i) {
        if (i + kAhead < seen_.size()) prefetch(i + kAhead);
        Described now;
        const Seen& then = seen_[i];
        if (!look(i, now) || now.data != then.data || now.rank != then.rank || now.dtype != then.dtype) return true;
        const int64_t* dims = dims_.data() + then.dims;
        for (int64_t d = 0; d < now.rank; ++d)
            if (now.sizes[d] != dims[d] || now.strides[d] != dims[now.rank + d]) return true;
    }
    return false;
}

}  // namespace grpo
