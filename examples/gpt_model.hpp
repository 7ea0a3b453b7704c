// The GPT of gpt_fsdp: weights, layers and loss, with all sharding and communication in types and calls. It needs the
// types alone (shardlib/shapes.hpp), so shape_tests.cpp can check it with nothing installed. model_parts.hpp has
// `Weight`, `gathered` (an all_gather over d and s), `TokenTensors`, `head_norm` and `drop` (dropout).
//
// Mesh: d data parallel, s context parallel (a part of each sequence), t tensor parallel, r replicas. FSDP is over d
// and s. r shards the batch, too, and replicates the weights (hybrid sharding).
// Dims: B batch, L length, M model, K key-value heads, Q query heads for each, D head, F feed-forward, V vocabulary.
// Dtypes: products, the weights that layers read, their gradients, and what is sent over d, s and t have the dtype C of
// computation, f32 or bf16. Sums over devices, norms, softmax, the residual stream and the loss are f32.
#pragma once

#include <shardlib/shapes.hpp>

#include <cstddef>
#include <optional>
#include <tuple>
#include <utility>

#include "model_parts.hpp"

namespace gpt {

using Ids = Tensor<i32, "B/r/d L/s">;
using Batch = TokenTensors<"B/r/d L/s">;
using Residual = Tensor<f32, "B/r/d L/s M/t">;

/// The configuration of the model, without tensors.
struct ModelConfig {
  RopeAngles rope;  ///< of rotary positions
  double norm_epsilon = 1e-6;
  RecomputePolicy recompute = {};
  std::optional<double> score_scale = {};           ///< factor of attention's scores, by default 1/sqrt(D)
  SequenceOrder order = SequenceOrder::contiguous;  ///< of a batch's tokens along L/s
  bool collective_matmul = false;                   ///< sums over t travel while the products of their shards run
  Dropout dropout = {};                             ///< of a microbatch, or in `layer` of that layer

  /// The configuration of this layer. Place 0 of the dropout is after the embedding, place 1 in the first layer.
  [[nodiscard]] ModelConfig of_layer(std::size_t number) const {
    ModelConfig config = *this;
    config.dropout = dropout.at(number + 1);
    return config;
  }
};

// ---- one layer: every weight is gathered just before its use (FSDP) -------------------------------------------------

// Gathers the residual stream over t, normalizes it and applies the scale. Communicates x once over t.
template <dtype C, Spec S = "M/t/d/s">
auto gathered_norm(const Residual& x, const Tensor<C, S>& norm, const ModelConfig& config) -> Tensor<C, "B/r/d L/s M"> {
  const auto whole = all_gather<"B/r/d L/s M/t -> B/r/d L/s M", backward_sum<f32>>(cast<C>(x));
  const auto scale = gathered<"M">(norm);
  return rms_norm<"M">(whole, scale, config.norm_epsilon);
}

// The product that ends a branch. Each device of t sums over its own heads, or over its part of F, and the scatter
// takes the sum over t.
template <OpSpec Product, dtype C, Spec Y, Spec W>
auto summed_over_t(const Tensor<C, Y>& y, const Tensor<C, W>& w, const ModelConfig& config, Site site = Site::current())
    -> Tensor<C, "B/r/d L/s M/t"> {
  if (config.collective_matmul) return einsum_scatter<make_op2<Y, W, "B/r/d L/s M/t">, f32>(y, w, site);
  const auto sums = einsum_unreduced<Product>(y, w, site);
  return reduce_scatter<"B/r/d L/s M +t -> B/r/d L/s M/t", f32>(sums, site);
}

// The weights of a layer and the functions of its branches. At rest, every tensor is sharded over d, s and t.
template <dtype C, bool Whole = false>
struct Layer {
  template <Spec S>
  using Weight = gpt::Weight<C, S, Whole>;
  Weight<"M/t/d/s"> norm1, norm2;
  Weight<"M/d/s Q K/t D"> w_q;
  Weight<"M/d/s K/t D"> w_k, w_v;
  Weight<"M/d/s Q K/t D"> w_o;
  Weight<"M/d/s F/t"> w_gate, w_up, w_down;
  // Biases, of which Qwen 2 has one each, other models none. E is K * Q * D, and G is K * D.
  Array<"bias", Weight<"E/t/d/s">> b_q;
  Array<"bias", Weight<"G/t/d/s">> b_k, b_v;
  Array<"norm", Weight<"N/t/d/s">> q_norm, k_norm;  // one each in Qwen 3, else none; N is D, padded

