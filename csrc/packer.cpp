#include "packer.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "hash.h"

namespace grpo {

namespace {

[[noreturn]] void refuse(const std::string& why) { throw std::invalid_argument(why); }

constexpr int64_t kMaxBytes = int64_t{1} << 62;

}  // namespace

Buckets::Buckets(const std::vector<WireTensor>& tensors, std::vector<Piece> pieces, std::vector<int64_t> bucket_bytes)
    : pieces_(std::move(pieces)), bytes_(std::move(bucket_bytes)) {
    if (tensors.size() > INT32_MAX || bytes_.size() > INT32_MAX) refuse("too many tensors or buckets");
    for (int64_t bytes : bytes_)
        if (bytes < 0 || bytes > kMaxBytes) refuse("bucket size out of range");
    for (const WireTensor& tensor : tensors) {
        if (tensor.count < 0 || tensor.count > kMaxBytes / 16) refuse("element count out of range");
        dtypes_.push_back(tensor.dtype);
        counts_.push_back(tensor.count);
    }
    starts_.assign(bytes_.size() + 1, 0);
    std::vector<int64_t> seen(tensors.size(), 0);
    int64_t bucket = 0, used = 0;
    for (size_t i = 0; i < pieces_.size(); ++i) {
        const Piece& piece = pieces_[i];
        if (piece.tensor < 0 || piece.tensor >= static_cast<int64_t>(tensors.size())) refuse("piece of an unknown tensor");
        if (piece.bucket < bucket || piece.bucket >= size()) refuse("pieces are not sorted by bucket");
        for (; bucket < piece.bucket; used = 0) starts_[static_cast<size_t>(++bucket)] = i;
        int64_t& taken = seen[static_cast<size_t>(piece.tensor)];
        if (piece.first != taken || piece.count < 1 || piece.count > count(piece.tensor) - taken) refuse("pieces do not cover a tensor in order");
        taken += piece.count;
        const auto item = static_cast<int64_t>(item_bytes(dtype(piece.tensor)));
        if (piece.offset < used || piece.offset % item != 0) refuse("pieces overlap or are not aligned to their elements");
        if (piece.offset > bytes_[static_cast<size_t>(bucket)] - piece.count * item) refuse("piece ends outside its bucket");
        used = piece.offset + piece.count * item;
    }
    while (bucket < size()) starts_[static_cast<size_t>(++bucket)] = pieces_.size();
    if (seen != counts_) refuse("pieces do not cover a tensor");
}

uint8_t* Views::checked(const View& view, Memory memory) const {
    const int64_t count = buckets_.count(view.tensor);
    if (count == 0) return nullptr;
    const uint64_t item = item_bytes(view.dtype);
    const auto last = static_cast<uint64_t>(view.strided ? view.strided->last_offset() : count - 1);
    if (memory.data == 0 && memory.storage == 0) return nullptr;  // pending: pack and unpack refuse it until it is moved
    if (memory.data == 0 || memory.data < memory.storage || memory.storage_bytes > kMaxBytes) refuse("no memory behind the tensor");
    const uint64_t start = memory.data - memory.storage;
    if (start > memory.storage_bytes || last >= (memory.storage_bytes - start) / item) refuse("the tensor reaches outside its storage");
    if (memory.data % (item == 16 ? 8 : item) != 0) refuse("the tensor is not aligned to its elements");
    return reinterpret_cast<uint8_t*>(memory.data);
}

void Views::add(int64_t tensor, Dtype dtype, const std::vector<int64_t>& shape, const std::vector<int64_t>& strides, Memory memory, bool target) {
    if (tensor < 0 || tensor >= static_cast<int64_t>(first_of_.size())) refuse("no such tensor in the plan");
    if (!views_.empty() && tensor < views_.back().tensor + (target ? 0 : 1)) refuse("views must be added in the plan's order");
    if (!convertible(dtype, buckets_.dtype(tensor))) refuse("the dtype cannot be converted to or from the wire dtype");
    const Geometry geometry(shape, strides);
    if (geometry.count() != buckets_.count(tensor)) refuse("the element count differs from the plan's");
    if (target && !geometry.writable()) refuse("elements of the target share memory");
    View view{nullptr, geometry.contiguous() ? nullptr : std::make_unique<Geometry>(geometry), static_cast<int32_t>(tensor), dtype};
    view.data = checked(view, memory);
    int64_t& first = first_of_[static_cast<size_t>(tensor)];
    if (first < 0) first = size();
    direct_ = direct_ && tensor == size();
    pending_ += pending(view);
    views_.push_back(std::move(view));
}

void Views::clear() {
    views_.clear();
    direct_ = true;
    pending_ = 0;
    std::fill(first_of_.begin(), first_of_.end(), -1);
}

void Views::move(int64_t view, Memory memory) {
    View& moved = views_.at(static_cast<size_t>(view));
    uint8_t* const data = checked(moved, memory);
    pending_ -= pending(moved);
    moved.data = data;
    pending_ += pending(moved);
}

void Views::require(int64_t bucket, bool each) const {
    // All of them, mostly: then there is nothing to look for in tens of thousands of pieces.
    if (pending_ == 0 && (!each || views_.size() == first_of_.size())) return;
    for (const Piece* piece = buckets_.begin(bucket); piece != buckets_.end(bucket); ++piece) {
        const View* view = first(piece->tensor);
        if (each && !view) refuse("a tensor of the bucket is not bound");
        for (; view; view = next(view))
            if (!view->data) refuse("a tensor of the bucket has no memory");
    }
}

const View* Views::first(int64_t tensor) const {
    const int64_t index = direct_ ? (tensor < size() ? tensor : -1) : first_of_[static_cast<size_t>(tensor)];
    return index < 0 ? nullptr : &views_[static_cast<size_t>(index)];
}

const View* Views::next(const View* view) const {
    const View* following = view + 1;
    return following < views_.data() + views_.size() && following->tensor == view->tensor ? following : nullptr;
}

namespace {

constexpr int64_t kBlock = xxh3::kBlock, kLeaf = xxh3::kLeaf, kTaskBytes = Scratch::kTaskBytes;
static_assert(kTaskBytes % kLeaf == 0);
constexpr int64_t kDirectBytes = 16384;

size_t tasks_of(int64_t bytes) { return static_cast<size_t>((bytes + kTaskBytes - 1) / kTaskBytes); }

// The first piece that ends after byte `at`.
const Piece* piece_at(const Buckets& buckets, int64_t bucket, int64_t at) {
    return std::partition_point(buckets.begin(bucket), buckets.end(bucket), [&](const Piece& piece) { return buckets.end_of(piece) <= at; });
}

// One piece's share of a task, as contiguous elements of the source's dtype.
struct Run {
    int64_t begin, end;  // bytes of the bucket
    const uint8_t* from;
    Dtype from_dtype, wire_dtype;
    // The source of byte `bucket_byte`, which begins an element.
    const uint8_t* at(int64_t bucket_byte) const {
        const auto item = static_cast<int64_t>(item_bytes(from_dtype)), wire_item = static_cast<int64_t>(item_bytes(wire_dtype));
        return from + (bucket_byte - begin) / wire_item * item;
    }
};

// Fills bytes [begin, end) of a bucket, one task, leaf after leaf.
class Task {
  public:
    Task(const Buckets& buckets, const Views& sources, int64_t bucket, int64_t begin, int64_t end, uint8_t* to, Mode mode, Scratch& scratch)
        : buckets_(buckets), sources_(sources), next_(piece_at(buckets, bucket, begin)), last_(buckets.end(bucket)), begin_(begin), end_(end),
          to_(to), mode_(mode), scratch_(scratch) {
        load();
    }

