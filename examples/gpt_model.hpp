// The GPT of gpt_fsdp.cpp: weights, layers and loss, with all partitioning and communication spelled out. It needs the
// types alone (shardlib/shapes.hpp), so that shape_tests.cpp can check it with nothing installed.
//
// Dims: B batch, L length, M model, Q query heads per key-value head, K key-value heads, D head, F feed-forward,
// V vocabulary. Mesh: d data parallel (FSDP), t tensor parallel.
#pragma once

#include <shardlib/shapes.hpp>

#include <cmath>

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
struct Form {
  double rope_base = 10000;   ///< the longest wavelength of rotary positions, over 2 pi
  bool library_loss = false;  ///< the library's cross_entropy in place of the one spelled below
  bool prefetch = false;      ///< gather the next layer's weights while a layer runs
};

/// Keys and values of the positions that sampling has passed.
struct Cache {
  Tensor<f32, "B/d Klen K/t D"> k, v;
};
/// Where sampling stands; training has none of it.
struct Sampling {
  std::int64_t offset = 0;       ///< the position of the first token
  Tensor<f32, "L Klen"> places;  ///< the position of each token, one-hot
  Cache* cache = nullptr;        ///< this layer's
};

// One batch: a segment is a document, and attention does not leave it. `weights` are each token's share of the loss;
// those of a step, over all devices and microbatches, add up to 1.
struct Batch {
  Tensor<i32, "B/d L"> inputs, targets, segments;
  Tensor<f32, "B/d L"> weights;
};

using Residual = Tensor<f32, "B/d L M/t">;
/// Which keys a query sees, those of its own segment up to itself: as a mask for attention that is spelled, as segments
/// for the library's. Only one of the two is there.
struct Mask {
  Tensor<bool_, "B/d Qlen Klen"> seen;
  Tensor<i32, "B/d L"> segments;
};

// ---- one layer ------------------------------------------------------------------------------------------------------

// Weights are gathered over d just before their use, or, with prefetch, while the layer before runs: this is FSDP.
struct AttentionWeights {
  Tensor<f32, "M Q K/t D"> w_q;
  Tensor<f32, "M K/t D"> w_k, w_v;
  Tensor<f32, "M Q K/t D"> w_o;
};
struct FeedForwardWeights {
  Tensor<f32, "M F/t"> w_gate, w_up, w_down;
};
inline auto gathered_gain(const Tensor<f32, "M/t/d">& gain) -> Tensor<f32, "M"> {
  return all_gather<"M/t/d -> M">(gain);
}
inline auto attention_weights(const Layer& w) -> AttentionWeights {
  return {all_gather<"M/d Q K/t D -> M Q K/t D">(w.w_q), all_gather<"M/d K/t D -> M K/t D">(w.w_k),
          all_gather<"M/d K/t D -> M K/t D">(w.w_v), all_gather<"M/d Q K/t D -> M Q K/t D">(w.w_o)};
}
inline auto feed_forward_weights(const Layer& w) -> FeedForwardWeights {
  return {all_gather<"M/d F/t -> M F/t">(w.w_gate), all_gather<"M/d F/t -> M F/t">(w.w_up),
          all_gather<"M/d F/t -> M F/t">(w.w_down)};
}
// All that a layer gathers of its weights, in the order in which it does.
struct LayerWeights {
  Tensor<f32, "M"> norm1;
  AttentionWeights attention;
  Tensor<f32, "M"> norm2;
  FeedForwardWeights feed_forward;
};
inline auto layer_weights(const Layer& w) -> LayerWeights {
  return {gathered_gain(w.norm1), attention_weights(w), gathered_gain(w.norm2), feed_forward_weights(w)};
}

// Gathers the residual stream over t, normalises it and applies the gain. Communicates x once over t.
inline auto gathered_norm(const Residual& x, const Tensor<f32, "M/t/d">& gain) -> Tensor<f32, "B/d L M"> {
  const auto whole = all_gather<"B/d L M/t -> B/d L M">(x);
  return rms_norm<"M">(whole) * gathered_gain(gain);
}

inline auto attention(const Tensor<f32, "B/d L M">& x, const Mask& mask, const Layer& w, const Form& form,
                      const Sampling& sampling) -> Tensor<f32, "B/d L M +t"> {
  const auto [w_q, w_k, w_v, w_o] = attention_weights(w);
  // Heads are sharded over t: this is tensor parallelism.
  const auto turn = [&](const auto& y) { return rope<"L", "D">(y, form.rope_base, sampling.offset); };
  const auto q = save_for_backward(turn(einsum_unreduced<"B/d L M, M Q K/t D -> B/d L Q K/t D">(x, w_q)));
  const auto new_k = save_for_backward(turn(einsum_unreduced<"B/d L M, M K/t D -> B/d L K/t D">(x, w_k)));
  const auto new_v = save_for_backward(einsum_unreduced<"B/d L M, M K/t D -> B/d L K/t D">(x, w_v));
  // --attention fused: the library's causal_attention in place of the one spelled below, which sampling needs.
  if (mask.segments)
    return einsum_unreduced<"B/d L Q K/t D, M Q K/t D -> B/d L M +t">(
        causal_attention<"L", "D">(q, new_k, new_v, mask.segments), w_o);
  auto k = rename<"L -> Klen">(new_k), v = rename<"L -> Klen">(new_v);
  if (Cache* const cache = sampling.cache) {
    k = cache->k = cache->k + einsum_unreduced<"L Klen, B/d L K/t D -> B/d Klen K/t D">(sampling.places, new_k);
    v = cache->v = cache->v + einsum_unreduced<"L Klen, B/d L K/t D -> B/d Klen K/t D">(sampling.places, new_v);
  }
  const auto logits =
      einsum_unreduced<"B/d Qlen Q K/t D, B/d Klen K/t D -> B/d Q K/t Qlen Klen">(rename<"L -> Qlen">(q), k);
  const double scale = 1.0 / std::sqrt(static_cast<double>(w.w_q.size("D")));
  const auto probabilities = softmax<"Klen">(where(mask.seen, logits * scale, -1e30));
  const auto heads =
      einsum_unreduced<"B/d Q K/t L Klen, B/d Klen K/t D -> B/d L Q K/t D">(rename<"Qlen -> L">(probabilities), v);
  // The heads of all devices of t have still to be summed: the type says so.
  return einsum_unreduced<"B/d L Q K/t D, M Q K/t D -> B/d L M +t">(heads, w_o);
}

