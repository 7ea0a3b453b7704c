// Observes a device's ops as they run: for traces, for the plan, for the graph.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "shardlib/runtime/op_report.hpp"
#include "shardlib/runtime/program_state.hpp"
#include "shardlib/runtime/value.hpp"
#include "shardlib/support/inline.hpp"
#include "shardlib/support/with_value.hpp"

namespace shardlib::detail {

/// Calls run() and reports it to the device's observer, if there is one. The tape does so for each op; an op with
/// several results does for each of them.
[[gnu::cold]] SHARDLIB_INLINE Buffer observed(const Value& out, const std::function<Buffer()>& run);

/// Whether an op with recorded reads did no work, because its result is the shard of an operand under another name.
[[nodiscard]] inline bool only_named(const OpReport& ran) {
  return ran.work.bytes == 0 && !ran.work.in_place &&
         std::ranges::find(ran.work.reads, ran.shard, &OpRead::shard) != ran.work.reads.end();
}

/// The bytes of the shards that an op has read, and of those that it has written; a shard that is read twice counts
/// once. The op's reads must have been recorded.
[[nodiscard]] inline std::int64_t touched(const OpReport& ran) {
  if (only_named(ran) || ran.work.made_before) return 0;
  std::vector<const void*> seen, written;
  const auto first = [](std::vector<const void*>& shards, const void* shard) {
    if (std::ranges::find(shards, shard) != shards.end()) return false;
    shards.push_back(shard);
    return true;
  };
  std::size_t bytes = ran.bytes;
  for (const auto& read : ran.work.reads) {
    if (first(seen, read.shard) && !read.overwritten) bytes += read.bytes;
    if (read.written && read.shard != ran.shard && first(written, read.shard)) bytes += read.bytes;
  }
  return static_cast<std::int64_t>(bytes);
}

/// While it lives, reports the device's ops to `observer`, in addition to existing observers.
class Observing {
 public:
  Observing(const DevicePtr& device, std::function<void(const OpReport&)> observer)
      : state_(program_state(device)), before_(state_.observer) {
    if (before_)
      state_.observer = [before = before_, also = std::move(observer)](const OpReport& ran) {
        before(ran);
        also(ran);
      };
    else
      state_.observer = std::move(observer);
    state_.work = {};
  }
  Observing(const Observing&) = delete;
  Observing& operator=(const Observing&) = delete;
  ~Observing() { state_.observer = std::move(before_); }

 private:
  ProgramState& state_;
  std::function<void(const OpReport&)> before_;
};

/// While it lives, ops record which shards they read. With `keep_shards`, a shard's address stays unique until the
/// observer has the report: no other op reuses its memory.
class NoteReads {
 public:
  explicit NoteReads(ProgramState& state, bool keep_shards = false)
      : note_(state.note_reads, true), keep_(state.keep_shards, keep_shards) {}

 private:
  WithValue<bool> note_, keep_;
};

}  // namespace shardlib::detail

#ifndef SHARDLIB_COMPILED
#include "shardlib/runtime/impl/observe.hpp"
#endif
