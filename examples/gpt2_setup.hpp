// The setup of gpt2.cpp: options, sizes of the model's dims, initial weights.
#pragma once

#include <fmt/format.h>

#include <shardlib/run/training.hpp>
#include <shardlib/shardlib.hpp>

#include <cmath>
#include <cstdint>
#include <numeric>
#include <string>

#include "gpt2_model.hpp"
#include "trainers.hpp"

namespace gpt2 {

using Mesh2 = Mesh<"d t">;

struct Options : TrainerOptions {
  std::int64_t layers = 4, d_model = 256, heads = 4, d_ff = 1024, context = 256, vocabulary = 0;
  std::string norm = "pre", activation = "gelu", dtype = "f32";
  gpt::HuggingFace files;
  bool tied = true;
  double dropout = 0, lora_alpha = 16;
  std::int64_t lora = 0;
  ModelConfig config;  // epsilon, recompute and prefetch; Setup::config has the rest
};

// The arguments of the functions below: the mesh, the options and the number of tokens.
struct Setup {
  Mesh2 mesh;
  const Options& o;
  std::int64_t vocabulary;

  [[nodiscard]] ModelConfig config() const {
    ModelConfig config = o.config;
    config.post_norm = o.norm == "post";
    config.relu = o.activation == "relu";
    if (o.lora > 0) config.adapter_scale = o.lora_alpha / static_cast<double>(o.lora);
    return config;
  }
};

// Sizes of the model's dims, padded so that the mesh divides them, and the vocabulary so that GEMMs have round shapes.
inline Sizes sizes_of(const Options& o, std::int64_t vocabulary, std::int64_t d, std::int64_t t) {
  const std::int64_t head = o.d_model / o.heads;
  const NamedSize heads = padded("E", o.d_model, t * std::lcm(d, head));  // whole heads, sharded as biases are
  return {padded("V", vocabulary, std::lcm<std::int64_t>(64, d * t)),
          {"P", o.context},
          padded("M", o.d_model, d * t),
          heads,
          {"H", o.heads, heads.padded / head},
          {"D", head},
          padded("F", o.d_ff, d * t),
          padded("R", o.lora, d)};
}
inline Sizes sizes_of(const Setup& s) {
  return sizes_of(s.o, s.vocabulary, s.mesh.size("d"), s.mesh.size("t"));
}

// ---- weights --------------------------------------------------------------------------------------------------------

// GPT-2: normal numbers of standard deviation 0.02, those that end a branch scaled down by the number of branches.
// miniGPT: Xavier's uniform numbers (Glorot and Bengio 2010), as in its tutorial. The same on every mesh.
inline Model<f32> initial_weights(const Setup& s) {
  const Options& o = s.o;
  const Sizes sizes = sizes_of(s);
  const double branch = 1 / std::sqrt(2.0 * static_cast<double>(o.layers));
  const bool xavier = o.norm == "post";
  std::uint64_t stream = 0;
  const auto normal = [&]<Spec S>(Tensor<f32, S>& w, double deviation) {
    w = random_normal<f32, S>(s.mesh, sizes, {o.training.seed, stream++}) * deviation;
  };
  const auto kernel = [&]<Spec S>(Tensor<f32, S>& w, std::int64_t in, std::int64_t out, double scale = 1) {
    if (!xavier) return normal(w, 0.02 * scale);
    const double limit = std::sqrt(6.0 / static_cast<double>(in + out));
    w = (random_uniform<f32, S>(s.mesh, sizes, {o.training.seed, stream++}) * 2.0 - 1.0) * limit;
  };
  const auto constant = [&]<Spec S>(Tensor<f32, S>& w, double value) { w = full<f32, S>(s.mesh, sizes, value); };
  const auto norm = [&](Norm<f32>& w) {
    constant(w.scale, 1);
    constant(w.bias, 0);
  };

  Model<f32> w;
  const std::int64_t m = o.d_model, f = o.d_ff;
  normal(w.embed, xavier ? 1 / std::sqrt(static_cast<double>(m)) : 0.02);
  normal(w.positions, xavier ? 1 / std::sqrt(static_cast<double>(m)) : 0.02);
  for (std::int64_t i = 0; i < o.layers; ++i) {
    Layer<f32>& layer = w.layers.emplace_back();
    norm(layer.norm1);
    norm(layer.norm2);
    for (auto* w_x : {&layer.w_q, &layer.w_k, &layer.w_v}) kernel(*w_x, m, m);
    for (auto* b_x : {&layer.b_q, &layer.b_k, &layer.b_v}) constant(*b_x, 0);
    kernel(layer.w_o, m, m, branch);
    constant(layer.b_o, 0);
    kernel(layer.w_up, m, f);
    constant(layer.b_up, 0);
    kernel(layer.w_down, f, m, branch);
    constant(layer.b_down, 0);
  }
  if (!xavier) norm(w.final_norm.emplace_back());
  if (!o.tied) {
    Unembed<f32>& out = w.unembed.emplace_back();
    kernel(out.w, m, s.vocabulary);
    constant(out.b, 0);
  }
  return w;
}

// Adapters that add nothing yet: b is 0, a uniform within 1 / sqrt(M), as in Hugging Face's peft.
inline Adapters<f32> initial_adapters(const Setup& s) {
  Adapters<f32> adapters;
  const Sizes sizes = sizes_of(s);
  const double limit = 1 / std::sqrt(static_cast<double>(s.o.d_model));
  for (std::int64_t i = 0; i < (s.o.lora > 0 ? s.o.layers : 0); ++i) {
    Adapter<f32>& adapter = adapters.layers.emplace_back();
    const RandomKey key{s.o.training.seed + 2, static_cast<std::uint64_t>(i)};
    adapter.a = (random_uniform<f32, "M/t/d R">(s.mesh, sizes, key) * 2.0 - 1.0) * limit;
    for (auto* b : {&adapter.b_q, &adapter.b_k, &adapter.b_v}) *b = zeros<f32, "R/d H/t D">(s.mesh, sizes);
  }
  return adapters;
}

}  // namespace gpt2
