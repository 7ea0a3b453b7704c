// Definitions of overlap.hpp.
#pragma once

#include "shardlib/autodiff/overlap.hpp"

#include <algorithm>
#include <cstddef>
#include <string>
#include <utility>

#include "shardlib/autodiff/tape.hpp"
#include "shardlib/support/error.hpp"

namespace shardlib::detail {

SHARDLIB_INLINE void make_progress(ProgramState& state) {
  // The program waits for the oldest one first.
  for (std::size_t i = 0; i < state.pending.size();) {
    PendingCollective& pending = *state.pending[i];
    if (!pending.done) pending.done = pending.request.test();
    if (!pending.done) return;
    if (pending.gathered || state.pending[i].use_count() > 1) {
      ++i;
    } else {  // the program has dropped the result
      pending.request.wait();
      state.pending.erase(state.pending.begin() + static_cast<std::ptrdiff_t>(i));
    }
  }
}

SHARDLIB_INLINE Handle<PendingCollective> find_pending(const Value& in, const Value& out) {
  const auto& all = program_state(out.device).pending;
  if (all.empty()) return nullptr;
  in.storage->materialize();
  const std::byte* const shard = in.storage->buffer.data();
  for (const auto& pending : all) {
    if (!pending->gathered || pending->gathered->spec != out.spec) continue;
    // The shard, not the storage: each call of reinterpret makes another storage of it.
    const Value& operand = *pending->operand;
    if (operand.device == in.device && operand.spec == in.spec && operand.local == in.local &&
        operand.storage->buffer.data() == shard)
      return pending;
  }
  return nullptr;
}

/// Completes the gathers, or the sums of gradients and the shifts, that started before hook number `hook`. Every rank
/// must do so.
inline void materialize_due(ProgramState& state, bool gathers, std::uint64_t hook) {
  for (;;) {
    const auto due = std::ranges::find_if(
        state.pending, [&](const auto& pending) { return bool(pending->gathered) == gathers && pending->hook < hook; });
    if (due == state.pending.end()) return;
    const auto pending = *due;
    // The read of the result removes it from the list. Nothing reads a sum or a shift whose deferred function, and its
    // handle, are gone.
    if (gathers)
      pending->gathered->storage->materialize();
    else if (pending.use_count() > 2)
      pending->deferred->materialize();
    if (std::erase(state.pending, pending) != 0) pending->request.wait();
  }
}

SHARDLIB_INLINE void complete_gathers(ProgramState& state) {
  materialize_due(state, true, state.hooks + 1);
}

/// Throws if the forward pass never read a gather that started before hook number `hook`.
inline void check_taken(const ProgramState& state, std::uint64_t hook) {
  for (const auto& pending : state.pending) {
    if (!pending->gathered || pending->hook >= hook) continue;
    const Value& unused = *pending->gathered;
    throw Error(unused.made_by.describe() +
                ": prefetch has started it, but the layer has not asked for its result: let the layer gather the same "
                "tensors with the same function that prefetch is given (" +
                unused.device->describe() + ")");
  }
}

SHARDLIB_INLINE bool is_tracked(const ValuePtr& value) {
  return bool(value->slot);
}

SHARDLIB_INLINE void fail_next(const OpInfo& op, const ValuePtr& x, std::size_t next, std::size_t layers) {
  throw Error(op.describe() + ": layer " + std::to_string(next) + " is given as the next one, but there are " +
              std::to_string(layers) + "; count from 0, and give " + std::to_string(layers) + " after the last one (" +
              x->device->describe() + ")");
}

SHARDLIB_INLINE ValuePtr prefetched(const OpInfo& op, const ValuePtr& x, const Handle<const Gathers>& ahead,
                                    const Handle<const Gathers>& behind) {
  ProgramState& s = program_state(x->device);
  if (s.twice) return x;  // what starts ahead is not on the tape
  if (s.mode != ProgramState::Mode::eager)
    throw Error(op.describe() +
                ": inside explicit_activation_checkpointing it would start gathers that the backward pass does not ask "
                "for; call it between the layers, outside (" +
                x->device->describe() + ")");
  const auto start = [](ProgramState& state, const Gathers& gathers) {
    const WithMode mode(state, ProgramState::Mode::start);
    gathers.start();
  };
  ++s.hooks;
  start(s, *ahead);
  check_taken(s, s.hooks);
  if (!x->slot) return x;
  s.overlaps = true;
  const VjpFunction vjp_fn = [start, behind](const ValuePtr& ct, const Residuals& /*none*/) {
    ProgramState& here = program_state(ct->device);
    // At most the sums of one layer are in progress while the next layer runs, which bounds their memory.
    materialize_due(here, false, here.hooks++);
    start(here, *behind);
    materialize_due(here, true, here.hooks);  // gathers that no derivative of the layer has read
    return ct;
  };
  auto out = detached(*x);
  attach(out, {{x->slot, {}, vjp_fn}});
  return out;
}

SHARDLIB_INLINE OverlapScope::OverlapScope(const DevicePtr& device)
    : state_(program_state(device)),
      pending_(std::exchange(state_.pending, {})),
      overlaps_(std::exchange(state_.overlaps, false)),
      hooks_(state_.hooks) {}

SHARDLIB_INLINE OverlapScope::~OverlapScope() {
  if (!pending_.empty()) state_.hooks = hooks_;  // by which theirs are numbered
  state_.pending = std::move(pending_);
  state_.overlaps = overlaps_;
}

SHARDLIB_INLINE void OverlapScope::end_forward() {
  check_taken(state_, ++state_.hooks);
}

SHARDLIB_INLINE void OverlapScope::end_backward() {
  ++state_.hooks;
  materialize_due(state_, false, state_.hooks);
  materialize_due(state_, true, state_.hooks);
}

}  // namespace shardlib::detail
