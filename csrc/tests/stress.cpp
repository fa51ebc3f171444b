// Several threads pack, unpack and hash with one pool and with pools of their own. Run under ThreadSanitizer, and for
// AArch64 under an emulator.
#include <atomic>
#include <cstdio>
#include <stdexcept>
#include <thread>

#include "../packer.h"

using namespace grpo;

namespace {

// Packs floats of every magnitude into every float dtype, with every instruction set here. Prints the hashes, which are
// the same on every machine, and returns how many instruction sets differ.
int casts() {
    constexpr int64_t kCount = 100'003;
    std::vector<float> source(kCount);
    uint64_t state = 1;
    for (float& value : source) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        const auto bits = static_cast<uint32_t>(state >> 32);
        memcpy(&value, &bits, sizeof value);
    }
    const auto address = reinterpret_cast<uint64_t>(source.data());
    Pool pool(2);
    int differ = 0;
    for (const Dtype wire : {Dtype::f32, Dtype::f16, Dtype::bf16, Dtype::e4m3, Dtype::e5m2}) {
        const auto bytes = kCount * static_cast<int64_t>(item_bytes(wire));
        const Buckets buckets({{wire, kCount}}, {{0, 0, 0, 0, kCount}}, {bytes});
        Views sources(buckets);
        sources.add(0, Dtype::f32, {kCount}, {1}, {address, address, kCount * 4}, false);
        std::vector<uint8_t> memory(static_cast<size_t>(bytes));
        std::vector<uint64_t> hashes;
        for (const Kernels* kernels : available_kernels()) hashes.push_back(pack(buckets, sources, pool, 0, memory.data(), {kernels, true, true}));
        for (const uint64_t hash : hashes) differ += hash != hashes.front();
        std::printf("dtype %d: %016llx\n", static_cast<int>(wire), static_cast<unsigned long long>(hashes.front()));
    }
    return differ;
}

// Items follow their lead: none starts before it is opened, all run if it says yes, and it may say no, or throw, anywhere.
int leads() {
    constexpr size_t kItems = 50;
    int failures = 0;
    for (size_t threads : {size_t{1}, size_t{2}, size_t{4}})
        for (size_t stop = 0; stop <= kItems; ++stop) {
            Pool pool(threads);
            for (const bool thrown : {false, true}) {
                std::atomic<size_t> opened{0}, ran{0}, early{0};
                bool good = false;
                try {
                    good = pool.run_behind(
                        kItems,
                        [&](size_t item, Scratch&) {
                            early += item >= opened;
                            ++ran;
                        },
                        [&](const std::function<void(size_t)>& open) {
                            for (size_t n = 1; n <= stop; ++n) {
                                opened = n;
                                open(n);
                            }
                            if (thrown && stop < kItems) throw std::runtime_error("no");
                            return stop == kItems;
                        });
                } catch (const std::runtime_error&) {
                    failures += !thrown;
                }
                failures += early != 0 || good != (stop == kItems) || ran > stop || (good && ran != kItems);
                std::atomic<size_t> after{0};  // the pool is as good as before
                pool.run(kItems, [&](size_t, Scratch&) { ++after; });
                failures += after != kItems;
            }
        }
    return failures;
}

}  // namespace

int main() {
    constexpr int64_t kCount = 300'000;
    std::vector<float> source(kCount);
    for (int64_t i = 0; i < kCount; ++i) source[static_cast<size_t>(i)] = static_cast<float>(i);
    const Buckets buckets({{Dtype::bf16, kCount}}, {{0, 0, 0, 0, kCount}}, {kCount * 2});
    const auto address = reinterpret_cast<uint64_t>(source.data());
    Views sources(buckets);
    sources.add(0, Dtype::f32, {500, 600}, {1, 500}, {address, address, kCount * 4}, false);
    Pool shared(3);
    const Kernels& kernels = *find_kernels("auto");
    std::vector<uint8_t> first(kCount * 2);
    const uint64_t expected = pack(buckets, sources, shared, 0, first.data(), {&kernels, true, true});

    std::vector<int> failures(4, 0);
    std::vector<std::thread> threads;
    for (size_t t = 0; t < failures.size(); ++t)
        threads.emplace_back([&, t] {
            Pool own(2);
            std::vector<uint8_t> memory(kCount * 2);
            std::vector<float> target(kCount);
            const auto at = reinterpret_cast<uint64_t>(target.data());
            Views targets(buckets);
            targets.add(0, Dtype::f32, {500, 600}, {1, 500}, {at, at, kCount * 4}, true);
            for (int round = 0; round < 10; ++round) {
                Pool& pool = round % 2 ? own : shared;
                failures[t] += pack(buckets, sources, pool, 0, memory.data(), {&kernels, true, round % 3 == 0}) != expected;
                failures[t] += tree_hash(memory.data(), memory.size(), pool, kernels) != expected;
                unpack(buckets, targets, pool, 0, memory.data(), {&kernels, false, true});
                failures[t] += memory != first || target[100] != 100.0f;
            }
        });
    for (auto& thread : threads) thread.join();
    int failed = casts() + leads();
    for (int count : failures) failed += count;
    std::printf("packing_stress: %d failures\n", failed);
    return failed != 0;
}
