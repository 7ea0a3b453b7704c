// What runs behind value_and_grad and explicit_activation_checkpointing, and the report of what is kept.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "shardlib/autodiff/backward.hpp"
#include "shardlib/autodiff/overlap.hpp"
#include "shardlib/autodiff/tape.hpp"
#include "shardlib/ops/value_and_grad.hpp"
#include "shardlib/support/inline.hpp"

namespace shardlib {
namespace detail {

/// One call of value_and_grad on this device: the weights as leaves of its tape, and what it sets in the program's
/// state while it runs. Its errors are those of programs whose gradients would be zero, or wrong, without a word.
class Differentiation {
 public:
  [[gnu::cold]] SHARDLIB_INLINE Differentiation(const char* op, const std::shared_ptr<Device>& device);
  Differentiation(const Differentiation&) = delete;
  Differentiation& operator=(const Differentiation&) = delete;
  [[gnu::cold]] SHARDLIB_INLINE ~Differentiation();

  /// The weight as a leaf. Throws Error if a function that contains this call is differentiated by it.
  [[gnu::cold]] SHARDLIB_INLINE ValuePtr weight(const ValuePtr& value, const Path& path);
  /// Looks at a tensor of argument `number` alike.
  [[gnu::cold]] SHARDLIB_INLINE void argument(const ValuePtr& value, std::size_t number);
  [[nodiscard]] const std::vector<Slot>& leaves() const { return leaves_; }
  /// The function has returned: later uses of the weights are not differentiated.
  [[gnu::cold]] SHARDLIB_INLINE void end_forward();
  /// The cotangents of the weights, given the loss and its cotangent. A weight that the loss does not depend on, and
  /// that the function takes no stop_gradient of, is an error, or null if weights may be `unused`.
  [[gnu::cold]] SHARDLIB_INLINE std::vector<ValuePtr> backward(const Value& loss, const ValuePtr& one, bool unused);

 private:
  void check_outside(const ValuePtr& value, const std::string& what) const;

  OpInfo op_;
  std::shared_ptr<Device> device_;
  ProgramState& state_;
  ProgramState::Pass outer_;        ///< other than `none`: within a function that is differentiated
  const std::uint64_t first_;       ///< nodes up to this number are of the function outside
  std::optional<WithNames> names_;  ///< while the function runs
  std::vector<Slot> leaves_;
  std::deque<std::string> titles_;  ///< of the weights: "the weight `layers/0/w`"
  std::vector<std::pair<std::shared_ptr<Storage>, const std::string*>>
      weights_;  ///< and what their storage said before
};

}  // namespace detail

/// One tensor that waits for the backward pass.
struct SavedResidual {
  std::string what;       ///< the leaf's name, or the op that made it and the line of the call
  std::string spec;       ///< spec of the tensor
  std::size_t bytes = 0;  ///< on this device
};

namespace detail {

/// What the nodes below `root` keep.
SHARDLIB_INLINE std::vector<SavedResidual> residuals_below(const Node* root);

}  // namespace detail

/// What differentiating f(weights, args...) keeps for the backward pass on this device, each buffer once, largest
/// first; weights that some VJP needs are there too, under their names. Runs f forward once. `saved_residuals(loss,
/// weights, batch)`
template <class F, class W, class... Args>
std::vector<SavedResidual> saved_residuals(F&& f, const W& weights, const Args&... args) {
  std::optional<detail::Differentiation> call;
  const W tracked = detail::with_leaves(weights, [&](const detail::ValuePtr& value, const detail::Path& path) {
    if (!call) call.emplace("saved_residuals", value->device);
    return call->weight(value, path);
  });
  const auto loss = f(tracked, args...);
  detail::OverlapScope(loss.value()->device).end_forward();
  return detail::residuals_below(loss.value()->slot.node.get());
}

}  // namespace shardlib

#ifndef SHARDLIB_COMPILED
#include "shardlib/autodiff/impl/value_and_grad.hpp"
#endif
