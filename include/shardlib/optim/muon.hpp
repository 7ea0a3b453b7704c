// Muon: steps along orthogonal matrices.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <string_view>
#include <type_traits>

#include "shardlib/compute/collectives.hpp"
#include "shardlib/compute/elementwise.hpp"
#include "shardlib/compute/layout.hpp"
#include "shardlib/optim/leaf_rules.hpp"
#include "shardlib/optim/optimizers.hpp"
#include "shardlib/runtime/names.hpp"
#include "shardlib/runtime/program_state.hpp"
#include "shardlib/spec/dtype.hpp"
#include "shardlib/support/handle.hpp"
#include "shardlib/support/inline.hpp"
#include "shardlib/types/spec_functions.hpp"

namespace shardlib {
namespace detail {

/// The matrix with singular values near 1 in place of its own: Newton-Schulz steps of the fifth order, with the
/// coefficients of Jordan et al. 2024.
[[nodiscard]] SHARDLIB_INLINE Tensor<f32, "Rows Cols"> orthogonalized(const Tensor<f32, "Rows Cols">& x, int steps);

constexpr TensorSpec unsharded(TensorSpec spec) {
  for (Dim& dim : spec.dims) dim.axes = {};
  return spec;
}

/// The leaf is a matrix whose dims have names, so that they may be renamed.
template <Spec S>
inline constexpr bool is_matrix = parsed<S>.rank() == 2 && !parsed<S>.dims[0].is_integer() &&
                                  !parsed<S>.dims[1].is_integer();

/// The same for a sharded leaf: every device gathers it and computes the whole.
template <Spec S>
[[nodiscard]] Tensor<f32, S> orthogonalized_leaf(const Tensor<f32, S>& x, int steps) {
  constexpr Spec whole = spec_of(unsharded(parsed<S>)), matrix = "Rows Cols";
  // Names of dims in here have other sizes for each leaf, also where the caller has a scope of names.
  const WithNames unchecked(program_state(x.device()), Handle<NameSizes>::make());
  if constexpr (whole == S)
    return rename<op_spec_of(matrix, S)>(orthogonalized(rename<op_spec_of(S, matrix)>(x), steps));
  else
    return shard<op_spec_of(whole, S)>(orthogonalized_leaf(all_gather<op_spec_of(S, whole)>(x), steps));
}

}  // namespace detail

/// Muon (Jordan et al. 2024): momentum, whose matrices are orthogonalised before a step. Leaves that are not matrices,
/// and those that `matrix(leaf name)` leaves out, as embeddings should be, are updated by `adamw`. A step of a matrix
/// has about AdamW's size (Liu et al. 2025), so that both take one learning rate and `adamw.weight_decay`.
/// A leaf of "A/d B/t" is gathered: communication, memory and products of a whole matrix on each device. `momentum` and
/// `nesterov` are as in SGD. `init` and `update` are those of an Optimizer.
/// `Muon().update(weights, moments, grads, 1e-3, scale, step, decays)`
struct Muon {
  double momentum = 0.95;
  bool nesterov = true;
  int iterations = 5;  ///< iterations of Newton-Schulz
  AdamW adamw = {};
  std::function<bool(std::string_view)> matrix = [](std::string_view) { return true; };

  /// `nu` of matrices stays zero.
  template <class Tree>
  using Moments = AdamW::Moments<Tree>;
  template <class Tree>
  [[nodiscard]] static Moments<Tree> init(const Tree& weights) {
    return AdamW::init(weights);
  }
  template <class Tree, class Grads, class Decays, class... Copies>
  void update(Tree& weights, Moments<Tree>& moments, const Grads& grads, double learning_rate, double scale,
              std::int64_t step, const Decays& decays, Copies&... copies) const {
    detail::require_factors<Decays>();
    const auto one = [&]<dtype P, Spec S, dtype G, Spec T>(std::string_view name, Tensor<P, S>& p, auto& mu, auto& nu,
                                                           const Tensor<G, T>& g, auto&... copy) {
      const LeafFactors leaf = detail::leaf_factors(decays, name);
      if (leaf.rate == 0) return;
      if constexpr (detail::is_matrix<S> && legal<rules::update, OpName("Muon"), dtype_v<P>, S, true, dtype_v<G>, T>) {
        if (matrix(name)) {
          const auto clipped = cast<f32>(g) * scale;
          mu = mu * momentum + clipped;
          const auto along = detail::orthogonalized_leaf(nesterov ? clipped + mu * momentum : mu, iterations);
          const auto shape = p.global_shape();
          auto change = along * (0.2 * std::sqrt(static_cast<double>(std::max(shape[0], shape[1]))));
          if (leaf.decay != 0) change = change + p * (adamw.weight_decay * leaf.decay);
          p = p - change * (learning_rate * leaf.rate);
          ((copy = cast<typename std::remove_cvref_t<decltype(copy)>::value_type>(p)), ...);
          return;
        }
      }
      detail::update_leaf<"Muon", 2>(adamw.numbers(learning_rate, scale, step, leaf), p, g, mu, nu, copy...);
    };
    for_each_leaf(one, weights, moments.mu, moments.nu, grads, copies...);
  }
};

}  // namespace shardlib

#ifndef SHARDLIB_COMPILED
#include "shardlib/optim/impl/muon.hpp"
#endif
