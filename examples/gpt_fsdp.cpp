// Trains the GPT of gpt_model.hpp: fully sharded data parallel over mesh axis d, tensor parallel over mesh axis t.
//
//   gpt_fsdp --data text.txt --mesh d=4,t=2     eight devices as threads of this process
//   mpirun -n 2 gpt_fsdp --data text.txt        two devices as MPI ranks
//   gpt_fsdp --preset 84m --data c4.zarr --tokenizer tokenizer.tiktoken --run runs/84m
//
// With gpt_model.hpp this is the whole training step. Data, checkpoints and reports are the library's (run/training.hpp).
#include <shardlib/run/checkpoints.hpp>
#include <shardlib/run/dry_run.hpp>
#include <shardlib/run/plan.hpp>
#include <shardlib/shardlib.hpp>

#include <numeric>

#include "gpt_model.hpp"

using namespace shardlib;
using GptMesh = Mesh<"d t">;

struct Options {
  run::Training training;
  std::int64_t layers = 4, d_model = 256, n_q_per_kv = 2, n_kv = 2, d_head = 64, d_ff = 768, vocabulary = 0;
  bool tied = false, library_optimizer = false, report_kept = false;
  std::string attention = "fused";
  gpt::Form form;
};

// ---- weights --------------------------------------------------------------------------------------------------------

// Sizes of the model's dims, padded so that the mesh divides them, and the vocabulary so that GEMMs have round shapes.
Sizes sizes_of(const Options& o, std::int64_t d, std::int64_t t) {
  const auto dim = [](std::string_view name, std::int64_t size, std::int64_t parts) {
    return NamedSize{name, size, round_up(size, parts)};
  };
  return {dim("V", o.vocabulary, std::lcm<std::int64_t>(64, t)), dim("M", o.d_model, d * t), {"Q", o.n_q_per_kv},
          dim("K", o.n_kv, t), {"D", o.d_head}, dim("F", o.d_ff, t)};
}

// Truncated normal numbers of standard deviation 1/sqrt(fan in); gains 1. The same on every mesh.
gpt::Model initial_weights(const GptMesh& mesh, const Options& o) {
  std::uint64_t stream = 0;
  const Sizes sizes = sizes_of(o, mesh.size("d"), mesh.size("t"));
  const auto init = [&]<class D, Spec S>(Tensor<D, S>& w, std::int64_t fan_in) {
    w = random_truncated_normal<D, S>(mesh, sizes, {o.training.seed, stream++}) / std::sqrt(static_cast<double>(fan_in));
  };
  const auto gain = [&](auto& w) { w = ones<f32, "M/t/d">(mesh, sizes); };
  // Two branches a layer add to the residual stream: their outputs are scaled down (GPT-2).
  const std::int64_t branches = 2 * o.layers;

  gpt::Model w;
  init(w.embed, o.d_model);
  if (!o.tied) init(w.unembed.emplace_back(), o.d_model);
  for (std::int64_t i = 0; i < o.layers; ++i) {
    gpt::Layer& layer = w.layers.emplace_back();
    gain(layer.norm1);
    gain(layer.norm2);
    init(layer.w_q, o.d_model);
    init(layer.w_k, o.d_model);
    init(layer.w_v, o.d_model);
    init(layer.w_o, o.n_q_per_kv * o.n_kv * o.d_head * branches);
    init(layer.w_gate, o.d_model);
    init(layer.w_up, o.d_model);
    init(layer.w_down, o.d_ff * branches);
  }
  gain(w.final_norm);
  return w;
}

// ---- AdamW ----------------------------------------------------------------------------------------------------------

struct TrainState {
  gpt::Model weights, mean, variance;
};

// This device's rows as tensors.
gpt::Batch place(const GptMesh& mesh, const io::TokenBatch& rows, std::int64_t length) {
  const auto host = std::make_shared<io::TokenBatch>(rows);
  const Sizes sizes{{"B", std::ssize(rows.inputs) / length * mesh.size("d")}, {"L", length}};
  const auto tensor = [&]<class T>(const std::vector<T>& values) {
    return from_memory<T, "B/d L">(mesh, sizes, std::span<const T>(values), host);
  };
  return {tensor(host->inputs), tensor(host->targets), tensor(host->segments), tensor(host->weights)};
}

// The mask of attention that is spelled; the library's needs none.
auto causal(const GptMesh& mesh, const Options& o) -> Tensor<bool_, "Qlen Klen"> {
  if (o.attention == "fused") return {};
  return causal_mask<"Qlen Klen">(mesh, o.training.seq, o.training.seq);
}

