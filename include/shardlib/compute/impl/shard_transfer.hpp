// Shards of operands and results on their way between the devices along an axis.
#pragma once

#include <algorithm>
#include <cstddef>
#include <string_view>
#include <utility>
#include <vector>

#include "shardlib/comm/communicator.hpp"
#include "shardlib/compute/collectives.hpp"
#include "shardlib/device/device.hpp"
#include "shardlib/device/exec.hpp"
#include "shardlib/memory/buffer.hpp"
#include "shardlib/runtime/value.hpp"
#include "shardlib/support/tuning.hpp"

namespace shardlib::detail {

/// The devices along an axis as a ring, seen by an op that makes the value `made` there. Shards travel in messages, so
/// that the first bytes of a shard can be used, or passed on, before the last ones have come. Kernels of a device take
/// a whole shard, so there all devices shift theirs at once.
class DeviceRing {
 public:
  DeviceRing(const Value& made, std::string_view axis)
      : made_(made), axis_(axis), group_(&made.device->group({axis})) {}
  [[nodiscard]] int size() const { return group_->size(); }
  /// The index on the axis of the device that many places later.
  [[nodiscard]] int at(int places) const { return (group_->rank() + places + 2 * size()) % size(); }
  [[nodiscard]] bool shifts() const { return made_.device->exec().on_device(); }
  /// Memory of the device.
  [[nodiscard]] Buffer place(std::size_t bytes) const { return made_.device->pool()->allocate(bytes); }
  /// The message of a shard that begins with this byte.
  // The first message is shorter in a longer shard: so devices whose shards differ in length find that at once, and
  // compute nothing with the wrong messages.
  [[nodiscard]] Buffer message(const Buffer& shard, std::size_t begin) const {
    const std::size_t bytes = shard.bytes();
    const std::size_t most = shifts() ? bytes : made_.device->tuning().shard_message;
    if (bytes <= most) return shard;
    const std::size_t length = begin == 0 ? most - std::min(most / 2, 64 * (bytes / most)) : most;
    return shard.slice(begin, std::min(length, bytes - begin));
  }
  /// Sends to the device that many places later. Nobody waits for it.
  void send(const Buffer& message, int places) const {
    static_cast<void>(begin(made_, [&] { return group_->send(message, at(places)); }));
    add_traffic(made_, message.bytes(), {axis_});
  }
  /// Receives from the device that many places later.
  [[nodiscard]] Request receive(const Buffer& message, int places) const {
    return begin(made_, [&] { return group_->recv(message, at(places)); });
  }
  /// Sends to the device that many places later, and receives from the one as many places earlier, as all devices do.
  [[nodiscard]] Request shift(const Buffer& leaving, const Buffer& arriving, int places) const {
    add_traffic(made_, leaving.bytes(), {axis_});
    return begin(made_, [&] { return group_->shift(leaving, arriving, places); });
  }
  void wait(Request& request) const {
    complete(made_, [&] { return std::move(request); });
  }

 private:
  const Value& made_;
  std::string_view axis_;
  Communicator* group_;
};

/// A shard that leaves for the device `places` later, and one that comes from the device as many places earlier.
class ShardTransfer {
 public:
  ShardTransfer(const DeviceRing& ring, const Buffer& leaving, int places)
      : ring_(&ring), leaving_(leaving), places_(places) {
    if (ring.shifts()) return;
    arriving_ = ring.place(leaving.bytes());
    for (std::size_t begin = 0; begin < arriving_.bytes();) {
      const Buffer message = ring.message(arriving_, begin);
      begin += message.bytes();
      messages_.push_back({ring.receive(message, -places), begin});
    }
  }
  /// Sends the messages within the first `bytes` bytes, which must not change any more.
  void send_until(std::size_t bytes) {
    while (sent_ < bytes) {
      const Buffer message = ring_->message(leaving_, sent_);
      if (sent_ + message.bytes() > bytes) return;
      if (ring_->shifts()) {
        arriving_ = ring_->place(message.bytes());
        messages_.push_back({ring_->shift(message, arriving_, places_), message.bytes()});
      } else {
        ring_->send(message, places_);
      }
      sent_ += message.bytes();
    }
    if (sent_ == leaving_.bytes()) leaving_ = {};
  }
  /// Waits for the first `bytes` bytes, or more. Returns how many have come.
  std::size_t wait_until(std::size_t bytes) {
    while (arrived_ < messages_.size() && (arrived_ == 0 || messages_[arrived_ - 1].end < bytes))
      ring_->wait(messages_[arrived_++].request);
    return arrived_ == 0 ? 0 : messages_[arrived_ - 1].end;
  }
  /// The shard that comes. On a device the buffer exists only after the whole leaving shard has been sent. Its bytes
  /// are there only after `wait_until`.
  [[nodiscard]] const Buffer& arriving() const { return arriving_; }
  /// Lets MPI make progress.
  void test() {
    if (arrived_ < messages_.size()) static_cast<void>(messages_[arrived_].request.test());
  }

 private:
  struct Message {
    Request request;
    std::size_t end;  ///< of its bytes, in the shard
  };
  const DeviceRing* ring_;
  Buffer leaving_, arriving_;
  int places_;
  std::size_t sent_ = 0;
  std::vector<Message> messages_;  ///< of the shard that comes
  std::size_t arrived_ = 0;        ///< messages
};

}  // namespace shardlib::detail