    // Fills the leaf [begin, end) and returns its hash (0 without one). Leaves must be filled in order.
    uint64_t fill(int64_t begin, int64_t end) {
        if (end - begin <= static_cast<int64_t>(xxh3::kShort)) {
            stage(begin, end);
            memcpy(to_ + begin, scratch_.staged, static_cast<size_t>(end - begin));
            return mode_.hash ? padded_xxh3(scratch_.staged, static_cast<size_t>(end - begin), *mode_.kernels) : 0;
        }
        uint64_t acc[xxh3::kLanes];
        xxh3::init(acc);
        const int64_t last_block = begin + (end - begin - 1) / kBlock * kBlock;  // XXH3 treats it apart
        for (int64_t at = begin; at < last_block;) {
            const int64_t direct = std::min(last_block, direct_end(at)), staged = std::min(last_block, at + static_cast<int64_t>(Scratch::kUnit));
            int64_t blocks = (direct - at) / kBlock;
            if (blocks > 0) {
                copy_direct(acc, at, blocks);
            } else {
                stage(at, staged);
                blocks = (staged - at) / kBlock;
                mode_.kernels->copy_blocks(mode_.hash ? acc : nullptr, to_ + at, scratch_.staged, static_cast<size_t>(blocks), mode_.stream);
            }
            at += blocks * kBlock;
        }
        return finish(acc, begin, last_block, end);
    }

