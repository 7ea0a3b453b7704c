// Hugging Face's folders of GPT-2 for gpt2.cpp: --load and --export.
#pragma once

#include <fmt/format.h>

#include <shardlib/io/agree.hpp>
#include <shardlib/io/checkpoint/checkpoint.hpp>
#include <shardlib/io/formats/safetensors_tree.hpp>
#include <shardlib/run/hugging_face.hpp>

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <system_error>
#include <utility>

#include "gpt2_setup.hpp"

namespace gpt2 {

// ---- Hugging Face's GPT-2 -------------------------------------------------------------------------------------------

// Where the leaves are in the files. Kernels are stored [in, out]; those of queries, keys and values are side by side
// in one tensor.
inline io::StoredTable stored_table(const std::string& prefix) {
  std::map<std::string, io::StoredLeaf> leaves{{"embed", {"wte.weight"}},
                                               {"positions", {"wpe.weight"}},
                                               {"final_norm.*.scale", {"ln_f.weight"}},
                                               {"final_norm.*.bias", {"ln_f.bias"}},
                                               {"layers.*.norm1.scale", {"h.*.ln_1.weight"}},
                                               {"layers.*.norm1.bias", {"h.*.ln_1.bias"}},
                                               {"layers.*.norm2.scale", {"h.*.ln_2.weight"}},
                                               {"layers.*.norm2.bias", {"h.*.ln_2.bias"}},
                                               {"layers.*.w_q", {"h.*.attn.c_attn.weight", {}, {1, 2}, 1, 0, 3}},
                                               {"layers.*.w_k", {"h.*.attn.c_attn.weight", {}, {1, 2}, 1, 1, 3}},
                                               {"layers.*.w_v", {"h.*.attn.c_attn.weight", {}, {1, 2}, 1, 2, 3}},
                                               {"layers.*.b_q", {"h.*.attn.c_attn.bias", {}, {}, 0, 0, 3}},
                                               {"layers.*.b_k", {"h.*.attn.c_attn.bias", {}, {}, 0, 1, 3}},
                                               {"layers.*.b_v", {"h.*.attn.c_attn.bias", {}, {}, 0, 2, 3}},
                                               {"layers.*.w_o", {"h.*.attn.c_proj.weight", {}, {2, 1}}},
                                               {"layers.*.b_o", {"h.*.attn.c_proj.bias"}},
                                               {"layers.*.w_up", {"h.*.mlp.c_fc.weight"}},
                                               {"layers.*.b_up", {"h.*.mlp.c_fc.bias"}},
                                               {"layers.*.w_down", {"h.*.mlp.c_proj.weight"}},
                                               {"layers.*.b_down", {"h.*.mlp.c_proj.bias"}}};
  for (auto& [leaf, stored] : leaves) stored.name.insert(0, prefix);
  return io::table_of(std::move(leaves));
}

// The layout has no place for other forms: weights would be left out, or a reader would misinterpret them.
inline void must_be_gpt2(const Options& o) {
  if (o.files.load.empty() && o.files.save.empty()) return;
  std::string wrong;
  for (const auto& [is, option] :
       {std::pair(o.norm != "pre", "--norm pre"), {o.activation != "gelu", "--activation gelu"}, {!o.tied, "--tied"}})
    if (is) wrong += (wrong.empty() ? "" : ", ") + std::string(option);
  if (!wrong.empty())
    throw UsageError(
        fmt::format("{}: Hugging Face's layout of GPT-2 has no place for this form of the model: it needs {}",
                    o.files.load.empty() ? "--export" : "--load", wrong));
}

// --load of a folder: gives the options the values of config.json, and refuses what this model does not compute
// exactly.
inline void read_config(run::Options& options, Options& o) {
  if (o.files.load.empty()) return;
  run::require_other_folder(o.files.save, o.files.load);
  options.imply("--sample-begin", "-1", "--load");  // these models were trained on texts without a first token
  std::error_code ignored;
  if (!std::filesystem::is_directory(o.files.load, ignored)) return;
  auto config = naming_option("--load", [&] { return run::HuggingFaceConfig(o.files.load); });
  config.require("architectures", {R"(["GPT2LMHeadModel"])"});
  if (!config.has("model_type")) config.refuse("model_type", "\"gpt2\"");
  config.require("model_type", {"\"gpt2\""});
  config.require("activation_function", {"\"gelu_new\""});
  for (const char* key : {"scale_attn_weights", "tie_word_embeddings"}) config.require(key, {"true"});
  for (const char* key : {"scale_attn_by_inverse_layer_idx", "add_cross_attention"}) config.require(key, {"false"});
  config.imply(options, "--layers", "n_layer");
  config.imply(options, "--heads", "n_head");
  config.imply(options, "--d-model", "n_embd");
  if (o.d_model % o.heads != 0) config.refuse("n_head", fmt::format("a divisor of the {} of 'n_embd'", o.d_model));
  config.imply(options, "--d-ff", "n_inner", std::to_string(4 * config.integer("n_embd")));
  config.imply(options, "--context", "n_positions");
  config.imply(options, "--vocabulary", "vocab_size");
  config.imply(options, "--norm-epsilon", "layer_norm_epsilon", "1e-5");
  // Where keys are absent, the defaults of transformers' class.
  for (const char* key : {"bos_token_id", "eos_token_id"}) o.files.kept[key] = config.json(key, "50256");
  if (!config.is_null("bos_token_id")) {
    const std::int64_t begin = config.integer("bos_token_id", 50256);
    if (begin < config.integer("vocab_size")) config.imply(options, "--row-begin", "bos_token_id", "50256");
  }
  config.finish({"_num_labels", "attn_pdrop", "embd_pdrop", "id2label", "label2id", "n_ctx", "n_special", "output_past",
                 "pad_token_id", "predict_special_tokens", "reorder_and_upcast_attn", "resid_pdrop",
                 "summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type",
                 "summary_use_proj", "task_specific_params.text-generation"});
}

inline void load_hugging_face(const Setup& s, Model<f32>& weights) {
  const io::SafetensorsFiles files(s.o.files.load);
  const std::string prefix = files.find("wte.weight").entry != nullptr ? "" : "transformer.";
  io::together(*s.mesh.device(), "--load", [&] {
    if (s.mesh.rank() == 0) run::require_tied(files, "lm_head.weight", prefix + "wte.weight");
  });
  // The file may also hold a tied output layer, and masks, which older versions of transformers stored.
  const auto may_be_left = [](const std::string& name) {
    return name == "lm_head.weight" || name.ends_with(".attn.bias") || name.ends_with(".attn.masked_bias");
  };
  io::load_safetensors(s.mesh, s.o.files.load, weights, stored_table(prefix), {may_be_left});
}

// config.json of --export.
inline std::string config_json(const Setup& s, const io::Tokenizer& tokenizer) {
  const Options& o = s.o;
  auto kept = o.files.kept;
  for (const char* key : {"bos_token_id", "eos_token_id"})
    kept.try_emplace(key, std::to_string(tokenizer.end_of_text()));
  return fmt::format(
      R"({{
  "architectures": ["GPT2LMHeadModel"],
  "model_type": "gpt2",
  "torch_dtype": "float32",
  "n_layer": {},
  "n_head": {},
  "n_embd": {},
  "n_inner": {},
  "n_positions": {},
  "vocab_size": {},
  "activation_function": "gelu_new",
  "layer_norm_epsilon": {},
  "resid_pdrop": {},
  "embd_pdrop": {},
  "attn_pdrop": 0.0,
  "bos_token_id": {},
  "eos_token_id": {},
  "tie_word_embeddings": true
}}
)",
      o.layers, o.heads, o.d_model, o.d_ff, o.context, s.vocabulary, run::json_float(o.config.epsilon),
      run::json_float(o.dropout), run::json_float(o.dropout), kept.at("bos_token_id"), kept.at("eos_token_id"));
}

