// Definitions of simulated_queue.hpp.
#pragma once

#include "shardlib/memory/simulated_queue.hpp"

#include "shardlib/memory/region.hpp"

namespace shardlib::detail {

SHARDLIB_INLINE void SimulatedQueue::put(Work work) {
  const std::lock_guard lock(mutex_);
  work_.push_back(std::move(work));
  ++put_;
}

SHARDLIB_INLINE std::uint64_t SimulatedQueue::last() const {
  const std::lock_guard lock(mutex_);
  return put_;
}

SHARDLIB_INLINE void SimulatedQueue::run_early() {
  constexpr std::size_t most = 1024;
  std::unique_lock lock(mutex_);
  bool runs = work_.size() >= most;
  if (random_ != 0) {
    random_ = random_ * 6364136223846793005U + 1442695040888963407U;
    runs = runs || (random_ >> 33) % 4 == 0;
  }
  if (runs) advance(lock, put_);
}

SHARDLIB_INLINE bool SimulatedQueue::advance(std::uint64_t until) {
  std::unique_lock lock(mutex_);
  return advance(lock, until);
}

SHARDLIB_INLINE void SimulatedQueue::synchronize() {
  std::unique_lock lock(mutex_);
  for (const std::uint64_t until = put_; !advance(lock, until);) idle_.wait(lock, [this] { return !busy_; });
}

SHARDLIB_INLINE bool SimulatedQueue::advance(std::unique_lock<std::mutex>& lock, std::uint64_t until) {
  if (error_) std::rethrow_exception(error_);
  if (done_ >= until) return true;
  if (busy_) return false;
  busy_ = true;
  lock.unlock();
  std::exception_ptr error;
  try {
    const MemoryAccess open(&region_);
    for (lock.lock(); done_ < until; ++done_) {
      const Work work = std::move(work_.front());
      work_.pop_front();
      lock.unlock();
      work.run(work.held.get());
      lock.lock();
    }
    lock.unlock();
  } catch (...) {
    error = std::current_exception();
  }
  if (!lock.owns_lock()) lock.lock();
  error_ = error;
  busy_ = false;
  idle_.notify_all();
  if (error_) std::rethrow_exception(error_);
  return true;
}

}  // namespace shardlib::detail
