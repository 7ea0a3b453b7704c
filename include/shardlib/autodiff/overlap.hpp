// Asynchronous communication: the collectives that have started, and the points where the program waits for them.
#pragma once

#include <cstdint>
#include <vector>

#include "shardlib/ops/prefetch.hpp"
#include "shardlib/runtime/pending_collective.hpp"
#include "shardlib/runtime/program_state.hpp"
#include "shardlib/runtime/value.hpp"
#include "shardlib/support/handle.hpp"
#include "shardlib/support/inline.hpp"

namespace shardlib::detail {

/// Advances the started collectives between two ops, because MPI makes no progress by itself.
[[gnu::cold]] SHARDLIB_INLINE void make_progress(ProgramState& state);

/// The gather of `in` to `out`, if it has started; else null.
[[gnu::cold]] SHARDLIB_INLINE Handle<PendingCollective> find_pending(const Value& in, const Value& out);

template <class Ct>
class AsyncSum {
 public:
  explicit AsyncSum(const DevicePtr& device)
      : mode_(program_state(device),
              program_state(device).overlaps ? ProgramState::Mode::start : program_state(device).mode) {}

 private:
  WithMode mode_;
};

/// Completes the gathers that a backward pass has started and not read, before another function's forward pass. Every
/// rank must do so.
[[gnu::cold]] SHARDLIB_INLINE void complete_gathers(ProgramState& state);

/// Lives while a function is differentiated. On every exit, including an exception, it drops the collectives that are
/// still pending. Collectives of an enclosing function wait meanwhile.
class OverlapScope {
 public:
  [[gnu::cold]] SHARDLIB_INLINE explicit OverlapScope(const DevicePtr& device);
  OverlapScope(const OverlapScope&) = delete;
  OverlapScope& operator=(const OverlapScope&) = delete;
  [[gnu::cold]] SHARDLIB_INLINE ~OverlapScope();
  /// Throws Error if the forward pass did not read a gather that has started.
  [[gnu::cold]] SHARDLIB_INLINE void end_forward();
  /// Waits for all gradients.
  [[gnu::cold]] SHARDLIB_INLINE void end_backward();

 private:
  ProgramState& state_;
  std::vector<Handle<PendingCollective>> pending_;  ///< of the enclosing function, as are the next two
  bool overlaps_;
  std::uint64_t hooks_;
};

}  // namespace shardlib::detail

#ifndef SHARDLIB_COMPILED
#include "shardlib/autodiff/impl/overlap.hpp"
#endif
