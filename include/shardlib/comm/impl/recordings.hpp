// Definitions of flight_recorder.hpp and recordings.hpp.
#pragma once

#include "shardlib/comm/recordings.hpp"

#include <chrono>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>
#include <system_error>

#include "shardlib/support/error.hpp"
#include "shardlib/support/stopwatch.hpp"

namespace shardlib::detail {

SHARDLIB_INLINE std::string FlightEntry::describe() const {
  std::string result = kind == Kind::collective   ? to_string(call)
                       : kind == Kind::form_group ? std::string("forming the group")
                                                  : std::to_string(call.bytes) + " bytes";
  if (const std::string name = op.text(); !name.empty() && kind != Kind::form_group) {
    const std::string of = spec.text();
    result += " in " + name + (of.empty() ? "" : "<`" + of + "`>");
  }
  if (line != 0) result += " at " + file.text() + ":" + std::to_string(line);
  return result;
}

struct FlightRecorder::State {
  State(int d, FlightRing* given)
      : device(d), own(given == nullptr ? std::make_unique<FlightRing>() : nullptr), ring(own ? *own : *given) {
    ring.count = 0;
  }

  int device;
  mutable std::mutex mutex = {};
  std::vector<GroupRecord> groups = {};
  std::unique_ptr<FlightRing> own;
  FlightRing& ring;
  std::map<std::uint64_t, FlightEntry> older = {};  ///< those that have not ended, but are no longer in the ring

