// The training step of gpt_fsdp.cpp: gradients, AdamW and sampling, in the dtype of computation C.
#pragma once

#include <shardlib/run/checkpoints.hpp>
#include <shardlib/run/plan.hpp>
#include <shardlib/run/token_tensors.hpp>
#include <shardlib/shardlib.hpp>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "gpt_decoding.hpp"
#include "gpt_setup.hpp"

using namespace shardlib;
using GptMesh = Mesh<"d t">;

struct Options : gpt::ModelOptions {
  run::Training training;
  std::string gather = "per-microbatch";
};

// ---- weights --------------------------------------------------------------------------------------------------------

inline gpt::Model<f32> initial_weights(const GptMesh& mesh, const Options& o) {
  const gpt::Initializer first{mesh, o, o.training.seed};
  gpt::Model<f32> w;
  first.embed(w.embed);
  if (!o.tied) first.unembed(w.unembed.emplace_back());
  for (std::int64_t i = 0; i < o.layers; ++i) first.layer(w.layers.emplace_back(), i);
  first.scale(w.final_norm);
  return w;
}

// ---- AdamW ----------------------------------------------------------------------------------------------------------

struct TrainState {
  gpt::Model<f32> weights, mu, nu;
};

// What is trained, and the weights in the dtype of computation, which the layers read: in f32 the same tensors.
template <dtype C>
struct Trained {
  TrainState state;
  gpt::Model<C> copies;
};

// The Euclidean norm of all gradients together. Each element stands on one device, so that none counts twice.
template <dtype C>
double gradient_norm(const GptMesh& mesh, const gpt::Model<C>& grads) {
  auto squares = to_partial<" -> +d +t">(zeros<f32, "">(mesh, {}));
  for_each_leaf([&](std::string_view, const auto& g) { squares = squares + sum(square(cast<f32>(g))); }, grads);
  return std::sqrt(item(all_reduce<"+d +t -> ">(squares)));
}

// AdamW (Loshchilov and Hutter 2017) of gradients that are scaled by `clip`. Without communication: weights, gradients
// and moments are sharded alike.
template <dtype C, dtype G>
void adamw(Trained<C>& trained, const gpt::Model<G>& grads, const run::Training& t, std::int64_t step,
           double learning_rate, double clip) {
  const auto f = [](double x) { return static_cast<float>(x); };
  const float rate = f(learning_rate), scale = f(clip), decay = f(t.weight_decay);
  const float beta1 = f(t.beta1), beta2 = f(t.beta2);
  const float correct1 = f(1 / (1 - std::pow(t.beta1, static_cast<double>(step + 1))));
  const float correct2 = f(1 / (1 - std::pow(t.beta2, static_cast<double>(step + 1))));
  for_each_leaf(
      [&](std::string_view, auto& weight, auto& mean, auto& variance, auto& copy, const auto& gradient) {
        const auto grad = cast<f32>(gradient);
        mean = map([=](auto m, auto g) { return beta1 * m + (1 - beta1) * scale * g; }, mean, grad);
        variance = map([=](auto v, auto g) { return beta2 * v + (1 - beta2) * scale * scale * g * g; }, variance, grad);
        const auto step = [=](auto w, auto m, auto v) {
          return w - rate * (m * correct1 / (sqrt(v * correct2) + 1e-8F) + decay * w);
        };
        weight = map(step, weight, mean, variance);
        copy = cast<C>(weight);
      },
      trained.state.weights, trained.state.mu, trained.state.nu, trained.copies, grads);
}

// Clipping by the global norm, and AdamW. Metrics are reduced outside the differentiated function.
template <dtype C, dtype G>
run::StepResult update(const GptMesh& mesh, Trained<C>& trained, const Options& o, const run::Step& step,
                       const Tensor<f32, "+d +t">& loss, const gpt::Model<G>& grads) {
  const double norm = gradient_norm(mesh, grads);
  const run::StepResult result{item(all_reduce<"+d +t -> ">(loss)), norm};
  if (!step.accepts(result)) return result;
  adamw(trained, grads, o.training, step.number, step.learning_rate, run::clip_factor(norm, o.training.clip));
  return result;
}

// Loss and gradients of the microbatches, by weights at rest or gathered over d. Sums of more than one are f32, and lie
// as the gradients do: of gathered weights, whose gradients are partial over d, nothing is sent.
template <dtype C, bool Whole, class Then>
run::StepResult accumulated(const GptMesh& mesh, const gpt::Model<C, Whole>& w, const Options& o, const run::Step& step,
                            const Then& then) {
  const auto differentiated = [&](const io::TokenBatch& rows) {
    const auto batch = run::token_tensors<gpt::Batch>(mesh, rows, o.training.seq);
    return value_and_grad(mesh, gpt::loss<C, Whole>, w, batch, o.config);
  };
  auto [loss, grads] = differentiated(step.microbatches[0]);
  if (step.microbatches.size() == 1) return then(loss, grads);
  auto sums = cast_tree<gradient_t<GptMesh, gpt::Model<f32, Whole>>>(std::exchange(grads, {}));
  for (std::size_t i = 1; i < step.microbatches.size(); ++i) {
    const auto [l, g] = differentiated(step.microbatches[i]);
    loss = loss + l;
    for_each_leaf([](std::string_view, auto& sum, const auto& x) { sum = sum + cast<f32>(x); }, sums, g);
  }
  return then(loss, sums);
}

