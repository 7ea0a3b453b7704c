// Trains a GPT whose feed-forward layers are mixtures of experts: fully sharded data parallel over the axes d and e of
// the mesh, with the experts over e; tensor parallel over t.
//
//   moe --data text.txt --mesh d=2,e=2             four devices as threads of this process; dropless
//   moe --data text.txt --mesh e=4 --capacity 1.25 slots of a fixed number; rows that find none are dropped
//   mpirun -n 4 moe --data text.txt --mesh e=4     four devices as MPI ranks
//
// moe_model.hpp is the model, moe_sampling.hpp its decoding. docs/mixture-of-experts.md says what moves.
#include <fmt/format.h>

#include <shardlib/run/checkpoints.hpp>
#include <shardlib/run/dry_run.hpp>
#include <shardlib/run/rope_options.hpp>
#include <shardlib/run/state_bytes.hpp>
#include <shardlib/run/token_tensors.hpp>
#include <shardlib/run/training.hpp>
#include <shardlib/shardlib.hpp>

#include <cmath>
#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

#include "moe_sampling.hpp"

using namespace shardlib;
using moe::MoeMesh;

struct Options {
  std::int64_t layers = 4, d_model = 128, heads = 4, d_head = 32, d_ff = 256, experts = 8, shared = 0, vocabulary = 0;
  moe::Config config;
  run::GatherPolicy gather;
  run::Training training;
};

void declare(run::Options& options, Options& o) {
  o.training.batch_axes = "d e";
  o.training.may_change = {"recompute", "gather"};
  run::declare(options, o.training);
  options.group("model");
  options.add("--layers", o.layers, "number of layers", run::size(1, run::most_layers));
  options.add("--d-model", o.d_model, "width of the residual stream", run::size());
  options.add("--heads", o.heads, "number of attention heads", run::size());
  options.add("--d-head", o.d_head, "width of a head", run::size());
  options.add("--d-ff", o.d_ff, "width of an expert", run::size());
  options.add("--experts", o.experts, "number of experts per layer; a multiple of the size of axis e", run::size());
  options.add("--experts-per-token", o.config.top_k, "number of experts per token", run::size());
  options.add("--shared", o.shared, "width of a shared expert, which processes every token (0: none)", run::size(0));
  options.add("--capacity", o.config.capacity, "slots of an expert, as a multiple of its share (0: dropless)",
              run::at_least(0));
  options.add("--balance", o.config.balance, "weight of the loss that balances the experts", run::at_least(0));
  options.add("--router-z", o.config.router_z, "weight of the router's z-loss", run::at_least(0));
  options.add("--vocabulary", o.vocabulary, "token ids (0: the tokenizer's)", run::size(0));
  options.add("--norm-epsilon", o.config.norm_epsilon, "epsilon of RMSNorm", run::above(0));
  run::declare(options, o.config.rope);
  run::declare(options, o.config.recompute);
  run::declare(options, o.gather);
}

// Sizes of the model's dims, padded so that the devices divide them.
Sizes sizes_of(const MoeMesh& mesh, const Options& o) {
  const std::int64_t t = mesh.size("t");
  return {{"V", o.vocabulary, round_up(o.vocabulary, t)},
          {"M", o.d_model, round_up(o.d_model, mesh.size())},
          {"H", o.heads, round_up(o.heads, t)},
          {"D", o.d_head},
          {"X", o.experts},
          {"F", o.d_ff, round_up(o.d_ff, t)},
          {"G", o.shared, round_up(o.shared, t)}};
}

