// grpo_lab.packing._packing: the Python face of the packer. It knows no torch: tensors come as addresses, shapes and strides.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <mutex>
#include <tuple>
#include <type_traits>
#include <utility>

#include "emulate.h"
#include "gil.h"
#include "hash.h"
#include "packer.h"
#include "watch.h"

namespace py = pybind11;
using namespace grpo;

namespace {

Dtype dtype_of(int code) {
    if (code < 0 || code >= kDtypes) throw std::invalid_argument("unknown dtype code " + std::to_string(code));
    return static_cast<Dtype>(code);
}

// As a piece holds it; -1, which is refused, for what does not fit.
int32_t index_of(int64_t value) { return value < 0 || value > INT32_MAX ? -1 : static_cast<int32_t>(value); }

const Kernels& kernels_of(const std::string& name) {
    const Kernels* kernels = find_kernels(name.c_str());
    if (!kernels) throw std::invalid_argument("this CPU has no instruction set named '" + name + "'");
    return *kernels;
}

py::buffer_info bytes_of(const py::buffer& buffer, bool writable) {
    py::buffer_info info = buffer.request(writable);
    const py::ssize_t contiguous = info.itemsize;
    if (info.ndim != 1 || (info.size > 1 && info.strides[0] != contiguous)) throw std::invalid_argument("the buffer must be one contiguous run of bytes");
    return info;
}

size_t size_of(const py::buffer_info& info) { return static_cast<size_t>(info.size) * static_cast<size_t>(info.itemsize); }

// Bound tensors, with the lock that keeps a re-bind and a pack of the same object apart.
struct BoundViews {
    BoundViews(std::shared_ptr<Buckets> plan, bool as_target) : buckets(std::move(plan)), views(*buckets), target(as_target) {}
    std::shared_ptr<Buckets> buckets;
    Views views;
    bool target;
    std::mutex mutex;

    template <typename F>
    auto locked(F f) {
        WithoutGil released;  // never wait for the lock while holding the GIL
        std::lock_guard<std::mutex> lock(mutex);
        if constexpr (std::is_invocable_v<F, WithoutGil&>) return f(released);
        else return f();
    }
};

using Addresses = std::tuple<uint64_t, uint64_t, uint64_t>;
Memory memory_of(const Addresses& a) { return {std::get<0>(a), std::get<1>(a), std::get<2>(a)}; }

// Looks at tensors [tensor, end), which are all of the bucket's, in order, and opens each task when its tensors are as
// they were. Tensor t's are those from starts[t] to starts[t + 1] of `watch`. False if one changed.
bool look_ahead(const Watch& watch, const uint64_t* starts, int64_t tensor, int64_t end, const Buckets& buckets, int64_t bucket,
                const std::function<void(size_t)>& open) {
    const auto same = [&](int64_t upto) {
        const int64_t from = std::exchange(tensor, std::max(tensor, upto));
        return !watch.changed(starts[from], starts[tensor]);
    };
    if (!std::is_sorted(starts + tensor, starts + end + 1)) throw std::invalid_argument("no such tensors: `starts` is not in order");
    const int64_t first = tensor;
    const Piece *piece = buckets.begin(bucket), *const last = buckets.end(bucket);
    for (int64_t task = 1; piece != last; ++task) {
        int64_t upto = tensor;
        for (; piece != last && piece->offset < task * static_cast<int64_t>(Scratch::kTaskBytes); ++piece) {
            if (piece->tensor < first || piece->tensor >= end) throw std::invalid_argument("a tensor of the bucket would not be looked at");
            upto = std::max(upto, piece->tensor + int64_t{1});
        }
        if (!same(upto)) return false;
        open(static_cast<size_t>(task));
    }
    return same(end);  // those without elements, last
}

void check_bucket(const Buckets& buckets, int64_t bucket, size_t bytes) {
    if (bucket < 0 || bucket >= buckets.size()) throw std::invalid_argument("no bucket " + std::to_string(bucket) + " in the plan");
    if (bytes < static_cast<size_t>(buckets.bytes(bucket))) throw std::invalid_argument("the memory is smaller than the bucket");
}

}  // namespace

