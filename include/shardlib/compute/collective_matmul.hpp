// Einsums of a device's shards that overlap with the transfer of an operand's or the result's shards.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <utility>
#include <vector>

#include "shardlib/autodiff/tape.hpp"
#include "shardlib/compute/collectives.hpp"
#include "shardlib/compute/einsum.hpp"
#include "shardlib/device/exec.hpp"
#include "shardlib/memory/buffer.hpp"
#include "shardlib/ops/collective_matmul.hpp"
#include "shardlib/runtime/value.hpp"
#include "shardlib/spec/dtype.hpp"
#include "shardlib/support/inline.hpp"

namespace shardlib::detail {

/// A dense array as equal slices along a dim. An array without that dim is one slice, which all others meet.
class Sliced {
 public:
  /// A slice as a dense array: within the whole one, or in memory of its own.
  struct Slice {
    std::byte* data = nullptr;
    Buffer copy;
  };

  /// At `dim` -1 the array lacks the dim.
  SHARDLIB_INLINE Sliced(const Exec& exec, DType dtype, const Shape& whole, int dim, std::int64_t slices);

  [[nodiscard]] const Shape& shape() const { return slice_; }  ///< of a slice
  /// How many bytes of the whole array must be there to read the slices up to this one. All, if they lie in pieces.
  [[nodiscard]] SHARDLIB_INLINE std::size_t read_until(std::int64_t index) const;
  /// How many bytes of it are complete when the slices up to this one are written. None, if more follow in pieces.
  [[nodiscard]] std::size_t written_until(std::int64_t index) const {
    return in_place() || index + 1 == slices_ ? read_until(index) : 0;
  }
  /// A slice to read.
  [[nodiscard]] SHARDLIB_INLINE Slice read(const Buffer& whole, std::int64_t index) const;
  /// A slice to write; `written` puts it into the whole array.
  [[nodiscard]] SHARDLIB_INLINE Slice write(const Buffer& whole, std::int64_t index) const;
  SHARDLIB_INLINE void written(const Slice& slice, const Buffer& whole, std::int64_t index) const;

 private:
  [[nodiscard]] bool in_place() const { return rows_ <= 1; }
  [[nodiscard]] std::size_t offset(std::int64_t index) const;
  [[nodiscard]] Buffer scratch() const;

  Exec exec_;
  std::size_t element_;
  Shape whole_, slice_;
  std::int64_t slices_ = 1;
  std::int64_t rows_ = 1;    ///< contiguous pieces of a slice in the whole array
  std::int64_t stride_ = 0;  ///< between two slices, in elements
};

/// The devices along an axis as a ring, seen by an op that makes the value `made` there. Shards travel in messages, so
/// that the first bytes of a shard can be used, or passed on, before the last ones have come.
class DeviceRing {
 public:
  SHARDLIB_INLINE DeviceRing(const Value& made, std::string_view axis);

  [[nodiscard]] int size() const { return group_->size(); }
  /// The index on the axis of the device that many places later.
  [[nodiscard]] int at(int places) const { return (group_->rank() + places + 2 * size()) % size(); }
  /// The message of a shard that begins with this byte.
  [[nodiscard]] SHARDLIB_INLINE Buffer message(const Buffer& shard, std::size_t begin) const;
  /// Sends to the device that many places later. Nobody waits for it.
  SHARDLIB_INLINE void send(const Buffer& message, int places) const;
  /// Receives from the device that many places later.
  [[nodiscard]] SHARDLIB_INLINE Request receive(const Buffer& message, int places) const;
  SHARDLIB_INLINE void wait(Request& request) const;

 private:
  const Value& made_;
  std::string_view axis_;
  Communicator* group_;
};

/// A shard that leaves for the device `places` later.
class LeavingShard {
 public:
  LeavingShard(const DeviceRing& ring, Buffer shard, int places)
      : ring_(&ring), shard_(std::move(shard)), places_(places) {}
  /// Sends the messages within the first `bytes` bytes, which must not change any more.
  SHARDLIB_INLINE void send_until(std::size_t bytes);

 private:
  const DeviceRing* ring_;
  Buffer shard_;
  int places_;
  std::size_t sent_ = 0;
};

/// A shard that comes from the device `places` later.
class ArrivingShard {
 public:
  SHARDLIB_INLINE ArrivingShard(const DeviceRing& ring, const Buffer& shard, int places);
  /// Waits for the first `bytes` bytes, or more. Returns how many have come.
  SHARDLIB_INLINE std::size_t wait_until(std::size_t bytes);
  /// Lets MPI make progress.
  SHARDLIB_INLINE void test();

 private:
  struct Message {
    Request request;
    std::size_t end;  ///< of its bytes, in the shard
  };
  const DeviceRing* ring_;
  std::vector<Message> messages_;
  std::size_t arrived_ = 0;  ///< messages
};

}  // namespace shardlib::detail

#ifndef SHARDLIB_COMPILED
#include "shardlib/compute/impl/collective_matmul.hpp"
#endif
