// Decoding by the GPT of gpt_model.hpp: attention to a cache of keys and values. It needs the types alone.
#pragma once

#include <shardlib/shapes.hpp>

#include <cmath>
#include <cstddef>
#include <cstdint>

#include "gpt_model.hpp"

namespace gpt {

// The keys and values of one layer. Positions that decoding has not reached hold zeros.
template <dtype C>
struct Cache {
  Tensor<C, "B/r/d Klen K/t D"> k, v;
};
// The tokens that a text grows by.
struct NewTokens {
  Tensor<i32, "B/r/d L/s"> ids;
  std::int64_t first = 0;          // the position of the first one
  Tensor<f32, "L Klen"> places;    // the position of each one, one-hot
  Tensor<bool_, "L/s Klen"> seen;  // the positions that each one attends to
};

// Adds the keys and values of the new tokens to the cache, which every device of s has whole, then attends to all of
// it.
template <dtype C>
auto cached_attention(const Tensor<C, "B/r/d L/s M">& x, Cache<C>& cache, const NewTokens& tokens, const Layer<C>& w,
                      const ModelConfig& config) -> Tensor<C, "B/r/d L/s M/t"> {
  const auto [q, k, v] = w.queries_keys_values(x, config, tokens.first);
  const auto places = cast<C>(tokens.places);
  const auto new_k = all_gather<"B/r/d L/s K/t D -> B/r/d L K/t D">(k),
             new_v = all_gather<"B/r/d L/s K/t D -> B/r/d L K/t D">(v);
  cache.k = cache.k + einsum_unreduced<"L Klen, B/r/d L K/t D -> B/r/d Klen K/t D">(places, new_k);
  cache.v = cache.v + einsum_unreduced<"L Klen, B/r/d L K/t D -> B/r/d Klen K/t D">(places, new_v);
  const auto scores = einsum_unreduced<"B/r/d L/s Q K/t D, B/r/d Klen K/t D -> B/r/d Q K/t L/s Klen", f32>(q, cache.k);
  const double scale = config.score_scale.value_or(1 / std::sqrt(static_cast<double>(q.size("D"))));
  const auto probabilities = cast<C>(softmax<"Klen">(where(tokens.seen, scores * scale, -1e30)));
  const auto y =
      einsum_unreduced<"B/r/d Q K/t L/s Klen, B/r/d Klen K/t D -> B/r/d L/s Q K/t D">(probabilities, cache.v);
  return w.output_projection(y, config);
}

template <dtype C>
auto cached_logits(const Model<C>& w, Array<"layers", Cache<C>>& caches, const NewTokens& tokens,
                   const ModelConfig& config) -> Tensor<f32, "B/r/d L/s V/t"> {
  const auto embed = gathered<"V/t M">(w.embed);
  Residual x = token_embeddings(embed, tokens.ids);
  for (std::size_t i = 0; i < caches.size(); ++i) {
    const Layer<C>& layer = w.layers[i];
    const auto attended = cached_attention(gathered_norm(x, layer.norm1, config), caches[i], tokens, layer, config);
    x = x + cast<f32>(attended);
    x = x + cast<f32>(layer.feed_forward(gathered_norm(x, layer.norm2, config), config));
  }
  const auto unembed = w.unembed.empty() ? embed : gathered<"V/t M">(w.unembed[0]);
  return output_logits(x, w.final_norm, unembed, config);
}

}  // namespace gpt
