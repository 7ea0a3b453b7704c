// A second stream of a device: what is put into it runs in its order, while the device computes.
#pragma once

#include <memory>

struct CUstream_st;  // a cudaStream_t points to one

namespace shardlib::detail {

/// A place in a stream.
class StreamMark {
 public:
  virtual ~StreamMark() = default;
  /// Whether all that was put into the stream before the mark has run. Throws Error if some of it has failed.
  [[nodiscard]] virtual bool passed() = 0;
  /// Work that the device begins from now on, in the stream of its kernels, runs after the mark. The host does not
  /// wait.
  virtual void hold_device() = 0;
};

/// A stream of a device. `Region::make_stream` makes it.
class Stream {
 public:
  virtual ~Stream() = default;
  /// The stream as a library for GPUs takes it.
  [[nodiscard]] virtual CUstream_st* handle() = 0;
  /// Work that is put into the stream from now on runs after the kernels and copies that the device has begun so far.
  /// Also makes the device the current one of the calling thread.
  virtual void follow_device() = 0;
  /// The device must be the current one of the calling thread, as after `follow_device`.
  [[nodiscard]] virtual std::unique_ptr<StreamMark> mark() = 0;
};

}  // namespace shardlib::detail
