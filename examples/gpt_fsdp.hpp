// The training step of gpt_fsdp.cpp: gradients and their update, in the dtype of computation C.
#pragma once

#include <shardlib/run/state_bytes.hpp>
#include <shardlib/run/token_tensors.hpp>
#include <shardlib/run/trained.hpp>
#include <shardlib/shardlib.hpp>

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

#include "gpt_hugging_face.hpp"
#include "gpt_sampling.hpp"
#include "gpt_setup.hpp"

using namespace shardlib;
using GptMesh = Mesh<"r d s t">;

struct Options : gpt::ModelOptions {
  run::Training training;
  run::OptimizerOptions optimizer;
  run::GatherPolicy gather;
  gpt::HuggingFace files;
};

inline gpt::Model<f32> initial_weights(const GptMesh& mesh, const Options& o) {
  const gpt::Initializer first{mesh, o, o.training.seed};
  gpt::Model<f32> w;
  first.embed(w.embed);
  if (!o.tied) first.unembed(w.unembed.emplace_back());
  for (std::int64_t i = 0; i < o.layers; ++i) first.layer(w.layers.emplace_back(), i);
  first.scale(w.final_norm);
  return w;
}

// ---- the step -------------------------------------------------------------------------------------------------------

using Loss = Tensor<f32, "+d +r +s +t">;

// Weights and moments, and copies of the weights in the dtype of computation for the layers; in f32 the same tensors.
template <dtype C>
using Trained = run::Trained<gpt::Model<f32>, gpt::Model<C>>;

// Gradients of weights at rest: of "M/d/s F/t" it is "M/d/s F/t +r", the sum over r still pending.
template <dtype C>
using Gradients = gradient_t<GptMesh, gpt::Model<C>>;

// The sums over r, once per step; clipping by the global norm; --optimizer. Metrics are reduced outside the
// differentiated function. AdamW communicates nothing: weights, reduced gradients and moments are sharded alike.
template <dtype C, class Grads>
run::StepResult update(const GptMesh& mesh, Trained<C>& trained, const Options& o, const run::Step& step,
                       const Loss& loss, Grads pending) {
  const auto grads = reduce_gradients(mesh, std::move(pending));
  const double norm = global_norm(mesh, grads, o.optimizer.groups);
  const run::StepResult result{item(all_reduce<"+d +r +s +t -> ">(loss)), norm};
  if (step.accepts(result)) run::update(trained, o.optimizer, o.training, step, grads, norm, o.optimizer.groups);
  return result;
}

template <dtype C, bool Whole>
auto differentiated(const GptMesh& mesh, const gpt::Model<C, Whole>& weights, const Options& o, const run::Step& step,
                    std::size_t microbatch) {
  const auto& rows = step.microbatches[microbatch];
  const auto batch = run::token_tensors<gpt::Batch, "B/r/d L/s">(mesh, rows, o.training.seq, o.config.order);
  gpt::ModelConfig config = o.config;
  const gpt::StepDropout of_step{o.dropout, o.training.seed, step.number, std::ssize(step.microbatches)};
  config.dropout = of_step.of(static_cast<std::int64_t>(microbatch));
  return value_and_grad(mesh, gpt::loss<C, Whole>, weights, batch, config);
}

// Loss and gradients of all microbatches, in f32. Gradients by whole weights have all sums pending: "M F/t +d +r +s".
template <dtype C, bool Whole>
auto accumulated(const GptMesh& mesh, const gpt::Model<C, Whole>& weights, const Options& o, const run::Step& step)
    -> std::pair<Loss, gradient_t<GptMesh, gpt::Model<f32, Whole>>> {
  auto [loss, grads] = differentiated(mesh, weights, o, step, 0);
  auto sums = cast_tree<gradient_t<GptMesh, gpt::Model<f32, Whole>>>(std::exchange(grads, {}));
  for (std::size_t i = 1; i < step.microbatches.size(); ++i) {
    const auto [l, g] = differentiated(mesh, weights, o, step, i);
    loss = loss + l;
    accumulate(sums, g);
  }
  return {std::move(loss), std::move(sums)};
}

// --gather per-step: weights are gathered over d and s once, before the microbatches, and the sums of their gradients
// are scattered over d and s once, after them.
template <dtype C>
auto gathered_once(const GptMesh& mesh, const gpt::Model<C>& weights, const Options& o, const run::Step& step)
    -> std::pair<Loss, Gradients<C>> {
  auto whole = gather_weights<gpt::Model<C, true>>(weights);
  auto [loss, sums] = accumulated(mesh, whole, o, step);
  whole = {};
  return {std::move(loss), scatter_gradients<Gradients<C>>(std::exchange(sums, {}))};
}

template <dtype C>
run::StepResult train_step(const GptMesh& mesh, Trained<C>& trained, const Options& o, const run::Step& step) {
  trained.free_average();
  const auto by = [&](auto found) { return update(mesh, trained, o, step, found.first, std::move(found.second)); };
  if (o.gather.per_step) return by(gathered_once(mesh, trained.copies, o, step));
  if (step.microbatches.size() > 1) return by(accumulated(mesh, trained.copies, o, step));
  return by(differentiated(mesh, trained.copies, o, step, 0));
}

// ---- a run ----------------------------------------------------------------------------------------------------------

template <dtype C>
void train(const DevicePtr& device, const Options& o, const run::Data& data, const std::string& toml) {
  const GptMesh mesh(device);
  Trained<C> trained;
  gpt::Model<f32>& weights = trained.state.weights;
  weights = initial_weights(mesh, o);
  run::check_groups(o.optimizer.groups, leaf_names(weights));
  gpt::load_weights(mesh, o.files, gpt::stored_table(o.tied), o.tied, weights);
  run::begin(trained, o.optimizer);
  run::Program program;
  program.checkpoints = run::checkpoints_of(mesh, trained, o.training);
  program.step = [&](const run::Step& step) { return train_step(mesh, trained, o, step); };
  program.validate = [&](const io::TokenBatch& rows) -> double {
    const auto batch = run::token_tensors<gpt::Batch, "B/r/d L/s">(mesh, rows, o.training.seq, o.config.order);
    return item(all_reduce<"+d +r +s +t -> ">(gpt::loss<C>(trained.model(), batch, o.config)));
  };
  program.decode = gpt::decoder(mesh, trained, o, o.training.seq);
  run::note_state(program, o.training, trained);
  if (o.gather.per_step)
    run::note_gathered(program, weights, trained.copies, std::int64_t{mesh.size("d")} * mesh.size("s"));
  program.flops_per_token = gpt::flops_per_token(o, program.parameters, o.training.seq);
  program.context = o.training.seq;
  program.dtype = o.dtype;
  run::train(device, o.training, data, toml, program);
  gpt::write_outputs(device, o, o.files, o.optimizer, o.training, data, program);
}

// CMake compiles these in gpt_fsdp_parts.cpp and gpt_fsdp_per_step.cpp, at the same time. Without the macro
// gpt_fsdp.cpp is the whole program.
#ifdef GPT_FSDP_PARTS
extern template auto gathered_once(const GptMesh&, const gpt::Model<f32>&, const Options&, const run::Step&)
    -> std::pair<Loss, Gradients<f32>>;
extern template auto gathered_once(const GptMesh&, const gpt::Model<bf16>&, const Options&, const run::Step&)
    -> std::pair<Loss, Gradients<bf16>>;
extern template void train<bf16>(const DevicePtr&, const Options&, const run::Data&, const std::string&);
#endif
