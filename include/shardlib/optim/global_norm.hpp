// The global norm of a tree, and the factor that clips by it.
#pragma once

#include <cmath>
#include <limits>
#include <string>
#include <string_view>
#include <type_traits>

#include "shardlib/compute/collectives.hpp"
#include "shardlib/compute/create.hpp"
#include "shardlib/compute/elementwise.hpp"
#include "shardlib/device/device.hpp"
#include "shardlib/optim/leaf_rules.hpp"
#include "shardlib/runtime/bindings.hpp"
#include "shardlib/runtime/tensor.hpp"
#include "shardlib/runtime/value.hpp"
#include "shardlib/spec/dtype.hpp"
#include "shardlib/support/error.hpp"
#include "shardlib/support/inline.hpp"
#include "shardlib/types/leaves.hpp"
#include "shardlib/types/spec_functions.hpp"
#include "shardlib/types/tree.hpp"

namespace shardlib {
namespace detail {

/// This device's part of the sum of a value's squares, as a scalar of the given spec, which is partial over all axes
/// of the mesh. On an axis that does not shard the value, only the first device counts it.
[[nodiscard]] SHARDLIB_INLINE ValuePtr sum_of_squares(const Value& x, const TensorSpec& spec);

template <Spec A>
struct CountsOnce {
  template <class D, Spec S>
  constexpr bool operator()(std::type_identity<Tensor<D, S>> /*leaf*/) const {
    return checked<rules::norm_leaf, A, dtype_v<D>, S>::ok;
  }
};
/// Throws unless the leaf is on the device of the mesh.
SHARDLIB_INLINE void require_on_mesh(const DevicePtr& mesh, const std::string& leaf, const Value& x);
/// Throws if the mesh is one stage of a pipeline.
SHARDLIB_INLINE void require_no_stage(const DevicePtr& mesh);
/// Adds this device's part of the sum of the squares of the leaves for which counts(name). The total may be empty.
template <Spec A, Spec S, class Tree, class Counts>
void add_squares(const Mesh<A>& mesh, Tensor<f32, S>& total, const Tree& tree, const Counts& counts) {
  if constexpr (checked_tree<"global_norm", Tree> && all_leaves<Tree>(CountsOnce<A>()))
    for (const auto& leaf : untyped_leaves(tree).leaves) {
      if (!counts(leaf.name)) continue;
      require_on_mesh(mesh.device(), leaf.name, *leaf.value());
      const Tensor<f32, S> squares(sum_of_squares(*leaf.value(), parsed<S>));
      total = total ? total + squares : squares;
    }
}
/// What add_squares has added, over all devices. 0 if it has added nothing.
template <Spec A, Spec S>
Tensor<f32, ""> over_devices(const Mesh<A>& mesh, const Tensor<f32, S>& total) {
  return total ? all_reduce<make_op<S, "">>(total) : zeros<f32, "">(mesh, {});
}
/// The root of that, as a number on the host.
inline double root_of(const Tensor<f32, "">& squares) {
  return std::sqrt(static_cast<double>(item(squares)));
}
}  // namespace detail

/// The square of global_norm as a scalar, which the host does not wait for. `squared_global_norm(mesh, grads)`
template <Spec A, class Tree, class Decays = LeafRules>
[[nodiscard]] Tensor<f32, ""> squared_global_norm(const Mesh<A>& mesh, const Tree& tree, const Decays& decays = {}) {
  detail::require_factors<Decays>();
  detail::require_no_stage(mesh.device());
  constexpr Spec everywhere = detail::dual_spec<"", A>();  // "+d +t"
  if constexpr (detail::checked_tree<"global_norm", Tree>) detail::require_matches(decays, tree);
  Tensor<f32, everywhere> total;
  detail::add_squares(mesh, total, tree,
                      [&](std::string_view name) { return detail::leaf_factors(decays, name).rate != 0; });
  return detail::over_devices(mesh, total);
}
/// The Euclidean norm of all leaves together, f32 or bf16, over all devices. Each element counts once: a leaf that is
/// replicated over an axis counts on the first device of that axis. Leaves that `decays`, as an optimizer takes it,
/// freezes do not count. Throws for a leaf on another mesh, and for the mesh of a pipeline's stage, whose norm is not
/// that of all ranks: pipeline::global_norm has it. `global_norm(mesh, grads)`
template <Spec A, class Tree, class Decays = LeafRules>
[[nodiscard]] double global_norm(const Mesh<A>& mesh, const Tree& tree, const Decays& decays = {}) {
  return detail::root_of(squared_global_norm(mesh, tree, decays));
}
/// A compile error without a mesh.
template <class Tree, class... More>
requires(!requires { Tree::axes; }) double global_norm(const Tree& tree, const More&... more) {
  detail::wrong_call<"global_norm", "global_norm(mesh, grads)">(tree, more...);
  return 0;
}
template <class Tree, class... More>
requires(!requires { Tree::axes; }) Tensor<f32, ""> squared_global_norm(const Tree& tree, const More&... more) {
  detail::wrong_call<"squared_global_norm", "squared_global_norm(mesh, grads)">(tree, more...);
  return {};
}

/// The factor that reduces gradients of this norm to the norm `largest` (0: no clipping). It is NaN if the norm is not
/// finite: an optimizer's update then throws. Throws UsageError if `largest` is negative or NaN.
/// `clip_factor(global_norm(mesh, grads), 1.0)`
[[nodiscard]] inline double clip_factor(double norm, double largest) {
  if (!(largest >= 0))
    throw UsageError("clip_factor: the largest norm is " + detail::show_number(largest) +
                     "; give a number of at least 0, which stands for no clipping");
  if (!std::isfinite(norm)) return std::numeric_limits<double>::quiet_NaN();
  return largest > 0 && norm > largest ? largest / norm : 1.0;
}

}  // namespace shardlib

#ifndef SHARDLIB_COMPILED
#include "shardlib/optim/impl/global_norm.hpp"
#endif
