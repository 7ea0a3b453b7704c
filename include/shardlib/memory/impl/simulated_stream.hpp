// Definitions of simulated_stream.hpp.
#pragma once

#include "shardlib/memory/simulated_stream.hpp"

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

class SimulatedStream::Mark final : public StreamMark {
 public:
  explicit Mark(SimulatedStream& stream)
      : stream_(stream), number_(stream.put_), follows_until_(stream.follows_until_) {}
  bool passed() override {
    // This thread runs its device's kernels without the mutex, so that others can run theirs.
    stream_.region_.queue()->advance(follows_until_);
    const std::lock_guard lock(simulated_streams.mutex);
    run_all();
    if (!stream_.fault_.empty()) throw Error(stream_.fault_);
    return stream_.done_ >= number_;
  }

 private:
  SimulatedStream& stream_;
  std::uint64_t number_, follows_until_;
};

SHARDLIB_INLINE SimulatedStream::SimulatedStream(Region& region) : region_(region) {
  const std::lock_guard lock(simulated_streams.mutex);
  simulated_streams.all.push_back(this);
  simulated_streams.is_empty = false;
}

SHARDLIB_INLINE SimulatedStream::~SimulatedStream() {
  const std::lock_guard lock(simulated_streams.mutex);
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
  queue_.push_back(std::move(work));
  ++put_;
}

SHARDLIB_INLINE void SimulatedStream::remove(const void* owner) {
  const std::lock_guard lock(simulated_streams.mutex);
  done_ += std::erase_if(queue_, [&](const Work& work) { return work.owner == owner; });
}

SHARDLIB_INLINE void SimulatedStream::stopped(const std::function<void()>& f) {
  const std::lock_guard lock(simulated_streams.mutex);
  f();
}

SHARDLIB_INLINE void SimulatedStream::run_all() {
  for (bool again = true; std::exchange(again, false);) {
    for (SimulatedStream* const stream : simulated_streams.all) {
      while (stream->fault_.empty() && !stream->queue_.empty() && stream->queue_.front().step()) {
        stream->queue_.pop_front();
        ++stream->done_;
        again = true;
      }
    }
  }
}

SHARDLIB_INLINE void SimulatedStream::freed(const void* begin, std::size_t bytes) {
  if (simulated_streams.is_empty) return;  // what a program without streams pays
  const std::lock_guard lock(simulated_streams.mutex);
  const auto* const first = static_cast<const std::byte*>(begin);
  for (SimulatedStream* const stream : simulated_streams.all)
    for (const Work& work : stream->queue_)
      for (const Range& range : work.uses) {
        const auto* const used = static_cast<const std::byte*>(range.begin);
        if (used < first + bytes && first < used + range.bytes)
          stream->fault_ = "simulated device: " + work.name + " uses a block that was freed before it has run";
      }
}

}  // namespace shardlib::detail
