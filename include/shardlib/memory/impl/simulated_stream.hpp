// Definitions of simulated_stream.hpp.
#pragma once

#include "shardlib/memory/simulated_stream.hpp"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <utility>

#include "shardlib/memory/region.hpp"
#include "shardlib/memory/simulated_queue.hpp"
#include "shardlib/support/error.hpp"

namespace shardlib::detail {

/// The streams of all simulated devices of this process. Work may free blocks while it runs, so the mutex is recursive.
struct SimulatedStreams {
  std::recursive_mutex mutex;
  std::vector<SimulatedStream*> all;
  std::atomic<bool> is_empty = true;
};
inline SimulatedStreams simulated_streams;
inline thread_local bool runs_simulated_streams = false;

SHARDLIB_INLINE bool SimulatedStream::Progress::reached(std::uint64_t number) const {
  if (!fault.empty()) throw Error(fault);
  return ended || done >= number;
}

class SimulatedStream::Mark final : public StreamMark {
 public:
  explicit Mark(SimulatedStream& stream)
      : stream_(stream), progress_(stream.progress_), number_(stream.put_), follows_until_(stream.follows_until_) {}
  bool passed() override {
    // This thread runs its device's kernels without the mutex, so that others can run theirs.
    stream_.region_.queue()->advance(follows_until_);
    const std::lock_guard lock(simulated_streams.mutex);
    run_all();
    return progress_->reached(number_);
  }
  void hold_device() override {
    {
      const std::lock_guard lock(simulated_streams.mutex);
      stream_.holds_until_ = std::max(stream_.holds_until_, number_);
    }
    stream_.region_.queue()->hold([progress = progress_, number = number_] {
      const std::lock_guard lock(simulated_streams.mutex);
      run_all();
      return progress->reached(number);
    });
  }

 private:
  SimulatedStream& stream_;
  std::shared_ptr<Progress> progress_;
  std::uint64_t number_, follows_until_;
};

SHARDLIB_INLINE SimulatedStream::SimulatedStream(Region& region) : region_(region) {
  const std::lock_guard lock(simulated_streams.mutex);
  simulated_streams.all.push_back(this);
  simulated_streams.is_empty = false;
}

SHARDLIB_INLINE SimulatedStream::~SimulatedStream() {
  const std::lock_guard lock(simulated_streams.mutex);
  progress_->ended = true;
  std::erase(simulated_streams.all, this);
  simulated_streams.is_empty = simulated_streams.all.empty();
}

SHARDLIB_INLINE void SimulatedStream::follow_device() {
  const std::lock_guard lock(simulated_streams.mutex);
  follows_ = true;
  follows_until_ = region_.queue()->last();
  put({.name = "the wait for kernels",
       .step = [queue = region_.queue(), until = follows_until_] { return queue->advance(until); }});
}

SHARDLIB_INLINE std::unique_ptr<StreamMark> SimulatedStream::mark() {
  const std::lock_guard lock(simulated_streams.mutex);
  follows_ = false;
  return std::make_unique<Mark>(*this);
}

SHARDLIB_INLINE void SimulatedStream::put(Work work) {
  const std::lock_guard lock(simulated_streams.mutex);
  work.number = ++put_;
  queue_.push_back(std::move(work));
}

SHARDLIB_INLINE void SimulatedStream::remove(const void* owner) {
  const std::lock_guard lock(simulated_streams.mutex);
  std::erase_if(queue_, [&](const Work& work) { return work.owner == owner; });
  progress_->done = queue_.empty() ? put_ : queue_.front().number - 1;
}

SHARDLIB_INLINE void SimulatedStream::stopped(const std::function<void()>& f) {
  const std::lock_guard lock(simulated_streams.mutex);
  f();
}

// A queue on hold that runs here calls this function again.
SHARDLIB_INLINE void SimulatedStream::run_all() {
  if (std::exchange(runs_simulated_streams, true)) return;
  struct End {
    ~End() { runs_simulated_streams = false; }
  } const end;
  for (bool again = true; std::exchange(again, false);) {
    for (SimulatedStream* const stream : simulated_streams.all) {
      while (stream->progress_->fault.empty() && !stream->queue_.empty() && stream->queue_.front().step()) {
        stream->progress_->done = stream->queue_.front().number;
        stream->queue_.pop_front();
        again = true;
      }
    }
  }
}

SHARDLIB_INLINE void SimulatedStream::freed(const void* begin, std::size_t bytes) {
  if (simulated_streams.is_empty) return;  // what a program without streams pays
  const std::lock_guard lock(simulated_streams.mutex);
  const auto* const first = static_cast<const std::byte*>(begin);
  for (SimulatedStream* const stream : simulated_streams.all) {
    for (const Work& work : stream->queue_) {
      if (work.number <= stream->holds_until_) continue;
      for (const Range& range : work.uses) {
        const auto* const used = static_cast<const std::byte*>(range.begin);
        if (used < first + bytes && first < used + range.bytes)
          stream->progress_->fault =
              "simulated device: " + work.name + " uses a block that was freed before it has run";
      }
    }
  }
}

}  // namespace shardlib::detail
