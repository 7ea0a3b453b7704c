// The implementation behind value_and_grad and explicit_activation_checkpointing, and the report of residuals.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "shardlib/autodiff/backward.hpp"
#include "shardlib/autodiff/overlap.hpp"
#include "shardlib/autodiff/tape.hpp"
#include "shardlib/ops/result.hpp"
#include "shardlib/ops/value_and_grad.hpp"
#include "shardlib/runtime/names.hpp"
#include "shardlib/runtime/program_state.hpp"
#include "shardlib/support/handle.hpp"
#include "shardlib/support/inline.hpp"
#include "shardlib/support/with_value.hpp"

namespace shardlib {
namespace detail {

/// One call of value_and_grad on this device. It holds the weights as leaves of the tape and sets the program's state
/// during the call. It throws where a gradient would otherwise silently be zero or wrong.
class Differentiation {
 public:
  /// Inside of a function that is differentiated, the gradient of a `nested` call is a differentiable function of the
  /// weights and arguments. That of other calls is not: tensors of the function around it are an error.
  [[gnu::cold]] SHARDLIB_INLINE Differentiation(const char* op, const DevicePtr& device, bool nested = false);
  Differentiation(const Differentiation&) = delete;
  Differentiation& operator=(const Differentiation&) = delete;
  [[gnu::cold]] SHARDLIB_INLINE ~Differentiation();

  /// Registers the weight as a leaf.
  [[gnu::cold]] SHARDLIB_INLINE ValuePtr weight(const ValuePtr& value, const std::string& name);
  /// Checks a tensor of argument number `number` in the same way.
  [[gnu::cold]] SHARDLIB_INLINE void argument(const ValuePtr& value, std::size_t number);
  /// Notes that the value belongs to a function that is differentiated, or throws Error if the call is not nested.
  [[gnu::cold]] SHARDLIB_INLINE void look_outside(const ValuePtr& value, const std::string& what);
  [[nodiscard]] const std::vector<Slot>& leaves() const { return leaves_; }
  /// Whether the call is inside of a function that is differentiated, and whether its gradient is differentiated there.
  [[nodiscard]] bool nested() const { return nested_; }
  [[nodiscard]] bool twice() const { return twice_; }
  /// Call it before the function runs.
  [[gnu::cold]] SHARDLIB_INLINE void begin_forward();
  /// Call it after the function has returned. Later uses of the weights do not contribute to the gradient.
  [[gnu::cold]] SHARDLIB_INLINE void end_forward();
  /// The cotangents of the weights, given the loss and its cotangent. If the loss does not depend on a weight and the
  /// function does not call stop_gradient on it, that is an error. So it is if no weight has a cotangent. If weights
  /// may be `unused`, the weight's cotangent is null instead.
  [[gnu::cold]] SHARDLIB_INLINE std::vector<ValuePtr> backward(const Value& loss, const ValuePtr& one, bool unused);
  /// The cotangents of the weights, given those of some results.
  [[nodiscard, gnu::cold]] SHARDLIB_INLINE std::vector<ValuePtr> transpose(
      const std::vector<std::pair<Slot, ValuePtr>>& roots) const;
  /// Throws Error if a weight has no cotangent, and stop_gradient of it was not called.
  [[gnu::cold]] SHARDLIB_INLINE void require_used(const std::vector<ValuePtr>& cotangents, const std::string& what,
                                                  const char* remedy) const;

 private:
  OpInfo op_;
  DevicePtr device_;
  ProgramState& state_;
  ProgramState::Pass outer_;  ///< other than `none`: inside a function that is differentiated
  const bool nested_;
  const bool outer_twice_;
  bool twice_ = false;         ///< the gradient is differentiated
  const std::uint64_t first_;  ///< nodes up to this number belong to the enclosing function
  WithValue<std::uint64_t> tape_;
  std::optional<WithNames> names_;  ///< set while the function runs
  std::vector<Slot> leaves_;
  std::deque<Differentiated> weights_;
  std::vector<Handle<Storage>> running_;  ///< storages of the weights, while the function runs
};

}  // namespace detail

/// One tensor that the tape keeps for the backward pass.
struct SavedResidual {
  std::string what;       ///< the leaf's name, or the op that made the tensor, with the line of the call
  std::string spec;       ///< spec of the tensor
  std::size_t bytes = 0;  ///< on this device
};

namespace detail {

/// The residuals of the nodes below `root`.
SHARDLIB_INLINE std::vector<SavedResidual> residuals_below(const Node* root);
/// Throws Error if the value is on another factorization of the device's mesh. Gradients are typed by the axes of one
/// mesh.
SHARDLIB_INLINE void require_mesh(const Value& value, const DevicePtr& device, const std::string& what);

}  // namespace detail

/// The residuals of f(weights, args...) on this device, each buffer once, the largest first. Weights that a VJP needs
/// are listed under their names. Runs the forward pass of f once. `saved_residuals(loss, weights, batch)`
template <class F, class W, class... Args>
requires(std::is_class_v<W>) std::vector<SavedResidual> saved_residuals(F&& f, const W& weights, const Args&... args) {
  std::optional<detail::Differentiation> call;
  std::optional<detail::OverlapScope> overlap;
  const auto leaf = [&](const detail::ValuePtr& value, const std::string& name) {
    if (!call) {
      call.emplace("saved_residuals", value->device);
      overlap.emplace(value->device);
    }
    return call->weight(value, name);
  };
  const W tracked = detail::with_leaves(weights, leaf, "saved_residuals");
  const auto loss = f(tracked, args...);
  if (overlap) overlap->end_forward();
  return detail::residuals_below(loss.value()->slot.node.get());
}
SHARDLIB_FORM_OF_CALL(saved_residuals, "saved_residuals(f, weights, ...)")

}  // namespace shardlib

#ifndef SHARDLIB_COMPILED
#include "shardlib/autodiff/impl/checkpoint.hpp"
#include "shardlib/autodiff/impl/value_and_grad.hpp"
#endif
