// Trains the GPT of gpt_model.hpp: fully sharded data parallel over mesh axis d, tensor parallel over mesh axis t.
//
//   gpt_fsdp --data text.txt --mesh d=4,t=2     eight devices as threads of this process
//   mpirun -n 2 gpt_fsdp --data text.txt        two devices as MPI ranks
//   gpt_fsdp --preset 84m --data c4.zarr --tokenizer tokenizer.tiktoken --run runs/84m
//
// With gpt_model.hpp this is the whole training step; gpt_setup.hpp has the model's options and first values. Data,
// checkpoints and reports are the library's (run/training.hpp).
#include <fmt/format.h>

#include <shardlib/run/checkpoints.hpp>
#include <shardlib/run/dry_run.hpp>
#include <shardlib/run/plan.hpp>
#include <shardlib/shardlib.hpp>

#include <cmath>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "gpt_setup.hpp"

using namespace shardlib;
using GptMesh = Mesh<"d t">;

struct Options : gpt::ModelOptions {
  run::Training training;
};

// ---- weights --------------------------------------------------------------------------------------------------------

gpt::Model initial_weights(const GptMesh& mesh, const Options& o) {
  const gpt::Initializer first{mesh, o, o.training.seed};
  gpt::Model w;
  first.embed(w.embed);
  if (!o.tied) first.unembed(w.unembed.emplace_back());
  for (std::int64_t i = 0; i < o.layers; ++i) first.layer(w.layers.emplace_back(), i);
  first.scale(w.final_norm);
  return w;
}

// ---- AdamW ----------------------------------------------------------------------------------------------------------

struct TrainState {
  gpt::Model weights, mu, nu;
};

// The Euclidean norm of all gradients together. Each element stands on one device, so that none counts twice.
double gradient_norm(const GptMesh& mesh, const gpt::Model& grads) {
  auto squares = to_partial<" -> +d +t">(zeros<f32, "">(mesh, {}));
  for_each_leaf([&](std::string_view, const auto& g) { squares = squares + sum(square(g)); }, grads);
  return std::sqrt(item(all_reduce<"+d +t -> ">(squares)));
}

// AdamW (Loshchilov and Hutter 2017) of gradients that are scaled by `clip`. Without communication: weights, gradients
// and moments are sharded alike.
void adamw(TrainState& state, const gpt::Model& grads, const run::Training& t, std::int64_t step, double learning_rate,
           double clip) {
  const auto f = [](double x) { return static_cast<float>(x); };
  const float rate = f(learning_rate), scale = f(clip), decay = f(t.weight_decay);
  const float beta1 = f(t.beta1), beta2 = f(t.beta2);
  const float correct1 = f(1 / (1 - std::pow(t.beta1, static_cast<double>(step + 1))));
  const float correct2 = f(1 / (1 - std::pow(t.beta2, static_cast<double>(step + 1))));
  for_each_leaf(
      [&](std::string_view, auto& weight, auto& mean, auto& variance, const auto& grad) {
        mean = map([=](auto m, auto g) { return beta1 * m + (1 - beta1) * scale * g; }, mean, grad);
        variance = map([=](auto v, auto g) { return beta2 * v + (1 - beta2) * scale * scale * g * g; }, variance, grad);
        const auto step = [=](auto w, auto m, auto v) {
          return w - rate * (m * correct1 / (sqrt(v * correct2) + 1e-8F) + decay * w);
        };
        weight = map(step, weight, mean, variance);
      },
      state.weights, state.mu, state.nu, grads);
}

// One step: loss, gradients (of the weights' own types, since all are fully sharded) summed over the microbatches,
// clipping by the global norm, AdamW. Metrics are reduced outside the differentiated function.
run::StepResult train_step(const GptMesh& mesh, TrainState& state, const Options& o, const run::Step& step) {
  const run::Training& t = o.training;
  Tensor<f32, "+d +t"> loss;
  gpt::Model grads;
  for (const io::TokenBatch& rows : step.microbatches) {
    const auto [l, g] = value_and_grad(mesh, gpt::loss, state.weights, gpt::place(mesh, rows, t.seq), o.config);
    grads = loss ? map_tree([](const auto& a, const auto& b) { return a + b; }, grads, g) : g;
    loss = loss ? loss + l : l;
  }
  const double norm = gradient_norm(mesh, grads);
  const run::StepResult result{item(all_reduce<"+d +t -> ">(loss)), norm};
  if (!step.accepts(result)) return result;
  adamw(state, grads, t, step.number, step.learning_rate, run::clip_factor(norm, t.clip));
  return result;
}

// ---- sampling -------------------------------------------------------------------------------------------------------

