// Folders of Hugging Face's transformers with models whose attention is Llama's, dense or with experts: what --load,
// --export and --logits of gpt_fsdp and moe have in common.
#pragma once

#include <fmt/format.h>

#include <shardlib/io/agree.hpp>
#include <shardlib/io/file.hpp>
#include <shardlib/io/formats/safetensors_tree.hpp>
#include <shardlib/run/hugging_face.hpp>
#include <shardlib/run/sampling.hpp>
#include <shardlib/run/training.hpp>
#include <shardlib/shardlib.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <system_error>
#include <utility>

#include "hugging_face_rope.hpp"
#include "trainers.hpp"

namespace gpt {

using namespace shardlib;

// The defaults of transformers' classes for keys that config.json lacks; 0 is none.
struct Architecture {
  const char *type, *name;
  std::int64_t kv_heads, head_dim, window, positions;  // 0: as many as heads, hidden / heads, none
  const char *begin, *end;                             // tokens
  bool qkv_bias, qk_norm;
  const char *rope_base = "10000", *norm_epsilon = "1e-6";

  // Qwen's tokenizers put no token before a text, and its attention has a window only if `use_sliding_window` is true.
  [[nodiscard]] bool is_qwen() const { return qkv_bias || qk_norm; }
};
inline std::string quoted_json(const std::string& text) {
  return '"' + text + '"';
}

// The architecture that both `model_type` and `architectures` of config.json name.
inline const Architecture& architecture_of(run::HuggingFaceConfig& config,
                                           std::span<const Architecture> architectures) {
  std::string all;
  for (const Architecture& one : architectures) all += (all.empty() ? "" : " or ") + quoted_json(one.type);
  if (!config.has("model_type")) config.refuse("model_type", all);
  for (const Architecture& one : architectures)
    if (config.value("model_type") == quoted_json(one.type)) {
      config.require("architectures", {"[" + quoted_json(one.name) + "]"});
      return one;
    }
  config.refuse("model_type", all);
}

// Where the leaves of embedding, norms and attention are in the files. Kernels are stored [out, in]. The query heads of
// a key-value head follow each other, and rotary positions pair the halves of a head, as they do here: nothing else is
// reordered.
inline std::map<std::string, io::StoredLeaf> decoder_leaves() {
  return {{"embed", {"model.embed_tokens.weight"}},
          {"final_norm", {"model.norm.weight"}},
          {"layers.*.norm1", {"model.layers.*.input_layernorm.weight"}},
          {"layers.*.norm2", {"model.layers.*.post_attention_layernorm.weight"}},
          {"layers.*.w_q", {"model.layers.*.self_attn.q_proj.weight", {2, 1, 3, 0}, {3, 1}}},
          {"layers.*.w_k", {"model.layers.*.self_attn.k_proj.weight", {1, 2, 0}, {2, 1}}},
          {"layers.*.w_v", {"model.layers.*.self_attn.v_proj.weight", {1, 2, 0}, {2, 1}}},
          {"layers.*.w_o", {"model.layers.*.self_attn.o_proj.weight", {0, 2, 1, 3}, {1, 3}}},
          {"layers.*.b_q.0", {"model.layers.*.self_attn.q_proj.bias"}},
          {"layers.*.b_k.0", {"model.layers.*.self_attn.k_proj.bias"}},
          {"layers.*.b_v.0", {"model.layers.*.self_attn.v_proj.bias"}},
          {"layers.*.q_norm.0", {"model.layers.*.self_attn.q_norm.weight"}},
          {"layers.*.k_norm.0", {"model.layers.*.self_attn.k_norm.weight"}}};
}

// ---- reading --------------------------------------------------------------------------------------------------------

// The config.json of --load, if it is given, after a check of the folders.
inline std::optional<run::HuggingFaceConfig> loaded_config(const HuggingFace& files, const run::Training& training) {
  if (!files.save.empty() && training.directory.empty())
    throw UsageError("--export writes the weights of a run's checkpoint: give --run too");
  if (files.load.empty()) return {};
  std::error_code ignored;
  if (io::file_exists(files.load) && !std::filesystem::is_directory(files.load, ignored))
    throw UsageError(fmt::format(
        "--load '{}' is not a folder: give the folder of the model, which has its config.json too", files.load));
  run::require_other_folder(files.save, files.load);
  return naming_option("--load", [&] { return run::HuggingFaceConfig(files.load); });
}

// Sets the options of the heads and their width.
inline void imply_heads(run::Options& options, run::HuggingFaceConfig& config, const Architecture& of) {
  const std::int64_t heads = config.integer("num_attention_heads"), width = config.integer("hidden_size");
  if (heads == 0) config.refuse("num_attention_heads", "at least 1");
  // null is the heads' number in all classes.
  const std::int64_t absent = config.is_null("num_key_value_heads") || of.kv_heads == 0 ? heads : of.kv_heads;
  const std::int64_t kv = config.integer("num_key_value_heads", absent);
  if (kv == 0 || heads % kv != 0)
    config.refuse("num_key_value_heads",
                  fmt::format("a divisor of the {} of 'num_attention_heads' (an absent one is {})", heads, absent));
  options.imply("--n-kv", std::to_string(kv), fmt::format("'{}': num_key_value_heads", config.path()));
  options.imply("--n-q-per-kv", std::to_string(heads / kv), fmt::format("'{}': num_attention_heads", config.path()));
  if (!config.has("head_dim") && of.head_dim == 0 && width % heads != 0)
    config.refuse("head_dim", fmt::format("given, as {} heads do not divide 'hidden_size', {}", heads, width));
  const std::int64_t head = config.integer("head_dim", of.head_dim == 0 ? width / heads : of.head_dim);
  if (head % 2 != 0) config.refuse("head_dim", fmt::format("even, as rotary positions rotate pairs: {} is not", head));
  options.imply("--d-head", std::to_string(head), fmt::format("'{}': head_dim", config.path()));
  for (const auto& [option, has] : {std::pair{"--qkv-bias", of.qkv_bias}, std::pair{"--qk-norm", of.qk_norm}})
    options.imply(option, has ? "true" : "false", fmt::format("'{}': model_type", config.path()));
}

// Refuses a window of attention that is shorter than a row.
inline void check_window(run::HuggingFaceConfig& config, const Architecture& of, std::int64_t seq,
                         std::int64_t layers) {
  const bool given = config.has("sliding_window");
  bool open = given || (of.window > 0 && !config.is_null("sliding_window"));  // null: no window, whatever the class
  if (of.is_qwen()) {
    config.require("use_sliding_window", {"true", "false"});
    open = open && config.json("use_sliding_window", "false") == "true";
    const std::string sliding = quoted_json("sliding_attention"), whole = quoted_json("full_attention");
    std::string kinds = config.json("layer_types", ""), expected;
    for (std::size_t at = 0; open && (at = kinds.find(sliding)) != std::string::npos;)
      kinds.replace(at, sliding.size(), whole);
    for (std::int64_t i = 0; i < layers; ++i) expected += (i == 0 ? "" : ",") + whole;
    if (config.has("layer_types") && kinds != "[" + expected + "]")
      config.refuse("layer_types", fmt::format("{} for each of the {} layers", whole, layers));
  }
  if (!open) return;
  if (!given && seq > of.window)
    config.refuse("sliding_window", fmt::format("null or at least --seq {}: an absent one is {}", seq, of.window));
  if (given && config.integer("sliding_window") < seq)
    config.refuse("sliding_window", fmt::format("null or at least --seq {}", seq));
}

// Sets the options of the token before a text.
inline void imply_tokens(run::Options& options, run::HuggingFaceConfig& config, const Architecture& of) {
  const bool none = config.json("bos_token_id", of.begin) == "null";
  if (none || of.is_qwen()) options.imply("--sample-begin", "-1", fmt::format("'{}': bos_token_id", config.path()));
  if (none) return;
  const std::int64_t begin = config.integer("bos_token_id", 1);
  if (begin >= config.integer("vocab_size")) config.refuse("bos_token_id", "below 'vocab_size' (an absent one is 1)");
  if (!of.is_qwen()) config.imply(options, "--sample-begin", "bos_token_id", of.begin);
  config.imply(options, "--row-begin", "bos_token_id", of.begin);
}

// The options and settings that all these architectures have; `rope` and `layers` are the options' values, which this
// call sets.
inline void imply_decoder(run::Options& options, run::HuggingFaceConfig& config, const Architecture& of,
                          HuggingFace& files, const run::Training& training, const RopeAngles& rope,
                          const std::int64_t& layers) {
  config.require("hidden_act", {"\"silu\"", "\"swish\""});
  if (!of.qkv_bias) config.require("attention_bias", {"false"});  // Qwen 2 has no such key
  for (const char* key : {"mlp_bias", "rope_interleaved", "use_mrope"}) config.require(key, {"false"});
  config.imply(options, "--layers", "num_hidden_layers");
  config.imply(options, "--d-model", "hidden_size");
  config.imply(options, "--vocabulary", "vocab_size");
  config.imply(options, "--norm-epsilon", "rms_norm_eps", of.norm_epsilon);
  imply_heads(options, config, of);
  check_window(config, of, training.seq, layers);
  files.positions = config.integer("max_position_embeddings", of.positions);
  const std::string rope_scaling = RopeConfig(options, config, rope, files.positions).imply(of.rope_base, training.seq);
  imply_tokens(options, config, of);
  files.kept = {{"architectures", config.json("architectures", "[" + quoted_json(of.name) + "]")},
                {"model_type", config.value("model_type")},
                {"bos_token_id", config.json("bos_token_id", of.begin)},
                {"eos_token_id", config.json("eos_token_id", of.end)},
                {"rope_scaling", rope_scaling},
                {"pad_token_id", config.json("pad_token_id", "null")}};
  for (const char* key : {"sliding_window", "use_sliding_window", "max_window_layers", "layer_types"})
    if (const std::string text = config.json(key, ""); !text.empty()) files.kept[key] = text;
}

// Reads the rest of config.json, and the tokenizer. `harmless` are keys that change nothing in this model.
inline void finish_config(run::Options& options, const run::HuggingFaceConfig& config, const HuggingFace& files,
                          run::Training& training, const std::set<std::string>& harmless = {}) {
  std::set<std::string> all{"attention_dropout", "is_llama_config", "pretraining_tp"};
  all.insert(harmless.begin(), harmless.end());
  config.finish(all);
  run::imply_tokenizer(options, files.load);
  if (!training.plan)
    training.initial_weights = naming_option("--load", [&] { return io::SafetensorsFiles(files.load).describe(); });
}

// Checks --load and --logits before the devices start.
inline void check_files(const HuggingFace& files, const run::Training& training, const run::Data& data) {
  run::note_loaded(training, data, files.load);
  if (!files.logits.empty() && !training.plan && training.graph.empty())
    run::require_logits(*data.tokenizer, training.prompt, training.seq, data.vocabulary);
}

// Before the first step: tries the outputs, and loads the weights.
template <Spec A, class Model>
void load_weights(const Mesh<A>& mesh, const HuggingFace& files, const run::Training& training,
                  const io::StoredTable& table, bool tied, Model& w) {
  if (files.empty()) return;
  io::together(*mesh.device(), "", [&] {
    if (mesh.rank() != 0) return;
    if (!files.save.empty()) run::require_writable_folder(training, files.save, "--export");
    if (!files.logits.empty()) run::require_logits_file(training, files.logits);
    if (!files.load.empty() && tied)
      run::require_tied(io::SafetensorsFiles(files.load), "lm_head.weight", "model.embed_tokens.weight");
  });
  if (files.load.empty()) return;
  // A tied output layer, and the frequencies that older versions of transformers stored.
  const auto may_be_left = [&](const std::string& name) {
    return (tied && name == "lm_head.weight") || name.ends_with(".self_attn.rotary_emb.inv_freq");
  };
  io::load_safetensors(mesh, files.load, w, table, {may_be_left});
}

// ---- writing --------------------------------------------------------------------------------------------------------

// The keys of config.json that an export repeats from the loaded one, or of a new model of this architecture.
inline std::string kept_json(const HuggingFace& files, const Architecture& of, const RopeAngles& rope,
                             const run::Training& training, const run::Data& data) {
  auto kept = files.kept;
  kept.try_emplace("architectures", "[" + quoted_json(of.name) + "]");
  kept.try_emplace("model_type", quoted_json(of.type));
  const auto begin = run::sample_options(training).begin;
  kept.try_emplace("bos_token_id", begin ? std::to_string(*begin) : "null");
  kept.try_emplace("eos_token_id", std::to_string(data.tokenizer->end_of_text()));
  kept.try_emplace("rope_scaling", rope_scaling_json(rope));
  kept["max_position_embeddings"] = std::to_string(std::max(training.seq, files.positions));
  std::string text;
  for (const auto& [key, value] : kept) text += fmt::format(",\n  \"{}\": {}", key, value);
  return text;
}

// config.json of a model by its options. `feed_forward` and `of_class` are the keys that not all classes have.
template <class ModelOptions>
std::string decoder_json(const ModelOptions& o, const std::string& feed_forward, const std::string& of_class, bool tied,
                         const std::string& kept) {
  return fmt::format(R"({{
  "torch_dtype": "float32",
  "hidden_size": {},
  "num_hidden_layers": {},
  "num_attention_heads": {},
  "num_key_value_heads": {},
  "head_dim": {},
  {},
  "vocab_size": {},
  "hidden_act": "silu",{}
  "rms_norm_eps": {},
  "rope_theta": {},
  "tie_word_embeddings": {}{}
}}
)",
                     o.d_model, o.layers, o.n_q_per_kv * o.n_kv, o.n_kv, o.d_head, feed_forward, o.vocabulary, of_class,
                     run::json_float(o.config.norm_epsilon), run::json_float(o.config.rope.base), tied, kept);
}

// --export and --logits, after the run. `config` makes the text of config.json.
template <class Config>
void write_outputs(const DevicePtr& device, const HuggingFace& files, const run::Training& training,
                   const run::Data& data, const run::Program& program, const io::StoredTable& table,
                   const Config& config) {
  if (!files.save.empty()) run::export_folder(*device, training.directory, files.save, table, config());
  if (!files.logits.empty()) run::write_logits(*device, *data.tokenizer, training.prompt, program.decode, files.logits);
}

}  // namespace gpt
