// A few threads that share one counter of work items. The caller takes part, so a pool of one has no thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>

namespace grpo {

// Memory of one thread. `staged` stays in its L1 cache, `gathered` in its L2 cache.
struct Scratch {
    static constexpr size_t kUnit = 2048;             // wire bytes staged at a time
    static constexpr size_t kTaskBytes = 512 << 10;   // wire bytes of one work item
    static constexpr size_t kMaxWidening = 4;         // the source of an 8-bit float may be an fp32
    alignas(64) uint8_t staged[kUnit];                // as it goes on the wire
    alignas(64) uint8_t gathered[kMaxWidening * kTaskBytes];  // contiguous, but in the dtype of the source or target
};

class Pool {
  public:
    using Work = std::function<void(size_t item, Scratch&)>;
    using Lead = std::function<bool(const std::function<void(size_t)>& open)>;

    explicit Pool(size_t threads);
    ~Pool();
    size_t threads() const;

    // Calls work(item, scratch) for each item in [0, items), from all threads, and returns when all are done. `work`
    // must not throw. Concurrent calls take turns. In a forked child the threads are started again.
    void run(size_t items, const Work& work);

    // As run, but item i starts only after `lead`, which runs in the calling thread meanwhile, has called open(n) with
    // n > i. Where `lead` returns true, all items are run. Where it returns false or throws, no further item is
    // started, those that were are waited for, and false is returned or the exception thrown.
    bool run_behind(size_t items, const Work& work, const Lead& lead);

  private:
    struct Crew;
    Crew& crew();
    size_t threads_;
    std::unique_ptr<Crew> crew_;
    int64_t owner_pid_;
};

}  // namespace grpo