// The Euclidean norm of all gradients together. Each element stands on one device, so that none counts twice.
double gradient_norm(const gpt::Model& grads) {
  Tensor<f32, "+d +t"> squares;
  for_each_leaf(
      [&](std::string_view, const auto& g) {
        const Tensor<f32, "+d +t"> s = sum(square(g));
        squares = squares ? squares + s : s;
      },
      grads);
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

  const auto update_mean = [=](auto m, auto g) { return beta1 * m + (1 - beta1) * scale * g; };
  const auto update_variance = [=](auto v, auto g) { return beta2 * v + (1 - beta2) * scale * scale * g * g; };
  const auto update_weight = [=](auto p, auto m, auto v) {
    return p - rate * (m * correct1 / (sqrt(v * correct2) + 1e-8F) + decay * p);
  };
  const auto each = [](auto f) { return [f](const auto&... leaves) { return map(f, leaves...); }; };
  state.mean = map_tree(each(update_mean), state.mean, grads);
  state.variance = map_tree(each(update_variance), state.variance, grads);
  state.weights = map_tree(each(update_weight), state.weights, state.mean, state.variance);
}

// One step: loss, gradients (of the weights' own types, since all are fully sharded) summed over the microbatches,
// clipping by the global norm, AdamW. Metrics are reduced outside the differentiated function.
run::StepResult train_step(const GptMesh& mesh, TrainState& state, const std::vector<io::TokenBatch>& microbatches,
                           const Options& o, std::int64_t step, double learning_rate) {
  const run::Training& t = o.training;
  const auto mask = causal(mesh, o);
  Tensor<f32, "+d +t"> loss;
  gpt::Model grads;
  for (const io::TokenBatch& rows : microbatches) {
    const auto [l, g] = value_and_grad(mesh, gpt::loss, state.weights, place(mesh, rows, t.seq), mask, o.form);
    grads = loss ? map_tree([](const auto& a, const auto& b) { return a + b; }, grads, g) : g;
    loss = loss ? loss + l : l;
  }
  // --library-optimizer: the library's global_norm and AdamW in place of the ones spelled above.
  const double norm = o.library_optimizer ? global_norm(mesh, grads) : gradient_norm(grads);
  const run::StepResult result{item(all_reduce<"+d +t -> ">(loss)), norm};
  run::check_finite(result, step);
  const double clip = run::clip_factor(norm, t.clip);
  if (o.library_optimizer) {
    const AdamW optimizer{.beta1 = t.beta1, .beta2 = t.beta2, .weight_decay = t.weight_decay};
    optimizer.update(state.weights, state.mean, state.variance, grads, learning_rate, clip, step,
                     [](std::string_view) { return true; });
  } else {
    adamw(state, grads, t, step, learning_rate, clip);
  }
  return result;
}

// ---- sampling -------------------------------------------------------------------------------------------------------

// One text, a batch of 1 that is padded to the devices of d, with a cache of keys and values.
class Decoder {
 public:
  Decoder(const GptMesh& mesh, const TrainState& state, const Options& o) : mesh_(mesh), state_(state), o_(o) {}

  std::vector<float> operator()(std::span<const std::int32_t> ids, std::int64_t position) {
    const NamedSize one{"B", 1, mesh_.size("d")};
    if (position == 0) {
      Sizes sizes = sizes_of(o_, mesh_.size("d"), mesh_.size("t"));
      sizes.insert(sizes.end(), {one, {"Klen", o_.training.seq}});
      const auto empty = zeros<f32, "B/d Klen K/t D">(mesh_, sizes);
      caches_.assign(state_.weights.layers.size(), {empty, empty});
    }
    std::vector<i32> row(ids.begin(), ids.end()), places(ids.size());
    std::iota(places.begin(), places.end(), static_cast<i32>(position));
    if (mesh_.coordinate("d") != 0) std::ranges::fill(row, 0);
    const NamedSize length{"L", std::ssize(ids)};
    const auto inputs = from_memory<i32, "B/d L">(mesh_, {one, length}, std::span<const i32>(row));
    const auto positions = from_memory<i32, "L">(mesh_, {length}, std::span<const i32>(places));
    const auto keys = iota<"Klen">(mesh_, o_.training.seq);
    const auto seen = greater_equal(rename<"L -> Qlen">(positions), keys);
    const gpt::Sampling sampling{position, cast<f32>(equal(positions, keys)), nullptr};
    const gpt::Mask mask{broadcast<"Qlen Klen -> B/d Qlen Klen">(seen, {one}), {}};
    const auto logits = gpt::logits(state_.weights, inputs, mask, o_.form, sampling, &caches_);
    const auto last = full<i32, "B/d">(mesh_, {one}, static_cast<double>(length.size - 1));
    const auto whole = all_gather<"B/d V/t -> B V">(index_unreduced<"B/d [L] V/t, B/d -> B/d V/t">(logits, last));
    const auto numbers = whole.span().first(static_cast<std::size_t>(o_.vocabulary));
    return {numbers.begin(), numbers.end()};
  }

