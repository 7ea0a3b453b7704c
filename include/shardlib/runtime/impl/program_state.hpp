// Definitions of program_state.hpp.
#pragma once

#include "shardlib/runtime/program_state.hpp"

#include <algorithm>

#include "shardlib/support/error.hpp"

namespace shardlib::detail {

SHARDLIB_INLINE void fail_twice(const OpInfo& op, const DevicePtr& device) {
  throw Error(op.describe() +
              ": its VJP has no derivative, so a derivative of higher order would miss a part; write it in the ops "
              "that have one (docs/autodiff.md lists them), take `stop_gradient` of the operand, or take a difference: "
              "hessian_vector_product with a step is that of two gradients, and a third derivative is that of two "
              "products (" +
              device->describe() + ")");
}

SHARDLIB_INLINE void note_read(const Value& value) {
  ProgramState& s = program_state(value.device);
  if (s.transposing != nullptr && value.slot &&
      std::ranges::find(s.transposing->differentiable, value.slot) == s.transposing->differentiable.end())
    fail_twice(s.transposing->op, value.device);
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
