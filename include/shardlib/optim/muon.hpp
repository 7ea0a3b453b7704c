// Muon: steps along orthogonal matrices.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

#include "shardlib/optim/optimizers.hpp"
#include "shardlib/support/error.hpp"
#include "shardlib/support/inline.hpp"
#include "shardlib/types/leaves.hpp"

namespace shardlib {
/// Muon (Jordan et al. 2024): momentum, whose matrices are orthogonalized before a step. Leaves that are not matrices,
/// and those that `matrix(leaf name)` leaves out, as embeddings should be, are updated by `adamw`. A leaf of three dims
/// for which `stack(leaf name)` is true is a matrix for each index of its first dim, as for each expert "X/e M/d F/t".
/// `stacked_dim` names the dim of scan_layers' layers: with "Y", a leaf "Y M/d F" is a matrix for each layer. A leaf
/// "Y F" has a bias for each layer, and counts as no matrix. A step of a matrix has about AdamW's size (Liu et al.
/// 2025), so that both take one learning rate and `adamw.weight_decay`. A leaf of "A/d B/t" is gathered: communication,
/// memory and products of a whole matrix on each device. A device gathers the matrices of a stack for its own indices
/// alone. `momentum` and `nesterov` are as in SGD. `init` and `update` are those of an Optimizer.
/// `Muon().update(weights, moments, grads, 1e-3, scale, step, decays)`
struct Muon {
  [[no_unique_address]] detail::NoRate no_rate{};  ///< takes no value
  double momentum = 0.95;
  bool nesterov = true;
  int iterations = 5;  ///< iterations of Newton-Schulz
  AdamW adamw = {};
  std::function<bool(std::string_view)> matrix = [](std::string_view) { return true; };
  std::function<bool(std::string_view)> stack = [](std::string_view) { return false; };
  std::string stacked_dim = {};  ///< empty: no leaf has layers

  /// `nu` of matrices stays zero.
  template <class Tree>
  using Moments = AdamW::Moments<Tree>;
  template <class Tree>
  [[nodiscard]] static Moments<Tree> init(const Tree& weights) {
    return AdamW::init(weights);
  }
  template <class Tree, class Grads, class Decays = LeafRules, class... Copies>
  void update(Tree& weights, Moments<Tree>& moments, const Grads& grads, double learning_rate, double scale,
              detail::StepNumber step, const Decays& decays, Copies&... copies) const {
    detail::check_step("Muon", learning_rate, scale, step.number, {momentum, adamw.beta1, adamw.beta2},
                       {{"iterations", static_cast<double>(iterations)},
                        {"adamw.epsilon", adamw.epsilon},
                        {"adamw.weight_decay", adamw.weight_decay}});
    const auto is_stacked = [&](const auto& leaf) {
      return !leaf.spec->dims.empty() && leaf.spec->dims[0].name == stacked_dim;
    };
    if (!stacked_dim.empty() && std::ranges::none_of(detail::untyped_leaves(weights, false).leaves, is_stacked))
      throw UsageError("Muon: no leaf has the stacked_dim `" + stacked_dim +
                       "` as its first dim; name the dim of scan_layers, or leave it out");
    const auto leaves = detail::leaf_updates<"Muon", 2>(decays, weights, grads, moments.mu, moments.nu, copies...);
    detail::begin_update("Muon", leaves, learning_rate, adamw.weight_decay, scale, step);
    for (const auto& leaf : leaves) update(leaf, learning_rate, scale, step.number);
  }
  /// A compile error for fewer arguments, for the moments of another optimizer, and for what cannot be written.
  template <class... Args>
  requires detail::wrong_arguments<Muon, Args&&...>
  auto update(Args&&... args) const { return detail::wrong_update<"Muon">(args...); }

 private:
  SHARDLIB_INLINE void update(const detail::LeafUpdate& leaf, double learning_rate, double scale,
                              std::int64_t step) const;
};

}  // namespace shardlib

#ifndef SHARDLIB_COMPILED
#include "shardlib/optim/impl/muon.hpp"
#endif
