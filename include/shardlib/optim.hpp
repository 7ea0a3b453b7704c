// AdamW and the global norm that clipping needs, over trees of tensors.
#pragma once

#include <cmath>
#include <cstdint>
#include <string_view>

#include "shardlib/ops/collectives.hpp"
#include "shardlib/ops/create.hpp"
#include "shardlib/ops/map.hpp"
#include "shardlib/ops/reductions.hpp"
#include "shardlib/tree.hpp"

namespace shardlib {

template <class Tree>
[[nodiscard]] Tree zeros_like(const Tree& tree) {
  return map_tree([](const auto& x) { return x * 0.0; }, tree);
}

/// The Euclidean norm of all leaves together, over all devices; every leaf is sharded over the whole mesh, so that no
/// element counts twice.
template <Spec A, class Tree>
[[nodiscard]] double global_norm(const Mesh<A>& /*mesh*/, const Tree& tree) {
  static_assert(fully_sharded<Mesh<A>, Tree>);
  constexpr Spec everywhere = detail::dual_spec("", A);  // "+d +t"
  Tensor<f32, everywhere> total;
  for_each_leaf(
      [&](std::string_view, const auto& leaf) {
        const Tensor<f32, everywhere> squares = sum(square(leaf));
        total = total ? total + squares : squares;
      },
      tree);
  return std::sqrt(static_cast<double>(item(all_reduce<detail::make_op(everywhere, "")>(total))));
}

/// AdamW (Loshchilov and Hutter 2017); with weight_decay 0 it is Adam (Kingma and Ba 2014).
struct AdamW {
  double beta1 = 0.9, beta2 = 0.95, epsilon = 1e-8, weight_decay = 0.1;

  /// One update of `weights`, in place. `scale` multiplies the gradients (clipping), `step` counts from 0, and
  /// `decays(leaf name)` says which leaves weight_decay applies to.
  template <class Tree, class Decays>
  void update(Tree& weights, Tree& mean, Tree& variance, const Tree& grads, double learning_rate, double scale,
              std::int64_t step, const Decays& decays) const {
    const auto f = [](double x) { return static_cast<float>(x); };
    const float b1 = f(beta1), b2 = f(beta2), eps = f(epsilon), rate = f(learning_rate), clip = f(scale);
    const float correct1 = f(1 / (1 - std::pow(beta1, static_cast<double>(step + 1))));
    const float correct2 = f(1 / (1 - std::pow(beta2, static_cast<double>(step + 1))));
    for_each_leaf(
        [&](std::string_view name, auto& p, auto& m, auto& v, const auto& g) {
          const float decay = decays(name) ? f(weight_decay) : 0.0F;
          m = map([=](auto m0, auto g0) { return b1 * m0 + (1 - b1) * clip * g0; }, m, g);
          v = map([=](auto v0, auto g0) { return b2 * v0 + (1 - b2) * clip * clip * g0 * g0; }, v, g);
          p = map([=](auto p0, auto m0,
                      auto v0) { return p0 - rate * (m0 * correct1 / (sqrt(v0 * correct2) + eps) + decay * p0); },
                  p, m, v);
        },
        weights, mean, variance, grads);
  }
};

}  // namespace shardlib
