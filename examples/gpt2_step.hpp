// The training step of gpt2.cpp: gradients and their update. C is the dtype of computation.
#pragma once

#include <shardlib/run/microbatches.hpp>
#include <shardlib/run/token_tensors.hpp>
#include <shardlib/run/trained.hpp>
#include <shardlib/run/training.hpp>
#include <shardlib/shardlib.hpp>

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <string_view>

#include "gpt2_model.hpp"
#include "gpt2_setup.hpp"

namespace gpt2 {

// Matrices decay, biases and scales do not.
inline bool decays(std::string_view name) {
  const auto field = name.substr(name.rfind('/') + 1);
  return field.starts_with("w") || field == "embed" || field == "positions";
}

// The factors of a leaf by --lr-mult, --decay-mult and --freeze.
inline LeafFactors factors_of(const Options& o, std::string_view leaf) {
  return o.optimizer.groups(leaf, decays(leaf));
}

// The model, and the adapters of --lora. With these the model does not change and has no moments.
template <dtype C>
struct Trained {
  run::Trained<Model<f32>, Model<C>> base;
  run::Trained<Adapters<f32>, Adapters<C>> lora;

  // The model for validation and sampling: the averages, if there are any.
  [[nodiscard]] Model<C> model() { return adapted(base.model(), lora.model()); }
};

inline Batch place(const Setup& s, const io::TokenBatch& rows) {
  return run::token_tensors<Batch>(s.mesh, rows, s.o.training.seq);
}

// Clipping by the global norm, --optimizer, and the average of --ema.
template <class W, class C, class Grads>
run::StepResult update(const Setup& s, run::Trained<W, C>& trained, const Tensor<f32, "+d +t">& loss,
                       const Grads& grads, const run::Step& step) {
  const auto factors = [&](std::string_view leaf) { return factors_of(s.o, leaf); };
  const auto total = all_reduce<"+d +t -> ">(loss);
  // The host reads the loss and the norm together. The host of a GPU waits for the step here, and nowhere else.
  const auto result = run::step_result({total}, squared_global_norm(s.mesh, grads, factors));
  return run::update(trained, s.o.optimizer, s.o.training, step, grads, result, factors);
}

// Returns a function that computes the loss and the gradients of microbatch i. `f` is a function of `weights`, by the
// first of which it is differentiated, and of a batch.
template <class F, class... Weights>
auto microbatch_grads(const Setup& s, const run::Step& step, const F& f, const Weights&... weights) {
  const auto& microbatches = step.microbatches;
  const gpt::StepDropout of_step{s.o.dropout, s.o.training.seed, step.number, std::ssize(microbatches)};
  return [&s, &f, &microbatches, &weights..., of_step, positions = iota<"L">(s.mesh, s.o.training.seq)](std::size_t i) {
    const auto dropout = of_step.of(static_cast<std::int64_t>(i));
    return value_and_grad(s.mesh, f, weights..., place(s, microbatches[i]), positions, s.config(), dropout);
  };
}

// Updates the weights by the gradients of all microbatches, which `of` computes. Sums of several are in f32.
template <class W, class C, class F>
run::StepResult update_by(const Setup& s, run::Trained<W, C>& trained, const run::Step& step, const F& of) {
  if (step.microbatches.size() == 1) {
    const auto [loss, grads] = of(0);
    return update(s, trained, loss, grads, step);
  }
  const auto [loss, sums] = run::sum_microbatches<gradient_t<Mesh2, W>>(step, of);
  return update(s, trained, loss, sums, step);
}

template <dtype C>
run::StepResult train_step(const Setup& s, Trained<C>& trained, const run::Step& step) {
  const Model<C>& copies = trained.base.copies;
  if (s.o.lora > 0)
    return update_by(s, trained.lora, step, microbatch_grads(s, step, adapted_loss<C>, trained.lora.copies, copies));
  if (!s.o.gather.per_step) return update_by(s, trained.base, step, microbatch_grads(s, step, loss<C, false>, copies));
  // --gather per-step: gathers the weights once, before the microbatches, and scatters the gradients once, after them.
  using Sums = gradient_t<Mesh2, Model<f32, true>>;
  const auto of = [&](const Model<C, true>& whole) {
    return run::sum_microbatches<Sums>(step, microbatch_grads(s, step, loss<C, true>, whole));
  };
  const auto [loss, grads] = run::gathered_once<Model<C, true>, Model<C>>(copies, of);
  return update(s, trained.base, loss, grads, step);
}

}  // namespace gpt2