// First values as in gpt_setup.hpp: truncated normal numbers of standard deviation 1/sqrt(fan in), and scales of 1.
moe::Model initial_weights(const MoeMesh& mesh, const Options& o) {
  const Sizes sizes = sizes_of(mesh, o);
  std::uint64_t stream = 0;
  const auto draw = [&]<Spec S>(Tensor<f32, S>& w, std::int64_t fan_in) {
    w = random_truncated_normal<f32, S>(mesh, sizes, {o.training.seed, stream++}) /
        std::sqrt(static_cast<double>(fan_in));
  };
  const auto scale = [&](Tensor<f32, "M/t/d/e">& w) { w = ones<f32, "M/t/d/e">(mesh, sizes); };
  const std::int64_t branches = 2 * o.layers;
  moe::Model model;
  draw(model.embed, o.d_model);
  draw(model.unembed, o.d_model);
  scale(model.final_norm);
  for (std::int64_t i = 0; i < o.layers; ++i) {
    moe::Layer& layer = model.layers.emplace_back();
    scale(layer.norm1);
    scale(layer.norm2);
    for (auto* w : {&layer.w_q, &layer.w_k, &layer.w_v}) draw(*w, o.d_model);
    draw(layer.w_o, o.heads * o.d_head * branches);
    draw(layer.router, o.d_model);
    draw(layer.w_gate, o.d_model);
    draw(layer.w_up, o.d_model);
    draw(layer.w_down, o.d_ff * branches);
    if (o.shared == 0) continue;
    auto& shared = layer.shared.emplace_back();
    draw(shared.w_gate, o.d_model);
    draw(shared.w_up, o.d_model);
    draw(shared.w_down, o.shared * branches);
  }
  return model;
}

struct TrainState {
  moe::Model weights, mu, nu;
};

// What the microbatches give: the mean of their numbers, and the sums of their gradients. Those by whole weights are
// pending: "M H/t D +d +e".
template <bool Whole>
struct Found {
  run::StepResult result;
  gradient_t<MoeMesh, moe::ModelOf<Whole>> grads;
};
template <bool Whole>
Found<Whole> accumulated(const MoeMesh& mesh, const moe::ModelOf<Whole>& weights, const Options& o,
                         const run::Step& step) {
  const auto microbatches = static_cast<std::int64_t>(step.microbatches.size());
  double loss = 0, load = 0, dropped = 0;
  gradient_t<MoeMesh, moe::ModelOf<Whole>> grads;
  for (const io::TokenBatch& rows : step.microbatches) {
    const auto batch = run::token_tensors<moe::Batch, "B/d/e L">(mesh, rows, o.training.seq);
    auto [l, g, metrics] = value_and_grad(mesh, moe::loss<Whole>, weights, batch, o.config, microbatches);
    loss += item(all_reduce<"+d +e +t -> ">(metrics.cross_entropy));
    load += item(metrics.balance.load) / static_cast<double>(microbatches);
    dropped += item(metrics.balance.dropped) / static_cast<double>(microbatches);
    if (&rows == &step.microbatches.front())
      grads = std::move(g);
    else
      for_each_leaf([](std::string_view, auto& sum, const auto& x) { sum = sum + x; }, grads, g);
  }
  return {{loss, 0, {{"expert_load", load}, {"dropped", dropped}}}, std::move(grads)};
}

// --gather per-step: weights are gathered once, before the microbatches, and gradients scattered once, after them.
Found<false> gathered_once(const MoeMesh& mesh, const moe::Model& weights, const Options& o, const run::Step& step) {
  auto whole = gather_weights<moe::ModelOf<true>>(weights);
  auto [result, sums] = accumulated(mesh, whole, o, step);
  whole = {};
  return {result, scatter_gradients<moe::Model>(std::exchange(sums, {}))};
}

run::StepResult train_step(const MoeMesh& mesh, TrainState& state, const Options& o, const run::Step& step) {
  auto [result, grads] =
      o.gather.per_step ? gathered_once(mesh, state.weights, o, step) : accumulated(mesh, state.weights, o, step);
  result.grad_norm = global_norm(mesh, grads);
  if (!step.accepts(result)) return result;
  const run::Training& t = o.training;
  AdamW{t.beta1, t.beta2, t.adam_epsilon, t.weight_decay}.update(
      state.weights, state.mu, state.nu, grads, step.learning_rate, run::clip_factor(result.grad_norm, t.clip),
      step.number, [](std::string_view) { return true; });
  return result;
}

