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

Buckets::Buckets(std::vector<WireTensor> tensors, std::vector<Piece> pieces, std::vector<int64_t> bucket_bytes)
    : tensors_(std::move(tensors)), pieces_(std::move(pieces)), bytes_(std::move(bucket_bytes)) {
    for (int64_t bytes : bytes_)
        if (bytes < 0 || bytes > kMaxBytes) refuse("bucket size out of range");
    for (const WireTensor& tensor : tensors_)
        if (tensor.count < 0 || tensor.count > kMaxBytes / 16) refuse("element count out of range");
    starts_.assign(bytes_.size() + 1, 0);
    std::vector<int64_t> seen(tensors_.size(), 0);
    int64_t bucket = 0, used = 0;
    for (size_t i = 0; i < pieces_.size(); ++i) {
        const Piece& piece = pieces_[i];
        if (piece.tensor < 0 || piece.tensor >= static_cast<int64_t>(tensors_.size())) refuse("piece of an unknown tensor");
        if (piece.bucket < bucket || piece.bucket >= size()) refuse("pieces are not sorted by bucket");
        for (; bucket < piece.bucket; used = 0) starts_[static_cast<size_t>(++bucket)] = i;
        const WireTensor& tensor = tensors_[static_cast<size_t>(piece.tensor)];
        int64_t& taken = seen[static_cast<size_t>(piece.tensor)];
        if (piece.first != taken || piece.count < 1 || piece.count > tensor.count - taken) refuse("pieces do not cover a tensor in order");
        taken += piece.count;
        const auto item = static_cast<int64_t>(item_bytes(tensor.dtype));
        if (piece.offset < used || piece.offset % item != 0) refuse("pieces overlap or are not aligned to their elements");
        if (piece.offset > bytes_[static_cast<size_t>(bucket)] - piece.count * item) refuse("piece ends outside its bucket");
        used = piece.offset + piece.count * item;
    }
    while (bucket < size()) starts_[static_cast<size_t>(++bucket)] = pieces_.size();
    for (size_t i = 0; i < tensors_.size(); ++i)
        if (seen[i] != tensors_[i].count) refuse("pieces do not cover a tensor");
}

int64_t Buckets::end_of(const Piece& piece) const {
    return piece.offset + piece.count * static_cast<int64_t>(item_bytes(tensors_[static_cast<size_t>(piece.tensor)].dtype));
}

uint8_t* Views::checked(const View& view, Memory memory) const {
    if (view.geometry.count() == 0) return nullptr;
    const uint64_t item = item_bytes(view.dtype);
    const auto last = static_cast<uint64_t>(view.geometry.last_offset());
    if (memory.data == 0 && memory.storage == 0) return nullptr;  // pending: pack and unpack refuse it until it is moved
    if (memory.data == 0 || memory.data < memory.storage || memory.storage_bytes > kMaxBytes) refuse("no memory behind the tensor");
    const uint64_t start = memory.data - memory.storage;
    if (start > memory.storage_bytes || last >= (memory.storage_bytes - start) / item) refuse("the tensor reaches outside its storage");
    if (memory.data % (item == 16 ? 8 : item) != 0) refuse("the tensor is not aligned to its elements");
    return reinterpret_cast<uint8_t*>(memory.data);
}

void Views::add(int64_t tensor, Dtype dtype, const std::vector<int64_t>& shape, const std::vector<int64_t>& strides, Memory memory, bool target) {
    if (tensor < 0 || tensor >= static_cast<int64_t>(first_of_.size())) refuse("no such tensor in the plan");
    const WireTensor& wire = buckets_.tensors()[static_cast<size_t>(tensor)];
    if (!views_.empty() && tensor < views_.back().tensor + (target ? 0 : 1)) refuse("views must be added in the plan's order");
    if (!convertible(dtype, wire.dtype)) refuse("the dtype cannot be converted to or from the wire dtype");
    View view{tensor, dtype, Geometry(shape, strides), nullptr};
    if (view.geometry.count() != wire.count) refuse("the element count differs from the plan's");
    if (target && !view.geometry.writable()) refuse("elements of the target share memory");
    view.data = checked(view, memory);
    int64_t& first = first_of_[static_cast<size_t>(tensor)];
    if (first < 0) first = size();
    views_.push_back(std::move(view));
}

