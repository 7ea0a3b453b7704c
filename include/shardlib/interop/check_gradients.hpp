// check_gradients: the gradients of value_and_grad against finite differences, for tests of ops and models.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "shardlib/autodiff/value_and_grad.hpp"
#include "shardlib/compute/elementwise.hpp"
#include "shardlib/interop/shard_map.hpp"
#include "shardlib/ops/result.hpp"
#include "shardlib/ops/value_and_grad.hpp"
#include "shardlib/runtime/names.hpp"
#include "shardlib/runtime/program_state.hpp"
#include "shardlib/runtime/tensor.hpp"
#include "shardlib/runtime/value.hpp"
#include "shardlib/spec/dtype.hpp"
#include "shardlib/support/function_ref.hpp"
#include "shardlib/support/inline.hpp"
#include "shardlib/types/leaves.hpp"

namespace shardlib {

/// The elements that check_gradients compares, and the tolerance. `GradientCheck{.elements = 8}`
struct GradientCheck {
  /// The step at x is this times max(1, |x|). 0: the cube root of the dtype's epsilon (f64 6e-6, f32 5e-3).
  double step = 0;
  /// The difference that is allowed, as a part of the leaf's largest gradient; the rounding of the loss is allowed too.
  /// 0: twice the step.
  double tolerance = 0;
  /// The number of elements of a leaf that are compared one by one, at least 1. In a larger leaf they are spread over
  /// it, the same in each run.
  std::int64_t elements = 64;
};

namespace detail {

/// The distance from 1 to the next number of the dtype.
constexpr double epsilon_of(DType dtype) {
  return dtype == DType::f64 ? 0x1p-52 : dtype == DType::bf16 ? 0x1p-7 : 0x1p-23;
}

struct LeafGradient {
  std::string name;
  ValuePtr value, gradient;
};
/// Compares the gradients with differences of `loss`, a function of the leaves. Throws where they differ. Returns the
/// number of elements that it has compared.
SHARDLIB_INLINE std::int64_t compare_gradients(const GradientCheck& how, std::span<const LeafGradient> leaves,
                                               DType loss_dtype,
                                               FunctionRef<double(const std::vector<ValuePtr>&)> loss);

template <class D, Spec S>
const Tensor<D, S>& loss_of(const Tensor<D, S>& loss) {
  return loss;
}
template <class L, class A>
const L& loss_of(const std::pair<L, A>& result) {
  return result.first;
}

}  // namespace detail

/// Compares the gradients of `value_and_grad(mesh, f, weights, args...)` with central differences of the loss, element
/// by element. If a leaf has more elements than are compared, all of them also move together along a direction v of
/// random signs. By the adjoint law the loss then moves by <v, gradient>. Throws Error, the same on every device,
/// that names each leaf whose gradient is wrong, the global index where it differs most, and both numbers there; also
/// where the loss is so large that its rounding hides errors. Returns the number of compared elements. Collective: f
/// runs twice for each of them, and for each direction. `check_gradients(mesh, GradientCheck{.elements = 8}, loss,
/// weights, batch)`
template <Spec A, class F, class W, class... Args>
std::int64_t check_gradients(const Mesh<A>& mesh, const GradientCheck& how, const F& f, const W& weights,
                             const Args&... args) {
  const auto gradients = std::get<1>(value_and_grad(mesh, f, weights, args...));
  std::vector<detail::LeafGradient> leaves;
  const auto names = leaf_names(weights);
  detail::each_value(weights, [&](const detail::ValuePtr& value) {
    leaves.push_back({names[leaves.size()], value, nullptr});
  });
  std::size_t next = 0;
  detail::each_value(gradients, [&](const detail::ValuePtr& value) { leaves[next++].gradient = value; });
  // Names have the sizes that they have within value_and_grad.
  detail::ProgramState& state = detail::program_state(mesh.device());
  const detail::WithNames sizes(state, detail::names_within(state, "check_gradients"));
  const auto bind = [&](const detail::ValuePtr& value) {
    detail::bind_names(detail::OpInfo{"check_gradients", {}, {}}, *value, "the weights and arguments");
  };
  detail::each_value(weights, bind);
  (detail::each_value(args, bind), ...);
  using Loss = std::remove_cvref_t<decltype(detail::loss_of(f(weights, args...)))>;
  const auto loss = [&](const std::vector<detail::ValuePtr>& at) {
    std::size_t i = 0;
    const W moved = detail::with_leaves(weights, [&](const detail::ValuePtr&, const std::string&) { return at[i++]; });
    return fetch(cast<f64>(detail::loss_of(f(moved, args...)))).data[0];
  };
  return detail::compare_gradients(how, leaves, dtype_v<typename Loss::value_type>, loss);
}
/// As above, with the defaults. `check_gradients(mesh, loss, weights, batch)`
template <Spec A, class F, class W, class... Args>
requires(!std::is_same_v<F, GradientCheck>) std::int64_t
    check_gradients(const Mesh<A>& mesh, const F& f, const W& weights, const Args&... args) {
  return check_gradients(mesh, GradientCheck{}, f, weights, args...);
}
SHARDLIB_FORM_OF_CALL(check_gradients, "check_gradients(mesh, f, weights, ...)")

}  // namespace shardlib

#ifndef SHARDLIB_COMPILED
#include "shardlib/interop/impl/check_gradients.hpp"
#endif
