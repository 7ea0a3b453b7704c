// Definitions of overlap.hpp.
#pragma once

#include "shardlib/autodiff/overlap.hpp"

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>

#include "shardlib/autodiff/tape.hpp"

namespace shardlib::detail {

SHARDLIB_INLINE void make_progress(State& state) {
  // The oldest is the next one that somebody waits for.
  for (const auto& started : state.started) {
    if (!started->done) started->done = started->request.test();
    if (!started->done) return;
  }
}

SHARDLIB_INLINE std::shared_ptr<Started> find_started(const Value& in, const Value& out) {
  for (const auto& started : state(out.device).started) {
    const ValuePtr& operand = started->operand;
    if (started->gathered && operand->storage == in.storage && operand->spec == in.spec &&
        started->gathered->spec == out.spec)
      return started;
  }
  return nullptr;
}

/// Completes the gathers, or the gradients' sums, of before the hook of this number. No rank may leave one out.
inline void settle(State& state, bool gathers, std::uint64_t hook) {
  for (;;) {
    const auto due = std::ranges::find_if(
        state.started, [&](const auto& started) { return bool(started->gathered) == gathers && started->hook < hook; });
    if (due == state.started.end()) return;
    const auto started = *due;
    // What asks for the result takes it out of the list.
    if (const auto storage = gathers ? started->gathered->storage : started->gradient.lock()) storage->settle();
    if (std::erase(state.started, started) != 0) started->request.wait();
  }
}

/// Throws if the forward pass has left a gather of before the hook of this number to itself.
inline void check_taken(const State& state, std::uint64_t hook) {
  for (const auto& started : state.started) {
    if (!started->gathered || started->hook >= hook) continue;
    const Value& unused = *started->gathered;
    throw Error(unused.made_by.describe() +
                ": prefetch has started it, but the layer has not asked for its result: let the layer gather the same "
                "tensors with the same function that prefetch is given (" +
                unused.device->describe() + ")");
  }
}

SHARDLIB_INLINE ValuePtr prefetched(const OpInfo& op, const ValuePtr& x, const Handle<const Gathers>& ahead,
                                    const Handle<const Gathers>& behind) {
  State& s = state(x->device);
  if (s.mode != State::Mode::eager)
    throw Error(op.describe() +
                ": inside explicit_activation_checkpointing it would start gathers that the backward pass does not ask "
                "for; call it between the layers, outside (" +
                x->device->describe() + ")");
  const auto start = [](State& state, const Gathers& gathers) {
    const WithMode mode(state, State::Mode::start);
    gathers.start();
  };
  ++s.hooks;
  start(s, *ahead);
  check_taken(s, s.hooks);
  if (!x->slot) return x;
  s.overlaps = true;
  const Pull pull = [start, behind](const ValuePtr& ct, const Residuals& /*none*/) {
    State& here = state(ct->device);
    // At most the sums of one layer are under way while the next one runs, which bounds their memory.
    settle(here, false, here.hooks++);
    start(here, *behind);
    settle(here, true, here.hooks);  // what the layer's derivatives did not need
    return ct;
  };
  auto out = detached(*x);
  attach(out, {{x->slot, {}, pull}});
  return out;
}

SHARDLIB_INLINE OverlapScope::OverlapScope(const std::shared_ptr<Device>& device) : state_(state(device)) {
  state_.overlaps = false;
}

SHARDLIB_INLINE OverlapScope::~OverlapScope() {
  state_.started.clear();
  state_.overlaps = false;
}

SHARDLIB_INLINE void OverlapScope::end_forward() {
  check_taken(state_, ++state_.hooks);
}

SHARDLIB_INLINE void OverlapScope::end_backward() {
  ++state_.hooks;
  settle(state_, false, state_.hooks);
  settle(state_, true, state_.hooks);
}

}  // namespace shardlib::detail
