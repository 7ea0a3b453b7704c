// The GPT of gpt_fsdp: weights, layers and loss, with all partitioning and communication spelled out. It needs the
// types alone (shardlib/shapes.hpp), so that shape_tests.cpp can check it with nothing installed.
//
// C is the dtype of computation, f32 or bf16: of products, of the weights that the layers read, of their gradients and
// of what is sent. Sums over devices, norms, softmax, the residual stream and the loss are f32.
// Dims: B batch, L length, M model, Q query heads per key-value head, K key-value heads, D head, F feed-forward,
// V vocabulary. Mesh: d data parallel, s context parallel (a part of each sequence), t tensor parallel. FSDP is over d
// and s.
#pragma once

#include <shardlib/shapes.hpp>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <optional>

namespace gpt {

using namespace shardlib;

// ---- weights: at rest, every tensor is sharded over the whole mesh --------------------------------------------------

template <dtype C>
struct Layer {
  Tensor<C, "M/t/d/s"> norm1, norm2;
  Tensor<C, "M/d/s Q K/t D"> w_q;
  Tensor<C, "M/d/s K/t D"> w_k, w_v;
  Tensor<C, "M/d/s Q K/t D"> w_o;
  Tensor<C, "M/d/s F/t"> w_gate, w_up, w_down;
  // One each in Qwen 2; E is K * Q * D, G is K * D.
  Array<"bias", Tensor<C, "E/t/d/s">> b_q;
  Array<"bias", Tensor<C, "G/t/d/s">> b_k, b_v;
  Array<"norm", Tensor<C, "N/t/d/s">> q_norm, k_norm;  // one each in Qwen 3; N is D, padded
};

template <dtype C>
struct Model {
  Tensor<C, "V/t M/d/s"> embed;
  Array<"unembed", Tensor<C, "V/t M/d/s">> unembed;  // empty: tied to embed
  Array<"layers", Layer<C>> layers;
  Tensor<C, "M/t/d/s"> final_norm;
};

static_assert(fully_sharded<Mesh<"d s t">, Model<f32>>);

/// What is not a tensor.
struct ModelConfig {
  RopeAngles rope;  ///< of rotary positions
  double norm_epsilon = 1e-6;
  RecomputePolicy recompute = {"seqax"};
  std::optional<double> score_scale = {};           ///< factor of attention's scores; without it 1/sqrt(D)
  SequenceOrder order = SequenceOrder::contiguous;  ///< of a batch's tokens along L/s
};

// One batch: a segment is a document, and attention does not leave it. `weights` are each token's share of the loss;
// those of a step, over all devices and microbatches, add up to 1.
struct Batch {
  Tensor<i32, "B/d L/s"> inputs, targets, segments;
  Tensor<f32, "B/d L/s"> weights;
};

// ---- one layer: every weight is gathered just before its use (FSDP) ------------------------------------------
//
// The backward pass of a gather sums the gradient over the devices. `backward_sum<f32>`: in f32, also where C is bf16.

using Residual = Tensor<f32, "B/d L/s M/t">;

// Gathers the residual stream over t, normalizes it and applies the scale. Communicates x once over t.
template <dtype C>
auto gathered_norm(const Residual& x, const Tensor<C, "M/t/d/s">& norm, const ModelConfig& config)
    -> Tensor<C, "B/d L/s M"> {
  const auto whole = all_gather<"B/d L/s M/t -> B/d L/s M", backward_sum<f32>>(cast<C>(x));
  const auto scale = all_gather<"M/t/d/s -> M", backward_sum<f32>>(norm);
  return cast<C>(rms_norm<"M">(cast<f32>(whole), config.norm_epsilon) * cast<f32>(scale));
}

template <dtype C>
struct Heads {
  Tensor<C, "B/d L/s Q K/t D"> q;
  Tensor<C, "B/d L/s K/t D"> k, v;
};

// Normalizes each head (Qwen 3). Heads share the scale.
template <dtype C, Spec S>
auto head_norm(const Tensor<C, S>& x, const Tensor<C, "N/t/d/s">& norm, const ModelConfig& config) -> Tensor<C, S> {
  const auto scale = all_gather<"N/t/d/s -> N", backward_sum<f32>>(norm);
  return cast<C>(rms_norm<"D">(cast<f32>(x), config.norm_epsilon) * cast<f32>(narrow<"N -> D">(scale, 0, x.size("D"))));
}

// Queries, keys and values of the tokens at these positions. Heads are sharded over t: this is tensor parallelism.
template <dtype C>
auto projected(const Tensor<C, "B/d L/s M">& x, const Layer<C>& w, const ModelConfig& config, Positions positions)
    -> Heads<C> {
  const auto w_q = all_gather<"M/d/s Q K/t D -> M Q K/t D", backward_sum<f32>>(w.w_q);
  auto q = einsum_unreduced<"B/d L/s M, M Q K/t D -> B/d L/s Q K/t D">(x, w_q);
  const auto w_k = all_gather<"M/d/s K/t D -> M K/t D", backward_sum<f32>>(w.w_k);
  auto k = einsum_unreduced<"B/d L/s M, M K/t D -> B/d L/s K/t D">(x, w_k);
  const auto w_v = all_gather<"M/d/s K/t D -> M K/t D", backward_sum<f32>>(w.w_v);
  auto v = einsum_unreduced<"B/d L/s M, M K/t D -> B/d L/s K/t D">(x, w_v);
  const Sizes groups{{"Q", q.size("Q")}, {"D", q.size("D")}}, heads{{"D", q.size("D")}};
  for (const auto& bias : w.b_q) {
    const auto b = all_gather<"E/t/d/s -> E/t", backward_sum<f32>>(bias);
    q = q + rearrange<"K/t Q D -> Q K/t D">(split<"E/t -> K/t Q D">(b, groups));
  }
  for (const auto& bias : w.b_k) {
    const auto b = all_gather<"G/t/d/s -> G/t", backward_sum<f32>>(bias);
    k = k + split<"G/t -> K/t D">(b, heads);
  }
  for (const auto& bias : w.b_v) {
    const auto b = all_gather<"G/t/d/s -> G/t", backward_sum<f32>>(bias);
    v = v + split<"G/t -> K/t D">(b, heads);
  }
  for (const auto& norm : w.q_norm) q = head_norm(q, norm, config);
  for (const auto& norm : w.k_norm) k = head_norm(k, norm, config);
  q = rope<"L", "D">(q, config.rope, positions);
  k = rope<"L", "D">(k, config.rope, positions);
  return {save_for_backward(q), save_for_backward(k), save_for_backward(v)};
}

// A token sees those of its segment up to itself: keys and values go to the devices of s that hold later tokens. The
// type of the result shows the pending sum over all heads, +t.
template <dtype C>
auto attention(const Tensor<C, "B/d L/s M">& x, const Tensor<i32, "B/d L/s">& segments, const Layer<C>& w,
               const ModelConfig& config) -> Tensor<C, "B/d L/s M +t"> {
  const auto [q, k, v] = projected(x, w, config, config.order);
  const auto y = causal_attention<"L", "D", over<"s">>(q, k, v, segments, config.score_scale, config.order);
  const auto w_o = all_gather<"M/d/s Q K/t D -> M Q K/t D", backward_sum<f32>>(w.w_o);
  return einsum_unreduced<"B/d L/s Q K/t D, M Q K/t D -> B/d L/s M +t">(y, w_o);
}

template <dtype C>
auto feed_forward(const Tensor<C, "B/d L/s M">& x, const Layer<C>& w) -> Tensor<C, "B/d L/s M +t"> {
  const auto w_gate = all_gather<"M/d/s F/t -> M F/t", backward_sum<f32>>(w.w_gate);
  const auto gate = save_for_backward(einsum_unreduced<"B/d L/s M, M F/t -> B/d L/s F/t">(x, w_gate));
  const auto w_up = all_gather<"M/d/s F/t -> M F/t", backward_sum<f32>>(w.w_up);
  const auto up = save_for_backward(einsum_unreduced<"B/d L/s M, M F/t -> B/d L/s F/t">(x, w_up));
  const auto y = map([](auto g, auto u) { return swish(g) * u; }, gate, up);
  const auto w_down = all_gather<"M/d/s F/t -> M F/t", backward_sum<f32>>(w.w_down);
  return einsum_unreduced<"B/d L/s F/t, M F/t -> B/d L/s M +t">(y, w_down);
}

template <dtype C>
auto layer(const Residual& x, const Tensor<i32, "B/d L/s">& segments, const Layer<C>& w, const ModelConfig& config)
    -> Residual {
  const auto attended = attention(gathered_norm(x, w.norm1, config), segments, w, config);
  const auto y = save_for_backward(x + cast<f32>(reduce_scatter<"B/d L/s M +t -> B/d L/s M/t", f32>(attended)));
  const auto fed = feed_forward(gathered_norm(y, w.norm2, config), w);
  return y + cast<f32>(reduce_scatter<"B/d L/s M +t -> B/d L/s M/t", f32>(fed));
}

// ---- the model ------------------------------------------------------------------------------------------------------

// Before the layers and after them; the tables are gathered over d and s.
template <dtype C>
auto embedded(const Tensor<C, "V/t M">& table, const Tensor<i32, "B/d L/s">& inputs) -> Residual {
  return cast<f32>(reduce_scatter<"B/d L/s M +t -> B/d L/s M/t", f32>(
      index_unreduced<"[V/t] M, B/d L/s -> B/d L/s M +t">(table, inputs)));
}
template <dtype C>
auto unembedded(const Residual& x, const Tensor<C, "M/t/d/s">& norm, const Tensor<C, "V/t M">& table,
                const ModelConfig& config) -> Tensor<f32, "B/d L/s V/t"> {
  return einsum_unreduced<"B/d L/s M, V/t M -> B/d L/s V/t", f32>(gathered_norm(x, norm, config), table);
}

template <dtype C>
auto logits(const Model<C>& w, const Tensor<i32, "B/d L/s">& inputs, const Tensor<i32, "B/d L/s">& segments,
            const ModelConfig& config) -> Tensor<f32, "B/d L/s V/t"> {
  const auto embed = all_gather<"V/t M/d/s -> V/t M", backward_sum<f32>>(w.embed);
  Residual x = embedded(embed, inputs);
  for (const Layer<C>& weights : w.layers)
    x = explicit_activation_checkpointing(layer<C>, config.recompute)(x, segments, weights, config);
  const auto unembed = w.unembed.empty() ? embed : all_gather<"V/t M/d/s -> V/t M", backward_sum<f32>>(w.unembed[0]);
  return unembedded(x, w.final_norm, unembed, config);
}

// Cross-entropy over a vocabulary that is sharded over t, without gathering it. Per token and still partial over t.
inline auto token_losses(const Tensor<f32, "B/d L/s V/t">& logits, const Tensor<i32, "B/d L/s">& targets)
    -> Tensor<f32, "B/d L/s +t"> {
  const auto highest = all_reduce_max<"B/d L/s V/t -> B/d L/s">(stop_gradient(logits));
  const auto shifted = logits - highest;
  const auto total = all_reduce<"B/d L/s +t -> B/d L/s">(sum<"B/d L/s V/t -> B/d L/s +t">(exp(shifted)));
  const auto target = index_unreduced<"B/d L/s [V/t], B/d L/s -> B/d L/s +t">(shifted, targets);
  return to_partial<"B/d L/s -> B/d L/s +t">(log(total)) - target;
}

// The mean loss of the tokens that count. Each device holds a part of the sum, as value_and_grad requires.
inline auto mean_loss(const Tensor<f32, "B/d L/s V/t">& logits, const Batch& batch) -> Tensor<f32, "+d +s +t"> {
  return sum<"B/d L/s +t -> +d +s +t">(token_losses(logits, batch.targets) * batch.weights);
}

template <dtype C>
auto loss(const Model<C>& w, const Batch& batch, const ModelConfig& config) -> Tensor<f32, "+d +s +t"> {
  return mean_loss(logits(w, batch.inputs, batch.segments, config), batch);
}

}  // namespace gpt
