// The flight recorder of a device: its last communications, and those in which it waits. If a device waits too long,
// the recordings of all devices show who is missing (recordings.hpp).
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "shardlib/comm/collective_call.hpp"
#include "shardlib/support/inline.hpp"
#include "shardlib/types/call_site.hpp"

namespace shardlib {

/// How long a device may wait for others, and where the recordings go afterwards. `launch(mesh, body, {.watchdog =
/// {.timeout = std::chrono::minutes(5), .folder = "runs/first"}})`
struct Watchdog {
  /// A communication that waits longer ends the program: every device throws an Error, and one of them has the table
  /// of who waits for whom. 0: never.
  std::chrono::milliseconds timeout{600'000};
  /// Folder for `flight_recorder/rank_<i>.json`, each device's last communications. Empty: none are written.
  std::string folder = {};
};

namespace detail {

/// How long a device has waited. If the whole process is stopped, as by Ctrl-Z, at most `most` of that time counts:
/// then nobody is late.
class WaitTime {
 public:
  using Clock = std::chrono::steady_clock;
  explicit WaitTime(Clock::duration most = std::chrono::seconds(2)) : most_(most) {}
  Clock::duration so_far() {
    const auto now = Clock::now();
    return waited_ += std::min(now - std::exchange(last_, now), most_);
  }

 private:
  Clock::duration most_, waited_{};
  Clock::time_point last_ = Clock::now();
};

enum class CommunicationKind : std::uint8_t { collective, send, recv, form_group };

struct FlightRing;
struct DeviceRecord;

/// The device writes it. Devices that wait for this device read it.
class FlightRecorder {
 public:
  /// `ring` is in memory that other processes read, and outlives this object. If it is null, the recorder uses its own
  /// memory.
  explicit FlightRecorder(int device, Watchdog watchdog = {}, FlightRing* ring = nullptr);
  FlightRecorder(const FlightRecorder&) = delete;
  FlightRecorder& operator=(const FlightRecorder&) = delete;
  ~FlightRecorder();

  [[nodiscard]] const Watchdog& watchdog() const { return watchdog_; }
  std::uint32_t add_group(std::string axes, std::vector<int> members);
  /// Records the start of a communication, and returns its number. `peer` is the other rank of a send or recv,
  /// otherwise -1.
  std::uint64_t start(std::uint32_t group, CommunicationKind kind, int peer, const CollectiveCall& call,
                      const OpInfo& op);
  void wait(std::uint64_t number);
  /// The wait is over: all members have called it, and the device's thread continues.
  void run(std::uint64_t number);
  void end(std::uint64_t number);
  /// A copy with at most this many of the last communications.
  [[nodiscard]] DeviceRecord record(std::size_t last = SIZE_MAX) const;

 private:
  struct State;
  Watchdog watchdog_;
  std::unique_ptr<State> state_;
};

/// One communication in a recorder. Empty if there is no recorder.
class FlightRecord {
 public:
  FlightRecord() = default;
  FlightRecord(std::shared_ptr<FlightRecorder> recorder, std::uint64_t number)
      : recorder_(std::move(recorder)), number_(number) {}
  void waits() const {
    if (recorder_) recorder_->wait(number_);
  }
  void runs() const {
    if (recorder_) recorder_->run(number_);
  }
  void ends() const {
    if (recorder_) recorder_->end(number_);
  }

 private:
  std::shared_ptr<FlightRecorder> recorder_;
  std::uint64_t number_ = 0;
};

/// The recorder as one group of the device uses it.
class GroupRecorder {
 public:
  GroupRecorder() = default;
  GroupRecorder(std::shared_ptr<FlightRecorder> recorder, std::string axes, std::vector<int> members)
      : recorder_(std::move(recorder)) {
    if (recorder_) group_ = recorder_->add_group(std::move(axes), std::move(members));
  }
  [[nodiscard]] FlightRecord starts(const CollectiveCall& call, const OpInfo& op) const {
    return add(CommunicationKind::collective, -1, call, op);
  }
  [[nodiscard]] FlightRecord sends(const OpInfo& op, std::size_t bytes, int to) const {
    return add(CommunicationKind::send, to, {.bytes = bytes}, op);
  }
  [[nodiscard]] FlightRecord receives(const OpInfo& op, std::size_t bytes, int from) const {
    return add(CommunicationKind::recv, from, {.bytes = bytes}, op);
  }
  /// How long a communication may take; 0: forever.
  [[nodiscard]] std::chrono::milliseconds timeout() const {
    return recorder_ ? recorder_->watchdog().timeout : std::chrono::milliseconds(0);
  }
  [[nodiscard]] FlightRecord forms() const { return add(CommunicationKind::form_group, -1, {}, {}); }

 private:
  FlightRecord add(CommunicationKind kind, int peer, const CollectiveCall& call, const OpInfo& op) const {
    return recorder_ ? FlightRecord(recorder_, recorder_->start(group_, kind, peer, call, op)) : FlightRecord();
  }
  std::shared_ptr<FlightRecorder> recorder_;
  std::uint32_t group_ = 0;
};

}  // namespace detail
}  // namespace shardlib

#ifndef SHARDLIB_COMPILED
#include "shardlib/comm/recordings.hpp"
#endif
