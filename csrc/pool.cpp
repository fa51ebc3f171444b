#include "pool.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <vector>

namespace grpo {

struct Pool::Crew {
    explicit Crew(size_t threads) : scratches(threads) {
        for (auto& scratch : scratches) scratch.reset(new Scratch);  // not make_unique, which would touch all of it
        try {
            for (size_t i = 1; i < threads; ++i) workers.emplace_back([this, i] { serve(i); });
        } catch (...) {
            stop();
            throw;
        }
    }
    ~Crew() { stop(); }

    bool run(size_t items, const Work& job, const Lead* lead) {
        std::lock_guard<std::mutex> turn(callers);
        if (workers.empty() || items < 2) {
            if (lead && !(*lead)([](size_t) {})) return false;
            for (size_t item = 0; item < items; ++item) job(item, *scratches[0]);
            return true;
        }
        {
            std::lock_guard<std::mutex> lock(mutex);
            work = &job;
            total = items;
            opened = lead ? 0 : items;
            closed = false;
            next.store(0, std::memory_order_relaxed);
            busy = workers.size();
            ++round;
        }
        start.notify_all();
        bool good = true;
        std::exception_ptr error;
        if (lead) try {
                good = (*lead)([this](size_t upto) { open(upto); });
            } catch (...) {
                good = false;
                error = std::current_exception();
            }
        if (good) {
            open(items);
            drain(*scratches[0]);
        } else {
            close();
        }
        {
            std::unique_lock<std::mutex> lock(mutex);
            done.wait(lock, [this] { return busy == 0; });
            work = nullptr;
        }
        if (error) std::rethrow_exception(error);
        return good;
    }

    void open(size_t upto) {
        {
            std::lock_guard<std::mutex> lock(mutex);
            if (upto <= opened) return;
            opened = std::min(upto, total);
        }
        opening.notify_all();
    }

    void close() {
        {
            std::lock_guard<std::mutex> lock(mutex);
            closed = true;
        }
        opening.notify_all();
    }

    // Waits until the item may be started; false if it may not.
    bool admitted(size_t item) {
        if (item < opened.load(std::memory_order_acquire)) return true;
        std::unique_lock<std::mutex> lock(mutex);
        opening.wait(lock, [&] { return item < opened || closed; });
        return item < opened;
    }

    void drain(Scratch& scratch) {
        for (size_t item; (item = next.fetch_add(1, std::memory_order_relaxed)) < total && admitted(item);) (*work)(item, scratch);
    }

    void serve(size_t index) {
        uint64_t seen = 0;
        for (;;) {
            {
                std::unique_lock<std::mutex> lock(mutex);
                start.wait(lock, [&] { return round != seen || stopping; });
                if (stopping) return;
                seen = round;
            }
            drain(*scratches[index]);
            std::lock_guard<std::mutex> lock(mutex);
            if (--busy == 0) done.notify_one();
        }
    }

    void stop() {
        {
            std::lock_guard<std::mutex> lock(mutex);
            stopping = true;
        }
        start.notify_all();
        for (auto& worker : workers) worker.join();
        workers.clear();
    }

    std::vector<std::unique_ptr<Scratch>> scratches;
    std::vector<std::thread> workers;
    std::mutex callers, mutex;
    std::condition_variable start, opening, done;
    const Work* work = nullptr;
    std::atomic<size_t> next{0}, opened{0};  // items taken, items that may be started
    size_t total = 0, busy = 0;
    uint64_t round = 0;
    bool closed = false, stopping = false;
};

Pool::Pool(size_t threads) : threads_(threads), owner_pid_(getpid()) {
    if (threads < 1 || threads > 256) throw std::invalid_argument("threads must be between 1 and 256");
    crew_ = std::make_unique<Crew>(threads);
}

Pool::~Pool() {
    if (owner_pid_ != getpid()) crew_.release();  // the threads are not in this process: nothing to join
}

size_t Pool::threads() const { return threads_; }

Pool::Crew& Pool::crew() {
    if (owner_pid_ != getpid()) {
        crew_.release();  // its locks may have been held at the fork: leave it alone
        crew_ = std::make_unique<Crew>(threads_);
        owner_pid_ = getpid();
    }
    return *crew_;
}

void Pool::run(size_t items, const Work& work) { crew().run(items, work, nullptr); }

bool Pool::run_behind(size_t items, const Work& work, const Lead& lead) { return crew().run(items, work, &lead); }

}  // namespace grpo
