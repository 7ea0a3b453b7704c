// Traces of a run for ui.perfetto.dev: a process row for each rank, a track for each category.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "shardlib/support/inline.hpp"

namespace shardlib::run {

/// An event: what ran, and when. `{.name = "einsum", .spec = "B M, M F -> B F", .begin_ns = begin, .duration_ns = 900}`
struct TraceEvent {
  std::string_view name;           ///< what ran
  std::string_view spec = {};      ///< the op spec
  std::string_view track = "ops";  ///< the row; its events must not overlap unless one contains the other
  std::string_view pass = {};      ///< forward, backward, recomputed or update
  std::string_view part = {};      ///< the part of the model: "layers/3"
  std::int64_t bytes = -1;         ///< bytes sent or written; below 0: left out
  std::int64_t touched = -1;       ///< bytes read and written in memory; below 0: left out
  double flops = 0;                ///< floating-point operations; 0: left out
  std::int64_t begin_ns = 0;       ///< the begin, by Trace::now()
  std::int64_t duration_ns = 0;    ///< the time that it took
};

/// The events of one rank (device). It may be used from several threads. A default-constructed object is off: an event
/// then costs one comparison.
class Trace {
 public:
  Trace() = default;
  /// `label` names the row, as in "d=0,t=1". Events beyond `most_events` are only counted, so that a long run cannot
  /// fill the memory (64 bytes each).
  Trace(int rank, std::string label, std::size_t most_events = 1'000'000);

  [[nodiscard]] bool on() const { return recording_ != nullptr; }  ///< whether it keeps events

  /// The clock of events, in nanoseconds. All processes of a machine share it.
  [[nodiscard]] static SHARDLIB_INLINE std::int64_t now();
  /// Shows events from this moment on. Ranks of several machines call it together, right after a barrier, because their
  /// clocks differ.
  void start();

  /// Records an event. Empty texts are left out.
  void event(const TraceEvent& event) {
    if (on()) record(event);
  }
  /// Records a number that changes in time, which a viewer draws as a curve: `counter("memory", live, Trace::now())`
  void counter(std::string_view name, std::int64_t value, std::int64_t at_ns) {
    if (on()) record({.name = name, .track = {}, .bytes = value, .begin_ns = at_ns});
  }

  /// The rank's events as a trace file of its own.
  [[nodiscard]] std::string json() const;
  /// Writes the rank's trace file. Throws Error if that fails.
  void write(const std::string& path) const;

 private:
  struct Event {
    std::uint32_t name = 0, spec = 0, track = 0, pass = 0, part = 0;
    std::int64_t bytes = 0, touched = -1;
    double flops = 0;
    std::int64_t begin_ns = 0, duration_ns = 0;
  };
  struct Recording {
    int rank = 0;
    std::string label;
    std::size_t most_events = 0, dropped = 0;
    std::int64_t origin_ns = 0;
    std::vector<Event> events;
    std::vector<std::string> texts;  ///< names recur, so each is stored once
    std::map<std::string, std::uint32_t, std::less<>> index;
    std::mutex mutex;
  };
  void record(const TraceEvent& event);

  std::shared_ptr<Recording> recording_;
};

/// Joins the files of all ranks (Trace::write) into one. Throws Error if a part is missing or damaged; then `path` is
/// not touched. `merge_traces({"trace-0.json", "trace-1.json"}, "trace.json")`
SHARDLIB_INLINE void merge_traces(const std::vector<std::string>& parts, const std::string& path);

}  // namespace shardlib::run

#ifndef SHARDLIB_COMPILED
#include "shardlib/run/impl/trace.hpp"
#endif
