// Included by one .cpp per instruction set, inside a namespace of its own, after `Lane` was defined:
//   struct Lane: the eight accumulators in registers: load(acc), store(acc), fold(from, secret), scramble();
//   Lane::Stripe: 64 bytes in registers, Lane::stripe(from) loads one, and put<kHash, kStream>(to, stripe, secret) stores
//   it and folds it
// Loops over elements are plain C++ here; the compiler vectorises them for the instruction set of the file.

// A cast reads past the end of a page before the hardware's prefetcher does, and staging stops at each unit and piece,
// which hides what comes from it; plain copies it serves best alone. Non-temporal, as a source is read once: that goes
// around the outer caches. Pages are asked for earlier, by one line in each: a miss of the TLB takes longest of all.
constexpr size_t kCastAhead = 2048, kPageAhead = 20480, kStagedAhead = 8192, kFoldAhead = 4096;
constexpr size_t kLongRun = 8;  // blocks from which on pages are worth asking for

GRPO_HD void prefetch_once(const void* line) { __builtin_prefetch(line, 0, 0); }

struct Copied {  // stripes of a source that is copied as it is
    const uint8_t* from;
    GRPO_HD Lane::Stripe next() {
        const Lane::Stripe stripe = Lane::stripe(from);
        from += xxh3::kStripe;
        return stripe;
    }
};

struct Halved {  // every other stripe, and a look at the one between
    const uint8_t* from;
    GRPO_HD Lane::Stripe next() {
        const Lane::Stripe stripe = Lane::stripe(from);
        static_cast<void>(*reinterpret_cast<const volatile uint8_t*>(from + xxh3::kStripe));
        from += 2 * xxh3::kStripe;
        return stripe;
    }
};

struct Doubled {  // every stripe twice
    const uint8_t* from;
    bool again = false;
    GRPO_HD Lane::Stripe next() {
        const Lane::Stripe stripe = Lane::stripe(from);
        from += again ? xxh3::kStripe : 0;
        again = !again;
        return stripe;
    }
};

template <bool kHash, bool kStream, typename Source>
void fill_blocks_as(uint64_t* acc, uint8_t* to, size_t blocks, Source source) {
    Lane lane;
    if (kHash) lane.load(acc);
    for (size_t block = 0; block < blocks; ++block) {
        if (blocks >= kLongRun) __builtin_prefetch(source.from + kPageAhead);
        for (size_t stripe = 0; stripe < 16; ++stripe, to += xxh3::kStripe)
            lane.template put<kHash, kStream>(to, source.next(), xxh3::kSecret + 8 * stripe);
        if (kHash) lane.scramble();
    }
    if (kHash) lane.store(acc);
}

template <typename Source>
void fill_blocks(uint64_t* acc, void* to, size_t blocks, bool stream, Source source) {
    auto* out = static_cast<uint8_t*>(to);
    if (acc) stream ? fill_blocks_as<true, true>(acc, out, blocks, source) : fill_blocks_as<true, false>(acc, out, blocks, source);
    else stream ? fill_blocks_as<false, true>(acc, out, blocks, source) : fill_blocks_as<false, false>(acc, out, blocks, source);
}

void copy_blocks(uint64_t* acc, void* to, const void* from, size_t blocks, bool stream) {
    fill_blocks(acc, to, blocks, stream, Copied{static_cast<const uint8_t*>(from)});
}

void move_blocks(void* to, const void* from, size_t blocks, int reads, int writes) {
    auto* out = static_cast<uint8_t*>(to);
    auto* in = static_cast<const uint8_t*>(from);
    if (reads > writes) fill_blocks_as<false, true>(nullptr, out, blocks, Halved{in});
    else if (reads < writes) fill_blocks_as<false, true>(nullptr, out, blocks, Doubled{in});
    else fill_blocks_as<false, true>(nullptr, out, blocks, Copied{in});
}

void fold_stripes(uint64_t* acc, const void* from, size_t stripes, size_t secret_offset) {
    auto* in = static_cast<const uint8_t*>(from);
    Lane lane;
    lane.load(acc);
    for (size_t stripe = 0; stripe < stripes; ++stripe) lane.fold(in + xxh3::kStripe * stripe, xxh3::kSecret + secret_offset + 8 * stripe);
    lane.store(acc);
}

