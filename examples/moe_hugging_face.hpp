// Folders of Hugging Face's transformers with mixtures of experts (Mixtral, Qwen2-MoE, Qwen3-MoE), for the model of
// moe_model.hpp: --load, --export and --logits of moe.
#pragma once

#include <fmt/format.h>

#include <shardlib/io/formats/safetensors_tree.hpp>
#include <shardlib/run/hugging_face.hpp>
#include <shardlib/run/sampling.hpp>
#include <shardlib/run/trained.hpp>
#include <shardlib/run/training.hpp>

#include <map>
#include <set>
#include <string>
#include <utility>

#include "hugging_face.hpp"
#include "moe_setup.hpp"

namespace moe {

inline constexpr gpt::Architecture architectures[] = {
    {"mixtral", "MixtralForCausalLM", 8, 0, 0, 131072, "1", "2", false, false, "1000000.0", "1e-05"},
    {"qwen2_moe", "Qwen2MoeForCausalLM", 16, 0, 4096, 32768, "null", "null", true, false},
    {"qwen3_moe", "Qwen3MoeForCausalLM", 4, 0, 4096, 32768, "null", "null", false, true},
};
enum class Kind { mixtral, qwen2_moe, qwen3_moe };  // in the order of the architectures above

// The architecture that has these attention layers.
inline Kind kind_of(const ModelOptions& o) {
  return o.qkv_bias ? Kind::qwen2_moe : o.qk_norm ? Kind::qwen3_moe : Kind::mixtral;
}

// Where the leaves are in the files. Each expert has tensors of its own.
inline io::StoredTable stored_table(Kind kind) {
  std::map<std::string, io::StoredLeaf> leaves = gpt::decoder_leaves();
  leaves["unembed"] = {"lm_head.weight"};
  const bool mixtral = kind == Kind::mixtral;
  const std::string mlp = mixtral ? "model.layers.*.block_sparse_moe." : "model.layers.*.mlp.";
  leaves["layers.*.router"] = {mlp + "gate.weight", {1, 0}};
  leaves["layers.*.w_gate"] = {mlp + (mixtral ? "experts.*.w1.weight" : "experts.*.gate_proj.weight"), {1, 0}};
  leaves["layers.*.w_up"] = {mlp + (mixtral ? "experts.*.w3.weight" : "experts.*.up_proj.weight"), {1, 0}};
  leaves["layers.*.w_down"] = {mlp + (mixtral ? "experts.*.w2.weight" : "experts.*.down_proj.weight")};
  leaves["layers.*.shared.0.w_gate"] = {mlp + "shared_expert.gate_proj.weight", {1, 0}};
  leaves["layers.*.shared.0.w_up"] = {mlp + "shared_expert.up_proj.weight", {1, 0}};
  leaves["layers.*.shared.0.w_down"] = {mlp + "shared_expert.down_proj.weight"};
  leaves["layers.*.shared.0.mix.0"] = {mlp + "shared_expert_gate.weight"};
  return io::table_of(std::move(leaves));
}

// --export: no class of Hugging Face has other experts with these attention layers.
inline void check_export(const ModelOptions& o) {
  const auto fail = [](const std::string& what) {
    throw UsageError("--export: " + what + "; give these options, or leave out --export");
  };
  const Kind kind = kind_of(o);
  if (o.qkv_bias && o.qk_norm) fail("no architecture of Hugging Face has both --qkv-bias and --qk-norm");
  if (kind == Kind::qwen2_moe && !o.shared_gate) fail("Qwen2-MoE, with --qkv-bias, has --shared and --shared-gate too");
  if (kind != Kind::qwen2_moe && o.shared != 0) fail("only Qwen2-MoE, with --qkv-bias, has a shared expert");
  if (kind == Kind::mixtral && !o.config.norm_topk_prob)
    fail("Mixtral, without --qkv-bias and --qk-norm, has --norm-topk-prob");
}

// --load: gives the options, among them those of `o`, the values of config.json, and refuses what this model does not
// compute exactly. Training balances the experts as --balance says, not as the folder does.
inline void read_config(run::Options& options, const ModelOptions& o, gpt::HuggingFace& files,
                        run::Training& training) {
  auto config = gpt::loaded_config(files, training);
  if (config) {
    const gpt::Architecture& of = gpt::architecture_of(*config, architectures);
    const auto as_class = [&](const char* option, const char* value) {
      options.imply(option, value, fmt::format("'{}': model_type", config->path()));
    };
    config->require("tie_word_embeddings", {"false"});
    config->imply(options, "--experts-per-token", "num_experts_per_tok", of.is_qwen() ? of.qkv_bias ? "4" : "8" : "2");
    if (of.is_qwen()) {
      config->imply(options, "--experts", "num_experts", of.qkv_bias ? "60" : "128");
      config->imply(options, "--d-ff", "moe_intermediate_size", of.qkv_bias ? "1408" : "768");
      config->imply(options, "--norm-topk-prob", "norm_topk_prob", "false");
      config->require("decoder_sparse_step", {"1"});  // experts in each layer
      config->require("mlp_only_layers", {"[]"});
    } else {
      config->imply(options, "--experts", "num_local_experts", "8");
      config->imply(options, "--d-ff", "intermediate_size");
      as_class("--norm-topk-prob", "true");
      config->require("router_jitter_noise", {"0.0", "0"});
    }
    if (of.qkv_bias) {
      config->require("qkv_bias", {"true"});
      config->imply(options, "--shared", "shared_expert_intermediate_size", "5632");
    } else {
      as_class("--shared", "0");
    }
    as_class("--shared-gate", of.qkv_bias ? "true" : "false");
    gpt::imply_decoder(options, *config, of, files, training, o.config.rope, o.layers);
    std::set<std::string> harmless{"output_router_logits", "router_aux_loss_coef"};
    if (of.is_qwen()) harmless.insert("intermediate_size");  // of layers without experts
    gpt::finish_config(options, *config, files, training, harmless);
  }
  if (!files.save.empty()) check_export(o);
}

inline std::string config_json(const ModelOptions& o, const std::string& kept) {
  const Kind kind = kind_of(o);
  const std::string attention = kind == Kind::qwen2_moe ? "" : "\n  \"attention_bias\": false,";
  std::string experts = fmt::format(R"("num_local_experts": {},
  "intermediate_size": {})",
                                    o.experts, o.d_ff);
  if (kind != Kind::mixtral)
    experts = fmt::format(R"("num_experts": {},
  "moe_intermediate_size": {},
  "decoder_sparse_step": 1,
  "mlp_only_layers": [],
  "norm_topk_prob": {})",
                          o.experts, o.d_ff, o.config.norm_topk_prob);
  if (kind == Kind::qwen2_moe) experts += fmt::format(",\n  \"shared_expert_intermediate_size\": {}", o.shared);
  experts += fmt::format(",\n  \"num_experts_per_tok\": {}", o.config.top_k);
  return gpt::decoder_json(o, experts, attention, false, kept);
}

// --export and --logits, after the run. With --ema the average is exported.
inline void write_outputs(const DevicePtr& device, const ModelOptions& o, const gpt::HuggingFace& files,
                          const run::OptimizerOptions& optimizer, const run::Training& training, const run::Data& data,
                          const run::Program& program) {
  const Kind kind = kind_of(o);
  const io::StoredTable table = run::table_of_state(optimizer, stored_table(kind));
  gpt::write_outputs(device, files, training, data, program, table, [&] {
    const gpt::Architecture& of = architectures[static_cast<int>(kind)];
    return config_json(o, gpt::kept_json(files, of, o.config.rope, training, data));
  });
}

}  // namespace moe
