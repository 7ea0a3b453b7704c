// The training step of moe.cpp: gradients and their update. C is the dtype of computation.
#pragma once

#include <shardlib/run/microbatches.hpp>
#include <shardlib/run/token_tensors.hpp>
#include <shardlib/run/trained.hpp>
#include <shardlib/run/training.hpp>
#include <shardlib/shardlib.hpp>

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "moe_model.hpp"
#include "moe_setup.hpp"
#include "trainers.hpp"

namespace moe {

struct Options : ModelOptions, TrainerOptions {
  gpt::HuggingFace files;
};

// Weights and moments, and copies of the weights in the dtype of computation; in f32 the same tensors.
template <dtype C>
using Trained = run::Trained<Model, ModelOf<C, false>>;

// Numbers of the microbatches. The host reads all of them at the end of the step: the host of a GPU waits at a read.
struct Numbers {
  run::Scalars cross_entropy, expert_load, dropped;
  friend Numbers operator+(Numbers all, const Numbers& more) {
    const auto append = [&](run::Scalars Numbers::*of) {
      (all.*of).insert((all.*of).end(), (more.*of).begin(), (more.*of).end());
    };
    append(&Numbers::cross_entropy);
    append(&Numbers::expert_load);
    append(&Numbers::dropped);
    return all;
  }
};

// The numbers of the microbatches, and the sums of their gradients, in f32. Gradients of whole weights are pending:
// "M H/t D +d +e +s".
template <dtype C, bool Whole>
auto summed_grads(const MoeMesh& mesh, const ModelOf<C, Whole>& weights, const Options& o, const run::Step& step) {
  using Sums = gradient_t<MoeMesh, ModelOf<f32, Whole>>;
  const auto microbatches = static_cast<std::int64_t>(step.microbatches.size());
  return run::sum_microbatches<Sums>(step, [&](std::size_t i) {
    const auto batch =
        run::token_tensors<Batch, "B/d/e L/s">(mesh, step.microbatches[i], o.training.seq, o.config.order);
    auto [l, grads, metrics] = value_and_grad(mesh, loss<C, Whole>, weights, batch, o.config, microbatches);
    const auto cross_entropy = all_reduce<"+d +e +s +t -> ">(metrics.cross_entropy);
    return std::pair{Numbers{{cross_entropy}, {metrics.balance.load}, {metrics.balance.dropped}}, std::move(grads)};
  });
}

template <dtype C>
run::StepResult train_step(const MoeMesh& mesh, Trained<C>& trained, const Options& o, const run::Step& step) {
  const auto& weights = trained.copies;
  const auto of = [&]<bool Whole>(const ModelOf<C, Whole>& w) { return summed_grads(mesh, w, o, step); };
  // --gather per-step: weights are gathered once, before the microbatches, and gradients scattered once, after them.
  const auto [numbers, grads] =
      o.gather.per_step ? run::gathered_once<ModelOf<C, true>, Model>(weights, of) : of(weights);
  const std::vector<std::pair<std::string, run::Scalars>> routing{{"expert_load", numbers.expert_load},
                                                                  {"dropped", numbers.dropped}};
  const auto result =
      run::step_result(numbers.cross_entropy, squared_global_norm(mesh, grads, o.optimizer.groups), routing);
  return run::update(trained, o.optimizer, o.training, step, grads, result);
}

}  // namespace moe