  private:
    // Whole blocks from `at` on, of one run.
    void copy_direct(uint64_t* acc, int64_t at, int64_t blocks) {
        uint64_t* const fold = mode_.hash ? acc : nullptr;
        const auto count = static_cast<size_t>(blocks);
        if (run_.from_dtype == run_.wire_dtype) mode_.kernels->copy_blocks(fold, to_ + at, run_.at(at), count, mode_.stream);
        else mode_.kernels->cast_blocks(fold, run_.wire_dtype, to_ + at, run_.from_dtype, run_.at(at), count, mode_.stream);
    }

    // Copies the last block, [at, end), and ends the leaf's hash.
    uint64_t finish(uint64_t* acc, int64_t begin, int64_t at, int64_t end) {
        const uint8_t* from = scratch_.staged;
        if (run_.from_dtype == run_.wire_dtype && direct_end(at) >= end) from = run_.at(at);
        else stage(at, end);
        const auto rest = static_cast<size_t>(end - at), length = static_cast<size_t>(end - begin);
        if (rest == kBlock) mode_.kernels->copy_blocks(nullptr, to_ + at, from, 1, mode_.stream);
        else memcpy(to_ + at, from, rest);
        if (!mode_.hash) return 0;
        if (rest >= xxh3::kStripe) return finish_leaf(acc, from, rest, length, *mode_.kernels);
        // The last stripe reaches back into what was already written.
        mode_.kernels->fence();
        uint8_t stripe[xxh3::kStripe];
        memcpy(stripe, to_ + end - xxh3::kStripe, sizeof stripe);
        return finish_leaf(acc, stripe + sizeof stripe - rest, rest, length, *mode_.kernels);
    }

    // Makes `run_` the next piece's share of this task; strided sources are gathered here, all of the share at once.
    void load() {
        if (next_ == last_ || next_->offset >= end_) {
            run_ = Run{end_, end_, nullptr, Dtype::raw1, Dtype::raw1};
            return;
        }
        const Piece& piece = *next_++;
        const View& view = *sources_.first(piece.tensor);
        const Dtype wire_dtype = buckets_.dtype(piece.tensor);
        const auto item = static_cast<int64_t>(item_bytes(view.dtype)), wire_item = static_cast<int64_t>(item_bytes(wire_dtype));
        // Both are on element boundaries: offsets are aligned to elements, and tasks to far more.
        const int64_t begin = std::max(piece.offset, begin_), end = std::min(buckets_.end_of(piece), end_);
        const int64_t first = piece.first + (begin - piece.offset) / wire_item;
        run_ = Run{begin, end, view.data + first * item, view.dtype, wire_dtype};
        if (view.strided) {
            view.strided->gather(view.data, static_cast<size_t>(item), first, (end - begin) / wire_item, scratch_.gathered);
            run_.from = scratch_.gathered;
        }
    }

    // Where the bytes end that are worth copying straight from memory, or casting on the way; `at` if there are none.
    int64_t direct_end(int64_t at) {
        while (run_.end <= at && run_.end < end_) load();
        return run_.begin <= at && run_.end - run_.begin >= kDirectBytes ? run_.end : at;
    }

    // Assembles bytes [at, upto) in scratch.staged: cast, and with zeros between pieces.
    void stage(int64_t at, int64_t upto) {
        uint8_t* out = scratch_.staged;
        while (at < upto) {
            while (run_.end <= at && run_.end < end_) load();
            if (run_.begin > at) {
                const int64_t gap = std::min(upto, run_.begin) - at;
                memset(out, 0, static_cast<size_t>(gap));
                out += gap;
                at += gap;
                continue;
            }
            const int64_t stop = std::min(upto, run_.end);
            const auto bytes = static_cast<size_t>(stop - at);
            if (run_.from_dtype == run_.wire_dtype) mode_.kernels->copy(out, run_.at(at), bytes, false);
            else mode_.kernels->convert(run_.wire_dtype, out, run_.from_dtype, run_.at(at), bytes / item_bytes(run_.wire_dtype));
            out += stop - at;
            at = stop;
        }
    }

