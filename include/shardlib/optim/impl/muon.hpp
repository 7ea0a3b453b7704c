// Definitions of muon.hpp.
#pragma once

#include "shardlib/optim/muon.hpp"

#include <cmath>
#include <utility>

#include "shardlib/autodiff/tape.hpp"
#include "shardlib/compute/einsum.hpp"
#include "shardlib/compute/elementwise.hpp"
#include "shardlib/compute/layout.hpp"
#include "shardlib/compute/reductions.hpp"
#include "shardlib/optim/impl/leaf_ops.hpp"
#include "shardlib/runtime/names.hpp"
#include "shardlib/runtime/program_state.hpp"
#include "shardlib/spec/dtype.hpp"
#include "shardlib/support/handle.hpp"
#include "shardlib/types/spec_functions.hpp"

namespace shardlib {
namespace detail {

/// The matrix "Rows Cols", or each matrix of a stack "Stack Rows Cols", with singular values near 1 in place of its
/// own: Newton-Schulz steps of the fifth order, with the coefficients of Jordan et al. 2024.
template <Spec S>
[[nodiscard]] Tensor<f32, S> orthogonalized(const Tensor<f32, S>& x, int steps) {
  static constexpr Spec flipped = renamed<S, "Rows Cols -> Cols Rows">, inner = renamed<S, "Rows -> Inner">;
  static constexpr Spec gram = renamed<S, "Cols -> Inner">, next = renamed<gram, "Rows Inner -> Inner Other">;
  static constexpr Spec other = renamed<S, "Cols -> Other">, each = without_dim<without_dim<S, "Rows">, "Cols">;
  // Products of the shorter side's length.
  const bool tall = x.size("Rows") > x.size("Cols");
  const auto wide = [tall](const Tensor<f32, S>& m) -> Tensor<f32, S> {
    if (!tall) return m;
    return rename<"Cols Rows -> Rows Cols">(rearrange<make_op<S, flipped>>(m));
  };
  Tensor<f32, S> y = wide(x);
  y = y / (sqrt(sum<make_op<S, each>>(square(y))) + 1e-7);  // singular values of at most 1
  for (int i = 0; i < steps; ++i) {
    const auto g = einsum_unreduced<make_op2<S, inner, gram>>(y, rename<"Rows -> Inner">(y));
    const auto g2 = einsum_unreduced<make_op2<gram, next, other>>(g, rename<"Rows Inner -> Inner Other">(g));
    const auto polynomial = g * -4.7750 + rename<"Other -> Inner">(g2) * 2.0315;
    y = y * 3.4445 + einsum_unreduced<make_op2<gram, inner, S>>(polynomial, rename<"Rows -> Inner">(y));
  }
  return wide(y);
}
template <Spec S>
[[nodiscard]] ValuePtr orthogonalized(const ValuePtr& x, int steps) {
  return orthogonalized(Tensor<f32, S>(with_spec(x, parsed<S>)), steps).value();
}

/// A leaf's matrix, or its matrices. Every device gathers its matrices and computes the whole of each.
inline ValuePtr orthogonalized_leaf(const ValuePtr& x, int steps) {
  const TensorSpec& spec = *x->spec;
  TensorSpec unsharded = spec;
  for (int i = spec.rank() - 2; i < spec.rank(); ++i) unsharded.dims[i].axes = {};
  const ValuePtr whole = gathered_leaf(x, lasting(unsharded));
  // Names of dims in here have other sizes for each leaf, also where the caller has a scope of names.
  const WithNames unchecked(program_state(x->device), Handle<NameSizes>::make());
  const auto own = detached(*whole);
  const bool stack = spec.rank() == 3;
  if (stack) own->global.logical[0] = own->global.padded[0] = own->local[0];  // the device's matrices of a stack
  const auto done =
      detached(*(stack ? orthogonalized<"Stack Rows Cols">(own, steps) : orthogonalized<"Rows Cols">(own, steps)));
  done->spec = whole->spec;
  done->global = whole->global;
  return leaf_shard(done, spec);
}

}  // namespace detail

SHARDLIB_INLINE void Muon::update(const detail::LeafUpdate& leaf, double learning_rate, double scale,
                                  std::int64_t step) const {
  const int rank = leaf.spec->rank();
  const bool of_layers = rank > 0 && !stacked_dim.empty() && leaf.spec->dims[0].name == stacked_dim;
  const bool orthogonal =
      rank == 2 ? !of_layers && matrix(leaf.name) : rank == 3 && (of_layers ? matrix(leaf.name) : stack(leaf.name));
  if (!orthogonal)
    return detail::update_in_place("adamw", adamw.numbers(learning_rate, scale, step, leaf.factors), leaf);
  const auto f = [](double x) { return static_cast<float>(x); };
  const auto shape = detail::view((*leaf.weight)->global.logical);
  const auto longer = static_cast<double>(std::max(shape[shape.size() - 2], shape[shape.size() - 1]));
  auto fresh = detail::make_value({"muon_momentum", {}, {}}, (*leaf.weight)->device, DType::f32, *leaf.spec,
                                  (*leaf.weight)->global);
  fresh->storage->buffer = detail::allocate(*fresh);
  detail::ValuePtr along = std::move(fresh);
  detail::LeafUpdate of_momentum = leaf;
  of_momentum.weight = &along;
  of_momentum.copy = nullptr;
  detail::update_in_place("muon_momentum", detail::MuonMomentum{f(momentum), f(scale), nesterov}, of_momentum);
  along = detail::orthogonalized_leaf(along, iterations);
  detail::LeafUpdate of_step = leaf;
  of_step.grad = &along;
  detail::update_in_place("muon",
                          detail::StepAlong{f(0.2 * std::sqrt(longer)), f(adamw.weight_decay * leaf.factors.decay),
                                            f(learning_rate * leaf.factors.rate)},
                          of_step);
}

}  // namespace shardlib