 private:
  const GptMesh& mesh_;
  const TrainState& state_;
  const Options& o_;
  Array<"layers", gpt::Cache> caches_;
};

// ---- the program ----------------------------------------------------------------------------------------------------

void declare(run::Options& options, Options& o) {
  run::declare(options, o.training);
  options.group("model");
  options.add("--layers", o.layers, "layers", run::size());
  options.add("--d-model", o.d_model, "width of the residual stream", run::size());
  options.add("--n-q-per-kv", o.n_q_per_kv, "query heads per key-value head", run::size());
  options.add("--n-kv", o.n_kv, "key-value heads", run::size());
  options.add("--d-head", o.d_head, "width of a head", run::size());
  options.add("--d-ff", o.d_ff, "width of the feed-forward layer", run::size());
  options.add("--vocabulary", o.vocabulary, "token ids (0: the tokenizer's)", run::size(0));
  options.add("--rope-base", o.form.rope_base, "base of rotary positions", run::above(1));
  options.flag("--tied", o.tied, "use the embedding as the unembedding too");
  options.add("--attention", o.attention, "of training: the library's in one op, or gpt_model.hpp's in einsums",
              run::one_of({"fused", "einsum"}));
  options.flag("--library-loss", o.form.library_loss, "the library's cross_entropy instead of gpt_model.hpp's");
  options.flag("--library-optimizer", o.library_optimizer, "the library's AdamW instead of gpt_fsdp.cpp's");
  options.flag("--report-kept", o.report_kept, "print what is kept for the backward pass");

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
}

void train(const std::shared_ptr<Device>& device, const Options& o, const run::Data& data, const std::string& toml) {
  const GptMesh mesh(device);
  TrainState state{initial_weights(mesh, o), {}, {}};
  state.mean = zeros_like(state.weights);
  state.variance = zeros_like(state.weights);
  if (o.report_kept && !device->is_dry()) {
    if (!data.train) throw UsageError("--report-kept takes a batch of --data: give it");
    const std::int64_t rows = o.training.batch / o.training.microbatches / mesh.size("d");
    const auto kept = kept_for_backward(gpt::loss, state.weights, place(mesh, data.train->rows(0, 0, rows), o.training.seq),
                                        causal(mesh, o), o.form);
    for (const Kept& k : kept)
      if (mesh.index() == 0) fmt::print("kept for backward: {:>12} bytes  [{}]  {}\n", k.bytes, k.spec, k.what);
  }
  run::Program program;
  program.checkpoints = run::checkpoints_of(mesh, state, o.training);
  program.step = [&](const auto& microbatches, std::int64_t step, double rate) {
    return train_step(mesh, state, microbatches, o, step, rate);
  };
  program.validate = [&](const io::TokenBatch& rows) -> double {
    const auto batch = place(mesh, rows, o.training.seq);
    return item(all_reduce<"+d +t -> ">(gpt::loss(state.weights, batch, causal(mesh, o), o.form)));
  };
  program.decode = Decoder(mesh, state, o);
  program.parameters = parameter_count(state.weights);
  program.weight_bytes = run::block_bytes(state.weights);
  program.optimizer_bytes = run::block_bytes(state.mean) + run::block_bytes(state.variance);
  const std::int64_t heads = o.n_q_per_kv * o.n_kv * o.d_head;
  program.flops_per_token = run::training_flops_per_token(
      program.parameters - (o.tied ? 0 : o.vocabulary * o.d_model), o.layers, heads, o.training.seq);
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
  if (o.d_head % 2 != 0)
    throw UsageError(fmt::format("--d-head {}: rotary positions turn pairs; choose a multiple of 2", o.d_head));
  const run::Data data = run::open_data(o.training, o.vocabulary);
  o.vocabulary = data.vocabulary;
  run::note_padding(mesh, sizes_of(o, mesh[0].size, mesh[1].size));
  run::announce(options, o.training);
  const auto body = [&](const Options& used) -> DeviceBody {
    return [&](const std::shared_ptr<Device>& device) { train(device, used, data, options.to_toml()); };
  };
  Options single = o;  // --graph draws one layer
  single.layers = 1;
  if (!run::dry_run(o.training, mesh, body(o), body(single))) launch(mesh, body(o));
  return 0;
}

int main(int argc, char** argv) {
  return run_program(argc, argv, [&] { return program(argc, argv); });
}
