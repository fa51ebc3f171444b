// What one CUDA thread does: assemble 16 bytes of a bucket, fold them into the hash, or deliver them to a target.
// Host and device code: tests run these functions on the CPU, thread after thread (emulate.cpp).
#pragma once

#include "elements.h"
#include "xxh3.h"

namespace grpo::device {

constexpr int kMaxRank = 6;
constexpr int kVector = 16;                                       // bytes that a thread handles at a time
constexpr int kBlockVectors = static_cast<int>(xxh3::kBlock) / kVector, kLeafBlocks = static_cast<int>(xxh3::kLeaf / xxh3::kBlock);

// A share of a bucket and the tensor behind it; Python fills it (grpo_lab/packing/device.py, same field order).
struct Piece {
    int64_t offset, end;          // bytes of the bucket
    int64_t first;                // row-major position of its first element
    uint8_t* data;                // the tensor's first element
    int64_t sizes[kMaxRank], strides[kMaxRank];
    int32_t rank;                 // 0: contiguous
    int32_t dtype, wire_dtype;    // in memory, in the bucket
    int32_t padding;
};
static_assert(sizeof(Piece) == 144);

struct alignas(16) Vector {
    uint64_t low, high;
};

// The first piece in [from, to) that ends after byte `at`, or `to`.
GRPO_HD int find(const Piece* pieces, int from, int to, int64_t at) {
    while (from < to) {
        const int middle = from + (to - from) / 2;
        if (pieces[middle].end <= at) from = middle + 1;
        else to = middle;
    }
    return from;
}

GRPO_HD uint8_t* element(const Piece& piece, int64_t position, size_t item) {
    if (piece.rank == 0) return piece.data + position * static_cast<int64_t>(item);
    int64_t offset = 0;
    for (int d = piece.rank; d-- > 0;) {
        offset += position % piece.sizes[d] * piece.strides[d];
        position /= piece.sizes[d];
    }
    return piece.data + offset * static_cast<int64_t>(item);
}

GRPO_HD uint32_t decode(Dtype dtype, const uint8_t* from) {
    switch (dtype) {
        case Dtype::f32: return *reinterpret_cast<const uint32_t*>(from);
        case Dtype::f16: return Half::decode(*reinterpret_cast<const uint16_t*>(from));
        case Dtype::bf16: return BFloat16::decode(*reinterpret_cast<const uint16_t*>(from));
        case Dtype::e4m3: return E4M3::decode(*from);
        default: return E5M2::decode(*from);
    }
}

GRPO_HD void encode(Dtype dtype, uint8_t* to, uint32_t value) {
    switch (dtype) {
        case Dtype::f32: *reinterpret_cast<uint32_t*>(to) = value; break;
        case Dtype::f16: *reinterpret_cast<uint16_t*>(to) = Half::encode(value); break;
        case Dtype::bf16: *reinterpret_cast<uint16_t*>(to) = BFloat16::encode(value); break;
        case Dtype::e4m3: *to = E4M3::encode(value); break;
        default: *to = E5M2::encode(value); break;
    }
}

// One element between memory and wire; both are aligned to their size (16-byte elements to 8).
GRPO_HD void convert(Dtype to_dtype, uint8_t* to, Dtype from_dtype, const uint8_t* from) {
    if (to_dtype != from_dtype) return encode(to_dtype, to, decode(from_dtype, from));
    switch (item_bytes(to_dtype)) {
        case 1: *to = *from; break;
        case 2: *reinterpret_cast<uint16_t*>(to) = *reinterpret_cast<const uint16_t*>(from); break;
        case 4: *reinterpret_cast<uint32_t*>(to) = *reinterpret_cast<const uint32_t*>(from); break;
        case 16: reinterpret_cast<uint64_t*>(to)[1] = reinterpret_cast<const uint64_t*>(from)[1]; [[fallthrough]];
        default: *reinterpret_cast<uint64_t*>(to) = *reinterpret_cast<const uint64_t*>(from); break;
    }
}

GRPO_HD bool aligned(const uint8_t* address) { return reinterpret_cast<uintptr_t>(address) % kVector == 0; }

// Where 16 whole bytes of one contiguous piece lie in memory, if they lie on a 16-byte boundary; else null.
GRPO_HD uint8_t* whole(const Piece& piece, int64_t at) {
    if (piece.rank != 0 || piece.offset > at || piece.end < at + kVector) return nullptr;
    const auto item = static_cast<int64_t>(item_bytes(static_cast<Dtype>(piece.dtype)));
    const auto wire_item = static_cast<int64_t>(item_bytes(static_cast<Dtype>(piece.wire_dtype)));
    uint8_t* address = piece.data + (piece.first + (at - piece.offset) / wire_item) * item;
    return aligned(address) ? address : nullptr;
}

// The 16 bytes from byte `at` (a multiple of 16) on: cast, and zero between pieces and from `end` on. `piece` is the
// first that ends after `at`; pieces[count] does not exist.
GRPO_HD Vector assemble(const Piece* pieces, int piece, int count, int64_t at, int64_t end) {
    alignas(16) uint8_t bytes[kVector] = {};
    if (piece < count) {
        const Piece& one = pieces[piece];
        if (const uint8_t* from = whole(one, at)) {
            const auto dtype = static_cast<Dtype>(one.dtype), wire = static_cast<Dtype>(one.wire_dtype);
            if (dtype == wire) return *reinterpret_cast<const Vector*>(from);
            if (dtype == Dtype::f32 && item_bytes(wire) == 2) {
                alignas(16) uint8_t wide[2 * kVector];
                for (int half = 0; half < 2; ++half) reinterpret_cast<Vector*>(wide)[half] = reinterpret_cast<const Vector*>(from)[half];
                for (int i = 0; i < 8; ++i) convert(wire, bytes + 2 * i, dtype, wide + 4 * i);
                return *reinterpret_cast<const Vector*>(bytes);
            }
        }
    }
    const int64_t stop = end < at + kVector ? end : at + kVector;
    for (; piece < count && pieces[piece].offset < stop; ++piece) {
        const Piece& one = pieces[piece];
        const auto dtype = static_cast<Dtype>(one.dtype), wire = static_cast<Dtype>(one.wire_dtype);
        const auto wire_item = static_cast<int64_t>(item_bytes(wire));
        const int64_t from = one.offset > at ? one.offset : at, upto = one.end < stop ? one.end : stop;
        int64_t position = one.first + (from - one.offset) / wire_item;
        for (int64_t byte = from; byte < upto; byte += wire_item, ++position)
            convert(wire, bytes + (byte - at), dtype, element(one, position, item_bytes(dtype)));
    }
    return *reinterpret_cast<const Vector*>(bytes);
}

// The inverse: writes the 16 bytes at `at` to the tensors behind them.
GRPO_HD void deliver(const Piece* pieces, int piece, int count, int64_t at, int64_t end, Vector vector) {
    if (piece >= count) return;
    alignas(16) uint8_t bytes[kVector];
    *reinterpret_cast<Vector*>(bytes) = vector;
    const Piece& only = pieces[piece];
    if (uint8_t* to = whole(only, at)) {
        if (only.dtype == only.wire_dtype) {
            *reinterpret_cast<Vector*>(to) = vector;
            return;
        }
    }
    const int64_t stop = end < at + kVector ? end : at + kVector;
    for (; piece < count && pieces[piece].offset < stop; ++piece) {
        const Piece& one = pieces[piece];
        const auto dtype = static_cast<Dtype>(one.dtype), wire = static_cast<Dtype>(one.wire_dtype);
        const auto wire_item = static_cast<int64_t>(item_bytes(wire));
        const int64_t from = one.offset > at ? one.offset : at, upto = one.end < stop ? one.end : stop;
        int64_t position = one.first + (from - one.offset) / wire_item;
        for (int64_t byte = from; byte < upto; byte += wire_item, ++position)
            convert(dtype, element(one, position, item_bytes(dtype)), wire, bytes + (byte - at));
    }
}

// A leaf of the tree hash. Short leaves are hashed as if zero-padded.
struct Leaf {
    int64_t begin, end;
    GRPO_HD Leaf(int64_t index, int64_t bytes) : begin(index * static_cast<int64_t>(xxh3::kLeaf)), end(begin + static_cast<int64_t>(xxh3::kLeaf)) {
        if (end > bytes) end = bytes;
    }
    GRPO_HD int64_t length() const { return end - begin <= static_cast<int64_t>(xxh3::kShort) ? static_cast<int64_t>(xxh3::kPadded) : end - begin; }
    GRPO_HD int blocks() const { return static_cast<int>((length() - 1) / static_cast<int64_t>(xxh3::kBlock)); }  // before the last one
    // Stripes of the block that are folded in place; the leaf's last 64 bytes are folded apart.
    GRPO_HD int stripes(int block) const {
        if (block < blocks()) return 16;
        const int64_t rest = length() - static_cast<int64_t>(xxh3::kBlock) * block;
        return rest <= 0 ? 0 : static_cast<int>((rest - 1) / static_cast<int64_t>(xxh3::kStripe));
    }
};

// Adds what vector `index` of a block contributes to two neighbouring lanes, 2 (index % 4) and the next.
GRPO_HD void fold(Vector vector, int index, uint64_t& even, uint64_t& odd) {
    const size_t key = static_cast<size_t>(8 * (index / 4) + 16 * (index % 4));
    even += xxh3::word_product(vector.low, xxh3::secret64(key)) + vector.high;
    odd += xxh3::word_product(vector.high, xxh3::secret64(key + 8)) + vector.low;
}

// Lane `lane` after all blocks: `sums` holds kLeafBlocks x 8 sums, `last_word(i)` word i of the leaf's last 64 bytes.
template <typename LastWord>
GRPO_HD uint64_t finish_lane(const Leaf& leaf, int lane, const uint64_t* sums, LastWord last_word) {
    uint64_t start[xxh3::kLanes];
    xxh3::init(start);
    uint64_t acc = start[lane];
    for (int block = 0; block < leaf.blocks(); ++block) acc = xxh3::scramble_lane(acc + sums[8 * block + lane], static_cast<size_t>(lane));
    acc += sums[8 * leaf.blocks() + lane];
    acc += xxh3::word_product(last_word(lane), xxh3::secret64(xxh3::kLastSecret + 8 * static_cast<size_t>(lane)));
    return acc + last_word(lane ^ 1);
}

}  // namespace grpo::device
