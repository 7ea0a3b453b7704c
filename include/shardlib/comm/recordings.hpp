// Reads the flight recorders of all devices when one of them has waited too long: which device waits for which, and in
// which call.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "shardlib/comm/collective_call.hpp"
#include "shardlib/comm/flight_recorder.hpp"
#include "shardlib/support/inline.hpp"

namespace shardlib::detail {

/// A text of bounded length. Longer texts lose their beginning. Plain data, so another process can read it.
template <std::size_t Capacity>
struct BoundedText {
  std::array<char, Capacity> chars = {};
  void assign(std::string_view text) {
    text.remove_prefix(text.size() - std::min(text.size(), Capacity - 1));
    *std::ranges::copy(text, chars.begin()).out = '\0';
  }
  [[nodiscard]] std::string text() const { return {chars.begin(), std::ranges::find(chars, '\0')}; }
};

/// One communication of a device, as the ring holds it.
struct FlightEntry {
  using Kind = CommunicationKind;
  /// `running`: all members have called it, and the device's thread continues. Only NCCL's groups know that.
  enum class State : std::uint8_t { started, waiting, running, ended };
  std::uint64_t number = 0;  ///< among the device's communications
  Kind kind = Kind::collective;
  State state = State::started;
  std::int32_t peer = -1;      ///< of send and recv: a rank of the group
  std::uint32_t group = 0;     ///< index in DeviceRecord::groups
  std::uint64_t sequence = 0;  ///< of the collective in its group, or of the message between its ranks
  double began = 0, waited_from = 0, ended = 0;  ///< seconds since 1970
  CollectiveCall call = {};
  BoundedText<32> op = {};
  BoundedText<128> spec = {};
  BoundedText<96> file = {};
  std::uint32_t line = 0;
  /// "all_reduce of 64 bytes (f32 sum) in all_reduce<`A +d -> A`> at trainer.cpp:12"
  [[nodiscard]] std::string describe() const;
};

/// The last communications of a device. Plain data, so another process of the node can read it. An entry that is
/// written during the read may be inconsistent. A device that is stopped or dead writes nothing.
struct FlightRing {
  static constexpr std::size_t capacity = 128;
  std::array<FlightEntry, capacity> entries = {};
  std::atomic<std::uint64_t> count = 0;  ///< communications so far
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

/// A device's communication in one group.
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
  bool answers = true;  ///< false if it is stopped, dead or busy; then the rest is unknown
  std::vector<GroupRecord> groups = {};
  std::optional<Communication> waiting = {};
  std::vector<Communication> last = {};  ///< those of the ring, after older ones that have not ended; oldest first
};

/// The recording of a device that does not answer, read from its ring.
[[nodiscard]] DeviceRecord record_of_silent(int device, const FlightRing& ring);

// ---- waiting devices -----------------------------------------------------------------------------------------------

/// The devices that `devices[i]` waits for: those that have not started its communication, or do not answer.
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

/// Writes the recordings into the watchdog's folder. Returns what to add to the message: the paths, or why there are
/// none.
[[nodiscard]] std::string write_recordings(const std::vector<DeviceRecord>& devices, const Watchdog& watchdog);

}  // namespace shardlib::detail

#ifndef SHARDLIB_COMPILED
#include "shardlib/comm/impl/recordings.hpp"
#endif
