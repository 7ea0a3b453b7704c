// Definitions of simulated_team.hpp.
#pragma once

#include "shardlib/device/simulated_team.hpp"

#include <setjmp.h>
#include <ucontext.h>

#include <array>
#include <memory>
#include <utility>

#include "shardlib/support/error.hpp"

namespace shardlib {

namespace detail {

/// longjmp itself: under _FORTIFY_SOURCE the header's name stands for a function that refuses another stack.
extern "C" [[noreturn]] void shardlib_longjmp(struct __jmp_buf_tag* to, int value) __asm__("_longjmp");

/// The lanes of a team as contexts of one thread. The thread's own context resumes each of them after a barrier. A
/// context starts by swapcontext, because sanitizers know that this changes the stack. From then on setjmp and longjmp
/// change the stack without a system call.
class SimulatedLanes {
 public:
  SimulatedLanes(const TeamMemory& memory, void (*lane)(const void*, const SimulatedTeam&), const void* kernel)
      : memory_(memory), lane_(lane), kernel_(kernel) {
    if (!stacks_) stacks_ = std::make_unique<std::byte[]>(stack_bytes * width);
    for (int i = 0; i < width; ++i) {
      ucontext_t& context = at(i).context;
      getcontext(&context);
      context.uc_stack.ss_sp = stacks_.get() + stack_bytes * static_cast<std::size_t>(i);
      context.uc_stack.ss_size = stack_bytes;
      context.uc_link = nullptr;
      makecontext(&context, &start, 0);
    }
  }
  SimulatedLanes(const SimulatedLanes&) = delete;
  SimulatedLanes& operator=(const SimulatedLanes&) = delete;

  void run() {
    SimulatedLanes* const before = std::exchange(running_, this);
    int ended = 0;
    while (ended == 0) {
      shuffle();
      for (const int i : order_) {
        current_ = i;
        resume(at(i));
        ended += at(i).ended ? 1 : 0;
      }
    }
    running_ = before;
    if (ended != width) throw Error("simulated device: a lane of a kernel's team missed a barrier that others wait at");
  }
  /// Called on a lane: lets the others run up to their barriers.
  void wait(int lane) {
    if (_setjmp(at(lane).waiting) == 0) shardlib_longjmp(scheduler_, 1);
  }

 private:
  static constexpr int width = SimulatedTeam::width;
  static constexpr std::size_t stack_bytes = std::size_t{1} << 18;
  struct Lane {
    ucontext_t context;
    jmp_buf waiting;
    bool started = false, ended = false;
  };
  Lane& at(int lane) { return lanes_[static_cast<std::size_t>(lane)]; }
  /// Returns when the lane waits or has ended.
  void resume(Lane& lane) {
    if (_setjmp(scheduler_) != 0) return;
    if (lane.started) shardlib_longjmp(lane.waiting, 1);
    lane.started = true;
    ucontext_t unused;
    swapcontext(&unused, &lane.context);
  }
  static void start() {  // makecontext hands over only integers
    SimulatedLanes& all = *running_;
    const int lane = all.current_;
    all.lane_(all.kernel_, SimulatedTeam(all.memory_, lane, &all));
    all.at(lane).ended = true;
    shardlib_longjmp(all.scheduler_, 1);
  }
  void shuffle() {
    for (std::size_t i = order_.size(); i > 1; --i) {
      random_ = random_ * 6364136223846793005U + 1442695040888963407U;
      std::swap(order_[i - 1], order_[(random_ >> 33) % i]);
    }
  }

  TeamMemory memory_;
  void (*lane_)(const void*, const SimulatedTeam&);
  const void* kernel_;
  jmp_buf scheduler_;
  std::array<Lane, width> lanes_{};
  std::array<int, width> order_{0, 1, 2, 3, 4};
  std::uint64_t random_ = 1;
  int current_ = 0;
  static inline thread_local SimulatedLanes* running_ = nullptr;
  static inline thread_local std::unique_ptr<std::byte[]> stacks_;
};

SHARDLIB_INLINE void run_lanes(const TeamMemory& memory, void (*lane)(const void*, const SimulatedTeam&),
                               const void* kernel) {
  SimulatedLanes(memory, lane, kernel).run();
}

}  // namespace detail

SHARDLIB_INLINE void SimulatedTeam::wait() const {
  all_->wait(lane_);
}

}  // namespace shardlib
