// Folders of Hugging Face's transformers with models of the Llama architecture (Llama, Mistral, Qwen 2, Qwen 3), for
// the model of gpt_model.hpp: --load, --export and --logits of gpt_fsdp.
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
#include <string>
#include <system_error>
#include <utility>

#include "gpt_setup.hpp"

namespace gpt {

struct HuggingFace {
  std::string load, save, logits;
  // Keys of config.json, as JSON, that an export repeats from the loaded one.
  std::map<std::string, std::string> kept;
  std::int64_t positions = 0;  // max_position_embeddings of the loaded one
};

inline void declare(run::Options& options, HuggingFace& o) {
  options.add("--load", o.load, "initial weights and sizes: a folder of a Llama, Mistral or Qwen model by Hugging Face",
              run::value_name("DIR") | run::command_line_only());
  options.add("--export", o.save, "write the weights of the run's last checkpoint as a folder of the same format",
              run::value_name("DIR") | run::command_line_only());
  options.add("--logits", o.logits, "write the logits of the prompt's tokens as a safetensors file, at the end",
              run::value_name("FILE") | run::command_line_only());
}

// What transformers' classes have where config.json says nothing; 0 is none.
struct Architecture {
  const char *type, *name;
  std::int64_t kv_heads, head_dim, window, positions;  // 0: as many as heads, hidden / heads, none
  const char *begin, *end;                             // tokens
  bool qkv_bias, qk_norm;

