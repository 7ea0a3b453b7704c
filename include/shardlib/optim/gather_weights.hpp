// Gathers weights once for several microbatches, and scatters the gradients by the gathered weights.
#pragma once

#include <string_view>
#include <utility>

#include "shardlib/compute/collectives.hpp"
#include "shardlib/compute/elementwise.hpp"
#include "shardlib/ops/result.hpp"
#include "shardlib/optim/optimizers.hpp"
#include "shardlib/types/spec_functions.hpp"

namespace shardlib {

/// The weights, gathered into the layout of another tree: one all_gather per leaf, none where the layout is the same.
/// Weights of "M/d F/t" for a tree with "M F/t": `const auto whole = gather_weights<Model<bf16, true>>(weights);`
template <class To, class From>
[[nodiscard]] To gather_weights(const From& weights) {
  To to = same_structure<To>(weights);
  for_each_leaf(
      []<class W, class R>(std::string_view, W& whole, const R& weight) {
        if constexpr (R::spec == W::spec) {
          whole = weight;
        } else {
          static constexpr OpSpec op = make_op<R::spec, W::spec>;
          whole = all_gather<op>(weight);
        }
      },
      to, weights);
  return to;
}

/// A compile error for a call without the type of the result.
template <class... To, class From>
requires(sizeof...(To) == 0) auto gather_weights(const From& weights) {
  return detail::wrong_call<"gather_weights",
                            "gather_weights<Gathered>(weights)`, where Gathered is the struct of the "
                            "gathered weights">(weights);
}

/// Gradients by gathered weights, cast and scattered into the layout of the weights at rest: one reduce_scatter per
/// leaf, whose operand is freed behind it. Call it once per step, after the sums over microbatches. Sums of "M F/t +d"
/// for a tree with "M/d F/t": `const auto grads = scatter_gradients<Model<bf16>>(std::move(sums));`
template <class To, class G>
[[nodiscard]] To scatter_gradients(G sums) {
  To to = same_structure<To>(sums);
  for_each_leaf(
      []<dtype D, Spec S, class R>(std::string_view, Tensor<D, S>& gradient, R& sum) {
        if constexpr (R::spec == S) {  // a leaf that was not gathered
          gradient = cast<D>(std::exchange(sum, {}));
          return;
        } else {
          static constexpr OpSpec op = make_op<R::spec, S>;
          gradient = reduce_scatter<op, detail::sum_of<D>>(cast<D>(std::exchange(sum, {})));
        }
      },
      to, sums);
  return to;
}
/// A compile error for a call without the type of the result.
template <class... To, class G>
requires(sizeof...(To) == 0) auto scatter_gradients(const G& sums) {
  return detail::wrong_call<"scatter_gradients",
                            "scatter_gradients<Weights>(std::move(sums))`, where Weights is the "
                            "struct of the weights at rest">(sums);
}

}  // namespace shardlib
