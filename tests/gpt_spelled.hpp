// The GPT of examples/gpt_model.hpp with attention spelled in einsums, which stores the scores, and by choice with the
// library's cross_entropy: what tests compare the example's causal_attention and its spelled loss with.
#pragma once

#include <cmath>
#include <shardlib/shapes.hpp>

#include "../examples/gpt_model.hpp"

namespace gpt_spelled {

using namespace shardlib;
using gpt::ModelConfig, gpt::Residual;
using Layer = gpt::Layer<f32>;
using Model = gpt::Model<f32>;
using Mask = Tensor<bool_, "B/r/d Qlen/s Klen">;

/// Which keys a query sees: those of its own segment up to itself.
inline auto segment_mask(const Tensor<i32, "B/r/d L/s">& segments, const Tensor<bool_, "Qlen/s Klen">& causal) -> Mask {
  const auto keys = rename<"L -> Klen">(all_gather<"B/r/d L/s -> B/r/d L">(segments));
  return logical_and(equal(rename<"L -> Qlen">(segments), keys), causal);
}

inline auto attention(const Tensor<f32, "B/r/d L/s M">& x, const Mask& seen, const Layer& w, const ModelConfig& config)
    -> Tensor<f32, "B/r/d L/s M +t"> {
  const auto [q, new_k, new_v] = w.queries_keys_values(x, config, 0);
  const auto k = rename<"L -> Klen">(all_gather<"B/r/d L/s K/t D -> B/r/d L K/t D">(new_k));
  const auto v = rename<"L -> Klen">(all_gather<"B/r/d L/s K/t D -> B/r/d L K/t D">(new_v));
  const auto scores =
      einsum_unreduced<"B/r/d Qlen/s Q K/t D, B/r/d Klen K/t D -> B/r/d Q K/t Qlen/s Klen">(rename<"L -> Qlen">(q), k);
  const double scale = 1.0 / std::sqrt(static_cast<double>(w.w_q.size("D")));
  const auto probabilities = softmax<"Klen">(where(seen, scores * scale, -1e30));
  const auto heads = einsum_unreduced<"B/r/d Q K/t L/s Klen, B/r/d Klen K/t D -> B/r/d L/s Q K/t D">(
      rename<"Qlen -> L">(probabilities), v);
  const auto w_o = all_gather<"M/d/s Q K/t D -> M Q K/t D">(w.w_o);
  return einsum_unreduced<"B/r/d L/s Q K/t D, M Q K/t D -> B/r/d L/s M +t">(heads, w_o);
}

inline auto layer(const Residual& x, const Mask& seen, const Layer& w, const ModelConfig& config) -> Residual {
  const auto attended = attention(gpt::gathered_norm(x, w.norm1, config), seen, w, config);
  const auto y = save_for_backward(x + reduce_scatter<"B/r/d L/s M +t -> B/r/d L/s M/t">(attended));
  return y + w.feed_forward(gpt::gathered_norm(y, w.norm2, config), config);
}

inline auto logits(const Model& w, const gpt::Batch& batch, const Tensor<bool_, "Qlen/s Klen">& causal,
                   const ModelConfig& config) -> Tensor<f32, "B/r/d L/s V/t"> {
  const auto seen = segment_mask(batch.segments, causal);
  const auto embed = all_gather<"V/t M/d/s -> V/t M">(w.embed);
  Residual x = gpt::token_embeddings(embed, batch.inputs);
  for (const Layer& weights : w.layers) x = explicit_activation_checkpointing(layer)(x, seen, weights, config);
  const auto unembed = w.unembed.empty() ? embed : all_gather<"V/t M/d/s -> V/t M">(w.unembed[0]);
  return gpt::output_logits(x, w.final_norm, unembed, config);
}

/// As gpt::mean_loss, with the library's cross_entropy.
inline auto library_loss(const Tensor<f32, "B/r/d L/s V/t">& logits, const gpt::Batch& batch)
    -> Tensor<f32, "+d +r +s +t"> {
  return sum<"B/r/d L/s +t -> +d +r +s +t">(cross_entropy(logits, batch.targets) * batch.weights);
}

}  // namespace gpt_spelled