void train(const DevicePtr& device, const Options& o, const run::Data& data, const std::string& toml) {
  const MoeMesh mesh(device);
  TrainState state{initial_weights(mesh, o), {}, {}};
  state.mu = zeros_like(state.weights);
  state.nu = zeros_like(state.weights);
  run::Program program;
  program.checkpoints = run::checkpoints_of(mesh, state, o.training);
  program.step = [&](const run::Step& step) { return train_step(mesh, state, o, step); };
  program.validate = [&](const io::TokenBatch& rows) -> double {
    const auto batch = run::token_tensors<moe::Batch, "B/d/e L">(mesh, rows, o.training.seq);
    return item(all_reduce<"+d +e +t -> ">(moe::loss(state.weights, batch, o.config, 1).second.cross_entropy));
  };
  program.decode = moe::decoder(mesh, state.weights, o.config, sizes_of(mesh, o), o.training.seq);
  run::note_state(program, o.training, state.weights, state.weights, state.mu, state.nu);
  if (o.gather.per_step) {
    std::int64_t whole = 0;
    for_each_leaf(
        [&]<Spec S>(std::string_view, const Tensor<f32, S>& w) {
          const bool expert = std::is_same_v<Tensor<f32, S>, moe::ExpertWeight<"X/e M/d F/t", false>>;
          whole += static_cast<std::int64_t>(w.value()->bytes()) * mesh.size("d") * (expert ? 1 : mesh.size("e"));
        },
        state.weights);
    program.copy_bytes = whole;
    program.gradient_bytes = whole;
  }
  // A token multiplies by its own experts alone, and the embedding is a look-up.
  const std::int64_t idle = o.layers * 3 * o.d_model * o.d_ff * (o.experts - o.config.top_k);
  program.flops_per_token = run::training_flops_per_token(program.parameters - o.vocabulary * o.d_model - idle,
                                                          o.layers, o.heads * o.d_head, o.training.seq);
  program.context = o.training.seq;
  run::train(device, o.training, data, toml, program);
}

int program(int argc, char** argv) {
  Options o;
  run::Options options("moe", "Trains a GPT with mixtures of experts, which are sharded over axis e.");
  declare(options, o);
  if (!options.parse(argc, argv)) {
    if (world_rank() == 0) fmt::print("{}", options.answer());
    return 0;
  }
  const auto mesh = run::chosen_mesh(o.training, "d e t");
  run::batch_must_divide(mesh, o.training);
  run::check_rope(o.config.rope, o.d_head);
  if (o.experts % mesh[1].size != 0)
    throw UsageError(fmt::format("--experts {} is not a multiple of axis e, which has size {}; change one of them",
                                 o.experts, mesh[1].size));
  if (o.config.top_k > o.experts)
    throw UsageError(fmt::format("--experts-per-token {} is more than the {} experts; choose at most as many",
                                 o.config.top_k, o.experts));
  if (o.training.rows != "packed")
    throw UsageError("--rows " + o.training.rows +
                     " pads rows, and padding would take slots of experts: use --rows packed");
  const run::Data data = run::open_data(o.training, o.vocabulary);
  o.vocabulary = data.vocabulary;
  const auto body = [&](const Options& used) -> DeviceBody {
    return [&](const DevicePtr& device) { train(device, used, data, options.to_toml()); };
  };
  run::choose_gather(o.gather, o.training, mesh, body(o));
  run::announce(options, o.training);
  Options single = o;  // --graph draws one layer
  single.layers = 1;
  if (!run::dry_run(o.training, mesh, body(o), body(single), "", &o.config.recompute, &o.gather))
    launch(mesh, body(o), run::launch_options(o.training));
  return 0;
}

int main(int argc, char** argv) {
  return run_program(argc, argv, [&] { return program(argc, argv); });
}
