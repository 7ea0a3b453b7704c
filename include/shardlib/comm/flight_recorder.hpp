// The flight recorder of a device: its last communications, and which of them it waits in. When one waits too long, the
// recordings of all devices say who is missing.
#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "shardlib/comm/collective_call.hpp"
#include "shardlib/support/inline.hpp"
#include "shardlib/types/call_site.hpp"

namespace shardlib {

/// How long a device may wait for others, and where the recordings go then.
/// `launch(mesh, body, {.watchdog = {.timeout = std::chrono::minutes(5), .folder = "runs/first"}})`
struct Watchdog {
  /// A communication that waits longer ends the program: every device throws an Error, and one of them has the table
  /// of who waits for whom. 0: never.
  std::chrono::milliseconds timeout{600'000};
  /// Folder for `flight_recorder/rank_<i>.json`, each device's last communications. Empty: none are written.
  std::string folder = {};
};

namespace detail {

/// A text of bounded length, whose end is kept: plain data, which another process may read.
template <std::size_t Capacity>
struct BoundedText {
  std::array<char, Capacity> chars = {};
  void assign(std::string_view text) {
    text.remove_prefix(text.size() - std::min(text.size(), Capacity - 1));
    *std::ranges::copy(text, chars.begin()).out = '\0';
  }
  [[nodiscard]] std::string text() const { return {chars.begin(), std::ranges::find(chars, '\0')}; }
};

/// One communication of a device, in the ring.
struct FlightEntry {
  enum class Kind : std::uint8_t { collective, send, recv, form_group };
  enum class State : std::uint8_t { started, waiting, ended };
  std::uint64_t number = 0;  ///< among the device's communications
  Kind kind = Kind::collective;
  State state = State::started;
  std::int32_t peer = -1;      ///< of send and recv: a rank of the group
  std::uint32_t group = 0;     ///< index in DeviceRecord::groups
  std::uint64_t sequence = 0;  ///< of the collective in its group, of the message between its two ranks; from 0
  double began = 0, waited_from = 0, ended = 0;  ///< seconds since 1970
  CollectiveCall call = {};
  BoundedText<32> op = {};
  BoundedText<128> spec = {};
  BoundedText<96> file = {};
  std::uint32_t line = 0;
  /// "all_reduce of 64 bytes (f32 sum) in all_reduce<`A +d -> A`> at trainer.cpp:12"
  [[nodiscard]] std::string describe() const;
};

/// One communication, for messages and files.
struct Communication {
  std::uint64_t number = 0;
  FlightEntry::Kind kind = FlightEntry::Kind::collective;
  FlightEntry::State state = FlightEntry::State::started;
  std::int32_t peer = -1;
  std::uint32_t group = 0;
  std::uint64_t sequence = 0;
  double began = 0, waited_from = 0, ended = 0;
  std::string text;  ///< FlightEntry::describe
};

/// What a device has done in one group.
struct GroupRecord {
  std::string axes;           ///< "d,t"
  std::vector<int> members;   ///< devices in rank order: the group's identity
  std::uint64_t started = 0;  ///< collectives
  std::vector<std::uint64_t> sent = std::vector<std::uint64_t>(members.size());
  std::vector<std::uint64_t> received = std::vector<std::uint64_t>(members.size());
};

/// A copy of a device's recording.
struct DeviceRecord {
  int device = 0;
  bool answers = true;  ///< false: it is stopped, dead or busy, and nothing below is known
  std::vector<GroupRecord> groups = {};
  std::optional<Communication> waiting = {};
  std::vector<Communication> last = {};  ///< oldest first
};

/// Written by its device, read by those that wait for it.
class FlightRecorder {
 public:
  static constexpr std::size_t capacity = 128;

  FlightRecorder(int device, Watchdog watchdog) : watchdog_(std::move(watchdog)), device_(device) {}

