// The training step of gpt_fsdp.cpp: gradients and their update. C is the dtype of computation.
#pragma once

#include <shardlib/run/microbatches.hpp>
#include <shardlib/run/token_tensors.hpp>
#include <shardlib/run/trained.hpp>
#include <shardlib/shardlib.hpp>

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

#include "gpt_hugging_face.hpp"
#include "gpt_sampling.hpp"
#include "gpt_setup.hpp"
#include "trainers.hpp"

using namespace shardlib;
using GptMesh = Mesh<"r d s t">;

struct Options : gpt::ModelOptions, TrainerOptions {
  gpt::HuggingFace files;
};

// Weights and moments in f32, and copies of the weights in C, which the layers read. In f32 the copies are the weights.
template <dtype C>
using Trained = run::Trained<gpt::Model<f32>, gpt::Model<C>>;

// The gradients of weights at rest. That of "M/d/s F/t" is "M/d/s F/t +r": the sum over r is pending.
template <dtype C>
using Gradients = gradient_t<GptMesh, gpt::Model<C>>;
template <dtype C>
using LossAndGrads = std::pair<Tensor<f32, "+d +r +s +t">, Gradients<C>>;

// Loss and gradients of one microbatch.
template <dtype C, bool Whole>
auto microbatch_grads(const GptMesh& mesh, const gpt::Model<C, Whole>& weights, const Options& o, const run::Step& step,
                      std::size_t microbatch) {
  const auto& rows = step.microbatches[microbatch];
  const auto batch = run::token_tensors<gpt::Batch, "B/r/d L/s">(mesh, rows, o.training.seq, o.config.order);
  gpt::ModelConfig config = o.config;
  const gpt::StepDropout of_step{o.dropout, o.training.seed, step.number, std::ssize(step.microbatches)};
  config.dropout = of_step.of(static_cast<std::int64_t>(microbatch));
  return value_and_grad(mesh, gpt::loss<C, Whole>, weights, batch, config);
}

// The sums over all microbatches, in f32. The gradient of a gathered weight keeps its sums pending: "M F/t +d +r +s".
template <dtype C, bool Whole>
auto summed_grads(const GptMesh& mesh, const gpt::Model<C, Whole>& weights, const Options& o, const run::Step& step) {
  using Sums = gradient_t<GptMesh, gpt::Model<f32, Whole>>;
  return run::sum_microbatches<Sums>(step, [&](std::size_t i) { return microbatch_grads(mesh, weights, o, step, i); });
}

// The same for --gather per-step: it gathers the weights over d and s once, before the microbatches, and scatters the
// sums of their gradients over d and s once, after them.
template <dtype C>
LossAndGrads<C> per_step_grads(const GptMesh& mesh, const gpt::Model<C>& weights, const Options& o,
                               const run::Step& step) {
  using Whole = gpt::Model<C, true>;
  const auto of = [&](const Whole& whole) { return summed_grads(mesh, whole, o, step); };
  return run::gathered_once<Whole, Gradients<C>>(weights, of);
}

template <dtype C>
run::StepResult train_step(const GptMesh& mesh, Trained<C>& trained, const Options& o, const run::Step& step) {
  const auto finish = [&](auto pending) {
    const auto grads = reduce_gradients(mesh, std::move(pending.second));  // the sums over r, once per step
    const auto loss = all_reduce<"+d +r +s +t -> ">(pending.first);
    // The host reads the loss and the norm together. The host of a GPU waits for the step here, and nowhere else.
    const auto result = run::step_result(run::Scalars{loss}, squared_global_norm(mesh, grads, o.optimizer.groups));
    // AdamW communicates nothing: weights, these gradients and moments are sharded alike.
    return run::update(trained, o.optimizer, o.training, step, grads, result);
  };
  if (o.gather.per_step) return finish(per_step_grads(mesh, trained.copies, o, step));
  if (step.microbatches.size() > 1) return finish(summed_grads(mesh, trained.copies, o, step));
  return finish(microbatch_grads(mesh, trained.copies, o, step, 0));
}

template <dtype C>
void train(const DevicePtr& device, const Options& o, const run::Data& data, const std::string& toml) {
  const GptMesh mesh(device);
  Trained<C> trained;
  trained.state.weights = gpt::initial_weights(mesh, o, o.training.seed);
  run::check_groups(o.optimizer.groups, leaf_names(trained.state.weights));
  gpt::load_weights(mesh, o.files, o.training, gpt::stored_table(o.tied), o.tied, trained.state.weights);
  run::begin(trained, o.optimizer);
  run::Program program = run::program_of(mesh, trained, o.training);  // what run::train calls: run/training.hpp
  program.step = [&](const run::Step& step) { return train_step(mesh, trained, o, step); };
  const auto loss_of = [&](const io::TokenBatch& rows) -> double {
    const auto batch = run::token_tensors<gpt::Batch, "B/r/d L/s">(mesh, rows, o.training.seq, o.config.order);
    return item(all_reduce<"+d +r +s +t -> ">(gpt::loss<C>(trained.model(), batch, o.config)));
  };
  program.validate = [&](const io::TokenBatch& rows) { return run::sum_of_parts(o.training, rows, loss_of); };
  program.decode = gpt::decoder<C>(
      mesh, [&]() -> const gpt::Model<C>& { return trained.model(); }, o, o.training.seq);
  if (o.gather.per_step) run::note_gathered(program, trained, mesh.size("d") * mesh.size("s"));
  program.flops_per_token = gpt::flops_per_token(o, program.parameters, o.training.seq);
  program.dtype = o.dtype;
  run::train(device, o.training, data, toml, program);
  gpt::write_outputs(device, o, o.files, o.optimizer, o.training, data, program);
}

#ifdef GPT_FSDP_PARTS
#include "gpt_fsdp_parts.hpp"
#endif
