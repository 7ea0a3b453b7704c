// The setup that gpt_fsdp and gpt_pipeline share for the model of gpt_model.hpp: options, sizes and initial values.
#pragma once

#include <shardlib/run/rope_options.hpp>
#include <shardlib/run/sequence_order.hpp>
#include <shardlib/run/training.hpp>
#include <shardlib/shardlib.hpp>

#include <cmath>
#include <cstdint>
#include <numeric>
#include <string>
#include <vector>

#include "gpt_model.hpp"
#include "trainers.hpp"

namespace gpt {

struct ModelOptions {
  std::int64_t layers = 4, d_model = 256, n_q_per_kv = 2, n_kv = 2, d_head = 64, d_ff = 768, vocabulary = 0;
  bool tied = false, qkv_bias = false, qk_norm = false;
  double dropout = 0;
  std::string dtype = "f32", init = "depth-scaled";
  ModelConfig config;
};

inline void declare(run::Options& options, ModelOptions& o, const run::Training& training) {
  declare_model(options, o, "width of the feed-forward layer");
  options.add("--dropout", o.dropout, "fraction of elements dropped from embedding and branches in training",
              run::between(0, 0.999));
  options.add("--dtype", o.dtype, "dtype of products and communication", run::one_of({"f32", "bf16"}));
  options.add("--init", o.init,
              "initial weights; depth-scaled: as in GPT-2, with 1/sqrt(2 layers) in the weights that end a branch; "
              "seqax: as in seqax, with 1/sqrt(d_head) in the queries instead of the scores",
              run::one_of({"depth-scaled", "seqax"}));
  options.flag("--tied", o.tied, "use the embedding as the output layer too");
  options.flag("--collective-matmul", o.config.collective_matmul,
               "overlap the sums over t with the products of their summands (einsum_scatter): for t over slow links");
  options.without_effect({"--collective-matmul"}, [&training](const run::Options&) {
    const auto mesh = naming_option("--mesh", [&] { return parse_mesh(training.mesh); });
    return axis_size(mesh, "t") > 1
               ? ""
               : "with t=1, which has no sums over t: give a --mesh with t above 1, or leave it out";
  });
}

// The sizes of the model's dims. They are padded to multiples of the axes that shard them, and the vocabulary also to a
// multiple of 64, which makes products faster.
inline Sizes sizes_of(const ModelOptions& o, const std::vector<AxisSize>& mesh) {
  const std::int64_t t = axis_size(mesh, "t"), shards = axis_size(mesh, "d") * axis_size(mesh, "s");
  // t shards biases by whole heads, then d and s shard each part.
  const NamedSize keys = padded("K", o.n_kv, t * (o.qkv_bias ? shards / std::gcd(shards, o.d_head) : 1));
  const std::int64_t key_bias = o.qkv_bias ? o.d_head : 0, query_bias = key_bias * o.n_q_per_kv;
  return {padded("V", o.vocabulary, std::lcm<std::int64_t>(64, t)),
          padded("M", o.d_model, shards * t),
          {"Q", o.n_q_per_kv},
          keys,
          {"D", o.d_head},
          padded("F", o.d_ff, t),
          {"E", o.n_kv * query_bias, keys.padded * query_bias},
          {"G", o.n_kv * key_bias, keys.padded * key_bias},
          padded("N", o.qk_norm ? o.d_head : 0, shards * t)};
}

// Checks the options, opens the data, and sets what follows from the mesh, from --init and from the data.
inline run::Data prepare(const std::vector<AxisSize>& mesh, ModelOptions& o, run::Training& training) {
  o.config.order = run::sequence_order(mesh, training, "s");
  run::check_rope(o.config.rope, o.d_head);
  if (o.init == "seqax") o.config.score_scale = 1;
  if (o.init == "seqax" && (o.tied || o.qk_norm || o.qkv_bias))
    throw UsageError(
        "--init seqax has no --tied, --qk-norm or --qkv-bias: leave them out, or choose --init depth-scaled");
  run::Data data = run::open_data(training, o.vocabulary);
  o.vocabulary = data.vocabulary;
  run::note_padding(mesh, sizes_of(o, mesh),
                    {{"V", "--vocabulary"}, {"M", "--d-model"}, {"K", "--n-kv"}, {"F", "--d-ff"}});
  return data;
}

// Initial weights, the same on every mesh: truncated normal numbers by sqrt(fan in), and scales of 1. seqax divides by
// the deviation of these numbers, too, and draws the embedding from a normal distribution (Model.init of train.py).
constexpr std::uint64_t draws_per_layer = 7;
constexpr double truncated_normal_deviation = 0.87962566103423978;  // of normal numbers cut to [-2, 2]

struct Initializer {
  const Mesh<"r d s t">& mesh;
  const ModelOptions& o;
  std::uint64_t seed;
  Sizes sizes = sizes_of(o, mesh.device()->axes());
  bool seqax = o.init == "seqax";

