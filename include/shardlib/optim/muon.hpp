// Muon: steps along orthogonal matrices.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <string_view>
#include <type_traits>

#include "shardlib/compute/collectives.hpp"
#include "shardlib/compute/einsum.hpp"
#include "shardlib/compute/elementwise.hpp"
#include "shardlib/compute/layout.hpp"
#include "shardlib/compute/reductions.hpp"
#include "shardlib/optim/leaf_rules.hpp"
#include "shardlib/optim/optimizers.hpp"
#include "shardlib/runtime/names.hpp"
#include "shardlib/runtime/program_state.hpp"
#include "shardlib/spec/dtype.hpp"
#include "shardlib/support/handle.hpp"
#include "shardlib/types/spec_functions.hpp"

namespace shardlib {
namespace detail {

/// The leaf is one matrix, or a stack of matrices along its first dim. Its dims have names, so that they may be
/// renamed.
template <Spec S>
inline constexpr bool has_names = std::ranges::none_of(parsed<S>.dims, [](const Dim& dim) { return dim.is_integer(); });
template <Spec S>
inline constexpr bool is_matrix = parsed<S>.rank() == 2 && has_names<S>;
template <Spec S>
inline constexpr bool is_stack = parsed<S>.rank() == 3 && has_names<S>;

/// The spec without the axes of the last dims, as many as `count`.
constexpr TensorSpec whole_along(TensorSpec spec, int count) {
  for (int i = spec.rank() - count; i < spec.rank(); ++i) spec.dims[i].axes = {};
  return spec;
}

/// The matrix "Rows Cols", or each matrix of a stack "Stack/e Rows Cols", with singular values near 1 in place of its
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

/// The same for a sharded leaf: every device gathers its matrices and computes the whole of each.
template <Spec S>
[[nodiscard]] Tensor<f32, S> orthogonalized_leaf(const Tensor<f32, S>& x, int steps) {
  static constexpr Spec whole = spec_of(whole_along(parsed<S>, 2)),
                        names = is_matrix<S> ? Spec("Rows Cols") : Spec("Stack Rows Cols");
  static constexpr Spec own = spec_of(whole_along(parsed<S>, parsed<S>.rank()));
  // Names of dims in here have other sizes for each leaf, also where the caller has a scope of names.
  const WithNames unchecked(program_state(x.device()), Handle<NameSizes>::make());
  if constexpr (whole == S)
    return rename<op_spec_of(names, own)>(orthogonalized(rename<op_spec_of(own, names)>(x), steps));
  else
    return shard<op_spec_of(whole, S)>(orthogonalized_leaf(all_gather<op_spec_of(S, whole)>(x), steps));
}

}  // namespace detail

/// Muon (Jordan et al. 2024): momentum, whose matrices are orthogonalised before a step. Leaves that are not matrices,
/// and those that `matrix(leaf name)` leaves out, as embeddings should be, are updated by `adamw`. A leaf of three dims
/// for which `stack(leaf name)` is true is a matrix for each index of its first dim, as for each expert "X/e M/d F/t".
/// A step of a matrix has about AdamW's size (Liu et al. 2025), so that both take one learning rate and
/// `adamw.weight_decay`. A leaf of "A/d B/t" is gathered: communication, memory and products of a whole matrix on each
/// device. Of a stack, a device gathers the matrices of its own indices. `momentum` and `nesterov` are as in SGD.
/// `init` and `update` are those of an Optimizer. `Muon().update(weights, moments, grads, 1e-3, scale, step, decays)`
struct Muon {
  double momentum = 0.95;
  bool nesterov = true;
  int iterations = 5;  ///< iterations of Newton-Schulz
  AdamW adamw = {};
  std::function<bool(std::string_view)> matrix = [](std::string_view) { return true; };
  std::function<bool(std::string_view)> stack = [](std::string_view) { return false; };

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
      constexpr bool fits = legal<rules::update, OpName("Muon"), dtype_v<P>, S, true, dtype_v<G>, T>;
      if constexpr (fits && (detail::is_matrix<S> || detail::is_stack<S>)) {
        if (detail::is_matrix<S> ? matrix(name) : stack(name)) {
          const auto clipped = cast<f32>(g) * scale;
          mu = mu * momentum + clipped;
          const auto along = detail::orthogonalized_leaf(nesterov ? clipped + mu * momentum : mu, iterations);
          const auto shape = p.global_shape();
          const auto longer = std::max(shape[shape.size() - 2], shape[shape.size() - 1]);
          auto change = along * (0.2 * std::sqrt(static_cast<double>(longer)));
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
