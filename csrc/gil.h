// Letting go of Python's lock and taking it again, in threads that Python may end.
//
// When Python exits, it ends daemon threads where they ask for the lock: up to 3.13 by pthread_exit, which unwinds their
// C++ frames. pybind11's guards ask for it in destructors, which nothing may unwind through: std::terminate, and the
// process aborts instead of exiting. These guards let such a thread wait for the end of the process, as Python does
// itself from 3.14 on. Its frames keep alive what it works with, so nothing is destroyed under it.
#pragma once

#include <pybind11/pybind11.h>

#include <unistd.h>

#ifdef __GLIBCXX__
#include <cxxabi.h>
#endif

namespace grpo {

template <typename F>
void or_wait_for_the_end(F ask_for_lock) noexcept {
#ifdef __GLIBCXX__
    try {
        ask_for_lock();
    } catch (abi::__forced_unwind&) {
        for (;;) pause();
    }
#else
    ask_for_lock();
#endif
}

class WithoutGil {
  public:
    WithoutGil() : state_(PyEval_SaveThread()) {}
    ~WithoutGil() {
        or_wait_for_the_end([this] { PyEval_RestoreThread(state_); });
    }
    WithoutGil(const WithoutGil&) = delete;
    WithoutGil& operator=(const WithoutGil&) = delete;

    // Has the lock for as long as f runs. In the thread that made this only.
    template <typename F>
    auto with_gil(F f) {
        struct Guard {
            explicit Guard(WithoutGil& owner) : owner(owner) {
                or_wait_for_the_end([this] { PyEval_RestoreThread(this->owner.state_); });
            }
            ~Guard() { owner.state_ = PyEval_SaveThread(); }
            WithoutGil& owner;
        } guard(*this);
        return f();
    }

  private:
    PyThreadState* state_;
};

}  // namespace grpo
