// Definitions of program_state.hpp.
#pragma once

#include "shardlib/runtime/program_state.hpp"

namespace shardlib::detail {

SHARDLIB_INLINE void note_read(const Value& value) {
  ProgramState& s = program_state(value.device);
  if (!s.note_reads) return;
  s.work.reads.push_back({value.storage->buffer.data(), value.label.empty() ? value.made_by.label() : value.label,
                          value.spec, value.bytes()});
}

SHARDLIB_INLINE void note_write(const Value& value) {
  ProgramState& s = program_state(value.device);
  if (s.note_reads) s.work.reads.back().written = true;
}

SHARDLIB_INLINE void note_overwritten(const Value& value) {
  for (OpRead& read : program_state(value.device).work.reads)
    if (read.shard == value.storage->buffer.data()) read.overwritten = true;
}

SHARDLIB_INLINE ProgramState& program_state(const DevicePtr& device) {
  return device->local<ProgramState>();
}

}  // namespace shardlib::detail