    const Buckets& buckets_;
    const Views& sources_;
    const Piece *next_, *last_;
    int64_t begin_, end_;
    uint8_t* to_;
    Mode mode_;
    Scratch& scratch_;
    Run run_;
};

// Writes `count` elements from `first` on to one view.
void deliver(const View& to, Dtype wire, int64_t first, int64_t count, const uint8_t* in, const Mode& mode, Scratch& scratch) {
    const auto item = static_cast<int64_t>(item_bytes(to.dtype)), wire_item = static_cast<int64_t>(item_bytes(wire));
    const bool cast = to.dtype != wire;
    if (to.strided) {
        if (cast) mode.kernels->convert(to.dtype, scratch.gathered, wire, in, static_cast<size_t>(count));
        to.strided->scatter(to.data, static_cast<size_t>(item), first, count, cast ? scratch.gathered : in);
        return;
    }
    uint8_t* out = to.data + first * item;
    if (!cast) {
        mode.kernels->copy(out, in, static_cast<size_t>(count * item), mode.stream);
        return;
    }
    // Whole blocks, from a cache line of the target on; what is before and after, with ordinary stores.
    const auto lines = static_cast<int64_t>(-reinterpret_cast<uintptr_t>(out) % xxh3::kStripe);
    const auto convert = [&](int64_t n) {
        mode.kernels->convert(to.dtype, out, wire, in, static_cast<size_t>(n));
        out += n * item;
        in += n * wire_item;
        count -= n;
    };
    convert(std::min(count, lines / item));
    const int64_t blocks = count * item / kBlock, whole = blocks * kBlock / item;
    mode.kernels->cast_blocks(nullptr, to.dtype, out, wire, in, static_cast<size_t>(blocks), mode.stream);
    out += whole * item;
    in += whole * wire_item;
    count -= whole;
    convert(count);
}

std::optional<uint64_t> pack(const Buckets& buckets, const Views& sources, Pool& pool, int64_t bucket, uint8_t* to, Mode mode, const Pool::Lead* lead) {
    sources.require(bucket, true);
    const int64_t bytes = buckets.bytes(bucket);
    mode.stream = mode.stream && reinterpret_cast<uintptr_t>(to) % xxh3::kStripe == 0;
    std::vector<uint64_t> leaves(static_cast<size_t>((bytes + kLeaf - 1) / kLeaf));
    const Pool::Work work = [&](size_t index, Scratch& scratch) {
        const int64_t begin = static_cast<int64_t>(index) * kTaskBytes, end = std::min(bytes, begin + kTaskBytes);
        Task task(buckets, sources, bucket, begin, end, to, mode, scratch);
        for (int64_t at = begin; at < end; at += kLeaf) leaves[static_cast<size_t>(at / kLeaf)] = task.fill(at, std::min(end, at + kLeaf));
        mode.kernels->fence();
    };
    if (!lead) pool.run(tasks_of(bytes), work);
    else if (!pool.run_behind(tasks_of(bytes), work, *lead)) return std::nullopt;
    return mode.hash ? root_hash(leaves, static_cast<size_t>(bytes), *mode.kernels) : 0;
}

}  // namespace

uint64_t pack(const Buckets& buckets, const Views& sources, Pool& pool, int64_t bucket, uint8_t* to, Mode mode) {
    return *pack(buckets, sources, pool, bucket, to, mode, nullptr);
}

std::optional<uint64_t> pack_behind(const Buckets& buckets, const Views& sources, Pool& pool, int64_t bucket, uint8_t* to, Mode mode, const Pool::Lead& lead) {
    return pack(buckets, sources, pool, bucket, to, mode, &lead);
}

void unpack(const Buckets& buckets, const Views& targets, Pool& pool, int64_t bucket, const uint8_t* from, Mode mode) {
    const int64_t bytes = buckets.bytes(bucket);
    targets.require(bucket, false);
    pool.run(tasks_of(bytes), [&](size_t index, Scratch& scratch) {
        const int64_t begin = static_cast<int64_t>(index) * kTaskBytes, end = std::min(bytes, begin + kTaskBytes);
        for (const Piece* piece = piece_at(buckets, bucket, begin); piece != buckets.end(bucket) && piece->offset < end; ++piece) {
            const Dtype wire = buckets.dtype(piece->tensor);
            const auto wire_item = static_cast<int64_t>(item_bytes(wire));
            const int64_t start = std::max(begin, piece->offset), stop = std::min(end, buckets.end_of(*piece));
            const int64_t first = piece->first + (start - piece->offset) / wire_item, count = (stop - start) / wire_item;
            for (const View* view = targets.first(piece->tensor); view; view = targets.next(view))
                deliver(*view, wire, first, count, from + start, mode, scratch);
        }
        mode.kernels->fence();
    });
}

}  // namespace grpo