  [[nodiscard]] const Watchdog& watchdog() const { return watchdog_; }
  std::uint32_t add_group(std::string axes, std::vector<int> members) {
    const std::lock_guard lock(mutex_);
    groups_.push_back({.axes = std::move(axes), .members = std::move(members)});
    return static_cast<std::uint32_t>(groups_.size() - 1);
  }
  /// Returns the number of the communication.
  std::uint64_t start(std::uint32_t group, FlightEntry::Kind kind, int peer, const CollectiveCall& call,
                      const OpInfo& op);
  void wait(std::uint64_t number) { change(number, FlightEntry::State::waiting); }
  void end(std::uint64_t number) { change(number, FlightEntry::State::ended); }
  /// `last`: how many of the last communications the copy has.
  [[nodiscard]] DeviceRecord record(std::size_t last = capacity) const;

 private:
  static double now() {
    return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
  }
  void change(std::uint64_t number, FlightEntry::State state);

  Watchdog watchdog_;
  int device_;
  mutable std::mutex mutex_;
  std::vector<GroupRecord> groups_;
  std::array<FlightEntry, capacity> ring_;
  std::uint64_t count_ = 0;
};

/// One communication in a recorder, or nothing where nobody records.
class FlightRecord {
 public:
  FlightRecord() = default;
  FlightRecord(std::shared_ptr<FlightRecorder> recorder, std::uint64_t number)
      : recorder_(std::move(recorder)), number_(number) {}
  void waits() const {
    if (recorder_) recorder_->wait(number_);
  }
  void ends() const {
    if (recorder_) recorder_->end(number_);
  }

 private:
  std::shared_ptr<FlightRecorder> recorder_;
  std::uint64_t number_ = 0;
};

/// The recorder as one of its groups has it.
class GroupRecorder {
 public:
  GroupRecorder() = default;
  GroupRecorder(std::shared_ptr<FlightRecorder> recorder, std::string axes, std::vector<int> members)
      : recorder_(std::move(recorder)) {
    if (recorder_) group_ = recorder_->add_group(std::move(axes), std::move(members));
  }
  [[nodiscard]] FlightRecord starts(const CollectiveCall& call, const OpInfo& op) const {
    return add(FlightEntry::Kind::collective, -1, call, op);
  }
  [[nodiscard]] FlightRecord sends(const OpInfo& op, std::size_t bytes, int to) const {
    return add(FlightEntry::Kind::send, to, {.bytes = bytes}, op);
  }
  [[nodiscard]] FlightRecord receives(const OpInfo& op, std::size_t bytes, int from) const {
    return add(FlightEntry::Kind::recv, from, {.bytes = bytes}, op);
  }
  [[nodiscard]] FlightRecord forms() const { return add(FlightEntry::Kind::form_group, -1, {}, {}); }

 private:
  FlightRecord add(FlightEntry::Kind kind, int peer, const CollectiveCall& call, const OpInfo& op) const {
    return recorder_ ? FlightRecord(recorder_, recorder_->start(group_, kind, peer, call, op)) : FlightRecord();
  }
  std::shared_ptr<FlightRecorder> recorder_;
  std::uint32_t group_ = 0;
};

// ---- who waits for whom --------------------------------------------------------------------------------------------

/// The devices that `devices[i]` waits for: those that have not started what it waits in, or do not answer.
[[nodiscard]] std::vector<int> missing(const std::vector<DeviceRecord>& devices, std::size_t i);

/// "device 0 waits over d for device 1, which waits over t for device 0"; empty if there is no cycle.
[[nodiscard]] std::string find_cycle(const std::vector<DeviceRecord>& devices);

/// "device 1 has waited 30.0 s over t for device 0 in collective 17, all_reduce of 64 bytes ... at trainer.cpp:12"
[[nodiscard]] std::string describe_wait(const std::vector<DeviceRecord>& devices, std::size_t i);

/// A line for each device, and the cycle of waits if there is one.
[[nodiscard]] std::string wait_table(const std::vector<DeviceRecord>& devices, const Watchdog& watchdog);

[[nodiscard]] std::string to_json(const DeviceRecord& device);
/// Throws Error for a text that `to_json` did not make.
[[nodiscard]] DeviceRecord device_record(std::string_view json);

/// Writes the recordings into the watchdog's folder. Returns what to add to the message: where they are, or why not.
[[nodiscard]] std::string write_recordings(const std::vector<DeviceRecord>& devices, const Watchdog& watchdog);

}  // namespace detail
}  // namespace shardlib

#ifndef SHARDLIB_COMPILED
#include "shardlib/comm/impl/flight_recorder.hpp"
#endif