void Views::clear() {
    views_.clear();
    std::fill(first_of_.begin(), first_of_.end(), -1);
}

std::vector<int64_t> Views::moved(int64_t first, const std::vector<uint64_t>& addresses) const {
    if (first < 0 || first > size() || static_cast<int64_t>(addresses.size()) > size() - first) refuse("no such views");
    std::vector<int64_t> found;
    for (size_t i = 0; i < addresses.size(); ++i) {
        const View& view = views_[static_cast<size_t>(first) + i];
        if (reinterpret_cast<uint64_t>(view.data) != addresses[i] && view.geometry.count() != 0) found.push_back(first + static_cast<int64_t>(i));
    }
    return found;
}

void Views::move(int64_t view, Memory memory) {
    View& moved = views_.at(static_cast<size_t>(view));
    moved.data = checked(moved, memory);
}

const View* Views::first(int64_t tensor) const {
    const int64_t index = first_of_[static_cast<size_t>(tensor)];
    return index < 0 ? nullptr : &views_[static_cast<size_t>(index)];
}

const View* Views::next(const View* view) const {
    const View* following = view + 1;
    return following < views_.data() + views_.size() && following->tensor == view->tensor ? following : nullptr;
}

namespace {

constexpr size_t kTaskLeaves = 4;  // 256 KiB: large enough to amortise a task, small enough to balance threads

// The first piece that ends after byte `at`.
const Piece* piece_at(const Buckets& buckets, int64_t bucket, int64_t at) {
    return std::partition_point(buckets.begin(bucket), buckets.end(bucket), [&](const Piece& piece) { return buckets.end_of(piece) <= at; });
}

class Filler {
  public:
    Filler(const Buckets& buckets, const Views& sources, int64_t bucket, uint8_t* to, Mode mode)
        : buckets_(buckets), sources_(sources), bucket_(bucket), to_(to), mode_(mode) {}

    // Fills bytes [begin, end), one leaf of the tree hash, and returns its hash.
    uint64_t fill(int64_t begin, int64_t end, Scratch& scratch) const {
        const Piece* piece = piece_at(buckets_, bucket_, begin);
        if (end - begin <= static_cast<int64_t>(xxh3::kShort)) {
            stage(piece, begin, end, scratch);
            memcpy(to_ + begin, scratch.staged, static_cast<size_t>(end - begin));
            return mode_.hash ? padded_xxh3(scratch.staged, static_cast<size_t>(end - begin), *mode_.kernels) : 0;
        }
        uint64_t acc[xxh3::kLanes];
        xxh3::init(acc);
        uint64_t* folded = mode_.hash ? acc : nullptr;
        const int64_t last_block = begin + (end - begin - 1) / kBlock * kBlock;  // XXH3 treats it apart
        for (int64_t at = begin;;) {
            while (piece != buckets_.end(bucket_) && buckets_.end_of(*piece) <= at) ++piece;
            const int64_t direct = std::min(last_block, direct_end(piece, at));
            if (direct - at >= kBlock) {
                const int64_t blocks = (direct - at) / kBlock;
                mode_.kernels->copy_blocks(folded, to_ + at, source(*piece, at), static_cast<size_t>(blocks), mode_.stream);
                at += blocks * kBlock;
                continue;
            }
            const int64_t upto = std::min(end, at + static_cast<int64_t>(Scratch::kUnit));
            stage(piece, at, upto, scratch);
            const int64_t blocks = (std::min(upto, last_block) - at) / kBlock;
            if (blocks > 0) mode_.kernels->copy_blocks(folded, to_ + at, scratch.staged, static_cast<size_t>(blocks), mode_.stream);
            if (upto < end) {
                at = upto;
                continue;
            }
            const uint8_t* rest = scratch.staged + blocks * kBlock;
            const auto rest_bytes = static_cast<size_t>(upto - at - blocks * kBlock);
            memcpy(to_ + at + blocks * kBlock, rest, rest_bytes);
            return mode_.hash ? finish(acc, rest, rest_bytes, begin, end) : 0;
        }
    }