// --gather per-step: weights are gathered once, before the microbatches, and gradients scattered once, behind them.
template <dtype C>
run::StepResult gather_once(const GptMesh& mesh, Trained<C>& trained, const Options& o, const run::Step& step) {
  auto whole = same_structure<gpt::Model<C, true>>(trained.copies);
  for_each_leaf([](std::string_view, auto& to, const auto& w) { to = all_gather<over<"d">>(w); }, whole,
                trained.copies);
  return accumulated(mesh, whole, o, step, [&](const auto& loss, auto& sums) {
    whole = {};
    auto grads = trained.copies;  // their structure
    for_each_leaf(
        []<Spec R, class G>(std::string_view, Tensor<C, R>& to, G& sum) {
          to = reduce_scatter<make_op<G::spec, R>, f32>(cast<C>(std::exchange(sum, {})));
        },
        grads, sums);
    return update(mesh, trained, o, step, loss, grads);
  });
}

// One step. Without --gather per-step each microbatch gathers and scatters, layer by layer.
template <dtype C>
run::StepResult train_step(const GptMesh& mesh, Trained<C>& trained, const Options& o, const run::Step& step) {
  if (o.gather == "per-step") return gather_once(mesh, trained, o, step);
  return accumulated(mesh, trained.copies, o, step,
                     [&](const auto& loss, const auto& grads) { return update(mesh, trained, o, step, loss, grads); });
}

// ---- sampling -------------------------------------------------------------------------------------------------------

// Decodes one text, a batch of 1 that is padded to the devices of d. `weights`, `o` and the mesh must outlive the
// result.
template <dtype C>
run::Decode decoder(const GptMesh& mesh, const gpt::Model<C>& weights, const Options& o) {
  Array<"layers", gpt::Cache<C>> caches;
  return [=, &mesh, &weights, &o](std::span<const std::int32_t> ids, std::int64_t first) mutable {
    const NamedSize one{"B", 1, mesh.size("d")}, length{"L", std::ssize(ids)}, context{"Klen", o.training.seq};
    if (first == 0) {
      Sizes sizes = gpt::sizes_of(o, mesh.size("d"), mesh.size("t"));
      sizes.insert(sizes.end(), {one, context});
      const auto empty = zeros<C, "B/d Klen K/t D">(mesh, sizes);
      caches.assign(weights.layers.size(), {empty, empty});
    }
    std::vector<i32> row(ids.size());
    if (mesh.axis_index("d") == 0) row.assign(ids.begin(), ids.end());
    const auto inputs = from_memory<i32, "B/d L">(mesh, {one, length}, std::span<const i32>(row));
    const auto positions = iota<"L">(mesh, length.size) + static_cast<double>(first);
    const auto keys = iota<"Klen">(mesh, context.size);
    const gpt::NewTokens tokens{inputs, first, cast<f32>(equal(positions, keys)), greater_equal(positions, keys)};
    const auto logits = gpt::cached_logits(weights, caches, tokens, o.config);
    const auto last = full<i32, "B/d">(mesh, {one}, static_cast<double>(length.size - 1));
    const auto whole = all_gather<"B/d V/t -> B V">(index_unreduced<"B/d [L] V/t, B/d -> B/d V/t">(logits, last));
    const auto numbers = whole.span().first(static_cast<std::size_t>(o.vocabulary));
    return std::vector<float>(numbers.begin(), numbers.end());
  };
}

// ---- a run ----------------------------------------------------------------------------------------------------------

template <dtype C>
void train(const std::shared_ptr<Device>& device, const Options& o, const run::Data& data, const std::string& toml) {
  const GptMesh mesh(device);
  Trained<C> trained{{initial_weights(mesh, o), {}, {}}, {}};
  auto& [state, copies] = trained;
  state.mu = zeros_like(state.weights);
  state.nu = zeros_like(state.weights);
  const auto copied = [&s = state] { return cast_tree<gpt::Model<C>>(s.weights); };
  copies = copied();
  run::Program program;
  program.checkpoints = run::renewing(run::checkpoints_of(mesh, state, o.training), copies, copied);
  program.step = [&](const run::Step& step) { return train_step(mesh, trained, o, step); };
  program.validate = [&](const io::TokenBatch& rows) -> double {
    const auto batch = run::token_tensors<gpt::Batch>(mesh, rows, o.training.seq);
    return item(all_reduce<"+d +t -> ">(gpt::loss<C>(trained.copies, batch, o.config)));
  };
  program.decode = decoder(mesh, copies, o);
  program.parameters = parameter_count(state.weights);
  program.weight_bytes = run::shard_bytes(state.weights);
  const std::int64_t gathered = o.gather == "per-step" ? mesh.size("d") : 0;  // times as large, beside those at rest
  const std::int64_t c_bytes = run::shard_bytes(copies);
  program.copy_bytes = (o.dtype == "f32" ? 0 : c_bytes) + gathered * c_bytes;
  program.gradient_bytes =
      (gathered > 0 ? gathered : 1) * (o.training.microbatches == 1 ? c_bytes : program.weight_bytes);
  program.optimizer_bytes = run::shard_bytes(state.mu) + run::shard_bytes(state.nu);
  program.flops_per_token = gpt::flops_per_token(o, program.parameters, o.training.seq);
  program.context = o.training.seq;
  run::train(device, o.training, data, toml, program);
}

// CMake compiles these in files of their own, at the same time. Without the macro gpt_fsdp.cpp is the whole program.
#ifdef GPT_FSDP_PARTS
extern template void train<bf16>(const std::shared_ptr<Device>&, const Options&, const run::Data&, const std::string&);
extern template run::StepResult gather_once(const GptMesh&, Trained<f32>&, const Options&, const run::Step&);
#endif
