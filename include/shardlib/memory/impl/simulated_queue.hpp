// Definitions of simulated_queue.hpp.
#pragma once

#include "shardlib/memory/simulated_queue.hpp"

#include <condition_variable>
#include <cstring>
#include <deque>
#include <exception>
#include <mutex>
#include <thread>

#include "shardlib/memory/flights.hpp"
#include "shardlib/memory/region.hpp"

namespace shardlib::detail {

struct SimulatedQueue::State {
  Region& region;
  std::uint64_t random;
  std::mutex mutex = {};  ///< not held while work runs
  std::condition_variable idle = {};
  std::deque<Work> work = {};
  std::uint64_t put = 0, done = 0;  ///< numbers of pieces of work
  std::exception_ptr error = {};
  bool busy = false;        ///< a thread runs work
  std::uint64_t waits = 0;  ///< of the host

  bool advance(std::unique_lock<std::mutex>& lock, std::uint64_t until);
  void synchronize(std::unique_lock<std::mutex>& lock);
};

SHARDLIB_INLINE SimulatedQueue::SimulatedQueue(Region& region, std::uint64_t seed)
    : state_(new State{.region = region, .random = seed}) {}
SHARDLIB_INLINE SimulatedQueue::~SimulatedQueue() = default;

SHARDLIB_INLINE void SimulatedQueue::put(Work work) {
  const std::lock_guard lock(state_->mutex);
  state_->work.push_back(std::move(work));
  ++state_->put;
}

SHARDLIB_INLINE void SimulatedQueue::upload(void* to, const void* from, std::size_t bytes) {
  struct Upload {
    void* to;
    std::size_t bytes;
  };
  auto held = std::make_unique_for_overwrite<std::byte[]>(sizeof(Upload) + bytes);
  ::new (held.get()) Upload{to, bytes};
  std::memcpy(held.get() + sizeof(Upload), from, bytes);
  const auto run = [](const std::byte* of) {
    const Upload& upload = *std::launder(reinterpret_cast<const Upload*>(of));
    std::memcpy(upload.to, of + sizeof(Upload), upload.bytes);
  };
  put({run, std::move(held)});
  run_early();
}

SHARDLIB_INLINE void SimulatedQueue::hold(std::function<bool()> passed) {
  put({nullptr, nullptr, std::move(passed)});
}

SHARDLIB_INLINE std::uint64_t SimulatedQueue::last() const {
  const std::lock_guard lock(state_->mutex);
  return state_->put;
}

SHARDLIB_INLINE void SimulatedQueue::run_early() {
  constexpr std::size_t most = 1024;
  State& s = *state_;
  s.region.flights()->before_enqueue();
  std::unique_lock lock(s.mutex);
  if (s.random != 0) s.random = s.random * 6364136223846793005U + 1442695040888963407U;
  if (s.work.size() >= most)
    s.synchronize(lock);  // a GPU's host blocks here
  else if (s.random != 0 && (s.random >> 33) % 4 == 0)
    s.advance(lock, s.put);
}

SHARDLIB_INLINE bool SimulatedQueue::advance(std::uint64_t until) {
  std::unique_lock lock(state_->mutex);
  return state_->advance(lock, until);
}

SHARDLIB_INLINE void SimulatedQueue::synchronize() {
  std::unique_lock lock(state_->mutex);
  ++state_->waits;
  state_->synchronize(lock);
}

SHARDLIB_INLINE std::uint64_t SimulatedQueue::waits() const {
  const std::lock_guard lock(state_->mutex);
  return state_->waits;
}

SHARDLIB_INLINE void SimulatedQueue::State::synchronize(std::unique_lock<std::mutex>& lock) {
  for (const std::uint64_t until = put; !advance(lock, until);) {
    if (busy) {
      idle.wait(lock, [this] { return !busy; });
    } else {  // on hold
      lock.unlock();
      std::this_thread::yield();
      lock.lock();
    }
  }
}

SHARDLIB_INLINE bool SimulatedQueue::State::advance(std::unique_lock<std::mutex>& lock, std::uint64_t until) {
  if (error) std::rethrow_exception(error);
  if (done >= until) return true;
  if (busy) return false;
  busy = true;
  lock.unlock();
  std::exception_ptr thrown;
  try {
    const MemoryAccess open(&region);
    for (lock.lock(); done < until; ++done) {
      const Work& next = work.front();  // others only add to the back
      lock.unlock();
      if (next.run != nullptr) next.run(next.held.get());
      const bool ends = next.run != nullptr || next.passed();
      lock.lock();
      if (!ends) break;
      work.pop_front();
    }
    lock.unlock();
  } catch (...) {
    thrown = std::current_exception();
  }
  if (!lock.owns_lock()) lock.lock();
  error = thrown;
  busy = false;
  idle.notify_all();
  if (error) std::rethrow_exception(error);
  return done >= until;
}

}  // namespace shardlib::detail