  private:
    static constexpr int64_t kBlock = xxh3::kBlock;

    uint64_t finish(uint64_t* acc, const uint8_t* rest, size_t rest_bytes, int64_t begin, int64_t end) const {
        const auto length = static_cast<size_t>(end - begin);
        if (rest_bytes >= xxh3::kStripe) return finish_leaf(acc, rest, rest_bytes, length, *mode_.kernels);
        // The last stripe reaches back into what was already written.
        mode_.kernels->fence();
        uint8_t stripe[xxh3::kStripe];
        memcpy(stripe, to_ + end - xxh3::kStripe, sizeof stripe);
        return finish_leaf(acc, stripe + sizeof stripe - rest_bytes, rest_bytes, length, *mode_.kernels);
    }

    const View& view(const Piece& piece) const { return *sources_.first(piece.tensor); }
    Dtype wire(const Piece& piece) const { return buckets_.tensors()[static_cast<size_t>(piece.tensor)].dtype; }

    // Where the bytes that can be copied straight from the source end; `at` if there are none.
    int64_t direct_end(const Piece* piece, int64_t at) const {
        if (piece == buckets_.end(bucket_) || piece->offset > at) return at;
        const View& from = view(*piece);
        return from.geometry.contiguous() && from.dtype == wire(*piece) ? buckets_.end_of(*piece) : at;
    }

    const uint8_t* source(const Piece& piece, int64_t at) const {
        const View& from = view(piece);
        return from.data + piece.first * static_cast<int64_t>(item_bytes(from.dtype)) + (at - piece.offset);
    }

    // Assembles bytes [at, upto) in scratch.staged, with zeros between pieces. Leaves `piece` at the last one used.
    void stage(const Piece*& piece, int64_t at, int64_t upto, Scratch& scratch) const {
        uint8_t* out = scratch.staged;
        const Piece* const last = buckets_.end(bucket_);
        while (at < upto) {
            while (piece != last && buckets_.end_of(*piece) <= at) ++piece;
            const int64_t start = piece == last ? upto : std::min(upto, piece->offset);
            if (at < start) {
                memset(out, 0, static_cast<size_t>(start - at));
                out += start - at;
                at = start;
                continue;
            }
            const int64_t stop = std::min(upto, buckets_.end_of(*piece));
            produce(*piece, at, stop, out, scratch);
            out += stop - at;
            at = stop;
        }
    }

    // Both ends are on element boundaries: offsets are aligned to elements, and units and leaves to 1024 bytes.
    void produce(const Piece& piece, int64_t at, int64_t stop, uint8_t* out, Scratch& scratch) const {
        const View& from = view(piece);
        const Dtype to_dtype = wire(piece);
        const auto item = static_cast<int64_t>(item_bytes(from.dtype)), wire_item = static_cast<int64_t>(item_bytes(to_dtype));
        const int64_t first = piece.first + (at - piece.offset) / wire_item, count = (stop - at) / wire_item;
        const bool cast = from.dtype != to_dtype;
        const uint8_t* in = from.data + first * item;
        if (!from.geometry.contiguous()) {
            uint8_t* gathered = cast ? scratch.gathered : out;
            from.geometry.gather(from.data, static_cast<size_t>(item), first, count, gathered);
            in = gathered;
        }
        if (cast) mode_.kernels->convert(to_dtype, out, from.dtype, in, static_cast<size_t>(count));
        else if (in != out) memcpy(out, in, static_cast<size_t>(stop - at));
    }