  // Qwen's tokenizers put no token before a text, and its windows stay shut unless `use_sliding_window` opens them.
  [[nodiscard]] bool is_qwen() const { return qkv_bias || qk_norm; }
};
inline constexpr Architecture architectures[] = {
    {"llama", "LlamaForCausalLM", 0, 0, 0, 2048, "1", "2", false, false},
    {"mistral", "MistralForCausalLM", 8, 0, 4096, 131072, "1", "2", false, false},
    {"qwen2", "Qwen2ForCausalLM", 32, 0, 4096, 32768, "null", "null", true, false},
    {"qwen3", "Qwen3ForCausalLM", 32, 128, 4096, 32768, "null", "null", false, true},
};
inline std::string quoted_json(const std::string& text) {
  return '"' + text + '"';
}

// The one that config.json names twice.
inline const Architecture& architecture_of(run::HuggingFaceConfig& config) {
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

// Where the leaves lie. Kernels are stored [out, in]. The query heads of a key-value head follow each other, and rotary
// positions pair the halves of a head, as they do here: nothing else is reordered.
inline io::StoredTable stored_table(bool tied) {
  std::map<std::string, io::StoredLeaf> leaves{
      {"embed", {"model.embed_tokens.weight"}},
      {"final_norm", {"model.norm.weight"}},
      {"layers.*.norm1", {"model.layers.*.input_layernorm.weight"}},
      {"layers.*.norm2", {"model.layers.*.post_attention_layernorm.weight"}},
      {"layers.*.w_q", {"model.layers.*.self_attn.q_proj.weight", {2, 1, 3, 0}, {3, 1}}},
      {"layers.*.w_k", {"model.layers.*.self_attn.k_proj.weight", {1, 2, 0}, {2, 1}}},
      {"layers.*.w_v", {"model.layers.*.self_attn.v_proj.weight", {1, 2, 0}, {2, 1}}},
      {"layers.*.w_o", {"model.layers.*.self_attn.o_proj.weight", {0, 2, 1, 3}, {1, 3}}},
      {"layers.*.w_gate", {"model.layers.*.mlp.gate_proj.weight", {1, 0}}},
      {"layers.*.w_up", {"model.layers.*.mlp.up_proj.weight", {1, 0}}},
      {"layers.*.w_down", {"model.layers.*.mlp.down_proj.weight"}},
      {"layers.*.b_q.0", {"model.layers.*.self_attn.q_proj.bias"}},
      {"layers.*.b_k.0", {"model.layers.*.self_attn.k_proj.bias"}},
      {"layers.*.b_v.0", {"model.layers.*.self_attn.v_proj.bias"}},
      {"layers.*.q_norm.0", {"model.layers.*.self_attn.q_norm.weight"}},
      {"layers.*.k_norm.0", {"model.layers.*.self_attn.k_norm.weight"}}};
  if (!tied) leaves["unembed.*"] = {"lm_head.weight"};
  return io::table_of(std::move(leaves));
}

// ---- reading --------------------------------------------------------------------------------------------------------

// Rotary positions: `rope_theta` and the object `rope_scaling`, or, as transformers 5 writes them, both in
// `rope_parameters`. A file may have both forms.
inline void imply_rope(run::Options& options, run::HuggingFaceConfig& config, const ModelOptions& o) {
  config.imply(options, "--rope-base",
               config.first_of({"rope_theta", "rope_parameters.rope_theta", "rope_scaling.rope_theta"}), "10000");
  const auto key = [&](const std::string& name) {
    return config.first_of({"rope_scaling." + name, "rope_parameters." + name});
  };
  // Older versions say `type`; those in between both.
  const std::string type = config.first_of(
      {"rope_scaling.rope_type", "rope_scaling.type", "rope_parameters.rope_type", "rope_parameters.type"});
  config.require(type, {"\"default\"", "\"linear\"", "\"llama3\""});
  const std::string kind = config.has(type) ? config.value(type) : "\"default\"";
  const auto imply = [&](const char* option, const char* name) { config.imply(options, option, key(name)); };
  if (kind == "\"default\"") return options.imply("--rope-factor", "1", fmt::format("'{}': {}", config.path(), type));
  imply("--rope-factor", "factor");
  if (kind == "\"linear\"") return options.imply("--rope-context", "0", fmt::format("'{}': {}", config.path(), type));
  imply("--rope-low", "low_freq_factor");
  imply("--rope-high", "high_freq_factor");
  imply("--rope-context", "original_max_position_embeddings");
  const RopeAngles& rope = o.config.rope;
  if (rope.low_freq_factor >= rope.high_freq_factor)
    config.refuse(key("low_freq_factor"), fmt::format("below the {} of 'high_freq_factor'", rope.high_freq_factor));
}

// Heads and their width.
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

// How far attention looks back: whole rows.
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

// The tokens before a text and after it.
inline void imply_tokens(run::Options& options, run::HuggingFaceConfig& config, const Architecture& of) {
  const bool none = config.json("bos_token_id", of.begin) == "null";
  if (none || of.is_qwen()) options.imply("--sample-begin", "-1", fmt::format("'{}': bos_token_id", config.path()));
  if (none) return;
  const std::int64_t begin = config.integer("bos_token_id", 1);
  if (begin >= config.integer("vocab_size")) config.refuse("bos_token_id", "below 'vocab_size' (an absent one is 1)");
  if (!of.is_qwen()) config.imply(options, "--sample-begin", "bos_token_id", of.begin);
  config.imply(options, "--row-begin", "bos_token_id", of.begin);
}

// --load: the options, among them those of `o`, take what config.json says. What this model does not compute exactly is
// refused.
inline void read_config(run::Options& options, const ModelOptions& o, HuggingFace& files, run::Training& training) {
  if (!files.save.empty() && training.directory.empty())
    throw UsageError("--export writes the weights of a run's checkpoint: give --run too");
  if (!files.save.empty() && o.qkv_bias && o.qk_norm)
    throw UsageError(
        "--export: no architecture of Hugging Face has both --qkv-bias and --qk-norm; leave one of them out");
  if (o.init == "seqax" && !(files.save.empty() && files.load.empty()))
    throw UsageError(
        "--init seqax (of seqax's presets, too): attention's scores are not scaled, and Hugging Face's models scale "
        "them by 1/sqrt(d_head); "
        "leave "
        "out --load and --export, or choose --init depth-scaled");
  if (files.load.empty()) return;
  std::error_code ignored;
  if (io::file_exists(files.load) && !std::filesystem::is_directory(files.load, ignored))
    throw UsageError(fmt::format(
        "--load '{}' is not a folder: give the folder of the model, which has its config.json too", files.load));
  run::require_other_folder(files.save, files.load);
  run::HuggingFaceConfig config(files.load);
  const Architecture& of = architecture_of(config);
  config.require("hidden_act", {"\"silu\"", "\"swish\""});
  if (!of.qkv_bias) config.require("attention_bias", {"false"});  // Qwen 2 has no such key
  for (const char* key : {"mlp_bias", "rope_interleaved", "use_mrope"}) config.require(key, {"false"});
  config.imply(options, "--layers", "num_hidden_layers");
  config.imply(options, "--d-model", "hidden_size");
  config.imply(options, "--d-ff", "intermediate_size");
  config.imply(options, "--vocabulary", "vocab_size");
  config.imply(options, "--norm-epsilon", "rms_norm_eps", "1e-6");
  config.imply(options, "--tied", "tie_word_embeddings", "false");
  imply_heads(options, config, of);
  check_window(config, of, training.seq, o.layers);
  imply_rope(options, config, o);
  imply_tokens(options, config, of);
  files.kept = {{"architectures", config.json("architectures", "[" + quoted_json(of.name) + "]")},
                {"model_type", config.value("model_type")},
                {"bos_token_id", config.json("bos_token_id", of.begin)},
                {"eos_token_id", config.json("eos_token_id", of.end)},
                {"pad_token_id", config.json("pad_token_id", "null")}};
  files.positions = config.integer("max_position_embeddings", of.positions);
  for (const char* key : {"sliding_window", "use_sliding_window", "max_window_layers", "layer_types"})
    if (const std::string text = config.json(key, ""); !text.empty()) files.kept[key] = text;
  config.finish({"_attn_implementation_autoset", "_name_or_path", "attention_dropout", "dtype", "initializer_range",
                 "is_llama_config", "pretraining_tp", "torch_dtype", "transformers.js_config", "transformers_version",
                 "use_cache"});
  run::imply_tokenizer(options, files.load);
  if (!training.plan) training.initial_weights = io::SafetensorsFiles(files.load).describe();
}

// Before the devices start: what --load and --logits ask for.
inline void check_files(const HuggingFace& files, const run::Training& training, const run::Data& data) {
  run::note_loaded(training, data, files.load);
  if (!files.logits.empty() && !training.plan && training.graph.empty())
    run::require_logits(*data.tokenizer, training.prompt, training.seq, data.vocabulary);
}

// Before the first step: tries the outputs, and loads the weights.
inline void load_weights(const Mesh<"r d s t">& mesh, const ModelOptions& o, const HuggingFace& files, Model<f32>& w) {
  if (mesh.device()->is_dry()) return;
  io::together(*mesh.device(), "", [&] {
    if (mesh.rank() != 0) return;
    if (!files.save.empty()) run::require_writable_folder(files.save, "--export");
    if (!files.logits.empty()) io::require_writable(files.logits, "--logits");
    if (!files.load.empty() && o.tied)
      run::require_tied(io::SafetensorsFiles(files.load), "lm_head.weight", "model.embed_tokens.weight");
  });
  if (files.load.empty()) return;
  // A tied output layer, and the frequencies that older versions of transformers stored.
  const auto may_be_left = [&](const std::string& name) {
    return (o.tied && name == "lm_head.weight") || name.ends_with(".self_attn.rotary_emb.inv_freq");
  };
  io::load_safetensors(mesh, files.load, w, stored_table(o.tied), {may_be_left});
}

// ---- writing --------------------------------------------------------------------------------------------------------

inline std::string config_json(const ModelOptions& o, const std::map<std::string, std::string>& kept) {
  const RopeAngles& rope = o.config.rope;
  std::string scaling = "null";
  if (rope.factor != 1)
    scaling = fmt::format(R"({{"rope_type": "linear", "factor": {}}})", run::json_float(rope.factor));
  if (rope.factor != 1 && rope.context > 0)
    scaling = fmt::format(R"({{"rope_type": "llama3", "factor": {}, "low_freq_factor": {}, "high_freq_factor": {},
                   "original_max_position_embeddings": {}}})",
                          run::json_float(rope.factor), run::json_float(rope.low_freq_factor),
                          run::json_float(rope.high_freq_factor), rope.context);
  // Those that the class knows.
  const char* const attention = o.qkv_bias ? "" : "\"attention_bias\": false,\n  ";
  const char* const feed_forward = o.qkv_bias || o.qk_norm ? "" : "\"mlp_bias\": false,\n  ";
  std::string text =
      fmt::format(R"({{
  "torch_dtype": "float32",
  "hidden_size": {},
  "num_hidden_layers": {},
  "num_attention_heads": {},
  "num_key_value_heads": {},
  "head_dim": {},
  "intermediate_size": {},
  "vocab_size": {},
  "hidden_act": "silu",
  {}{}"rms_norm_eps": {},
  "rope_theta": {},
  "rope_scaling": {},
  "tie_word_embeddings": {})",
                  o.d_model, o.layers, o.n_q_per_kv * o.n_kv, o.n_kv, o.d_head, o.d_ff, o.vocabulary, attention,
                  feed_forward, run::json_float(o.config.norm_epsilon), run::json_float(rope.base), scaling, o.tied);
  for (const auto& [key, value] : kept) text += fmt::format(",\n  \"{}\": {}", key, value);
  return text + "\n}\n";
}

// --export and --logits, behind the run.
inline void write_outputs(const DevicePtr& device, const ModelOptions& o, const HuggingFace& files,
                          const run::Training& training, const run::Data& data, const run::Program& program) {
  if (device->is_dry()) return;
  if (!files.save.empty()) {
    auto kept = files.kept;
    const Architecture& of = *std::ranges::find_if(
        architectures, [&](const Architecture& one) { return one.qkv_bias == o.qkv_bias && one.qk_norm == o.qk_norm; });
    kept.try_emplace("architectures", "[" + quoted_json(of.name) + "]");
    kept.try_emplace("model_type", quoted_json(of.type));
    const auto begin = run::sample_options(training).begin;
    kept.try_emplace("bos_token_id", begin ? std::to_string(*begin) : "null");
    kept.try_emplace("eos_token_id", std::to_string(data.tokenizer->end_of_text()));
    kept["max_position_embeddings"] = std::to_string(std::max(training.seq, files.positions));
    run::export_folder(*device, training.directory, files.save, stored_table(o.tied), config_json(o, kept));
  }
  if (!files.logits.empty()) run::write_logits(*device, *data.tokenizer, training.prompt, program.decode, files.logits);
}

}  // namespace gpt
