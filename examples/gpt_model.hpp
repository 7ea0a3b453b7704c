// The GPT of gpt_fsdp: weights, layers and loss, with all partitioning and communication spelled out. It needs the
// types alone (shardlib/shapes.hpp), so that shape_tests.cpp can check it with nothing installed.
// model_parts.hpp has `Weight`, `gathered` (an all_gather over d and s), `TokenTensors`, `head_norm` and `drop`
// (dropout).
//
// C is the dtype of computation, f32 or bf16: of products, of the weights that the layers read, of their gradients and
// of what is sent over d, s and t. Sums over devices, norms, softmax, the residual stream and the loss are f32.
// Dims: B batch, L length, M model, Q query heads per key-value head, K key-value heads, D head, F feed-forward,
// V vocabulary. Mesh: d data parallel, s context parallel (a part of each sequence), t tensor parallel. FSDP is over d
// and s. The batch is sharded over r, too, and the weights are replicated over it (hybrid sharding).
#pragma once

#include <shardlib/shapes.hpp>

#include <cstddef>
#include <optional>
#include <tuple>
#include <utility>

#include "model_parts.hpp"

namespace gpt {

// ---- weights: at rest, every tensor is sharded over d, s and t ------------------------------------------------------

template <dtype C, bool Whole = false>
struct Layer {
  Weight<C, "M/t/d/s", Whole> norm1, norm2;
  Weight<C, "M/d/s Q K/t D", Whole> w_q;
  Weight<C, "M/d/s K/t D", Whole> w_k, w_v;
  Weight<C, "M/d/s Q K/t D", Whole> w_o;
  Weight<C, "M/d/s F/t", Whole> w_gate, w_up, w_down;
  // One each in Qwen 2; E is K * Q * D, G is K * D.
  Array<"bias", Weight<C, "E/t/d/s", Whole>> b_q;
  Array<"bias", Weight<C, "G/t/d/s", Whole>> b_k, b_v;
  Array<"norm", Weight<C, "N/t/d/s", Whole>> q_norm, k_norm;  // one each in Qwen 3; N is D, padded
};

template <dtype C, bool Whole = false>
struct Model {
  Weight<C, "V/t M/d/s", Whole> embed;
  Array<"unembed", Weight<C, "V/t M/d/s", Whole>> unembed;  // empty: tied to embed
  Array<"layers", Layer<C, Whole>> layers;
  Weight<C, "M/t/d/s", Whole> final_norm;
};

static_assert(fully_sharded<Mesh<"d s t">, Model<f32>>);

/// The configuration of the model, without tensors.
struct ModelConfig {
  RopeAngles rope;  ///< of rotary positions
  double norm_epsilon = 1e-6;
  RecomputePolicy recompute = {};
  std::optional<double> score_scale = {};           ///< factor of attention's scores; without it 1/sqrt(D)
  SequenceOrder order = SequenceOrder::contiguous;  ///< of a batch's tokens along L/s
  bool collective_matmul = false;                   ///< sums over t travel while the products of their shards run
  Dropout dropout = {};                             ///< of a microbatch; for a layer, of this layer