    const Buckets& buckets_;
    const Views& sources_;
    int64_t bucket_;
    uint8_t* to_;
    Mode mode_;
};

// Writes `count` elements from `first` on to one view.
void deliver(const View& to, Dtype wire, int64_t first, int64_t count, const uint8_t* in, const Mode& mode, Scratch& scratch) {
    const auto item = static_cast<int64_t>(item_bytes(to.dtype)), wire_item = static_cast<int64_t>(item_bytes(wire));
    const bool contiguous = to.geometry.contiguous(), cast = to.dtype != wire;
    if (contiguous && !cast) {
        mode.kernels->copy(to.data + first * item, in, static_cast<size_t>(count * item), mode.stream);
        return;
    }
    const int64_t unit = static_cast<int64_t>(Scratch::kUnit) / item;
    for (; count > 0; first += unit, count -= unit, in += unit * wire_item) {
        const int64_t n = std::min(count, unit);
        const uint8_t* converted = in;
        if (cast) {
            mode.kernels->convert(to.dtype, scratch.staged, wire, in, static_cast<size_t>(n));
            converted = scratch.staged;
        }
        if (contiguous) mode.kernels->copy(to.data + first * item, converted, static_cast<size_t>(n * item), mode.stream);
        else to.geometry.scatter(to.data, static_cast<size_t>(item), first, n, converted);
    }
}

}  // namespace

uint64_t pack(const Buckets& buckets, const Views& sources, Pool& pool, int64_t bucket, uint8_t* to, Mode mode) {
    for (const Piece* piece = buckets.begin(bucket); piece != buckets.end(bucket); ++piece) {
        const View* source = sources.first(piece->tensor);
        if (!source || !source->data) refuse("a tensor of the bucket is not bound");
    }
    const int64_t bytes = buckets.bytes(bucket), leaf_bytes = xxh3::kLeaf;
    mode.stream = mode.stream && reinterpret_cast<uintptr_t>(to) % xxh3::kStripe == 0;
    std::vector<uint64_t> leaves(static_cast<size_t>((bytes + leaf_bytes - 1) / leaf_bytes));
    const Filler filler(buckets, sources, bucket, to, mode);
    pool.run((leaves.size() + kTaskLeaves - 1) / kTaskLeaves, [&](size_t task, Scratch& scratch) {
        const size_t end = std::min(leaves.size(), (task + 1) * kTaskLeaves);
        for (size_t leaf = task * kTaskLeaves; leaf < end; ++leaf) {
            const int64_t begin = static_cast<int64_t>(leaf) * leaf_bytes;
            leaves[leaf] = filler.fill(begin, std::min(bytes, begin + leaf_bytes), scratch);
        }
        mode.kernels->fence();
    });
    return mode.hash ? root_hash(leaves, static_cast<size_t>(bytes), *mode.kernels) : 0;
}

void unpack(const Buckets& buckets, const Views& targets, Pool& pool, int64_t bucket, const uint8_t* from, Mode mode) {
    const int64_t bytes = buckets.bytes(bucket), task_bytes = kTaskLeaves * xxh3::kLeaf;
    for (const Piece* piece = buckets.begin(bucket); piece != buckets.end(bucket); ++piece)
        for (const View* view = targets.first(piece->tensor); view; view = targets.next(view))
            if (!view->data) refuse("a target of the bucket has no memory");
    pool.run(static_cast<size_t>((bytes + task_bytes - 1) / task_bytes), [&](size_t task, Scratch& scratch) {
        const int64_t begin = static_cast<int64_t>(task) * task_bytes, end = std::min(bytes, begin + task_bytes);
        for (const Piece* piece = piece_at(buckets, bucket, begin); piece != buckets.end(bucket) && piece->offset < end; ++piece) {
            const Dtype wire = buckets.tensors()[static_cast<size_t>(piece->tensor)].dtype;
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