PYBIND11_MODULE(_packing, m) {
    m.doc() = "Gather, cast, hash and scatter of tensors, one pass over memory.";

    py::class_<Pool, std::shared_ptr<Pool>>(m, "Pool")
        .def(py::init<size_t>(), py::arg("threads"))
        .def_property_readonly("threads", &Pool::threads);

    py::class_<Buckets, std::shared_ptr<Buckets>>(m, "Buckets")
        .def(py::init([](const std::vector<std::tuple<int, int64_t>>& tensors,
                         const std::vector<std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t>>& pieces, std::vector<int64_t> bucket_bytes) {
                 std::vector<WireTensor> wire;
                 for (const auto& [code, count] : tensors) wire.push_back({dtype_of(code), count});
                 std::vector<Piece> cut;
                 for (const auto& [tensor, bucket, offset, first, count] : pieces) cut.push_back({index_of(tensor), index_of(bucket), offset, first, count});
                 return std::make_shared<Buckets>(wire, std::move(cut), std::move(bucket_bytes));
             }),
             py::arg("tensors"), py::arg("pieces"), py::arg("bucket_bytes"));

    py::class_<BoundViews, std::shared_ptr<BoundViews>>(m, "Views")
        .def(py::init<std::shared_ptr<Buckets>, bool>(), py::arg("buckets"), py::arg("target"))
        .def("add",
             [](BoundViews& self, int64_t tensor, int code, const std::vector<int64_t>& shape, const std::vector<int64_t>& strides, Addresses memory) {
                 self.locked([&] { self.views.add(tensor, dtype_of(code), shape, strides, memory_of(memory), self.target); });
             })
        .def("clear", [](BoundViews& self) { self.locked([&] { self.views.clear(); }); })
        .def("move", [](BoundViews& self, int64_t view, Addresses memory) {
                 self.locked([&] {
                     if (view < 0 || view >= self.views.size()) throw std::invalid_argument("no such view");
                     self.views.move(view, memory_of(memory));
                 });
             })
        .def("__len__", [](BoundViews& self) { return self.views.size(); });

    py::class_<Watch>(m, "Watch")
        .def(py::init<py::tuple, py::type>(), py::arg("tensors"), py::arg("type"))
        .def("changed", &Watch::changed, py::arg("begin"), py::arg("end"))
        .def("__len__", &Watch::size);

    m.def("pack",
          [](BoundViews& sources, Pool& pool, int64_t bucket, const py::buffer& memory, bool hash, bool stream, const std::string& isa) {
              if (sources.target) throw std::invalid_argument("these views are targets, not sources");
              const py::buffer_info info = bytes_of(memory, true);
              check_bucket(*sources.buckets, bucket, size_of(info));
              const Mode mode{&kernels_of(isa), hash, stream};
              return sources.locked([&] { return pack(*sources.buckets, sources.views, pool, bucket, static_cast<uint8_t*>(info.ptr), mode); });
          },
          py::arg("sources"), py::arg("pool"), py::arg("bucket"), py::arg("memory"), py::arg("hash"), py::arg("stream"), py::arg("isa") = "auto");

    m.def("pack_watched",
          [](BoundViews& sources, const Watch& watch, const py::buffer& starts, std::pair<int64_t, int64_t> tensors, Pool& pool, int64_t bucket,
             const py::buffer& memory, bool hash, bool stream, const std::string& isa) {
              if (sources.target) throw std::invalid_argument("these views are targets, not sources");
              const py::buffer_info info = bytes_of(memory, true), index = bytes_of(starts, false);
              const auto count = static_cast<int64_t>(sources.buckets->tensors());
              if (index.itemsize != 8 || index.size != count + 1) throw std::invalid_argument("`starts` needs one number for each tensor, and the end");
              if (tensors.first < 0 || tensors.first > tensors.second || tensors.second > count) throw std::invalid_argument("no such tensors in the plan");
              check_bucket(*sources.buckets, bucket, size_of(info));
              const Mode mode{&kernels_of(isa), hash, stream};
              return sources.locked([&](WithoutGil& released) {
                  const Pool::Lead lead = [&](const std::function<void(size_t)>& open) {
                      return released.with_gil([&] {
                          return look_ahead(watch, static_cast<const uint64_t*>(index.ptr), tensors.first, tensors.second, *sources.buckets, bucket, open);
                      });
                  };
                  return pack_behind(*sources.buckets, sources.views, pool, bucket, static_cast<uint8_t*>(info.ptr), mode, lead);
              });
          },
          py::arg("sources"), py::arg("watch"), py::arg("starts"), py::arg("tensors"), py::arg("pool"), py::arg("bucket"), py::arg("memory"), py::arg("hash"), py::arg("stream"),
          py::arg("isa") = "auto", "As pack, looking at tensors while those already looked at are packed; None if one changed.");

    m.def("unpack",
          [](BoundViews& targets, Pool& pool, int64_t bucket, const py::buffer& memory, bool stream, const std::string& isa) {
              if (!targets.target) throw std::invalid_argument("these views are sources, not targets");
              const py::buffer_info info = bytes_of(memory, false);
              check_bucket(*targets.buckets, bucket, size_of(info));
              const Mode mode{&kernels_of(isa), false, stream};
              targets.locked([&] { unpack(*targets.buckets, targets.views, pool, bucket, static_cast<const uint8_t*>(info.ptr), mode); });
          },
          py::arg("targets"), py::arg("pool"), py::arg("bucket"), py::arg("memory"), py::arg("stream"), py::arg("isa") = "auto");

    m.def("hash64",
          [](const py::buffer& memory, Pool& pool, const std::string& isa) {
              const py::buffer_info info = bytes_of(memory, false);
              const Kernels& kernels = kernels_of(isa);
              WithoutGil released;
              return tree_hash(static_cast<const uint8_t*>(info.ptr), size_of(info), pool, kernels);
          },
          py::arg("memory"), py::arg("pool"), py::arg("isa") = "auto");

    m.def("move",
          [](const py::buffer& to, const py::buffer& from, Pool& pool, int reads, int writes, const std::string& isa) {
              const py::buffer_info out = bytes_of(to, true), in = bytes_of(from, false);
              if (reads < 1 || writes < 1 || reads * writes > 2) throw std::invalid_argument("reads and writes must be 1 and 1, 2 and 1, or 1 and 2");
              if (reinterpret_cast<uintptr_t>(out.ptr) % xxh3::kStripe) throw std::invalid_argument("the target must begin with a cache line");
              const auto behind = [&](size_t at) { return at / static_cast<size_t>(writes) * static_cast<size_t>(reads); };  // byte of `from` for one of `to`
              const size_t step = Scratch::kTaskBytes, fed = size_of(in) / static_cast<size_t>(reads) * static_cast<size_t>(writes);
              const size_t bytes = std::min(size_of(out), fed) / xxh3::kBlock * xxh3::kBlock;
              const Kernels& kernels = kernels_of(isa);
              WithoutGil released;
              pool.run((bytes + step - 1) / step, [&](size_t task, Scratch&) {
                  const size_t at = task * step, blocks = std::min(step, bytes - at) / xxh3::kBlock;
                  kernels.move_blocks(static_cast<uint8_t*>(out.ptr) + at, static_cast<const uint8_t*>(in.ptr) + behind(at), blocks, reads, writes);
                  kernels.fence();
              });
              return bytes;
          },
          py::arg("to"), py::arg("from_"), py::arg("pool"), py::arg("reads") = 1, py::arg("writes") = 1, py::arg("isa") = "auto",
          "Moves whole KiB past the caches, `reads` bytes for each `writes`, as many as there are at both ends; returns the bytes written: the limit that the benchmark compares with.");

    m.def("root_hash",
          [](const std::vector<uint64_t>& leaves, size_t length) {
              std::vector<uint64_t> hashes = leaves;
              return root_hash(hashes, length, kernels_of("auto"));
          },
          py::arg("leaves"), py::arg("length"), "The bucket's hash from its leaves' hashes.");

    m.def("emulate_device_pack",
          [](const py::buffer& table, const py::buffer& memory) {
              const py::buffer_info pieces = bytes_of(table, false), out = bytes_of(memory, true);
              return device::emulate_pack(static_cast<const device::Piece*>(pieces.ptr), static_cast<int>(size_of(pieces) / sizeof(device::Piece)),
                                          static_cast<int64_t>(size_of(out)), static_cast<uint8_t*>(out.ptr));
          },
          py::arg("pieces"), py::arg("memory"), "What the CUDA kernel does, on the CPU and unchecked: for tests.");

    m.def("emulate_device_unpack",
          [](const py::buffer& table, const py::buffer& memory) {
              const py::buffer_info pieces = bytes_of(table, false), in = bytes_of(memory, false);
              device::emulate_unpack(static_cast<const device::Piece*>(pieces.ptr), static_cast<int>(size_of(pieces) / sizeof(device::Piece)),
                                     static_cast<int64_t>(size_of(in)), static_cast<const uint8_t*>(in.ptr));
          },
          py::arg("pieces"), py::arg("memory"), "What the CUDA kernel does, on the CPU and unchecked: for tests.");

    m.def("instruction_sets", [] {
        std::vector<std::string> names;
        for (const Kernels* kernels : available_kernels()) names.emplace_back(kernels->name);
        return names;
    });
}
