// A second stream of the simulated device, next to that of its kernels. Its work runs late, and in order.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "shardlib/memory/stream.hpp"
#include "shardlib/support/inline.hpp"

namespace shardlib {

class Region;

namespace detail {

/// A stream of the simulated device. It runs its work one piece after the other, and none when it is put in: any
/// thread that asks for a mark runs the streams of all devices as far as they can go, since GPUs run by themselves.
class SimulatedStream final : public Stream {
 public:
  struct Range {
    const void* begin = nullptr;
    std::size_t bytes = 0;
  };
  /// One piece of work.
  struct Work {
    std::string name = {};            ///< for errors
    std::vector<Range> uses = {};     ///< blocks that must not be freed before it has run
    std::function<bool()> step = {};  ///< does what can be done now; returns whether that was all. It never waits.
    const void* owner = nullptr;      ///< see `remove`
    std::uint64_t number = 0;         ///< in its stream; `put` sets it
  };

  explicit SimulatedStream(Region& region);
  SimulatedStream(const SimulatedStream&) = delete;
  SimulatedStream& operator=(const SimulatedStream&) = delete;
  ~SimulatedStream() override;

  [[nodiscard]] CUstream_st* handle() override { return reinterpret_cast<CUstream_st*>(this); }
  /// The stream that has this handle.
  static SimulatedStream& of(CUstream_st* handle) { return *reinterpret_cast<SimulatedStream*>(handle); }
  void follow_device() override;
  /// Whether `follow_device` was called since the last mark.
  [[nodiscard]] bool follows_device() const { return follows_; }
  [[nodiscard]] std::unique_ptr<StreamMark> mark() override;

  /// The memory of the device.
  [[nodiscard]] Region& region() const { return region_; }
  void put(Work work);
  /// Takes back all work of `owner` that has not run.
  void remove(const void* owner);
  /// Calls f while no stream runs.
  static void stopped(const std::function<void()>& f);
  /// A block becomes free. It is an error of each stream with work that uses it, unless the device waits for this work:
  /// then whatever uses the block next comes later.
  static void freed(const void* begin, std::size_t bytes);

 private:
  class Mark;
  /// The state of a stream that its marks read. They may outlive it.
  struct Progress {
    std::uint64_t done = 0;  ///< the number of the last piece of work that has run
    std::string fault = {};
    bool ended = false;  ///< the stream
    /// Whether the pieces up to `number` have run. Throws the fault.
    [[nodiscard]] bool reached(std::uint64_t number) const;
  };
  static void run_all();

  Region& region_;
  std::deque<Work> queue_;
  std::uint64_t put_ = 0;  ///< the number of the last piece of work
  std::shared_ptr<Progress> progress_ = std::make_shared<Progress>();
  std::uint64_t follows_until_ = 0;  ///< the work of the device's queue that work in this stream waits for
  std::uint64_t holds_until_ = 0;    ///< the work in this stream that the device's queue waits for
  bool follows_ = false;
};

}  // namespace detail

}  // namespace shardlib

#ifndef SHARDLIB_COMPILED
#include "shardlib/memory/impl/simulated_stream.hpp"
#endif
