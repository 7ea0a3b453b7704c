// Folders of Hugging Face's transformers with models of the Llama architecture (Llama, Mistral, Qwen 2, Qwen 3), for
// the model of gpt_model.hpp: --load, --export and --logits of gpt_fsdp.
#pragma once

#include <fmt/format.h>

#include <shardlib/io/formats/safetensors_tree.hpp>
#include <shardlib/run/hugging_face.hpp>
#include <shardlib/run/sampling.hpp>
#include <shardlib/run/trained.hpp>
#include <shardlib/run/training.hpp>

#include <algorithm>
#include <map>
#include <string>
#include <utility>

#include "gpt_setup.hpp"
#include "hugging_face.hpp"

namespace gpt {

inline constexpr Architecture architectures[] = {
    {"llama", "LlamaForCausalLM", 0, 0, 0, 2048, "1", "2", false, false},
    {"mistral", "MistralForCausalLM", 8, 0, 4096, 131072, "1", "2", false, false},
    {"qwen2", "Qwen2ForCausalLM", 32, 0, 4096, 32768, "null", "null", true, false},
    {"qwen3", "Qwen3ForCausalLM", 32, 128, 4096, 32768, "null", "null", false, true},
};

inline io::StoredTable stored_table(bool tied) {
  std::map<std::string, io::StoredLeaf> leaves = decoder_leaves();
  leaves["layers.*.w_gate"] = {"model.layers.*.mlp.gate_proj.weight", {1, 0}};
  leaves["layers.*.w_up"] = {"model.layers.*.mlp.up_proj.weight", {1, 0}};
  leaves["layers.*.w_down"] = {"model.layers.*.mlp.down_proj.weight"};
  if (!tied) leaves["unembed.*"] = {"lm_head.weight"};
  return io::table_of(std::move(leaves));
}

// ---- reading --------------------------------------------------------------------------------------------------------

// --load: gives the options, among them those of `o`, the values of config.json, and refuses what this model does not
// compute exactly.
inline void read_config(run::Options& options, const ModelOptions& o, HuggingFace& files, run::Training& training) {
  if (!files.save.empty() && o.qkv_bias && o.qk_norm)
    throw UsageError(
        "--export: no architecture of Hugging Face has both --qkv-bias and --qk-norm; leave one of them out");
  if (o.init == "seqax" && !(files.save.empty() && files.load.empty()))
    throw UsageError(
        "--init seqax (of seqax's presets, too): attention's scores are not scaled, and Hugging Face's models scale "
        "them by 1/sqrt(d_head); leave out --load and --export, or choose --init depth-scaled");
  auto config = loaded_config(files, training);
  if (!config) return;
  const Architecture& of = architecture_of(*config, architectures);
  config->imply(options, "--d-ff", "intermediate_size");
  config->imply(options, "--tied", "tie_word_embeddings", "false");
  imply_decoder(options, *config, of, files, training, o.config.rope, o.layers);
  finish_config(options, *config, files, training);
}

// ---- writing --------------------------------------------------------------------------------------------------------

inline std::string config_json(const ModelOptions& o, const std::string& kept) {
  std::string of_class = o.qkv_bias ? "" : "\n  \"attention_bias\": false,";
  if (!o.qkv_bias && !o.qk_norm) of_class += "\n  \"mlp_bias\": false,";
  return decoder_json(o, fmt::format("\"intermediate_size\": {}", o.d_ff), of_class, o.tied, kept);
}

// --export and --logits, after the run. With --ema the average is exported.
inline void write_outputs(const DevicePtr& device, const ModelOptions& o, const HuggingFace& files,
                          const run::OptimizerOptions& optimizer, const run::Training& training, const run::Data& data,
                          const run::Program& program) {
  const io::StoredTable table = run::table_of_state(optimizer, stored_table(o.tied));
  write_outputs(device, files, training, data, program, table, [&] {
    const Architecture& of = *std::ranges::find_if(
        architectures, [&](const Architecture& one) { return one.qkv_bias == o.qkv_bias && one.qk_norm == o.qk_norm; });
    return config_json(o, kept_json(files, of, o.config.rope, training, data));
  });
}

}  // namespace gpt