inline auto feed_forward(const Tensor<f32, "B/d L M">& x, const Layer& w) -> Tensor<f32, "B/d L M +t"> {
  const auto [w_gate, w_up, w_down] = feed_forward_weights(w);
  const auto gate = save_for_backward(einsum_unreduced<"B/d L M, M F/t -> B/d L F/t">(x, w_gate));
  const auto up = save_for_backward(einsum_unreduced<"B/d L M, M F/t -> B/d L F/t">(x, w_up));
  const auto y = map([](auto g, auto u) { return swish(g) * u; }, gate, up);
  return einsum_unreduced<"B/d L F/t, M F/t -> B/d L M +t">(y, w_down);
}

inline auto layer(const Residual& x, const Mask& mask, const Layer& w, const Form& form, const Sampling& sampling)
    -> Residual {
  const auto attended = attention(gathered_norm(x, w.norm1), mask, w, form, sampling);
  const auto y = save_for_backward(x + reduce_scatter<"B/d L M +t -> B/d L M/t">(attended));
  const auto fed = feed_forward(gathered_norm(y, w.norm2), w);
  return y + reduce_scatter<"B/d L M +t -> B/d L M/t">(fed);
}

// ---- the model ------------------------------------------------------------------------------------------------------

// Without a causal mask (--attention fused) no mask is made.
inline auto segment_mask(const Tensor<i32, "B/d L">& segments, const Tensor<bool_, "Qlen Klen">& causal) -> Mask {
  if (!causal) return {{}, segments};
  return {logical_and(equal(rename<"L -> Qlen">(segments), rename<"L -> Klen">(segments)), causal), {}};
}

// Before the layers and behind them; the tables are gathered over d.
inline auto embedded(const Tensor<f32, "V/t M">& table, const Tensor<i32, "B/d L">& inputs) -> Residual {
  return reduce_scatter<"B/d L M +t -> B/d L M/t">(index_unreduced<"[V/t] M, B/d L -> B/d L M +t">(table, inputs));
}
inline auto unembedded(const Residual& x, const Tensor<f32, "M/t/d">& norm, const Tensor<f32, "V/t M">& table)
    -> Tensor<f32, "B/d L V/t"> {
  return einsum_unreduced<"B/d L M, V/t M -> B/d L V/t">(gathered_norm(x, norm), table);
}

// Logits of a batch; `caches` is for sampling.
inline auto logits(const Model& w, const Tensor<i32, "B/d L">& inputs, const Mask& mask, const Form& form,
                   const Sampling& sampling, Array<"layers", Cache>* caches) -> Tensor<f32, "B/d L V/t"> {
  const auto embed = all_gather<"V/t M/d -> V/t M">(w.embed);
  Residual x = embedded(embed, inputs);
  for (std::size_t i = 0; i < w.layers.size(); ++i) {
    if (form.prefetch) x = prefetch(x, layer_weights, w.layers, i);
    x = caches != nullptr ? layer(x, mask, w.layers[i], form, {sampling.offset, sampling.places, &(*caches)[i]})
                          : explicit_activation_checkpointing(layer)(x, mask, w.layers[i], form, sampling);
  }
  const auto y = unembedded(x, w.final_norm, w.unembed.empty() ? embed : all_gather<"V/t M/d -> V/t M">(w.unembed[0]));
  // The backward pass begins here: the last layers' weights come while it unembeds.
  return form.prefetch ? prefetch(y, layer_weights, w.layers, w.layers.size()) : y;
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

// The mean loss of the tokens that count. Each device of the mesh holds a part of the sum: that is what value_and_grad
// wants.
inline auto mean_loss(const Tensor<f32, "B/d L V/t">& logits, const Batch& batch, const Form& form)
    -> Tensor<f32, "+d +t"> {
  // --library-loss: the library's cross_entropy in place of the one spelled above.
  const auto losses = form.library_loss ? cross_entropy(logits, batch.targets) : token_losses(logits, batch.targets);
  return sum<"B/d L +t -> +d +t">(losses * batch.weights);
}

inline auto loss(const Model& w, const Batch& batch, const Tensor<bool_, "Qlen Klen">& causal, const Form& form)
    -> Tensor<f32, "+d +t"> {
  return mean_loss(logits(w, batch.inputs, segment_mask(batch.segments, causal), form, {}, nullptr), batch, form);
}

}  // namespace gpt