  using Hidden = Tensor<C, "B/r/d L/s M">;    // what a branch reads: the residual stream, gathered and normalized
  using Branch = Tensor<C, "B/r/d L/s M/t">;  // what it adds to the residual stream
  using Queries = Tensor<C, "B/r/d L/s Q K/t D">;
  using Keys = Tensor<C, "B/r/d L/s K/t D">;
  using QKV = std::tuple<Queries, Keys, Keys>;

  // Queries, keys and values of the tokens at these positions. t shards the heads: this is tensor parallelism.
  auto queries_keys_values(const Hidden& x, const ModelConfig& config, Positions positions) const -> QKV {
    const auto w_q = gathered<"M Q K/t D">(this->w_q);
    auto q = einsum_unreduced<"B/r/d L/s M, M Q K/t D -> B/r/d L/s Q K/t D">(x, w_q);
    const auto w_k = gathered<"M K/t D">(this->w_k);
    auto k = einsum_unreduced<"B/r/d L/s M, M K/t D -> B/r/d L/s K/t D">(x, w_k);
    const auto w_v = gathered<"M K/t D">(this->w_v);
    auto v = einsum_unreduced<"B/r/d L/s M, M K/t D -> B/r/d L/s K/t D">(x, w_v);
    if (!b_q.empty()) std::tie(q, k, v) = with_biases({q, k, v});
    for (const auto& norm : q_norm) q = head_norm<"N">(q, norm, config.norm_epsilon);
    for (const auto& norm : k_norm) k = head_norm<"N">(k, norm, config.norm_epsilon);
    q = rope<"L", "D">(q, config.rope, positions);
    k = rope<"L", "D">(k, config.rope, positions);
    return {save_for_backward(q), save_for_backward(k), save_for_backward(v)};
  }

  // Adds the biases (Qwen 2). They are stored with all heads in one dim.
  auto with_biases(const QKV& heads) const -> QKV {
    const auto& [q, k, v] = heads;
    const auto b_q = gathered<"E/t">(this->b_q[0]);
    const auto q_bias = split<"E/t -> K/t Q D">(b_q, {{"Q", q.size("Q")}, {"D", q.size("D")}});
    const auto b_k = gathered<"G/t">(this->b_k[0]);
    const auto k_bias = split<"G/t -> K/t D">(b_k, {{"D", k.size("D")}});
    const auto b_v = gathered<"G/t">(this->b_v[0]);
    const auto v_bias = split<"G/t -> K/t D">(b_v, {{"D", v.size("D")}});
    return {q + rearrange<"K/t Q D -> Q K/t D">(q_bias), k + k_bias, v + v_bias};
  }

  auto output_projection(const Queries& y, const ModelConfig& config) const -> Branch {
    const auto w_o = gathered<"M Q K/t D">(this->w_o);
    return summed_over_t<"B/r/d L/s Q K/t D, M Q K/t D -> B/r/d L/s M +t">(y, w_o, config);
  }

  // Causal attention within segments. Keys and values travel along s, to the devices that hold later tokens.
  auto attention(const Hidden& x, const Ids& segments, const ModelConfig& config) const -> Branch {
    const auto [q, k, v] = queries_keys_values(x, config, config.order);
    const auto y = causal_attention<"L", "D", over<"s">>(q, k, v, segments, config.score_scale, config.order);
    return output_projection(y, config);
  }

