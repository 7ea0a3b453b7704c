// Trains the GPTs of gpt2_model.hpp, GPT-2 and miniGPT: fully sharded over mesh axis d, tensor parallel over axis t.
//
//   gpt2 --preset gpt2-124m --data tokens.zarr --tokenizer r50k_base.tiktoken --run runs/first --mesh d=4,t=2
//   mpirun -n 2 gpt2 --preset minigpt --data stories.txt --tokenizer r50k_base.tiktoken
//   gpt2 --preset gpt2-124m --load models/gpt2 --steps 0 --prompt "Once upon"     weights of Hugging Face's GPT-2
//   gpt2 --load models/gpt2 --data text.txt --lora 8 --run runs/tuned --export models/tuned     fine-tunes adapters
#include <fmt/format.h>

#include <shardlib/run/hugging_face.hpp>
#include <shardlib/run/trained.hpp>
#include <shardlib/run/training.hpp>
#include <shardlib/shardlib.hpp>

#include <algorithm>
#include <concepts>
#include <cstdint>
#include <functional>
#include <numeric>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "gpt2_hugging_face.hpp"
#include "gpt2_model.hpp"
#include "gpt2_setup.hpp"
#include "gpt2_step.hpp"

using namespace gpt2;

template <dtype C>
double validate(const Setup& s, const Model<C>& w, const io::TokenBatch& rows) {
  const auto positions = iota<"L">(s.mesh, s.o.training.seq);
  return item(all_reduce<"+d +t -> ">(loss<C>(w, place(s, rows), positions, s.config(), {})));
}

// ---- sampling -------------------------------------------------------------------------------------------------------

// One text, a batch of 1 that is padded to the devices of d, with a cache of keys and values.
template <dtype C>
class Decoder {
 public:
  Decoder(const Setup& s, std::function<Model<C>()> model) : s_(s), model_(std::move(model)) {}

  std::vector<float> operator()(std::span<const std::int32_t> ids, std::int64_t position) {
    const Mesh2& mesh = s_.mesh;
    const auto length = std::ssize(ids);
    const NamedSize one{"B", 1, mesh.size("d")};
    if (position == 0) {
      Sizes sizes = sizes_of(s_);
      sizes.insert(sizes.end(), {one, {"Klen", s_.o.context}});
      const auto empty = zeros<C, "B/d Klen H/t D">(mesh, sizes);
      caches_.assign(static_cast<std::size_t>(s_.o.layers), {empty, empty});
    }
    std::vector<i32> row(ids.begin(), ids.end()), places(ids.size());
    std::iota(places.begin(), places.end(), static_cast<i32>(position));
    if (mesh.axis_index("d") != 0) std::ranges::fill(row, 0);
    const auto inputs = from_memory<i32, "B/d L">(mesh, {one, {"L", length}}, std::span<const i32>(row), nullptr);
    const auto positions = from_memory<i32, "L">(mesh, {{"L", length}}, std::span<const i32>(places), nullptr);
    const auto keys = iota<"Klen">(mesh, s_.o.context);
    const auto seen = greater_equal(rename<"L -> Qlen">(positions), keys);
    const auto logits =
        extend<C>(model_(), caches_, inputs, positions, broadcast<"Qlen Klen -> B/d Qlen Klen">(seen, {one}),
                  cast<C>(cast<f32>(equal(positions, keys))), s_.config());
    const auto last = full<i32, "B/d">(mesh, {one}, static_cast<double>(length - 1));
    const auto whole = all_gather<"B/d V/t -> B V">(index_unreduced<"B/d [L] V/t, B/d -> B/d V/t">(logits, last));
    const auto numbers = whole.span().first(static_cast<std::size_t>(s_.vocabulary));
    return {numbers.begin(), numbers.end()};
  }

 private:
  const Setup& s_;
  std::function<Model<C>()> model_;
  Array<"layers", Cache<C>> caches_;
};

// ---- the program ----------------------------------------------------------------------------------------------------

void declare_presets(run::Options& options) {
  // clang-format off
  const auto gpt2 = [&](const char* name, const char* layers, const char* width, const char* heads, const char* ff) {
    options.preset(name, {{"layers", layers}, {"d_model", width}, {"heads", heads}, {"d_ff", ff},
                          {"context", "1024"}, {"seq", "1024"}, {"learning_rate", "6e-4"}});
  };
  gpt2("gpt2-124m", "12", "768", "12", "3072");
  gpt2("gpt2-350m", "24", "1024", "16", "4096");
  gpt2("gpt2-774m", "36", "1280", "20", "5120");
  gpt2("gpt2-1558m", "48", "1600", "25", "6400");
  // The model of the JAX tutorial "Pretraining an LLM": rows are stories filled up with 0, in the order of the data,
  // Adam at a constant rate. Its model has dropout, but its training calls the model without `training=True`, so none.
  options.preset("minigpt", {{"layers", "4"}, {"d_model", "256"}, {"heads", "8"}, {"d_ff", "256"},
                             {"context", "256"}, {"norm", "post"}, {"activation", "relu"}, {"tied", "false"},
                             {"norm_epsilon", "1e-6"}, {"rows", "stories"}, {"shuffle", "no"}, {"batch", "256"},
                             {"seq", "256"}, {"learning_rate", "1e-3"}, {"warmup", "0"},
                             {"final_learning_rate", "1"}, {"weight_decay", "0"}, {"beta2", "0.999"}, {"clip", "0"},
                             {"sample_every", "200"}, {"prompt", "Once upon a time"}, {"top_k", "10"},
                             {"temperature", "1"}});
  // clang-format on
}

