// AdamW and the global norm that clipping needs, over trees of tensors.
#pragma once

#include <cmath>
#include <cstdint>
#include <string_view>
#include <type_traits>

#include "shardlib/detail/inline.hpp"
#include "shardlib/ops/collectives.hpp"
#include "shardlib/ops/create.hpp"
#include "shardlib/ops/elementwise.hpp"
#include "shardlib/tree.hpp"
#include "shardlib/value.hpp"

namespace shardlib {
namespace detail {

/// The sum of the squares of this device's block, as a scalar of the given spec.
[[nodiscard]] SHARDLIB_INLINE ValuePtr sum_of_squares(const Value& x, const TensorSpec& spec);

/// What an update of AdamW needs to know of a leaf, beside the leaf.
struct AdamWNumbers {
  float beta1, beta2, epsilon, decay, rate;
  float correct1, correct2;  ///< of the moments' bias towards zero
  float clip;                ///< multiplies the gradient
};
/// One pass over a leaf: in place in those blocks that nobody else sees, in new ones of the others. `grad` is f32 or
/// bf16; `copy`, unless it is null, holds the weight in either and becomes the new one: in f32 the same value.
SHARDLIB_INLINE void adamw(const AdamWNumbers& numbers, ValuePtr& weight, ValuePtr& mean, ValuePtr& variance,
                           const Value& grad, ValuePtr* copy);

template <class D>
inline constexpr bool is_f32_or_bf16 = std::is_same_v<D, f32> || std::is_same_v<D, bf16>;

/// This device's part of the sum of a leaf's squares, pending over the axes.
template <Spec Axes, dtype D, Spec S>
[[nodiscard]] auto sum_of_squares(const Tensor<D, S>& leaf) {
  static_assert(is_f32_or_bf16<D>, "global_norm: its leaves are f32 or bf16; cast them");
  using Out = Tensor<f32, dual_spec("", Axes)>;  // "+d +t"
  return Out(sum_of_squares(*leaf.value(), parsed<Out::spec>));
}

}  // namespace detail

template <class Tree>
[[nodiscard]] Tree zeros_like(const Tree& tree) {
  return map_tree([](const auto& x) { return x * 0.0; }, tree);
}

/// The Euclidean norm of all leaves together, f32 or bf16, over all devices; every leaf is sharded over the whole mesh,
/// so that no element counts twice.
template <Spec A, class Tree>
[[nodiscard]] double global_norm(const Mesh<A>& /*mesh*/, const Tree& tree) {
  static_assert(fully_sharded<Mesh<A>, Tree>);
  constexpr Spec everywhere = detail::dual_spec("", A);  // "+d +t"
  Tensor<f32, everywhere> total;
  for_each_leaf(
      [&](std::string_view, const auto& leaf) {
        const auto squares = detail::sum_of_squares<A>(leaf);
        total = total ? total + squares : squares;
      },
      tree);
  return std::sqrt(static_cast<double>(item(all_reduce<detail::make_op(everywhere, "")>(total))));
}

/// AdamW (Loshchilov and Hutter 2017); with weight_decay 0 it is Adam (Kingma and Ba 2014).
struct AdamW {
  double beta1 = 0.9, beta2 = 0.95, epsilon = 1e-8, weight_decay = 0.1;

  /// One update of `weights`, in place. `scale` multiplies the gradients (clipping), `step` counts from 0, and
  /// `decays(leaf name)` says which leaves weight_decay applies to. Weights and moments are f32, gradients f32 or bf16.
  /// `copies`, if given, are the weights in the dtype that the program computes in: bf16, made in the same pass, or
  /// f32, where they become the weights themselves.
  template <class Tree, class Grads, class Decays, class... Copies>
  void update(Tree& weights, Tree& mean, Tree& variance, const Grads& grads, double learning_rate, double scale,
              std::int64_t step, const Decays& decays, Copies&... copies) const {
    static_assert(sizeof...(Copies) <= 1, "AdamW: one tree of copies at most");
    const auto f = [](double x) { return static_cast<float>(x); };
    const auto correction = [&](double beta) { return f(1 / (1 - std::pow(beta, static_cast<double>(step + 1)))); };
    for_each_leaf(
        [&]<dtype G, Spec S, dtype... C>(std::string_view name, Tensor<f32, S>& p, Tensor<f32, S>& m, Tensor<f32, S>& v,
                                         const Tensor<G, S>& g, Tensor<C, S>&... copy) {
          static_assert((detail::is_f32_or_bf16<G> && ... && detail::is_f32_or_bf16<C>),
                        "AdamW: gradients and copies are f32 or bf16; cast them");
          const detail::AdamWNumbers numbers{
              f(beta1),         f(beta2),          f(epsilon),        decays(name) ? f(weight_decay) : 0.0F,
              f(learning_rate), correction(beta1), correction(beta2), f(scale)};
          // The tensors let go of their values, so that nobody else sees them.
          const auto released = []<dtype D>(Tensor<D, S>& x) {
            detail::ValuePtr value = x.value();
            x = {};
            return value;
          };
          detail::ValuePtr copied;
          ((copied = released(copy)), ...);
          detail::ValuePtr weight = released(p), mean_of = released(m), variance_of = released(v);
          detail::adamw(numbers, weight, mean_of, variance_of, *g.value(), copied ? &copied : nullptr);
          p = Tensor<f32, S>(weight);
          m = Tensor<f32, S>(mean_of);
          v = Tensor<f32, S>(variance_of);
          ((copy = Tensor<C, S>(copied)), ...);
        },
        weights, mean, variance, grads, copies...);
  }
};

}  // namespace shardlib

#ifndef SHARDLIB_COMPILED
#include "shardlib/optim_inl.hpp"
#endif
