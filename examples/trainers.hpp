// How the trainers start.
#pragma once

#include <fmt/format.h>

#include <shardlib/device/launch.hpp>
#include <shardlib/device/mesh_axes.hpp>
#include <shardlib/run/dry_run.hpp>
#include <shardlib/run/options.hpp>
#include <shardlib/run/rope_options.hpp>
#include <shardlib/run/trained.hpp>
#include <shardlib/run/training.hpp>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

// The settings that every trainer has besides those of its model.
struct TrainerOptions {
  shardlib::run::Training training;
  shardlib::run::OptimizerOptions optimizer;
  shardlib::run::GatherPolicy gather;
};

namespace gpt {

// A model in a folder of Hugging Face's transformers: what --load, --export and --logits name.
struct HuggingFace {
  std::string load, save, logits;
  std::map<std::string, std::string> kept;  // keys of the loaded config.json, as JSON, that an export repeats
  std::int64_t positions = 0;               // its max_position_embeddings

  [[nodiscard]] bool empty() const { return load.empty() && save.empty() && logits.empty(); }
};

// Declares these options. The value of --load has the name `value`, and `help` describes it.
inline void declare(shardlib::run::Options& options, HuggingFace& o, const char* value, const char* help) {
  namespace run = shardlib::run;
  options.add("--load", o.load, help, run::value_name(value) | run::command_line_only());
  options.add("--export", o.save, "write the weights of the run's last checkpoint as a folder of the same format",
              run::value_name("DIR") | run::command_line_only());
  options.add("--logits", o.logits, "write the logits of the prompt's tokens as a safetensors file, at the end",
              run::value_name("FILE") | run::command_line_only());
}

}  // namespace gpt

// The options that only some of the trainers have: the others name these programs in the error about such an option.
// tests/programs.py compares it with the texts of --help.
inline void declare_others(shardlib::run::Options& options) {
  options.known_by({"gpt2"},
                   {"--heads", "--context", "--norm", "--activation", "--prefetch", "--lora", "--lora-alpha"});
  options.known_by({"gpt_fsdp", "gpt_pipeline", "moe"},
                   {"--n-q-per-kv", "--n-kv", "--d-head", "--rope-base", "--rope-factor", "--rope-context",
                    "--rope-low", "--rope-high", "--rope-yarn", "--rope-beta-fast", "--rope-beta-slow",
                    "--rope-truncate", "--rope-amplitude", "--qkv-bias", "--qk-norm"});
  options.known_by({"gpt_fsdp", "gpt_pipeline"}, {"--init", "--collective-matmul"});
  options.known_by({"gpt2", "gpt_fsdp", "gpt_pipeline"}, {"--tied", "--dropout"});
  options.known_by({"gpt2", "gpt_fsdp", "moe"}, {"--load", "--export", "--logits"});
  options.known_by({"gpt_pipeline"}, {"--schedule", "--stages", "--stage-layers", "--show-schedule",
                                      "--fuse-steady-state", "--show-placement", "--timeline", "--model"});
  options.known_by({"moe"}, {"--experts", "--experts-per-token", "--norm-topk-prob", "--shared", "--shared-gate",
                             "--capacity", "--balance", "--router-z"});
}

// The options that the models of gpt_fsdp, gpt_pipeline and moe share. `d_ff` describes that option.
template <class ModelOptions>
void declare_model(shardlib::run::Options& options, ModelOptions& o, const char* d_ff) {
  namespace run = shardlib::run;
  options.group("model");
  options.add("--layers", o.layers, "number of layers", run::size(1, run::most_layers));
  options.add("--d-model", o.d_model, "width of the residual stream", run::size());
  options.add("--n-q-per-kv", o.n_q_per_kv, "query heads per key-value head", run::size());
  options.add("--n-kv", o.n_kv, "key-value heads", run::size());
  options.add("--d-head", o.d_head, "width of a head", run::size());
  options.add("--d-ff", o.d_ff, d_ff, run::size());
  options.add("--vocabulary", o.vocabulary, "number of token ids (0: the tokenizer's)", run::size(0));
  options.add("--norm-epsilon", o.config.norm_epsilon, "epsilon of RMSNorm", run::above(0));
  run::declare(options, o.config.rope);
  run::declare(options, o.config.recompute);
  options.flag("--qkv-bias", o.qkv_bias, "add biases to queries, keys and values (Qwen 2)");
  options.flag("--qk-norm", o.qk_norm, "normalize each query and each key (Qwen 3)");
}

// Options::parse, which knows the options of the other trainers.
inline bool parse(shardlib::run::Options& options, int argc, char** argv) {
  declare_others(options);
  return options.parse(argc, argv);
}

// The program of --graph: one layer.
template <class Options>
Options one_layer(Options o) {
  o.layers = 1;
  o.optimizer.groups = {};  // may name other layers
  return o;
}

// The options of a dry run, in which `train` loads and writes no models.
template <class Options>
Options without_files(Options o) {
  o.files = {};
  return o;
}

// Trains by `train(device, o)` on each device, or does what --plan and --graph ask for. It decides --gather auto in
// `o`, unless `may_gather_once` says that the program cannot gather weights once per step.
template <class Options, class F>
void train_or_plan(const shardlib::run::Options& options, Options& o, const std::vector<shardlib::AxisSize>& mesh,
                   const F& train, bool may_gather_once = true) {
  const auto body = [&](const Options& used) -> shardlib::DeviceBody {
    return [&](const shardlib::DevicePtr& device) { train(device, used); };
  };
  Options planned = without_files(o);
  if (may_gather_once) {
    shardlib::run::choose_gather(planned.gather, o.training, mesh, body(planned));
    o.gather = planned.gather;
  }
  shardlib::run::announce(options, o.training);
  const Options single = one_layer(planned);
  if (!shardlib::run::dry_run(o.training, mesh, body(planned), body(single), "", &planned.config.recompute,
                              may_gather_once ? &planned.gather : nullptr))
    shardlib::launch(mesh, body(o), shardlib::run::launch_options(o.training));
}