  /// Dropout stands at place 0 behind the embedding, and in layer i at the places of i + 1.
  [[nodiscard]] ModelConfig of_layer(std::size_t number) const {
    ModelConfig config = *this;
    config.dropout = dropout.at(number + 1);
    return config;
  }
};

using Batch = TokenTensors<"B/r/d L/s">;
using Residual = Tensor<f32, "B/r/d L/s M/t">;

// ---- one layer: every weight is gathered just before its use (FSDP) -------------------------------------------------

// Gathers the residual stream over t, normalizes it and applies the scale. Communicates x once over t.
template <dtype C, Spec S = "M/t/d/s">
auto gathered_norm(const Residual& x, const Tensor<C, S>& norm, const ModelConfig& config) -> Tensor<C, "B/r/d L/s M"> {
  const auto whole = all_gather<"B/r/d L/s M/t -> B/r/d L/s M", backward_sum<f32>>(cast<C>(x));
  const auto scale = gathered<"M">(norm);
  return rms_norm<"M">(whole, scale, config.norm_epsilon);
}

template <dtype C>
using Heads = std::tuple<Tensor<C, "B/r/d L/s Q K/t D">, Tensor<C, "B/r/d L/s K/t D">, Tensor<C, "B/r/d L/s K/t D">>;

// Adds the biases (Qwen 2).
template <dtype C, bool Whole>
auto biased(const Heads<C>& heads, const Layer<C, Whole>& w) -> Heads<C> {
  const auto& [q, k, v] = heads;
  const auto b_q = gathered<"E/t">(w.b_q[0]);
  const auto b_k = gathered<"G/t">(w.b_k[0]);
  const auto b_v = gathered<"G/t">(w.b_v[0]);
  return {q + rearrange<"K/t Q D -> Q K/t D">(split<"E/t -> K/t Q D">(b_q, {{"Q", q.size("Q")}, {"D", q.size("D")}})),
          k + split<"G/t -> K/t D">(b_k, {{"D", k.size("D")}}), v + split<"G/t -> K/t D">(b_v, {{"D", v.size("D")}})};
}

// Queries, keys and values of the tokens at these positions. Heads are sharded over t: this is tensor parallelism.
template <dtype C, bool Whole = false>
auto projected(const Tensor<C, "B/r/d L/s M">& x, const Layer<C, Whole>& w, const ModelConfig& config,
               Positions positions) -> Heads<C> {
  const auto w_q = gathered<"M Q K/t D">(w.w_q);
  auto q = einsum_unreduced<"B/r/d L/s M, M Q K/t D -> B/r/d L/s Q K/t D">(x, w_q);
  const auto w_k = gathered<"M K/t D">(w.w_k);
  auto k = einsum_unreduced<"B/r/d L/s M, M K/t D -> B/r/d L/s K/t D">(x, w_k);
  const auto w_v = gathered<"M K/t D">(w.w_v);
  auto v = einsum_unreduced<"B/r/d L/s M, M K/t D -> B/r/d L/s K/t D">(x, w_v);
  if (!w.b_q.empty()) std::tie(q, k, v) = biased(Heads<C>{q, k, v}, w);
  for (const auto& norm : w.q_norm) q = head_norm<"N">(q, norm, config.norm_epsilon);
  for (const auto& norm : w.k_norm) k = head_norm<"N">(k, norm, config.norm_epsilon);
  q = rope<"L", "D">(q, config.rope, positions);
  k = rope<"L", "D">(k, config.rope, positions);
  return {save_for_backward(q), save_for_backward(k), save_for_backward(v)};
}

// The sum over all heads, on t.
template <dtype C, Spec S>
auto output(const Tensor<C, "B/r/d L/s Q K/t D">& y, const Tensor<C, S>& w, const ModelConfig& config)
    -> Tensor<C, "B/r/d L/s M/t"> {
  const auto w_o = gathered<"M Q K/t D">(w);
  if (config.collective_matmul) return einsum_scatter<"B/r/d L/s Q K/t D, M Q K/t D -> B/r/d L/s M/t", f32>(y, w_o);
  const auto sums = einsum_unreduced<"B/r/d L/s Q K/t D, M Q K/t D -> B/r/d L/s M +t">(y, w_o);
  return reduce_scatter<"B/r/d L/s M +t -> B/r/d L/s M/t", f32>(sums);
}

// A token sees those of its segment up to itself: keys and values go to the devices of s that hold later tokens.
template <dtype C, bool Whole = false>
auto attention(const Tensor<C, "B/r/d L/s M">& x, const Tensor<i32, "B/r/d L/s">& segments, const Layer<C, Whole>& w,
               const ModelConfig& config) -> Tensor<C, "B/r/d L/s M/t"> {
  const auto [q, k, v] = projected(x, w, config, config.order);
  const auto y = causal_attention<"L", "D", over<"s">>(q, k, v, segments, config.score_scale, config.order);
  return output(y, w.w_o, config);
}

template <dtype C, bool Whole = false>
auto feed_forward(const Tensor<C, "B/r/d L/s M">& x, const Layer<C, Whole>& w, const ModelConfig& config)
    -> Tensor<C, "B/r/d L/s M/t"> {
  const auto w_gate = gathered<"M F/t">(w.w_gate);
  const auto gate = save_for_backward(einsum_unreduced<"B/r/d L/s M, M F/t -> B/r/d L/s F/t">(x, w_gate));
  const auto w_up = gathered<"M F/t">(w.w_up);
  const auto up = save_for_backward(einsum_unreduced<"B/r/d L/s M, M F/t -> B/r/d L/s F/t">(x, w_up));
  const auto y = map([](auto g, auto u) { return swish(g) * u; }, gate, up);
  const auto w_down = gathered<"M F/t">(w.w_down);
  if (config.collective_matmul) return einsum_scatter<"B/r/d L/s F/t, M F/t -> B/r/d L/s M/t", f32>(y, w_down);
  const auto sums = einsum_unreduced<"B/r/d L/s F/t, M F/t -> B/r/d L/s M +t">(y, w_down);
  return reduce_scatter<"B/r/d L/s M +t -> B/r/d L/s M/t", f32>(sums);
}

template <dtype C, bool Whole = false>
auto layer(const Residual& x, const Tensor<i32, "B/r/d L/s">& segments, const Layer<C, Whole>& w,
           const ModelConfig& config) -> Residual {
  const auto normal_x = gathered_norm(x, w.norm1, config);
  const auto attended = attention(normal_x, segments, w, config);
  const auto y = save_for_backward(x + drop(cast<f32>(attended), config.dropout.at(0)));
  const auto normal_y = gathered_norm(y, w.norm2, config);
  const auto fed = feed_forward(normal_y, w, config);
  return y + drop(cast<f32>(fed), config.dropout.at(1));
}

// ---- the model ------------------------------------------------------------------------------------------------------

// Before the layers and after them; the tables are gathered over d and s.
template <dtype C>
auto embedded(const Tensor<C, "V/t M">& table, const Tensor<i32, "B/r/d L/s">& inputs) -> Residual {
  return cast<f32>(reduce_scatter<"B/r/d L/s M +t -> B/r/d L/s M/t", f32>(
      index_unreduced<"[V/t] M, B/r/d L/s -> B/r/d L/s M +t">(table, inputs)));
}
template <dtype C, Spec S = "M/t/d/s">
auto unembedded(const Residual& x, const Tensor<C, S>& norm, const Tensor<C, "V/t M">& table, const ModelConfig& config)
    -> Tensor<f32, "B/r/d L/s V/t"> {
  return einsum_unreduced<"B/r/d L/s M, V/t M -> B/r/d L/s V/t", f32>(gathered_norm(x, norm, config), table);
}

template <dtype C, bool Whole = false>
auto logits(const Model<C, Whole>& w, const Tensor<i32, "B/r/d L/s">& inputs, const Tensor<i32, "B/r/d L/s">& segments,
            const ModelConfig& config) -> Tensor<f32, "B/r/d L/s V/t"> {
  const auto embed = gathered<"V/t M">(w.embed);
  Residual x = drop(embedded(embed, inputs), config.dropout.at(0));
  for (std::size_t i = 0; i < w.layers.size(); ++i)
    x = explicit_activation_checkpointing(layer<C, Whole>, config.recompute)(x, segments, w.layers[i],
                                                                             config.of_layer(i));
  const auto unembed = w.unembed.empty() ? embed : gathered<"V/t M">(w.unembed[0]);
  return unembedded(x, w.final_norm, unembed, config);
}

// Cross-entropy over a vocabulary that is sharded over t, without gathering it. Per token and still partial over t.
// Logits are the largest arrays of a step, so those before the shift are dropped.
inline auto token_losses(Tensor<f32, "B/r/d L/s V/t"> logits, const Tensor<i32, "B/r/d L/s">& targets)
    -> Tensor<f32, "B/r/d L/s +t"> {
  const auto highest = all_reduce_max<"B/r/d L/s V/t -> B/r/d L/s">(stop_gradient(logits));
  logits = logits - highest;
  const auto target = index_unreduced<"B/r/d L/s [V/t], B/r/d L/s -> B/r/d L/s +t">(logits, targets);
  const auto total = all_reduce<"B/r/d L/s +t -> B/r/d L/s">(sum<"B/r/d L/s V/t -> B/r/d L/s +t">(exp(logits)));
  return to_partial<"B/r/d L/s -> B/r/d L/s +t">(log(total)) - target;
}

// The mean loss of the tokens that count. Each device holds a part of the sum, as value_and_grad requires.
inline auto mean_loss(Tensor<f32, "B/r/d L/s V/t"> logits, const Batch& batch) -> Tensor<f32, "+d +r +s +t"> {
  return sum<"B/r/d L/s +t -> +d +r +s +t">(token_losses(std::move(logits), batch.targets) * batch.weights);
}

template <dtype C, bool Whole = false>
auto loss(const Model<C, Whole>& w, const Batch& batch, const ModelConfig& config) -> Tensor<f32, "+d +r +s +t"> {
  return mean_loss(logits(w, batch.inputs, batch.segments, config), batch);
}

}  // namespace gpt