  // The embedding draws from stream 0, and an output layer of its own from stream 1.
  void embed(Tensor<f32, "V/t M/d/s">& table) const {
    if (!seqax) return draw(table, 0, o.d_model);
    table = random_normal<f32, "V/t M/d/s">(mesh, sizes, {seed, 0});
  }
  void unembed(Tensor<f32, "V/t M/d/s">& table) const { draw(table, 1, o.d_model); }
  // Layer `number` of the model. As in GPT-2, the weights that end a branch are smaller, because the two branches of
  // each layer add to the residual stream.
  void layer(Layer<f32>& layer, std::int64_t number) const {
    const std::uint64_t tables = o.tied ? 1 : 2;
    std::uint64_t stream = tables + draws_per_layer * static_cast<std::uint64_t>(number);
    const std::int64_t branches = seqax ? 1 : 2 * o.layers;
    for (auto* norm : {&layer.norm1, &layer.norm2}) scale(*norm);
    draw(layer.w_q, stream++, o.d_model * (seqax ? o.d_head : 1));
    for (auto* w : {&layer.w_k, &layer.w_v}) draw(*w, stream++, o.d_model);
    draw(layer.w_o, stream++, o.n_q_per_kv * o.n_kv * o.d_head * branches);
    for (auto* w : {&layer.w_gate, &layer.w_up}) draw(*w, stream++, o.d_model);
    draw(layer.w_down, stream++, o.d_ff * branches);
    if (o.qkv_bias) layer.b_q = {zeros<f32, "E/t/d/s">(mesh, sizes)};
    if (o.qkv_bias) layer.b_k = layer.b_v = {zeros<f32, "G/t/d/s">(mesh, sizes)};
    if (o.qk_norm) layer.q_norm = layer.k_norm = {ones<f32, "N/t/d/s">(mesh, sizes)};
  }
  void scale(Tensor<f32, "M/t/d/s">& w) const { w = ones<f32, "M/t/d/s">(mesh, sizes); }
  template <Spec S>
  void draw(Tensor<f32, S>& w, std::uint64_t stream, std::int64_t fan_in) const {
    w = random_truncated_normal<f32, S>(mesh, sizes, {seed, stream}) /
        (std::sqrt(static_cast<double>(fan_in)) * (seqax ? truncated_normal_deviation : 1));
  }
};

inline Model<f32> initial_weights(const Mesh<"r d s t">& mesh, const ModelOptions& o, std::uint64_t seed) {
  const Initializer first{mesh, o, seed};
  Model<f32> w;
  first.embed(w.embed);
  if (!o.tied) first.unembed(w.unembed.emplace_back());
  for (std::int64_t i = 0; i < o.layers; ++i) first.layer(w.layers.emplace_back(), i);
  first.scale(w.final_norm);
  return w;
}

// The FLOPs of training for one token. An embedding that is not tied only looks up rows, and counts none.
inline double flops_per_token(const ModelOptions& o, std::int64_t parameters, std::int64_t length) {
  return run::training_flops_per_token(parameters - (o.tied ? 0 : o.vocabulary * o.d_model), o.layers,
                                       o.n_q_per_kv * o.n_kv * o.d_head, length);
}

}  // namespace gpt
