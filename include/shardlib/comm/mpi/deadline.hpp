// A time limit on what all ranks do together before and after a launch, when no watchdog runs.
#pragma once

#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>

#include "shardlib/support/error.hpp"
#include "shardlib/support/text.hpp"

namespace shardlib::detail::mpi {

/// The value of SHARDLIB_START_TIMEOUT in seconds; 0 means no limit. Throws UsageError for another value.
inline std::chrono::seconds start_timeout() {
  const char* const text = std::getenv("SHARDLIB_START_TIMEOUT");
  if (text == nullptr) return std::chrono::seconds(600);
  unsigned value = 0;
  if (!parse_number(text, value))
    throw UsageError("SHARDLIB_START_TIMEOUT=" + std::string(text) +
                     ": write the seconds that the ranks may take to start or to end together, 0 for any time");
  return std::chrono::seconds(value);
}

/// While this object lives, the process must make progress within the limit. Otherwise it prints an error and ends with
/// status 1, so that the launcher ends the others. MPI_Abort is not allowed before MPI has started.
class Deadline {
 public:
  explicit Deadline(std::string_view what) : timeout_(start_timeout()) {
    if (timeout_.count() == 0) return;
    thread_ = std::thread([this, what = std::string(what)] {
      std::unique_lock lock(mutex_);
      if (wake_.wait_for(lock, timeout_, [this] { return over_; })) return;
      const char* const rank = std::getenv("OMPI_COMM_WORLD_RANK");
      std::fprintf(stderr,
                   "error: rank %s: %s has lasted longer than %lld s (SHARDLIB_START_TIMEOUT): another rank has not "
                   "come so far, is stopped, or cannot be reached\n",
                   rank == nullptr ? "?" : rank, what.c_str(), static_cast<long long>(timeout_.count()));
      std::fflush(stderr);
      _exit(1);
    });
  }
  Deadline(const Deadline&) = delete;
  Deadline& operator=(const Deadline&) = delete;
  ~Deadline() {
    if (!thread_.joinable()) return;
    {
      const std::lock_guard lock(mutex_);
      over_ = true;
    }
    wake_.notify_one();
    thread_.join();
  }

 private:
  std::chrono::seconds timeout_;
  std::mutex mutex_;
  std::condition_variable wake_;
  bool over_ = false;
  std::thread thread_;
};

}  // namespace shardlib::detail::mpi