  void change(std::uint64_t number, FlightEntry::State state) {
    const std::lock_guard lock(mutex);
    const auto old = older.find(number);
    FlightEntry& entry = old == older.end() ? ring.entries[number % FlightRing::capacity] : old->second;
    if (entry.number != number) return;  // it has ended before
    entry.state = state;
    if (state == FlightEntry::State::waiting) entry.waited_from = unix_seconds();
    if (state == FlightEntry::State::ended) entry.ended = unix_seconds();
    if (old != older.end() && state == FlightEntry::State::ended) older.erase(old);
  }
};

SHARDLIB_INLINE FlightRecorder::FlightRecorder(int device, Watchdog watchdog, FlightRing* ring)
    : watchdog_(std::move(watchdog)), state_(std::make_unique<State>(device, ring)) {}
SHARDLIB_INLINE FlightRecorder::~FlightRecorder() = default;

SHARDLIB_INLINE std::uint32_t FlightRecorder::add_group(std::string axes, std::vector<int> members) {
  const std::lock_guard lock(state_->mutex);
  state_->groups.push_back({.axes = std::move(axes), .members = std::move(members)});
  return static_cast<std::uint32_t>(state_->groups.size() - 1);
}

SHARDLIB_INLINE std::uint64_t FlightRecorder::start(std::uint32_t group, CommunicationKind kind, int peer,
                                                    const CollectiveCall& call, const OpInfo& op) {
  const std::lock_guard lock(state_->mutex);
  GroupRecord& record = state_->groups[group];
  FlightRing& ring = state_->ring;
  const auto at = static_cast<std::size_t>(peer);
  const std::uint64_t number = ring.count.load(std::memory_order_relaxed);
  FlightEntry& entry = ring.entries[number % FlightRing::capacity];
  if (number >= FlightRing::capacity && entry.state != FlightEntry::State::ended)
    state_->older.emplace(entry.number, entry);
  entry.number = number;
  entry.kind = kind;
  entry.state = FlightEntry::State::started;
  entry.peer = peer;
  entry.group = group;
  entry.sequence = kind == CommunicationKind::collective ? record.started++
                   : kind == CommunicationKind::send     ? record.sent[at]++
                   : kind == CommunicationKind::recv     ? record.received[at]++
                                                         : 0;
  entry.began = unix_seconds();
  entry.waited_from = entry.ended = 0;
  entry.call = call;
  entry.op.assign(op.name);
  entry.spec.assign(op.spec);
  entry.file.assign(op.site.file_name());
  entry.line = op.site.line();
  ring.count.store(number + 1, std::memory_order_release);
  return number;
}

SHARDLIB_INLINE void FlightRecorder::wait(std::uint64_t number) {
  state_->change(number, FlightEntry::State::waiting);
}
SHARDLIB_INLINE void FlightRecorder::run(std::uint64_t number) {
  state_->change(number, FlightEntry::State::running);
}
SHARDLIB_INLINE void FlightRecorder::end(std::uint64_t number) {
  state_->change(number, FlightEntry::State::ended);
}

inline Communication communication(const FlightEntry& e) {
  return {e.number, e.kind, e.state, e.peer, e.group, e.sequence, e.began, e.waited_from, e.ended, e.describe()};
}

/// Oldest first.
inline std::vector<Communication> communications(const FlightRing& ring) {
  std::vector<Communication> result;
  const std::uint64_t count = ring.count.load(std::memory_order_acquire);
  for (std::uint64_t number = count - std::min<std::uint64_t>(count, FlightRing::capacity); number < count; ++number) {
    result.push_back(communication(ring.entries[number % FlightRing::capacity]));
  }
  return result;
}

SHARDLIB_INLINE DeviceRecord FlightRecorder::record(std::size_t last) const {
  const std::lock_guard lock(state_->mutex);
  DeviceRecord result{.device = state_->device, .groups = state_->groups};
  for (const auto& [number, entry] : state_->older) result.last.push_back(communication(entry));
  std::ranges::move(communications(state_->ring), std::back_inserter(result.last));
  for (const Communication& c : result.last) {
    // A device that waits in one may complete others meanwhile; the last that it began to wait for is the innermost.
    if (c.state == FlightEntry::State::waiting && (!result.waiting || result.waiting->waited_from <= c.waited_from))
      result.waiting = c;
  }
  if (result.last.size() > last)
    result.last.erase(result.last.begin(), result.last.end() - static_cast<std::ptrdiff_t>(last));
  return result;
}

SHARDLIB_INLINE DeviceRecord record_of_silent(int device, const FlightRing& ring) {
  return {.device = device, .answers = false, .last = communications(ring)};
}

// ---- waiting devices -----------------------------------------------------------------------------------------------

inline const DeviceRecord* find_device(const std::vector<DeviceRecord>& devices, int device) {
  const auto it = std::ranges::find(devices, device, &DeviceRecord::device);
  return it == devices.end() ? nullptr : &*it;
}

/// Whether the device has started its part in what `waits`, of `group` and seen from its rank `rank`, waits for.
inline bool has_started(const DeviceRecord& device, const Communication& waits, const GroupRecord& group,
                        std::size_t rank) {
  if (!device.answers) return false;
  const auto same = std::ranges::find(device.groups, group.members, &GroupRecord::members);
  if (same == device.groups.end()) return false;
  switch (waits.kind) {
    case FlightEntry::Kind::collective:
      return same->started > waits.sequence;
    case FlightEntry::Kind::recv:
      return same->sent[rank] > waits.sequence;
    case FlightEntry::Kind::send:
      return same->received[rank] > waits.sequence;
    case FlightEntry::Kind::form_group:
      return true;
  }
  return true;
}

SHARDLIB_INLINE std::vector<int> missing(const std::vector<DeviceRecord>& devices, std::size_t i) {
  const DeviceRecord& mine = devices[i];
  std::vector<int> result;
  if (!mine.waiting) return result;
  const GroupRecord& group = mine.groups[mine.waiting->group];
  const auto rank = static_cast<std::size_t>(std::ranges::find(group.members, mine.device) - group.members.begin());
  for (std::size_t m = 0; m < group.members.size(); ++m) {
    if (m == rank || (mine.waiting->peer >= 0 && m != static_cast<std::size_t>(mine.waiting->peer))) continue;
    const DeviceRecord* const other = find_device(devices, group.members[m]);
    if (other != nullptr && !has_started(*other, *mine.waiting, group, rank)) result.push_back(other->device);
  }
  return result;
}

inline std::string over(const DeviceRecord& device) {
  const std::string& axes = device.groups[device.waiting->group].axes;
  return axes.empty() ? "" : " over " + axes;
}

SHARDLIB_INLINE std::string find_cycle(const std::vector<DeviceRecord>& devices) {
  // Depth first: `path` is the chain of waits, `state` 1 on it and 2 for devices that lead to no cycle.
  std::vector<int> state(devices.size());
  std::vector<std::size_t> path;
  const auto index = [&](int device) {
    return static_cast<std::size_t>(std::ranges::find(devices, device, &DeviceRecord::device) - devices.begin());
  };
  const auto visit = [&](const auto& self, std::size_t i) -> bool {
    state[i] = 1;
    path.push_back(i);
    for (const int device : missing(devices, i)) {
      const std::size_t next = index(device);
      if (state[next] == 1) {
        path.erase(path.begin(), std::ranges::find(path, next));
        return true;
      }
      if (state[next] == 0 && self(self, next)) return true;
    }
    path.pop_back();
    state[i] = 2;
    return false;
  };
  for (std::size_t i = 0; i < devices.size(); ++i) {
    if (state[i] != 0 || !visit(visit, i)) continue;
    std::string text = "device " + std::to_string(devices[path[0]].device);
    for (std::size_t k = 0; k < path.size(); ++k) {
      text += std::string(k == 0 ? "" : ", which") + " waits" + over(devices[path[k]]) + " for device " +
              std::to_string(devices[path[(k + 1) % path.size()]].device);
    }
    return text;
  }
  return {};
}

inline std::string seconds(double s) {
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%.1f s", s);
  return text.data();
}

inline std::string list(const std::vector<int>& devices) {
  std::string text = devices.size() == 1 ? "device " : "devices ";
  constexpr std::size_t most = 8;
  for (std::size_t i = 0; i < std::min(devices.size(), most); ++i)
    text += (i == 0 ? "" : ", ") + std::to_string(devices[i]);
  return text + (devices.size() > most ? " and " + std::to_string(devices.size() - most) + " more" : "");
}

SHARDLIB_INLINE std::string describe_wait(const std::vector<DeviceRecord>& devices, std::size_t i) {
  const DeviceRecord& device = devices[i];
  const std::string who = "device " + std::to_string(device.device);
  if (!device.answers)
    return who + " does not answer: it is stopped, dead or busy outside of communication" +
           (device.last.empty() ? ""
                                : "; " + seconds(unix_seconds() - device.last.back().began) + " ago it began " +
                                      device.last.back().text);
  if (!device.waiting) {
    if (device.last.empty()) return who + " has not communicated yet";
    const Communication& last = device.last.back();
    return who + " waits for nobody; " + seconds(unix_seconds() - last.began) + " ago it began " + last.text;
  }
  const Communication& wait = *device.waiting;
  const std::vector<int> absent = missing(devices, i);
  const std::string what = wait.kind == FlightEntry::Kind::collective
                               ? "collective " + std::to_string(wait.sequence) + ", "
                           : wait.kind == FlightEntry::Kind::recv ? "the receipt of "
                           : wait.kind == FlightEntry::Kind::send ? "the sending of "
                                                                  : "";
  return who + " has waited " + seconds(unix_seconds() - wait.waited_from) + over(device) +
         (absent.empty() ? ", though all have begun," : " for " + list(absent)) + " in " + what + wait.text;
}

SHARDLIB_INLINE std::string wait_table(const std::vector<DeviceRecord>& devices, const Watchdog& watchdog) {
  std::string text = "a device has waited longer than the collective timeout of " +
                     seconds(std::chrono::duration<double>(watchdog.timeout).count()) +
                     " (--collective-timeout of the trainers, LaunchOptions::watchdog)";
  for (std::size_t i = 0; i < devices.size(); ++i) text += "\n  " + describe_wait(devices, i);
  if (const std::string cycle = find_cycle(devices); !cycle.empty()) text += "\n  a cycle: " + cycle;
  return text;
}

// ---- JSON ----------------------------------------------------------------------------------------------------------

NLOHMANN_JSON_SERIALIZE_ENUM(FlightEntry::Kind, {{FlightEntry::Kind::collective, "collective"},
                                                 {FlightEntry::Kind::send, "send"},
                                                 {FlightEntry::Kind::recv, "recv"},
                                                 {FlightEntry::Kind::form_group, "form_group"}})
NLOHMANN_JSON_SERIALIZE_ENUM(FlightEntry::State, {{FlightEntry::State::started, "started"},
                                                  {FlightEntry::State::waiting, "waiting"},
                                                  {FlightEntry::State::running, "running"},
                                                  {FlightEntry::State::ended, "ended"}})
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Communication, number, kind, state, peer, group, sequence, began, waited_from, ended,
                                   text)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(GroupRecord, axes, members, started, sent, received)

