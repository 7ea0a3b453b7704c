// Definitions of trace.hpp. The format is Chrome's "Trace Event Format" as JSON. A file has one event a line, so that
// parts are joined without reading JSON.
#pragma once

#include "shardlib/run/trace.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <fstream>
#include <utility>

#include "shardlib/io/file.hpp"
#include "shardlib/support/error.hpp"
#include "shardlib/support/print.hpp"
#include "shardlib/support/regular_file.hpp"
#include "shardlib/support/stopwatch.hpp"

namespace shardlib::run {

namespace detail {

inline constexpr std::string_view trace_begin = "{\"displayTimeUnit\": \"ms\", \"traceEvents\": [";
inline constexpr std::string_view trace_end = "]}";

inline std::string trace_text(std::string_view text) {
  return quote(as_utf8(text));
}

/// Something said of a rank's row or of one of its tracks.
inline std::string trace_metadata(const char* what, int rank, std::size_t track, const std::string& key,
                                  const std::string& value) {
  return fmt::format(R"({{"ph": "M", "name": "{}", "pid": {}, "tid": {}, "args": {{"{}": {}}}}})", what, rank, track,
                     key, value);
}

/// Calls f with each event of a part, without its comma. Throws Error unless the part is whole.
template <class F>
void for_each_event_line(const std::string& path, const F& f) {
  shardlib::detail::require_regular_file(path);
  std::ifstream file(path, std::ios::binary);
  if (!file) throw Error("cannot read the trace '" + path + "': has its rank written it?");
  std::string line, last;
  std::getline(file, line);
  bool whole = line == trace_begin;
  while (whole && std::getline(file, line) && line != trace_end) {
    if (line.ends_with(',')) line.pop_back();
    f(line);
  }
  whole = whole && line == trace_end;
  if (!whole) throw Error("the trace '" + path + "' is damaged or was not written by shardlib");
}

}  // namespace detail

SHARDLIB_INLINE Trace::Trace(int rank, std::string label, std::size_t most_events)
    : recording_(std::make_shared<Recording>()) {
  recording_->rank = rank;
  recording_->label = std::move(label);
  recording_->most_events = most_events;
  start();
}

SHARDLIB_INLINE std::int64_t Trace::now() {
  return shardlib::detail::steady_ns();
}

SHARDLIB_INLINE void Trace::start() {
  if (on()) recording_->origin_ns = now();
}

SHARDLIB_INLINE void Trace::record(const TraceEvent& event) {
  Recording& recording = *recording_;
  const std::lock_guard lock(recording.mutex);
  if (recording.events.size() >= recording.most_events) {
    ++recording.dropped;
    return;
  }
  const auto number = [&](std::string_view text) {
    const auto known = recording.index.find(text);
    if (known != recording.index.end()) return known->second;
    const auto next = static_cast<std::uint32_t>(recording.texts.size());
    recording.texts.emplace_back(text);
    recording.index.emplace(std::string(text), next);
    return next;
  };
  recording.events.push_back({number(event.name), number(event.spec), number(event.track), number(event.pass),
                              number(event.part), event.bytes, event.touched, event.flops, event.begin_ns,
                              event.duration_ns});
}

SHARDLIB_INLINE std::string Trace::json() const {
  if (!on()) return {};
  constexpr std::size_t most_tracks = 16;
  const Recording& recording = *recording_;
  const std::lock_guard lock(recording_->mutex);
  std::vector<std::size_t> track(recording.texts.size(), 0);
  std::vector<std::string> lines;
  const auto name_of_row =
      fmt::format("rank {}{}{}", recording.rank, recording.label.empty() ? "" : "  ", recording.label);
  lines.push_back(detail::trace_metadata("process_name", recording.rank, 0, "name", detail::trace_text(name_of_row)));
  lines.push_back(
      detail::trace_metadata("process_sort_index", recording.rank, 0, "sort_index", std::to_string(recording.rank)));
  std::size_t tracks = 0;
  for (const Event& event : recording.events) {
    if (track[event.track] != 0 || recording.texts[event.track].empty()) continue;
    // Readers take a tid as one process's, and the thread whose tid is its pid as the first to show.
    track[event.track] = most_tracks * static_cast<std::size_t>(recording.rank) + ++tracks;
    const std::string name = detail::trace_text(recording.texts[event.track]);
    lines.push_back(detail::trace_metadata("thread_name", recording.rank, track[event.track], "name", name));
    lines.push_back(detail::trace_metadata("thread_sort_index", recording.rank, track[event.track], "sort_index",
                                           std::to_string(tracks)));
  }
  const auto microseconds = [](std::int64_t ns) { return fmt::format("{:.3f}", static_cast<double>(ns) * 1e-3); };
  std::int64_t end = 0;
  for (const Event& event : recording.events) {
    end = std::max(end, event.begin_ns + event.duration_ns - recording.origin_ns);
    const std::string begin = microseconds(event.begin_ns - recording.origin_ns);
    if (recording.texts[event.track].empty()) {
      lines.push_back(
          fmt::format(R"({{"ph": "C", "name": {}, "pid": {}, "tid": 0, "ts": {}, "args": {{"bytes": {}}}}})",
                      detail::trace_text(recording.texts[event.name]), recording.rank, begin, event.bytes));
      continue;
    }
    std::string args;
    const auto add = [&](const char* key, const std::string& value) {
      args += fmt::format("{}\"{}\": {}", args.empty() ? "" : ", ", key, value);
    };
    const auto say = [&](const char* key, std::uint32_t text) {
      if (!recording.texts[text].empty()) add(key, detail::trace_text(recording.texts[text]));
    };
    say("spec", event.spec);
    say("pass", event.pass);
    say("part", event.part);
    if (event.bytes >= 0) add("bytes", std::to_string(event.bytes));
    if (event.touched >= 0) add("touched", std::to_string(event.touched));
    if (event.flops > 0) add("flops", fmt::format("{:.0f}", event.flops));
    lines.push_back(fmt::format(
        R"({{"ph": "X", "name": {}, "cat": {}, "pid": {}, "tid": {}, "ts": {}, "dur": {}, "args": {{{}}}}})",
        detail::trace_text(recording.texts[event.name]), detail::trace_text(recording.texts[event.track]),
        recording.rank, track[event.track], begin, microseconds(event.duration_ns), args));
  }
  if (recording.dropped > 0) {
    lines.push_back(fmt::format(
        R"({{"ph": "i", "s": "p", "name": "trace full: {} later events left out", "pid": {}, "tid": 0, "ts": {}}})",
        recording.dropped, recording.rank, microseconds(end)));
  }
  std::string text(detail::trace_begin);
  for (std::size_t i = 0; i < lines.size(); ++i) text += (i == 0 ? "\n" : ",\n") + lines[i];
  return text + "\n" + std::string(detail::trace_end) + "\n";
}

SHARDLIB_INLINE void Trace::write(const std::string& path) const {
  if (on()) io::replace_file(path, io::as_bytes(json()));
}

SHARDLIB_INLINE void merge_traces(const std::vector<std::string>& parts, const std::string& path) {
  // Traces are large: some events in memory at a time, into a file of their own, so that a damaged part leaves no half
  // result.
  constexpr std::size_t most_text = std::size_t{1} << 20;
  io::OutputFile file(path);
  std::string text = std::string(detail::trace_begin) + "\n";
  bool first = true;
  for (const std::string& part : parts) {
    detail::for_each_event_line(part, [&](const std::string& line) {
      text += std::exchange(first, false) ? "" : ",\n";
      text += line;
      if (text.size() < most_text) return;
      file.write(io::as_bytes(text));
      text.clear();
    });
  }
  text += std::string(first ? "" : "\n") + std::string(detail::trace_end) + "\n";
  file.write(io::as_bytes(text));
  file.commit(false);
}

}  // namespace shardlib::run
