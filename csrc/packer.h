// Buckets and how to fill and empty them. Everything that comes from outside is checked here once, when it is
// declared or bound; the loops that follow trust it.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "geometry.h"
#include "kernels.h"
#include "pool.h"

namespace grpo {

struct WireTensor {
    Dtype dtype;
    int64_t count;
};

// `count` elements of a tensor, from row-major position `first`, at byte `offset` of a bucket. Small, as are View and
// what a pack reads of a tensor else: with tens of thousands of tiny tensors that is a part of the bytes that move.
struct Piece {
    int32_t tensor, bucket;
    int64_t offset, first, count;
};

// Where each tensor lies on the wire. Throws std::invalid_argument unless pieces are in range, sorted, disjoint and
// aligned to their elements, and together hold every element of every tensor exactly once.
class Buckets {
  public:
    Buckets(const std::vector<WireTensor>& tensors, std::vector<Piece> pieces, std::vector<int64_t> bucket_bytes);

    size_t tensors() const { return counts_.size(); }
    Dtype dtype(int64_t tensor) const { return dtypes_[static_cast<size_t>(tensor)]; }
    int64_t count(int64_t tensor) const { return counts_[static_cast<size_t>(tensor)]; }
    int64_t size() const { return static_cast<int64_t>(bytes_.size()); }
    int64_t bytes(int64_t bucket) const { return bytes_.at(static_cast<size_t>(bucket)); }
    const Piece* begin(int64_t bucket) const { return pieces_.data() + starts_[static_cast<size_t>(bucket)]; }
    const Piece* end(int64_t bucket) const { return pieces_.data() + starts_[static_cast<size_t>(bucket) + 1]; }
    int64_t end_of(const Piece& piece) const { return piece.offset + piece.count * static_cast<int64_t>(item_bytes(dtype(piece.tensor))); }

  private:
    std::vector<Dtype> dtypes_;
    std::vector<int64_t> counts_;
    std::vector<Piece> pieces_;
    std::vector<int64_t> bytes_;
    std::vector<size_t> starts_;
};

struct Memory {  // the storage that a tensor must stay within
    uint64_t data, storage, storage_bytes;
};

struct View {
    uint8_t* data;
    std::unique_ptr<Geometry> strided;  // null: contiguous
    int32_t tensor;
    Dtype dtype;
};

// Tensors in memory, as sources of a pack or targets of an unpack. Not copied, not owned: the caller keeps them alive.
class Views {
  public:
    explicit Views(const Buckets& buckets) : buckets_(buckets), first_of_(buckets.tensors(), -1) {}

    // Views must be added in the order of the tensors; a target may have several views of one tensor, a source one.
    // Throws std::invalid_argument on a wrong shape or dtype, and where the view reaches outside its storage.
    void add(int64_t tensor, Dtype dtype, const std::vector<int64_t>& shape, const std::vector<int64_t>& strides, Memory memory, bool target);
    void clear();
    void move(int64_t view, Memory memory);

    int64_t size() const { return static_cast<int64_t>(views_.size()); }
    const View* first(int64_t tensor) const;         // null if the tensor is not bound
    const View* next(const View* view) const;        // the next view of the same tensor, or null
    // Throws std::invalid_argument unless every tensor of the bucket is bound (`each`), and every view has memory.
    void require(int64_t bucket, bool each) const;

  private:
    uint8_t* checked(const View& view, Memory memory) const;
    bool pending(const View& view) const { return !view.data && buckets_.count(view.tensor) != 0; }
    const Buckets& buckets_;
    std::vector<View> views_;
    std::vector<int64_t> first_of_;
    bool direct_ = true;   // view i is of tensor i, for all: first_of_ need not be read
    int64_t pending_ = 0;  // views of elements without memory
};

// How a bucket is written or read.
struct Mode {
    const Kernels* kernels;
    bool hash;
    bool stream;  // non-temporal stores
};

// Fills bucket bytes [0, buckets.bytes(bucket)) at `to`. Returns the hash, or 0 without `mode.hash`.
// Throws std::invalid_argument if a tensor of the bucket is not bound.
uint64_t pack(const Buckets& buckets, const Views& sources, Pool& pool, int64_t bucket, uint8_t* to, Mode mode);

// As pack, behind `lead` (see Pool): item n fills bytes from n * Scratch::kTaskBytes on, and reads the tensors there only.
// Where `lead` says no there is no hash, and the bucket's bytes are undefined.
std::optional<uint64_t> pack_behind(const Buckets& buckets, const Views& sources, Pool& pool, int64_t bucket, uint8_t* to, Mode mode, const Pool::Lead& lead);

// Writes the bucket's elements to every bound view of its tensors; tensors that are not bound are left out.
void unpack(const Buckets& buckets, const Views& targets, Pool& pool, int64_t bucket, const uint8_t* from, Mode mode);

uint64_t tree_hash(const uint8_t* from, size_t bytes, Pool& pool, const Kernels& kernels);

}  // namespace grpo