// Decodes one text, a batch of 1 that is padded to the devices of d. `weights`, `o` and the mesh must outlive the
// result.
run::Decode decoder(const GptMesh& mesh, const gpt::Model& weights, const Options& o) {
  Array<"layers", gpt::Cache> caches;
  return [=, &mesh, &weights, &o](std::span<const std::int32_t> ids, std::int64_t first) mutable {
    const NamedSize one{"B", 1, mesh.size("d")}, length{"L", std::ssize(ids)}, context{"Klen", o.training.seq};
    if (first == 0) {
      Sizes sizes = gpt::sizes_of(o, mesh.size("d"), mesh.size("t"));
      sizes.insert(sizes.end(), {one, context});
      const auto empty = zeros<f32, "B/d Klen K/t D">(mesh, sizes);
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

// ---- the program ----------------------------------------------------------------------------------------------------

void declare(run::Options& options, Options& o) {
  run::declare(options, o.training);
  gpt::declare(options, o);

  // clang-format off
  // The models of seqax's configurations for C4 with the Llama tokenizer.
  const auto seqax = [&](const char* name, const char* width, const char* heads, const char* ff, const char* rate,
                         const char* steps, const char* warmup) {
    options.preset(name, {{"d_model", width}, {"n_q_per_kv", "1"}, {"n_kv", heads}, {"d_head", "128"}, {"layers", "8"},
                          {"d_ff", ff}, {"vocabulary", "32768"}, {"batch", "64"}, {"seq", "1024"}, {"steps", steps},
                          {"warmup", warmup}, {"learning_rate", rate}});
  };
  seqax("84m", "512", "8", "4096", "3e-3", "26000", "2600");
  seqax("270m", "1024", "16", "8192", "3e-4", "92000", "9200");
  seqax("540m", "2048", "16", "8192", "3e-4", "185000", "18500");
  seqax("1b", "2048", "16", "16384", "1e-5", "370000", "37000");
  seqax("2b", "4096", "16", "16384", "1e-5", "740000", "74000");
  options.preset("local-test-synthetic",
                 {{"mesh", "d=4,t=2"}, {"batch", "64"}, {"seq", "64"}, {"d_model", "256"}, {"n_q_per_kv", "2"},
                  {"n_kv", "2"}, {"d_head", "32"}, {"layers", "2"}, {"vocabulary", "1280"}, {"d_ff", "1024"},
                  {"steps", "50"}, {"warmup", "10"}, {"learning_rate", "3e-4"}, {"rope_base", "256"},
                  {"max_tokens", "0"}},
                 "seqax's run on its sample data set");
  // clang-format on
}

void train(const std::shared_ptr<Device>& device, const Options& o, const run::Data& data, const std::string& toml) {
  const GptMesh mesh(device);
  TrainState state{initial_weights(mesh, o), {}, {}};
  state.mu = zeros_like(state.weights);
  state.nu = zeros_like(state.weights);
  run::Program program;
  program.checkpoints = run::checkpoints_of(mesh, state, o.training);
  program.step = [&](const run::Step& step) { return train_step(mesh, state, o, step); };
  program.validate = [&](const io::TokenBatch& rows) -> double {
    const auto loss = gpt::loss(state.weights, gpt::place(mesh, rows, o.training.seq), o.config);
    return item(all_reduce<"+d +t -> ">(loss));
  };
  program.decode = decoder(mesh, state.weights, o);
  program.parameters = parameter_count(state.weights);
  program.weight_bytes = run::shard_bytes(state.weights);
  program.optimizer_bytes = run::shard_bytes(state.mu) + run::shard_bytes(state.nu);
  program.flops_per_token = gpt::flops_per_token(o, program.parameters, o.training.seq);
  program.context = o.training.seq;
  run::train(device, o.training, data, toml, program);
}

int program(int argc, char** argv) {
  Options o;
  run::Options options("gpt_fsdp", "Trains a GPT, fully sharded and tensor parallel over a mesh of devices.");
  declare(options, o);
  if (!options.parse(argc, argv)) {
    if (world_rank() == 0) fmt::print("{}", options.help());
    return 0;
  }
  const auto mesh = run::chosen_mesh(o.training, "d t");
  run::batch_must_divide(mesh, o.training);
  gpt::check_head(o);
  const run::Data data = run::open_data(o.training, o.vocabulary);
  o.vocabulary = data.vocabulary;
  run::note_padding(mesh, gpt::sizes_of(o, mesh[0].size, mesh[1].size));
  run::announce(options, o.training);
  const auto body = [&](const Options& used) -> DeviceBody {
    return [&](const std::shared_ptr<Device>& device) { train(device, used, data, options.to_toml()); };
  };
  Options single = o;  // --graph draws one layer
  single.layers = 1;
  if (!run::dry_run(o.training, mesh, body(o), body(single))) launch(mesh, body(o), run::launch_options(o.training));
  return 0;
}

int main(int argc, char** argv) {
  return run_program(argc, argv, [&] { return program(argc, argv); });
}
