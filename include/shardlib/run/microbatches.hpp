// Loss and gradients of a step with several microbatches, and the loss of a validation in as small parts.
#pragma once

#include <cstddef>
#include <iterator>
#include <utility>

#include "shardlib/io/data/token_batch.hpp"
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

/// The sum of the losses that `of(part)` returns for the rows' microbatches, so that Program::validate takes no more
/// memory than a step. Rows that are fewer, as those of --evaluate, are one part.
/// `program.validate = [&](const io::TokenBatch& rows) { return run::sum_of_parts(o.training, rows, loss_of); };`
template <class F>
[[nodiscard]] double sum_of_parts(const Training& training, const io::TokenBatch& rows, const F& of) {
  const bool divides = std::ssize(rows.inputs) / training.seq % training.microbatches == 0;
  double loss = 0;
  for (const io::TokenBatch& part : io::split_rows(rows, divides ? training.microbatches : 1)) loss += of(part);
  return loss;
}

/// Gathers the weights into the tree `Whole`, once for the step, and scatters the gradients by them into the tree
/// `Grads`. `of(whole)` returns the loss and the sums of the gradients over all microbatches as a pair. The gathered
/// weights are freed before the sums are scattered.
/// `gathered_once<Model<C, true>, Grads>(weights, [&](const auto& whole) { return summed_grads(mesh, whole, step); })`
template <class Whole, class Grads, class W, class F>
[[nodiscard]] auto gathered_once(const W& weights, const F& of) {
  auto whole = gather_weights<Whole>(weights);
  auto [loss, sums] = of(whole);
  whole = {};
  return std::pair{std::move(loss), scatter_gradients<Grads>(std::exchange(sums, {}))};
}

}  // namespace shardlib::run