void fold_blocks(uint64_t* acc, const void* from, size_t blocks) {
    auto* in = static_cast<const uint8_t*>(from);
    Lane lane;
    lane.load(acc);
    for (size_t block = 0; block < blocks; ++block, in += xxh3::kBlock) {
        for (size_t stripe = 0; stripe < 16; ++stripe) {
            __builtin_prefetch(in + xxh3::kStripe * stripe + kFoldAhead);
            lane.fold(in + xxh3::kStripe * stripe, xxh3::kSecret + 8 * stripe);
        }
        lane.scramble();
    }
    lane.store(acc);
}

void copy(void* to, const void* from, size_t bytes, bool stream) {
    auto* out = static_cast<uint8_t*>(to);
    auto* in = static_cast<const uint8_t*>(from);
    if (stream && bytes >= 2 * xxh3::kBlock) {
        const size_t head = (-reinterpret_cast<uintptr_t>(out)) % xxh3::kStripe;
        memcpy(out, in, head);
        const size_t blocks = (bytes - head) / xxh3::kBlock;
        copy_blocks(nullptr, out + head, in + head, blocks, true);
        const size_t done = head + blocks * xxh3::kBlock;
        memcpy(out + done, in + done, bytes - done);
        return;
    }
    for (; bytes >= xxh3::kStripe; bytes -= xxh3::kStripe, in += xxh3::kStripe, out += xxh3::kStripe) {
        prefetch_once(in + kStagedAhead);
        memcpy(out, in, xxh3::kStripe);
    }
    memcpy(out, in, bytes);
}

template <typename To, typename From>
void convert_as(void* to, const void* from, size_t count) {
    auto* __restrict out = static_cast<typename To::bits_type*>(to);
    auto* __restrict in = static_cast<const typename From::bits_type*>(from);
    constexpr size_t kChunk = 128;
    size_t i = 0;
    for (; i + kChunk <= count; i += kChunk) {
        const auto* ahead = reinterpret_cast<const uint8_t*>(in + i) + kStagedAhead;
        for (size_t line = 0; line < kChunk * sizeof(*in); line += 64) prefetch_once(ahead + line);
        for (size_t k = i; k < i + kChunk; ++k) out[k] = To::encode(From::decode(in[k]));
    }
    for (; i < count; ++i) out[i] = To::encode(From::decode(in[i]));
}

template <typename To>
void convert_to(void* to, Dtype from_dtype, const void* from, size_t count) {
    switch (from_dtype) {
        case Dtype::f32: return convert_as<To, Float32>(to, from, count);
        case Dtype::f16: return convert_as<To, Half>(to, from, count);
        case Dtype::bf16: return convert_as<To, BFloat16>(to, from, count);
        case Dtype::e4m3: return convert_as<To, E4M3>(to, from, count);
        case Dtype::e5m2: return convert_as<To, E5M2>(to, from, count);
        default: return;  // convertible() was checked when the tensor was bound
    }
}

void convert(Dtype to_dtype, void* to, Dtype from_dtype, const void* from, size_t count) {
    switch (to_dtype) {
        case Dtype::f32: return convert_to<Float32>(to, from_dtype, from, count);
        case Dtype::f16: return convert_to<Half>(to, from_dtype, from, count);
        case Dtype::bf16: return convert_to<BFloat16>(to, from_dtype, from, count);
        case Dtype::e4m3: return convert_to<E4M3>(to, from_dtype, from, count);
        case Dtype::e5m2: return convert_to<E5M2>(to, from_dtype, from, count);
        default: return;
    }
}

// Through a block in the L1 cache, for any two dtypes.
void cast_blocks_staged(uint64_t* acc, Dtype to_dtype, void* to, Dtype from_dtype, const void* from, size_t blocks, bool stream) {
    alignas(64) uint8_t block[xxh3::kBlock];
    auto* out = static_cast<uint8_t*>(to);
    auto* in = static_cast<const uint8_t*>(from);
    const size_t count = xxh3::kBlock / item_bytes(to_dtype);
    for (; blocks > 0; --blocks, out += xxh3::kBlock, in += count * item_bytes(from_dtype)) {
        convert(to_dtype, block, from_dtype, in, count);
        copy_blocks(acc, out, block, 1, stream);
    }
}
