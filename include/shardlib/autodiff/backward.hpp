// Running the tape backward: all at once, or for some of the leaves first and for the others later.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "shardlib/autodiff/tape.hpp"
#include "shardlib/support/inline.hpp"

namespace shardlib::detail {

/// A backward pass from `roots` (slots and their cotangents) down to `leaves`, in the same order on every device. Nodes
/// are emptied as their VJPs run, which frees their residuals. A pass may stop once some leaves have their cotangents,
/// and go on later; it then keeps what the other VJPs need, and sums come out the same, bit for bit.
class Backward {
 public:
  Backward(const std::vector<std::pair<Slot, ValuePtr>>& roots, std::vector<Slot> leaves);

  /// The cotangents of all leaves that have not had theirs yet; null where none arrived, or where it was given before.
  std::vector<ValuePtr> run();
  /// The cotangents of the leaves that are `wanted`. Only the VJPs on the way to them run.
  std::vector<ValuePtr> run(const std::vector<bool>& wanted);
  /// Whether the program has said, with stop_gradient, that it wants no gradient of some use of a leaf.
  [[nodiscard]] bool stopped(std::size_t leaf) const;

 private:
  class Pass;
  std::shared_ptr<Pass> pass_;
};

/// The whole pass at once.
SHARDLIB_INLINE std::vector<ValuePtr> backward(const std::vector<std::pair<Slot, ValuePtr>>& roots,
                                               const std::vector<Slot>& leaves);

/// The cotangent of a scalar loss by itself: 1.
SHARDLIB_INLINE ValuePtr cotangent_of_loss(const std::shared_ptr<Device>& device, DType dtype);

}  // namespace shardlib::detail

#ifndef SHARDLIB_COMPILED
#include "shardlib/autodiff/impl/backward.hpp"
#endif