void declare(run::Options& options, Options& o) {
  run::declare(options, o.training);
  o.training.may_change = {"recompute", "prefetch", "gather"};  // the same numbers, except for rounding
  o.training.model_settings = {{"activation", ""}, {"lora_alpha", ""}};
  options.group("model");
  options.add("--layers", o.layers, "number of layers", run::size(1, run::most_layers));
  options.add("--d-model", o.d_model, "width of the residual stream", run::size());
  options.add("--heads", o.heads, "attention heads; each is d-model / heads wide", run::size());
  options.add("--d-ff", o.d_ff, "width of the feed-forward layer", run::size());
  options.add("--context", o.context, "number of learned positions, the length of the longest text", run::size());
  options.add("--vocabulary", o.vocabulary, "number of token ids (0: the tokenizer's)", run::size(0));
  options.add("--norm", o.norm, "LayerNorm before each branch (GPT-2) or after it (miniGPT)",
              run::one_of({"pre", "post"}));
  options.add("--activation", o.activation, "activation of the feed-forward layer", run::one_of({"gelu", "relu"}));
  options.flag("--tied", o.tied, "use the embedding as the output layer too");
  options.add("--norm-epsilon", o.config.epsilon, "epsilon of LayerNorm", run::above(0));
  options.add("--dropout", o.dropout, "fraction of elements dropped from embedding and branches",
              run::between(0, 0.999));
  options.add("--dtype", o.dtype, "dtype of products and communication; weights are trained in f32",
              run::one_of({"f32", "bf16"}));
  run::declare(options, o.config.recompute);
  options.flag("--prefetch", o.config.prefetch,
               "gather the next layer's weights while a layer runs; not with --recompute none");
  options.add("--lora", o.lora, "train low-rank adapters of this rank, not the weights (0: the weights)", run::size(0));
  options.add("--lora-alpha", o.lora_alpha, "with --lora: the adapters' output is multiplied by alpha / rank",
              run::above(0));
  options.without_effect({"--lora-alpha"}, [&o](const run::Options&) {
    return o.lora > 0 ? "" : "without --lora R: give that too, or leave it out";
  });
  options.without_effect({"--weight-decay"}, [&o](const run::Options&) {
    const bool none = o.lora > 0 && o.optimizer.groups.decay_mult.empty();
    return none ? "with --lora, as adapters do not decay: leave it out, or give --decay-mult too" : "";
  });
  gpt::declare(options, o.files, "PATH",
               "initial weights: a folder of Hugging Face's GPT-2, which gives the sizes too, or its safetensors file");
  run::declare(options, o.gather);
  run::declare(options, o.optimizer);
  declare_presets(options);
}

template <dtype C>
void train(const Setup& s, const run::Data& data, const std::string& toml) {
  const Options& o = s.o;
  Trained<C> trained;
  auto& state = trained.base.state;
  auto& lora = trained.lora.state;
  state.weights = initial_weights(s);
  lora.weights = initial_adapters(s);
  run::check_groups(o.optimizer.groups, o.lora > 0 ? leaf_names(lora.weights) : leaf_names(state.weights));
  if (!o.files.load.empty()) load_hugging_face(s, state.weights);
  if (o.lora > 0) trained.base.copies = cast_tree<Model<C>>(state.weights);
  const auto keep = [&](auto& trains) {
    run::begin(trains, o.optimizer);
    return run::program_of(s.mesh, trains, o.training);
  };
  run::Program program = o.lora > 0 ? keep(trained.lora) : keep(trained.base);
  program.step = [&](const run::Step& step) { return train_step(s, trained, step); };
  const auto loss_of = [&](const io::TokenBatch& rows) { return validate(s, trained.model(), rows); };
  program.validate = [&](const io::TokenBatch& rows) { return run::sum_of_parts(o.training, rows, loss_of); };
  program.decode = Decoder<C>(s, [&] { return trained.model(); });
  program.parameters = parameter_count(state.weights) + parameter_count(lora.weights);
  program.weight_bytes = run::shard_bytes(state.weights) + run::shard_bytes(lora.weights);
  if (!std::same_as<C, f32>)
    program.copy_bytes = run::shard_bytes(trained.base.copies) + run::shard_bytes(trained.lora.copies);
  if (o.gather.per_step) run::note_gathered(program, trained.base, s.mesh.size("d"));
  program.context = o.context;
  program.dtype = o.dtype;
  const std::int64_t looked_up = o.context * o.d_model + (o.tied ? 0 : s.vocabulary * o.d_model);
  program.flops_per_token =
      run::training_flops_per_token(program.parameters - looked_up, o.layers, o.d_model, o.training.seq);
  // Two of the six FLOPs for each parameter make its gradient.
  if (o.lora > 0) program.flops_per_token -= 2.0 * static_cast<double>(parameter_count(state.weights) - looked_up);
  run::train(s.mesh.device(), o.training, data, toml, program);
  if (!o.files.save.empty())
    export_model(s, state.ema.empty() ? state.weights : state.ema[0], lora.ema.empty() ? lora.weights : lora.ema[0],
                 config_json(s, *data.tokenizer));
  if (!o.files.logits.empty())
    run::write_logits(*s.mesh.device(), *data.tokenizer, o.training.prompt, program.decode, o.files.logits);
}