// --export. The weights come from the run's checkpoint. Averages and merged adapters are in no checkpoint, so they are
// first saved in a temporary one below the exported folder.
inline void export_model(const Setup& s, Model<f32> weights, const Adapters<f32>& adapters, const std::string& config) {
  Device& device = *s.mesh.device();
  if (s.o.lora == 0 && s.o.optimizer.ema == 0)
    return run::export_folder(device, s.o.training.directory, s.o.files.save, stored_table(""), config);
  for (std::size_t i = 0; i < adapters.layers.size(); ++i) {
    Layer<f32>& w = weights.layers[i];
    const Adapter<f32>& adapter = adapters.layers[i];
    w.w_q = merged(w.w_q, adapter.a, adapter.b_q, s.config());
    w.w_k = merged(w.w_k, adapter.a, adapter.b_k, s.config());
    w.w_v = merged(w.w_v, adapter.a, adapter.b_v, s.config());
  }
  const std::string partial = s.o.files.save + "/partial";
  const auto remove = [&] {
    io::together(device, "--export", [&] {
      std::error_code error;
      if (device.rank() == 0) std::filesystem::remove_all(partial, error);
      if (error) throw Error(fmt::format("cannot remove '{}': {}", partial, error.message()));
    });
  };
  remove();  // an interrupted export may have left one
  io::save(s.mesh, partial + "/checkpoints", 0, weights);
  run::export_folder(device, s.o.training.directory, s.o.files.save, stored_table(""), config,
                     partial + "/checkpoints");
  remove();
}

}  // namespace gpt2
