// A thread that has MPI move messages while the program computes.
#pragma once

#include <mpi.h>
#include <signal.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <thread>

#include "shardlib/comm/mpi/process.hpp"

namespace shardlib::detail::mpi {

/// Asks MPI for progress again and again while something is under way, and sleeps in between. It completes no request
/// and runs nobody's code, so that results and memory are the same with and without it.
class ProgressThread {
 public:
  ProgressThread() : thread_([this] { run(); }) {}
  ProgressThread(const ProgressThread&) = delete;
  ProgressThread& operator=(const ProgressThread&) = delete;
  ~ProgressThread() {
    change(State::ending);
    thread_.join();
  }

  /// Whether something is under way. Called by the thread that communicates.
  void set_busy(bool busy) { change(busy ? State::busy : State::idle); }

 private:
  enum class State { idle, busy, ending };
  /// A socket's buffers hold more than what a fast link brings in this time, and waking up this often costs a percent
  /// or two of a core.
  static constexpr std::chrono::microseconds nap{500};

  void change(State state) {
    if (state_.exchange(state) != state) state_.notify_one();
  }
  void run() {
    // The program's signals are for threads that expect them.
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, nullptr);
    for (;;) {
      state_.wait(State::idle);
      if (state_ == State::ending) return;
      int there = 0;
      MPI_Iprobe(0, 0, MPI_COMM_SELF, &there, MPI_STATUS_IGNORE);  // finds nothing, but moves everything
      std::this_thread::sleep_for(nap);
    }
  }

  std::atomic<State> state_ = State::idle;
  std::thread thread_;
};

/// Null unless SHARDLIB_PROGRESS_THREAD is 1.
inline std::unique_ptr<ProgressThread> progress_thread;

/// Throws UsageError unless the environment variable is unset, 0 or 1.
inline bool wants_progress_thread() {
  return switched_on(progress_variable, "0",
                     "write 1 for a thread of each rank that moves its messages, or 0 to move them between ops");
}

/// Sets `progress_thread`, once MPI runs.
inline void start_progress_thread() {
  if (!wants_progress_thread()) return;
  int provided = 0;
  check(MPI_Query_thread(&provided), "MPI_Query_thread", 0);
  check_threads(provided, MPI_THREAD_MULTIPLE);
  progress_thread = std::make_unique<ProgressThread>();
}

}  // namespace shardlib::detail::mpi