  // The gated feed-forward layer (SwiGLU). t shards F.
  auto feed_forward(const Hidden& x, const ModelConfig& config) const -> Branch {
    const auto w_gate = gathered<"M F/t">(this->w_gate);
    const auto gate = save_for_backward(einsum_unreduced<"B/r/d L/s M, M F/t -> B/r/d L/s F/t">(x, w_gate));
    const auto w_up = gathered<"M F/t">(this->w_up);
    const auto up = save_for_backward(einsum_unreduced<"B/r/d L/s M, M F/t -> B/r/d L/s F/t">(x, w_up));
    const auto y = map([](auto g, auto u) { return swish(g) * u; }, gate, up);
    const auto w_down = gathered<"M F/t">(this->w_down);
    return summed_over_t<"B/r/d L/s F/t, M F/t -> B/r/d L/s M +t">(y, w_down, config);
  }
};

template <dtype C, bool Whole = false>
auto layer(const Residual& x, const Ids& segments, const Layer<C, Whole>& w, const ModelConfig& config) -> Residual {
  const auto normal_x = gathered_norm(x, w.norm1, config);
  const auto attended = w.attention(normal_x, segments, config);
  const auto y = save_for_backward(x + drop(cast<f32>(attended), config.dropout.at(0)));
  const auto normal_y = gathered_norm(y, w.norm2, config);
  const auto fed = w.feed_forward(normal_y, config);
  return y + drop(cast<f32>(fed), config.dropout.at(1));
}

// ---- the model ------------------------------------------------------------------------------------------------------

template <dtype C, bool Whole = false>
struct Model {
  Weight<C, "V/t M/d/s", Whole> embed;
  Array<"unembed", Weight<C, "V/t M/d/s", Whole>> unembed;  // empty: tied to embed
  Array<"layers", Layer<C, Whole>> layers;
  Weight<C, "M/t/d/s", Whole> final_norm;
};

static_assert(fully_sharded<Mesh<"d s t">, Model<f32>>);

// The residual stream before the layers. t shards the rows of the table, so a device of t finds some of the tokens'
// rows, and has zeros for the others.
template <dtype C>
auto token_embeddings(const Tensor<C, "V/t M">& table, const Ids& inputs) -> Residual {
  return cast<f32>(reduce_scatter<"B/r/d L/s M +t -> B/r/d L/s M/t", f32>(
      index_unreduced<"[V/t] M, B/r/d L/s -> B/r/d L/s M +t">(table, inputs)));
}
// The logits after the layers. t shards the vocabulary.
template <dtype C, Spec S = "M/t/d/s">
auto output_logits(const Residual& x, const Tensor<C, S>& norm, const Tensor<C, "V/t M">& table,
                   const ModelConfig& config) -> Tensor<f32, "B/r/d L/s V/t"> {
  return einsum_unreduced<"B/r/d L/s M, V/t M -> B/r/d L/s V/t", f32>(gathered_norm(x, norm, config), table);
}

template <dtype C, bool Whole = false>
auto logits(const Model<C, Whole>& w, const Ids& inputs, const Ids& segments, const ModelConfig& config)
    -> Tensor<f32, "B/r/d L/s V/t"> {
  const auto embed = gathered<"V/t M">(w.embed);
  Residual x = drop(token_embeddings(embed, inputs), config.dropout.at(0));
  for (std::size_t i = 0; i < w.layers.size(); ++i)
    x = explicit_activation_checkpointing(layer<C, Whole>, config.recompute)(x, segments, w.layers[i],
                                                                             config.of_layer(i));
  const auto unembed = w.unembed.empty() ? embed : gathered<"V/t M">(w.unembed[0]);
  return output_logits(x, w.final_norm, unembed, config);
}

// The cross-entropy of each token. t shards the vocabulary, and no device gathers it: the losses are a pending sum over
// t. Logits are the largest arrays of a step, so the function frees those before the shift.
inline auto token_losses(Tensor<f32, "B/r/d L/s V/t"> logits, const Ids& targets) -> Tensor<f32, "B/r/d L/s +t"> {
  const auto highest = all_reduce_max<"B/r/d L/s V/t -> B/r/d L/s">(stop_gradient(logits));
  logits = logits - highest;
  const auto target = index_unreduced<"B/r/d L/s [V/t], B/r/d L/s -> B/r/d L/s +t">(logits, targets);
  const auto total = all_reduce<"B/r/d L/s +t -> B/r/d L/s">(sum<"B/r/d L/s V/t -> B/r/d L/s +t">(exp(logits)));
  return to_partial<"B/r/d L/s -> B/r/d L/s +t">(log(total)) - target;
}

// The mean loss of the tokens that count. The sum over all devices is pending, as value_and_grad requires.
inline auto mean_loss(Tensor<f32, "B/r/d L/s V/t"> logits, const Batch& batch) -> Tensor<f32, "+d +r +s +t"> {
  return sum<"B/r/d L/s +t -> +d +r +s +t">(token_losses(std::move(logits), batch.targets) * batch.weights);
}

template <dtype C, bool Whole = false>
auto loss(const Model<C, Whole>& w, const Batch& batch, const ModelConfig& config) -> Tensor<f32, "+d +r +s +t"> {
  return mean_loss(logits(w, batch.inputs, batch.segments, config), batch);
}

}  // namespace gpt
