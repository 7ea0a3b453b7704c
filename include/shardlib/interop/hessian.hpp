// hessian_vector_product: the derivative of a gradient along a direction.
#pragma once

#include <algorithm>
#include <cmath>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <vector>

#include "shardlib/autodiff/value_and_grad.hpp"
#include "shardlib/compute/elementwise.hpp"
#include "shardlib/interop/check_gradients.hpp"
#include "shardlib/ops/result.hpp"
#include "shardlib/ops/value_and_grad.hpp"
#include "shardlib/optim/global_norm.hpp"
#include "shardlib/spec/dtype.hpp"
#include "shardlib/types/tree.hpp"

namespace shardlib {

namespace detail {

/// The Euclidean norm of leaves of f32 or f64.
template <Spec A, class Tree>
double norm_of_leaves(const Mesh<A>& mesh, const Tree& tree) {
  Tensor<f32, dual_spec<"", A>()> total;
  const auto all = [](std::string_view) { return true; };
  for_each_leaf([&](std::string_view, const auto& leaf) { add_squares(mesh, total, cast<f32>(leaf), all); }, tree);
  return root_of(over_devices(mesh, total));
}
template <class Tree>
inline constexpr bool leaves_of_f32_or_f64 = all_leaves<Tree>([]<class D, Spec S>(std::type_identity<Tensor<D, S>>) {
  return std::is_same_v<D, f32> || std::is_same_v<D, f64>;
});
/// The epsilon of the leaf with the fewest digits.
template <class Tree>
double epsilon_of_leaves(const Tree& tree) {
  double epsilon = 0;
  for_each_leaf([&]<class D, Spec S>(std::string_view,
                                     const Tensor<D, S>&) { epsilon = std::max(epsilon, epsilon_of(dtype_v<D>)); },
                tree);
  return epsilon;
}
template <class W, class V>
void require_direction(const W& weights, const V& direction) {
  static_assert(std::is_same_v<V, W>,
                "hessian_vector_product: the direction has the types of the weights; complete the sums of a product "
                "first, with reduce_gradients");
  if constexpr (is_tree<W>() && std::is_same_v<V, W>)
    untyped_leaves(direction).require_structure_of(untyped_leaves(weights), "hessian_vector_product");
}

}  // namespace detail

/// The product of the loss's Hessian at the weights with a direction, which has the types and sizes of the weights. The
/// result has the types of the gradient. It is exact except for rounding: the gradient's backward pass is
/// differentiated, by the VJP of the direction. Throws Error that names the op if f runs one whose VJP has no
/// derivative. f runs once. `hessian_vector_product(mesh, loss, weights, direction, batch)`
template <Spec A, class F, class W, class V, class... Args>
requires(!std::is_arithmetic_v<F>)
    [[nodiscard]] auto hessian_vector_product(const Mesh<A>& mesh, const F& f, const W& weights, const V& direction,
                                              const Args&... args) {
  detail::require_direction(weights, direction);
  detail::GradientCall call(mesh.device());
  const W tracked = detail::tracked_weights(call, "hessian_vector_product", weights, args...);
  detail::each_value(direction, [&](const detail::ValuePtr& value) { call.direction(value); });
  call.begin();
  const auto gradient = std::get<1>(value_and_grad(mesh, f, tracked, args...));
  call.end();
  std::vector<detail::ValuePtr> results, cotangents;
  for (const auto& leaf : detail::untyped_leaves(gradient).leaves) results.push_back(leaf.value());
  for (const auto& leaf : detail::untyped_leaves(direction).leaves) cotangents.push_back(leaf.value());
  return detail::collect<std::remove_cv_t<decltype(gradient)>>(weights, call.transpose(results, cotangents));
}
/// As above, by the central difference (g(w + e v) - g(w - e v)) / 2e of two gradients, for functions of any ops. Its
/// error falls with e^2. e is `step` times max(1, |w|) / |v|, where 0 stands for the cube root of the dtype's epsilon
/// (f64 6e-6, f32 5e-3). Weights are f32 or f64. Collective: f runs twice, with the same random keys.
/// `hessian_vector_product(mesh, 0.0, loss, weights, direction, batch)`
template <Spec A, class F, class W, class V, class... Args>
[[nodiscard]] auto hessian_vector_product(const Mesh<A>& mesh, double step, const F& f, const W& weights,
                                          const V& direction, const Args&... args) {
  detail::require_direction(weights, direction);
  static_assert(
      detail::leaves_of_f32_or_f64<W>,
      "hessian_vector_product: the weights are f32 or f64, because a difference of bf16 gradients has no digits");
  const double length = detail::norm_of_leaves(mesh, direction);
  if (step == 0) step = std::cbrt(detail::epsilon_of_leaves(weights));
  const double e = length == 0 ? 1 : step * std::max(1.0, detail::norm_of_leaves(mesh, weights)) / length;
  const auto gradient_at = [&](double at) {
    const W moved = map_tree([at](const auto& w, const auto& v) { return w + v * at; }, weights, direction);
    return std::get<1>(value_and_grad(mesh, f, moved, args...));
  };
  const auto ahead = gradient_at(e), behind = gradient_at(-e);
  return map_tree([e](const auto& a, const auto& b) { return (a - b) * (0.5 / e); }, ahead, behind);
}
SHARDLIB_FORM_OF_CALL(hessian_vector_product, "hessian_vector_product(mesh, f, weights, direction, ...)")

}  // namespace shardlib
