// Definitions of program_state.hpp.
#pragma once

#include "shardlib/runtime/program_state.hpp"

#include <algorithm>
#include <string_view>

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
  if (value.checkpoint > s.began && value.checkpoint != s.checkpoint && s.pass == ProgramState::Pass::forward &&
      !value.stopped && is_floating(value.dtype))
    throw Error("the result of " + value.made_by.describe() +
                " has left explicit_activation_checkpointing, but not as a result of its function, so its gradient "
                "would be lost; return it, or take `stop_gradient` of it if no gradient is meant");
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

SHARDLIB_INLINE void note_op(ProgramState& state, const Value& out, NumbersIn numbers) {
  FunctionRun& ran = state.ran;
  out.storage->number = ran.tensor(++ran.ops);
  const auto mix = [&ran](std::size_t value) { ran.mix(value); };
  mix(std::hash<std::string_view>()(out.made_by.name));
  mix(std::hash<std::string_view>()(out.made_by.spec));
  mix(static_cast<std::size_t>(out.dtype));
  mix(std::hash<const void*>()(out.spec));  // each spec is one object
  for (const std::int64_t size : out.global.logical) mix(static_cast<std::size_t>(size));
  for (std::size_t i = 0; i < numbers.padding.size(); ++i)
    if (!numbers.padding[i]) mix(static_cast<const unsigned char*>(numbers.object)[i]);
}

/// Whether the function that runs now runs twice.
inline bool runs_again(const ProgramState& s) {
  return s.mode == ProgramState::Mode::checkpoint || s.mode == ProgramState::Mode::replay;
}

SHARDLIB_INLINE void note_made(const Value& value) {
  const ProgramState& s = program_state(value.device);
  if (runs_again(s)) value.storage->number = s.ran.tensor(0);
}

SHARDLIB_INLINE std::uint64_t tensor_number(const Value& x) {
  std::uint64_t& number = x.storage->number;
  if (number == 0) number = ++program_state(x.device).numbers << 32U;
  return number;
}

SHARDLIB_INLINE void note_operand(const Value& x) {
  ProgramState& s = program_state(x.device);
  if (runs_again(s)) s.ran.mix(tensor_number(x));
}

SHARDLIB_INLINE void fail_replay(const OpInfo& op, const std::string& why, const DevicePtr& device) {
  throw Error(
      "explicit_activation_checkpointing: the function computed something else when it ran again for the "
      "backward pass, up to " +
      op.describe() + ": " + why +
      "; it must not depend on global or static variables that change, on the time or on other random numbers: "
      "pass what it needs as arguments, also the keys of random numbers (" +
      device->describe() + ")");
}

SHARDLIB_INLINE const Value& next_saved(ProgramState& state, const Value& due) {
  const std::size_t at = state.next_saved++;
  if (at >= state.saved.size())
    fail_replay(due.made_by, "the forward pass has saved " + std::to_string(at) + " values, and now there are more",
                due.device);
  const Value& saved = *state.saved[at];
  if (saved.dtype != due.dtype || saved.local != due.local)
    fail_replay(due.made_by, "the forward pass has saved the result of " + saved.made_by.describe() + " in its place",
                due.device);
  return saved;
}

SHARDLIB_INLINE ProgramState& program_state(const DevicePtr& device) {
  return device->local<ProgramState>();
}

}  // namespace shardlib::detail
