// Samples from the mixture of experts of moe_model.hpp, token by token: attention to a cache of keys and values, and
// experts that take every token.
#pragma once

#include <shardlib/run/trained.hpp>
#include <shardlib/run/training.hpp>
#include <shardlib/shardlib.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "moe_model.hpp"

namespace moe {

// The keys and values of one layer. Positions that decoding has not reached hold zeros.
template <dtype C>
struct Cache {
  Tensor<C, "B/d/e Klen H/t D"> k, v;
};
// The tokens that a text grows by. Tokens of padding behind them make the length divide over s; the cache does not get
// those.
struct NewTokens {
  Tensor<i32, "B/d/e L/s"> ids;
  std::int64_t first = 0;          // the position of the first one
  Tensor<f32, "L Klen"> places;    // the position of each one, one-hot
  Tensor<bool_, "L/s Klen"> seen;  // the positions that each one attends to
};

// Adds the keys and values of the new tokens to the cache, which every device of s has whole, then attends to all of
// it.
template <dtype C>
auto cached_attention(const Hidden<C>& x, Cache<C>& cache, const NewTokens& tokens, const LayerOf<C, false>& w,
                      const ModelConfig& config) -> Residual {
  const auto [q, k, v] = queries_keys_values(x, w, config, tokens.first);
  const auto new_k = all_gather<"B/d/e L H/t D">(k), new_v = all_gather<"B/d/e L H/t D">(v);
  const auto places = cast<C>(tokens.places);
  cache.k = cache.k + einsum_unreduced<"L Klen, B/d/e L H/t D -> B/d/e Klen H/t D">(places, new_k);
  cache.v = cache.v + einsum_unreduced<"L Klen, B/d/e L H/t D -> B/d/e Klen H/t D">(places, new_v);
  const auto scores = einsum_unreduced<"B/d/e L/s Q H/t D, B/d/e Klen H/t D -> B/d/e Q H/t L/s Klen", f32>(q, cache.k);
  const double scale = 1 / std::sqrt(static_cast<double>(q.size("D")));
  const auto probabilities = cast<C>(softmax<"Klen">(where(tokens.seen, scores * scale, -1e30)));
  return joined(einsum_unreduced<"B/d/e Q H/t L/s Klen, B/d/e Klen H/t D -> B/d/e L/s Q H/t D">(probabilities, cache.v),
                w);
}

template <dtype C>
auto cached_logits(const ModelOf<C, false>& w, Array<"layers", Cache<C>>& caches, const NewTokens& tokens,
                   const ModelConfig& config) -> Tensor<f32, "B/d/e L/s V/t"> {
  Residual x = token_embeddings(w, tokens.ids);
  for (std::size_t i = 0; i < caches.size(); ++i) {
    const LayerOf<C, false>& layer = w.layers[i];
    x = x + cached_attention(normalized(x, layer.norm1, config), caches[i], tokens, layer, config);
    x = x + feed_forward(normalized(x, layer.norm2, config), layer, config).first;
  }
  return einsum_unreduced<"B/d/e L/s M, V/t M -> B/d/e L/s V/t", f32>(normalized(x, w.final_norm, config),
                                                                      gathered<"V/t M">(w.unembed));
}

// Decodes one text of up to `positions` tokens, the first row of a batch that has one for each device of d and e. Every
// token reaches its experts, whatever their capacity in training. `trained` and the mesh must outlive the result.
template <dtype C>
run::Decode decoder(const MoeMesh& mesh, run::Trained<Model, ModelOf<C, false>>& trained, ModelConfig config,
                    const Sizes& sizes, std::int64_t positions) {
  config.capacity = 0;
  Array<"layers", Cache<C>> caches;
  return [=, &mesh, &trained](std::span<const std::int32_t> ids, std::int64_t first) mutable {
    const auto& weights = trained.model();
    const NamedSize rows{"B", mesh.size("d") * mesh.size("e")}, context{"Klen", positions};
    const NamedSize length{"L", round_up(std::ssize(ids), mesh.size("s"))};
    if (first == 0) {
      Sizes all = sizes;
      all.insert(all.end(), {rows, context});
      const auto empty = zeros<C, "B/d/e Klen H/t D">(mesh, all);
      caches.assign(weights.layers.size(), {empty, empty});
    }
    std::vector<i32> row(static_cast<std::size_t>(length.size));
    if (mesh.axis_index("d") == 0 && mesh.axis_index("e") == 0) std::ranges::copy(ids, row.begin());
    const auto whole_row = from_memory<i32, "B/d/e L">(mesh, {rows, length}, std::span<const i32>(row));
    const auto number = iota<"L">(mesh, length.size), at = number + static_cast<double>(first);
    const auto keys = iota<"Klen">(mesh, context.size);
    const auto is_new = less(number, static_cast<double>(ids.size()));
    const NewTokens tokens{shard<"B/d/e L -> B/d/e L/s">(whole_row), first,
                           cast<f32>(logical_and(equal(at, keys), is_new)), greater_equal(shard<"L -> L/s">(at), keys)};
    const auto logits = cached_logits(weights, caches, tokens, config);
    const auto last = full<i32, "B/d/e">(mesh, {rows}, static_cast<double>(ids.size() - 1));
    const auto found = all_reduce<"B/d/e V/t +s -> B/d/e V/t">(
        index_unreduced<"B/d/e [L/s] V/t, B/d/e -> B/d/e V/t +s">(logits, last));
    const auto whole = all_gather<"B/d/e V/t -> B V">(found);
    const auto numbers = whole.span().first(static_cast<std::size_t>(weights.embed.size("V")));
    return std::vector<float>(numbers.begin(), numbers.end());
  };
}

}  // namespace moe