SHARDLIB_INLINE std::string to_json(const DeviceRecord& device) {
  nlohmann::json json{{"device", device.device}, {"groups", device.groups}, {"last", device.last}};
  if (device.waiting) json["waiting"] = *device.waiting;
  return json.dump(1, ' ', false, nlohmann::json::error_handler_t::replace);
}

SHARDLIB_INLINE DeviceRecord device_record(std::string_view text) {
  try {
    const auto json = nlohmann::json::parse(text);
    DeviceRecord device{.device = json.at("device").get<int>(),
                        .groups = json.at("groups").get<std::vector<GroupRecord>>(),
                        .last = json.at("last").get<std::vector<Communication>>()};
    if (json.contains("waiting")) device.waiting = json.at("waiting").get<Communication>();
    return device;
  } catch (const nlohmann::json::exception& e) {
    throw Error(std::string("a device's recording: ") + e.what());
  }
}

SHARDLIB_INLINE std::string write_recordings(const std::vector<DeviceRecord>& devices, const Watchdog& watchdog) {
  if (watchdog.folder.empty()) return {};
  const std::filesystem::path folder = std::filesystem::path(watchdog.folder) / "flight_recorder";
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  for (const DeviceRecord& device : devices) {
    if (device.last.empty()) continue;
    const auto path = folder / ("rank_" + std::to_string(device.device) + ".json");
    std::ofstream file(path);
    file << to_json(device) << '\n';
    file.close();
    if (!file) return "\n  the recordings cannot be written: " + path.string();
  }
  return "\n  the last communications of the devices: " + folder.string() + "/rank_*.json";
}

}  // namespace shardlib::detail
