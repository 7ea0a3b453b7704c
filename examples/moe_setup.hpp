// The setup of moe.cpp for the model of moe_model.hpp: options, presets, sizes and initial weights.
#pragma once

#include <shardlib/run/training.hpp>
#include <shardlib/shardlib.hpp>

#include <cmath>
#include <cstdint>
#include <numeric>
#include <string>
#include <vector>

#include "moe_model.hpp"
#include "trainers.hpp"

namespace moe {

struct ModelOptions {
  std::int64_t layers = 4, d_model = 128, n_q_per_kv = 1, n_kv = 4, d_head = 32, d_ff = 256, experts = 8, shared = 0,
               vocabulary = 0;
  bool shared_gate = false, qkv_bias = false, qk_norm = false;
  std::string dtype = "f32";
  ModelConfig config;
};

inline void declare(run::Options& options, ModelOptions& o) {
  declare_model(options, o, "width of an expert");
  options.add("--experts", o.experts, "number of experts per layer; a multiple of the size of axis e", run::size());
  options.add("--experts-per-token", o.config.top_k, "number of experts per token", run::size());
  options.flag("--norm-topk-prob", o.config.norm_topk_prob,
               "scale the weights of a token's experts so that they add up to 1");
  options.add("--shared", o.shared, "width of a shared expert, which processes every token (0: none)", run::size(0));
  options.flag("--shared-gate", o.shared_gate, "weight each token's shared expert by a sigmoid gate (Qwen 2)");
  options.add("--capacity", o.config.capacity, "slots of an expert, as a multiple of its share (0: dropless)",
              run::at_least(0));
  options.add("--dtype", o.dtype, "dtype of products and communication", run::one_of({"f32", "bf16"}));
  options.add("--balance", o.config.balance, "weight of the loss that balances the experts", run::at_least(0));
  options.add("--router-z", o.config.router_z, "weight of the router's z-loss", run::at_least(0));
}

// The presets of public models. --load of their folders sets the same options.
// clang-format off
inline void declare_presets(run::Options& options) {
  options.preset("mixtral-8x7b", {{"layers", "32"}, {"d_model", "4096"}, {"n_q_per_kv", "4"}, {"n_kv", "8"},
                                  {"d_head", "128"}, {"d_ff", "14336"}, {"experts", "8"},
                                  {"experts_per_token", "2"}, {"vocabulary", "32000"}, {"norm_epsilon", "1e-5"},
                                  {"rope_base", "1e6"}});
  options.preset("qwen1.5-moe-a2.7b", {{"layers", "24"}, {"d_model", "2048"}, {"n_q_per_kv", "1"}, {"n_kv", "16"},
                                       {"d_head", "128"}, {"d_ff", "1408"}, {"experts", "60"},
                                       {"experts_per_token", "4"}, {"norm_topk_prob", "false"}, {"shared", "5632"},
                                       {"shared_gate", "true"}, {"qkv_bias", "true"}, {"vocabulary", "151936"},
                                       {"norm_epsilon", "1e-6"}, {"rope_base", "1e6"}});
  options.preset("qwen3-30b-a3b", {{"layers", "48"}, {"d_model", "2048"}, {"n_q_per_kv", "8"}, {"n_kv", "4"},
                                   {"d_head", "128"}, {"d_ff", "768"}, {"experts", "128"},
                                   {"experts_per_token", "8"}, {"qk_norm", "true"}, {"vocabulary", "151936"},
                                   {"norm_epsilon", "1e-6"}, {"rope_base", "1e6"}});
}
// clang-format on

// Sizes of the model's dims, padded so that the devices divide them.
inline Sizes sizes_of(const ModelOptions& o, const std::vector<AxisSize>& mesh) {
  const std::int64_t t = axis_size(mesh, "t");
  const std::int64_t shards = std::int64_t{axis_size(mesh, "d")} * axis_size(mesh, "e") * axis_size(mesh, "s");
  const std::int64_t devices = shards * t;
  // t shards biases by whole heads, then d, e and s shard each part.
  const std::int64_t heads = round_up(o.n_kv, t * (o.qkv_bias ? shards / std::gcd(shards, o.d_head) : 1));
  const std::int64_t key_bias = o.qkv_bias ? o.d_head : 0, query_bias = key_bias * o.n_q_per_kv;
  const std::int64_t head_norm = o.qk_norm ? o.d_head : 0;
  return {{"V", o.vocabulary, round_up(o.vocabulary, t)},
          {"M", o.d_model, round_up(o.d_model, devices)},
          {"Q", o.n_q_per_kv},
          {"H", o.n_kv, heads},
          {"D", o.d_head},
          {"HQD", o.n_kv * query_bias, heads * query_bias},
          {"HD", o.n_kv * key_bias, heads * key_bias},
          {"E", head_norm, round_up(head_norm, devices)},
          {"X", o.experts},
          {"F", o.d_ff, round_up(o.d_ff, t)},
          {"G", o.shared, round_up(o.shared, t)},
          {"I", 1}};
}
inline Sizes sizes_of(const ModelOptions& o, const MoeMesh& mesh) {
  return sizes_of(o, mesh.device()->axes());
}

// Initial weights as in gpt_setup.hpp: truncated normal numbers of standard deviation 1/sqrt(fan in), and scales of 1.
inline Model initial_weights(const MoeMesh& mesh, const ModelOptions& o, std::uint64_t seed) {
  const Sizes sizes = sizes_of(o, mesh);
  std::uint64_t stream = 0;
  const auto draw = [&]<Spec S>(Tensor<f32, S>& w, std::int64_t fan_in) {
    w = random_truncated_normal<f32, S>(mesh, sizes, {seed, stream++}) / std::sqrt(static_cast<double>(fan_in));
  };
  const auto scale = [&](Tensor<f32, "M/t/d/e/s">& w) { w = ones<f32, "M/t/d/e/s">(mesh, sizes); };
  const std::int64_t branches = 2 * o.layers;
  Model model;
  draw(model.embed, o.d_model);
  draw(model.unembed, o.d_model);
  scale(model.final_norm);
  for (std::int64_t i = 0; i < o.layers; ++i) {
    Layer& layer = model.layers.emplace_back();
    scale(layer.norm1);
    scale(layer.norm2);
    draw(layer.w_q, o.d_model);
    for (auto* w : {&layer.w_k, &layer.w_v}) draw(*w, o.d_model);
    draw(layer.w_o, o.n_q_per_kv * o.n_kv * o.d_head * branches);
    draw(layer.router, o.d_model);
    draw(layer.w_gate, o.d_model);
    draw(layer.w_up, o.d_model);
    draw(layer.w_down, o.d_ff * branches);
    if (o.qkv_bias) layer.b_q = {zeros<f32, "HQD/t/d/e/s">(mesh, sizes)};
    if (o.qkv_bias) layer.b_k = layer.b_v = {zeros<f32, "HD/t/d/e/s">(mesh, sizes)};
    if (o.qk_norm) layer.q_norm = layer.k_norm = {ones<f32, "E/t/d/e/s">(mesh, sizes)};
    if (o.shared == 0) continue;
    auto& shared = layer.shared.emplace_back();
    draw(shared.w_gate, o.d_model);
    draw(shared.w_up, o.d_model);
    draw(shared.w_down, o.shared * branches);
    if (o.shared_gate) draw(shared.mix.emplace_back(), o.d_model);
  }
  return model;
}

}  // namespace moe
