// The GPT of gpt_fsdp.cpp: weights, layers and loss, with all partitioning and communication spelled out. It needs the
// types alone (shardlib/shapes.hpp), so that shape_tests.cpp can check it with nothing installed.
//
// Dims: B batch, L length, M model, Q query heads per key-value head, K key-value heads, D head, F feed-forward,
// V vocabulary. Mesh: d data parallel (FSDP), t tensor parallel.
#pragma once

#include <shardlib/shapes.hpp>

#include <cmath>
#include <cstddef>
#include <cstdint>

namespace gpt {

using namespace shardlib;

// ---- weights: at rest, every tensor is sharded over the whole mesh --------------------------------------------------

struct Layer {
  Tensor<f32, "M/t/d"> norm1, norm2;
  Tensor<f32, "M/d Q K/t D"> w_q;
  Tensor<f32, "M/d K/t D"> w_k, w_v;
  Tensor<f32, "M/d Q K/t D"> w_o;
  Tensor<f32, "M/d F/t"> w_gate, w_up, w_down;
};

struct Model {
  Tensor<f32, "V/t M/d"> embed;
  Array<"unembed", Tensor<f32, "V/t M/d">> unembed;  // empty: tied to embed
  Array<"layers", Layer> layers;
  Tensor<f32, "M/t/d"> final_norm;
};

static_assert(fully_sharded<Mesh<"d t">, Model>);

/// What is not a tensor.
struct ModelConfig {
  double rope_base = 10000;  ///< the longest wavelength of rotary positions, over 2 pi
};

// One batch: a segment is a document, and attention does not leave it. `weights` are each token's share of the loss;
// those of a step, over all devices and microbatches, add up to 1.
struct Batch {
  Tensor<i32, "B/d L"> inputs, targets, segments;
  Tensor<f32, "B/d L"> weights;
};

// ---- one layer: every weight is gathered over d just before its use (FSDP) ------------------------------------------

using Residual = Tensor<f32, "B/d L M/t">;

// Gathers the residual stream over t, normalizes it and applies the scale. Communicates x once over t.
inline auto gathered_norm(const Residual& x, const Tensor<f32, "M/t/d">& norm) -> Tensor<f32, "B/d L M"> {
  const auto whole = all_gather<"B/d L M/t -> B/d L M">(x);
  const auto scale = all_gather<"M/t/d -> M">(norm);
  return rms_norm<"M">(whole) * scale;
}

struct Heads {
  Tensor<f32, "B/d L Q K/t D"> q;
  Tensor<f32, "B/d L K/t D"> k, v;
};

// Queries, keys and values of the tokens at positions `first`, `first` + 1, ... Heads are sharded over t: this is
// tensor parallelism.
inline auto projected(const Tensor<f32, "B/d L M">& x, const Layer& w, const ModelConfig& config, std::int64_t first)
    -> Heads {
  const auto w_q = all_gather<"M/d Q K/t D -> M Q K/t D">(w.w_q);
  const auto q =
      rope<"L", "D">(einsum_unreduced<"B/d L M, M Q K/t D -> B/d L Q K/t D">(x, w_q), config.rope_base, first);
  const auto w_k = all_gather<"M/d K/t D -> M K/t D">(w.w_k);
  const auto k = rope<"L", "D">(einsum_unreduced<"B/d L M, M K/t D -> B/d L K/t D">(x, w_k), config.rope_base, first);
  const auto w_v = all_gather<"M/d K/t D -> M K/t D">(w.w_v);
  const auto v = einsum_unreduced<"B/d L M, M K/t D -> B/d L K/t D">(x, w_v);
  return {save_for_backward(q), save_for_backward(k), save_for_backward(v)};
}

// A token sees those of its segment up to itself. The type of the result shows the pending sum over all heads, +t.
inline auto attention(const Tensor<f32, "B/d L M">& x, const Tensor<i32, "B/d L">& segments, const Layer& w,
                      const ModelConfig& config) -> Tensor<f32, "B/d L M +t"> {
  const auto [q, k, v] = projected(x, w, config, 0);
  const auto y = causal_attention<"L", "D">(q, k, v, segments);
  const auto w_o = all_gather<"M/d Q K/t D -> M Q K/t D">(w.w_o);
  return einsum_unreduced<"B/d L Q K/t D, M Q K/t D -> B/d L M +t">(y, w_o);
}

inline auto feed_forward(const Tensor<f32, "B/d L M">& x, const Layer& w) -> Tensor<f32, "B/d L M +t"> {
  const auto w_gate = all_gather<"M/d F/t -> M F/t">(w.w_gate);
  const auto gate = save_for_backward(einsum_unreduced<"B/d L M, M F/t -> B/d L F/t">(x, w_gate));
  const auto w_up = all_gather<"M/d F/t -> M F/t">(w.w_up);
  const auto up = save_for_backward(einsum_unreduced<"B/d L M, M F/t -> B/d L F/t">(x, w_up));
  const auto y = map([](auto g, auto u) { return swish(g) * u; }, gate, up);
  const auto w_down = all_gather<"M/d F/t -> M F/t">(w.w_down);
  return einsum_unreduced<"B/d L F/t, M F/t -> B/d L M +t">(y, w_down);
}

inline auto layer(const Residual& x, const Tensor<i32, "B/d L">& segments, const Layer& w, const ModelConfig& config)
    -> Residual {
  const auto attended = attention(gathered_norm(x, w.norm1), segments, w, config);
  const auto y = save_for_backward(x + reduce_scatter<"B/d L M +t -> B/d L M/t">(attended));
  const auto fed = feed_forward(gathered_norm(y, w.norm2), w);
  return y + reduce_scatter<"B/d L M +t -> B/d L M/t">(fed);
}

// ---- the model ------------------------------------------------------------------------------------------------------

// Before the layers and after them; the tables are gathered over d.
inline auto embedded(const Tensor<f32, "V/t M">& table, const Tensor<i32, "B/d L">& inputs) -> Residual {
  return reduce_scatter<"B/d L M +t -> B/d L M/t">(index_unreduced<"[V/t] M, B/d L -> B/d L M +t">(table, inputs));
}
inline auto unembedded(const Residual& x, const Tensor<f32, "M/t/d">& norm, const Tensor<f32, "V/t M">& table)
    -> Tensor<f32, "B/d L V/t"> {
  return einsum_unreduced<"B/d L M, V/t M -> B/d L V/t">(gathered_norm(x, norm), table);
}

inline auto logits(const Model& w, const Tensor<i32, "B/d L">& inputs, const Tensor<i32, "B/d L">& segments,
                   const ModelConfig& config) -> Tensor<f32, "B/d L V/t"> {
  const auto embed = all_gather<"V/t M/d -> V/t M">(w.embed);
  Residual x = embedded(embed, inputs);
  for (const Layer& weights : w.layers) x = explicit_activation_checkpointing(layer)(x, segments, weights, config);
  const auto unembed = w.unembed.empty() ? embed : all_gather<"V/t M/d -> V/t M">(w.unembed[0]);
  return unembedded(x, w.final_norm, unembed);
}

// Cross-entropy over a vocabulary that is sharded over t, without gathering it. Per token and still partial over t.
inline auto token_losses(const Tensor<f32, "B/d L V/t">& logits, const Tensor<i32, "B/d L">& targets)
    -> Tensor<f32, "B/d L +t"> {
  const auto highest = all_reduce_max<"B/d L V/t -> B/d L">(stop_gradient(logits));
  const auto shifted = logits - highest;
  const auto total = all_reduce<"B/d L +t -> B/d L">(sum<"B/d L V/t -> B/d L +t">(exp(shifted)));
  const auto target = index_unreduced<"B/d L [V/t], B/d L -> B/d L +t">(shifted, targets);
  return to_partial<"B/d L -> B/d L +t">(log(total)) - target;
}

// The mean loss of the tokens that count. Each device holds a part of the sum, as value_and_grad requires.
inline auto mean_loss(const Tensor<f32, "B/d L V/t">& logits, const Batch& batch) -> Tensor<f32, "+d +t"> {
  return sum<"B/d L +t -> +d +t">(token_losses(logits, batch.targets) * batch.weights);
}

inline auto loss(const Model& w, const Batch& batch, const ModelConfig& config) -> Tensor<f32, "+d +t"> {
  return mean_loss(logits(w, batch.inputs, batch.segments, config), batch);
}

// ---- decoding: attention to a cache of keys and values -------------------------------------------------------

// The keys and values of one layer. Positions that decoding has not reached hold zeros.
struct Cache {
  Tensor<f32, "B/d Klen K/t D"> k, v;
};
// The tokens that a text grows by.
struct NewTokens {
  Tensor<i32, "B/d L"> ids;
  std::int64_t first = 0;        // the position of the first one
  Tensor<f32, "L Klen"> places;  // the position of each one, one-hot
  Tensor<bool_, "L Klen"> seen;  // the positions that each one attends to
};

// Adds the keys and values of the new tokens to the cache, then attends to all of it.
inline auto cached_attention(const Tensor<f32, "B/d L M">& x, Cache& cache, const NewTokens& tokens, const Layer& w,
                             const ModelConfig& config) -> Tensor<f32, "B/d L M +t"> {
  const auto [q, k, v] = projected(x, w, config, tokens.first);
  cache.k = cache.k + einsum_unreduced<"L Klen, B/d L K/t D -> B/d Klen K/t D">(tokens.places, k);
  cache.v = cache.v + einsum_unreduced<"L Klen, B/d L K/t D -> B/d Klen K/t D">(tokens.places, v);
  const auto scores = einsum_unreduced<"B/d L Q K/t D, B/d Klen K/t D -> B/d Q K/t L Klen">(q, cache.k);
  const double scale = 1 / std::sqrt(static_cast<double>(q.size("D")));
  const auto probabilities = softmax<"Klen">(where(tokens.seen, scores * scale, -1e30));
  const auto y = einsum_unreduced<"B/d Q K/t L Klen, B/d Klen K/t D -> B/d L Q K/t D">(probabilities, cache.v);
  const auto w_o = all_gather<"M/d Q K/t D -> M Q K/t D">(w.w_o);
  return einsum_unreduced<"B/d L Q K/t D, M Q K/t D -> B/d L M +t">(y, w_o);
}

inline auto cached_logits(const Model& w, Array<"layers", Cache>& caches, const NewTokens& tokens,
                          const ModelConfig& config) -> Tensor<f32, "B/d L V/t"> {
  const auto embed = all_gather<"V/t M/d -> V/t M">(w.embed);
  Residual x = embedded(embed, tokens.ids);
  for (std::size_t i = 0; i < caches.size(); ++i) {
    const Layer& layer = w.layers[i];
    const auto attended = cached_attention(gathered_norm(x, layer.norm1), caches[i], tokens, layer, config);
    x = x + reduce_scatter<"B/d L M +t -> B/d L M/t">(attended);
    x = x + reduce_scatter<"B/d L M +t -> B/d L M/t">(feed_forward(gathered_norm(x, layer.norm2), layer));
  }
  const auto unembed = w.unembed.empty() ? embed : all_gather<"V/t M/d -> V/t M">(w.unembed[0]);
  return unembedded(x, w.final_norm, unembed);
}

}  // namespace gpt
