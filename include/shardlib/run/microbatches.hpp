// Loss and gradients of a step with several microbatches.
#pragma once

#include <cstddef>
#include <utility>

#include "shardlib/optim/gather_weights.hpp"
#include "shardlib/optim/optimizers.hpp"
#include "shardlib/run/training.hpp"

namespace shardlib::run {

/// Adds the losses and the gradients of the step's microbatches. `of(i)` returns those of microbatch i as a pair. The
/// gradients are cast to the tree `Sums`, whose leaves are f32, and are added there.
/// `sum_microbatches<gradient_t<M, Model<f32>>>(step, [&](std::size_t i) { return value_and_grad(...); })`
template <class Sums, class F>
[[nodiscard]] auto sum_microbatches(const Step& step, const F& of) {
  auto [loss, grads] = of(std::size_t{0});
  auto sums = cast_tree<Sums>(std::exchange(grads, {}));
  for (std::size_t i = 1; i < step.microbatches.size(); ++i) {
    const auto [l, g] = of(i);
    loss = loss + l;
    accumulate(sums, g);
  }
  return std::pair{std::move(loss), std::move(sums)};
}

/// Gathers the weights into the tree `Whole`, once for the step, and scatters the gradients by them into the tree
/// `Grads`. `of(whole)` returns the loss and the sums of the gradients over all microbatches as a pair. The gathered
/// weights are freed before the sums are scattered.
/// `gathered_once<Model<C, true>, Grads>(weights, [&](const auto& whole) { return accumulated(mesh, whole, step); })`
template <class Whole, class Grads, class W, class F>
[[nodiscard]] auto gathered_once(const W& weights, const F& of) {
  auto whole = gather_weights<Whole>(weights);
  auto [loss, sums] = of(whole);
  whole = {};
  return std::pair{std::move(loss), scatter_gradients<Grads>(std::exchange(sums, {}))};
}

}  // namespace shardlib::run