int program(int argc, char** argv) {
  Options o;
  run::Options options("gpt2", "Trains GPT-2 or miniGPT, fully sharded and tensor parallel over a mesh of devices.");
  declare(options, o);
  if (!parse(options, argc, argv)) return 0;
  read_config(options, o);
  run::imply_tokenizer(options, o.files.load, true);
  const auto mesh = run::chosen_mesh(o.training, "d t");
  run::batch_must_divide(mesh, o.training);
  if (o.d_model % o.heads != 0)
    throw UsageError(
        fmt::format("--d-model {} does not divide into --heads {}: choose a multiple", o.d_model, o.heads));
  if (!options.given("--seq") && o.training.seq > o.context)
    options.imply("--seq", std::to_string(o.context), fmt::format("--context {}", o.context));
  if (o.training.seq > o.context)
    throw UsageError(
        fmt::format("--seq {} is longer than --context {}, the number of positions", o.training.seq, o.context));
  if (o.config.prefetch && o.config.recompute.name == "none")
    throw UsageError(
        "--prefetch needs a backward pass that recomputes, not --recompute none: choose marked or another one");
  if (o.config.prefetch && o.gather.name == "per-step")
    throw UsageError("--prefetch gathers weights layer by layer: leave it out, or choose --gather per-microbatch");
  if (o.lora > 0 && o.gather.name == "per-step")
    throw UsageError("--lora gathers weights where they are used: leave it out, or choose --gather per-microbatch");
  if (o.lora > o.d_model)
    throw UsageError(fmt::format("--lora {} is not a low rank: choose at most --d-model {}", o.lora, o.d_model));
  if (o.lora > 0 && o.optimizer.name == "muon")
    throw UsageError(
        "--optimizer muon orthogonalizes w_up and w_down, which --lora does not train: choose another one");
  if (!o.files.save.empty() && o.training.directory.empty())
    throw UsageError("--export writes the weights of a run's checkpoint: give --run too");
  must_be_gpt2(o);
  if (!o.files.load.empty() && !o.training.plan)
    o.training.initial_weights = naming_option("--load", [&] { return io::SafetensorsFiles(o.files.load).describe(); });
  if (o.lora > 0 && o.files.load.empty() && !o.training.plan)
    throw UsageError("--lora trains adapters of the weights of --load, which the run does not keep: give it too");
  if (o.lora > 0) o.training.frozen_weights = o.training.initial_weights;
  const run::Data data = run::open_data(o.training, o.vocabulary);
  run::note_padding(mesh, sizes_of(o, data.vocabulary, mesh[0].size, mesh[1].size),
                    {{"V", "--vocabulary"}, {"M", "--d-model"}, {"H", "--heads"}, {"F", "--d-ff"}, {"R", "--lora"}});
  if (!o.training.plan && o.training.graph.empty()) {
    run::note_loaded(o.training, data, o.files.load);
    if (!o.files.logits.empty()) run::require_logits(*data.tokenizer, o.training.prompt, o.context, data.vocabulary);
    if (!o.files.save.empty()) run::require_writable_folder(o.training, o.files.save, "--export");
    if (!o.files.logits.empty()) run::require_logits_file(o.training, o.files.logits);
  }
  const auto train_on = [&](const DevicePtr& device, const Options& used) {
    const Setup setup{Mesh2(device), used, data.vocabulary};
    (used.dtype == "bf16" ? train<bf16> : train<f32>)(setup, data, options.to_toml());
  };
  train_or_plan(options, o, mesh, train_on, !o.config.prefetch && o.lora == 0);
  return 0;
}

int main(int argc, char** argv) {
  return run_program(argc, argv, [&] { return program(argc, argv); });
}
