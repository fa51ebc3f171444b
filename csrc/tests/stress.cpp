// Several threads pack, unpack and hash with one pool and with pools of their own. Run under ThreadSanitizer.
#include <cstdio>
#include <thread>

#include "../packer.h"

using namespace grpo;

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
    int failed = 0;
    for (int count : failures) failed += count;
    std::printf("packing_stress: %d failures\n", failed);
    return failed != 0;
}
