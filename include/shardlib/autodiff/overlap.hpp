// Overlap of communication and computation: pending collectives, and where the program waits for them.
#pragma once

#include <functional>
#include <memory>

#include "shardlib/ops/value_and_grad.hpp"
#include "shardlib/runtime/value.hpp"
#include "shardlib/support/inline.hpp"

namespace shardlib::detail {

/// Moves on what has started, between two ops: MPI makes no progress by itself.
[[gnu::cold]] SHARDLIB_INLINE void make_progress(ProgramState& state);

/// The gather that makes `out` of `in`, if it is under way; otherwise null.
[[gnu::cold]] SHARDLIB_INLINE std::shared_ptr<PendingCollective> find_pending(const Value& in, const Value& out);

template <class Ct>
class AsyncSum {
 public:
  explicit AsyncSum(const std::shared_ptr<Device>& device)
      : mode_(program_state(device),
              program_state(device).overlaps ? ProgramState::Mode::start : program_state(device).mode) {}

 private:
  WithMode mode_;
};

/// The time in which a function is differentiated. Whatever ends it, nothing that it has started outlives it.
class OverlapScope {
 public:
  [[gnu::cold]] SHARDLIB_INLINE explicit OverlapScope(const std::shared_ptr<Device>& device);
  OverlapScope(const OverlapScope&) = delete;
  OverlapScope& operator=(const OverlapScope&) = delete;
  [[gnu::cold]] SHARDLIB_INLINE ~OverlapScope();
  /// Throws Error if a gather is under way that the forward pass has not asked for.
  [[gnu::cold]] SHARDLIB_INLINE void end_forward();
  /// Waits for all gradients.
  [[gnu::cold]] SHARDLIB_INLINE void end_backward();

 private:
  ProgramState& state_;
};

}  // namespace shardlib::detail

#ifndef SHARDLIB_COMPILED
#include "shardlib/autodiff/impl/overlap.hpp"
#endif
