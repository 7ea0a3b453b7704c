// Runs the tape backward, for all leaves at once or for some leaves first.
#pragma once

#include <utility>
#include <vector>

#include "shardlib/autodiff/tape.hpp"
#include "shardlib/spec/dtype.hpp"
#include "shardlib/support/handle.hpp"
#include "shardlib/support/inline.hpp"

namespace shardlib::detail {

/// A backward pass from `roots` (slots and their cotangents) to `leaves`, in the same order on every device. A node
/// drops its residuals when its VJPs have run. A pass may stop when some leaves have their cotangents and continue
/// later. It then keeps the residuals of the remaining VJPs, and the sums are the same, bit for bit.
///
/// If `twice`, the pass is itself differentiated: nodes keep their residuals, VJPs run with the tape on, and only those
/// on paths to the leaves run. An op whose VJP cannot be differentiated is an error.
class Backward {
 public:
  Backward(const std::vector<std::pair<Slot, ValuePtr>>& roots, std::vector<Slot> leaves, bool twice = false);

  /// The cotangents of all leaves that have not been returned yet. One is null if none arrived or an earlier call
  /// returned it.
  std::vector<ValuePtr> run();
  /// The cotangents of the `wanted` leaves. Runs only the VJPs on the paths to them.
  std::vector<ValuePtr> run(const std::vector<bool>& wanted);
  /// Whether the program called stop_gradient on some use of the leaf.
  [[nodiscard]] bool stopped(std::size_t leaf) const;

 private:
  class Pass;  // shared by the copies of a Backward
  Handle<Pass> pass_;
};

/// The cotangent of a scalar loss with respect to itself: 1.
SHARDLIB_INLINE ValuePtr cotangent_of_loss(const DevicePtr& device, DType dtype);

}  // namespace shardlib::detail

#ifndef SHARDLIB_COMPILED
#include "shardlib/autodiff/impl/backward.hpp"
#endif
