// Samples from the GPT of gpt_model.hpp, token by token.
#pragma once

#include <shardlib/run/training.hpp>
#include <shardlib/shardlib.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "gpt_decoding.hpp"
#include "gpt_setup.hpp"

namespace gpt {

// Decodes one text of up to `positions` tokens, a batch of 1 that is padded to the devices of r and d; the new tokens
// are padded to those of s. `o` and the mesh must outlive the result.
template <dtype C>
run::Decode decoder(const Mesh<"r d s t">& mesh, std::function<const Model<C>&()> model, const ModelOptions& o,
                    std::int64_t positions) {
  Array<"layers", Cache<C>> caches;
  return [=, &mesh, &o](std::span<const std::int32_t> ids, std::int64_t first) mutable {
    const Model<C>& weights = model();
    const NamedSize one{"B", 1, mesh.size("r") * mesh.size("d")}, context{"Klen", positions};
    const NamedSize length{"L", std::ssize(ids), round_up(std::ssize(ids), mesh.size("s"))};
    if (first == 0) {
      Sizes sizes = sizes_of(o, mesh.device()->axes());
      sizes.insert(sizes.end(), {one, context});
      const auto empty = zeros<C, "B/r/d Klen K/t D">(mesh, sizes);
      caches.assign(weights.layers.size(), {empty, empty});
    }
    std::vector<i32> row(static_cast<std::size_t>(length.padded));
    if (mesh.axis_index("r") == 0 && mesh.axis_index("d") == 0) std::ranges::copy(ids, row.begin());
    const auto whole_row = from_memory<i32, "B/r/d L">(mesh, {one, length}, std::span<const i32>(row));
    const auto at = iota<"L">(mesh, {length.size, length.padded}) + static_cast<double>(first);
    const auto keys = iota<"Klen">(mesh, context.size);
    const NewTokens tokens{shard<"B/r/d L -> B/r/d L/s">(whole_row), first, cast<f32>(equal(at, keys)),
                           greater_equal(shard<"L -> L/s">(at), keys)};
    const auto logits = cached_logits(weights, caches, tokens, o.config);
    const auto last = full<i32, "B/r/d">(mesh, {one}, static_cast<double>(length.size - 1));
    const auto found = all_reduce<"B/r/d V/t +s -> B/r/d V/t">(
        index_unreduced<"B/r/d [L/s] V/t, B/r/d -> B/r/d V/t +s">(logits, last));
    const auto whole = all_gather<"B/r/d V/t -> B V">(found);
    const auto numbers = whole.span().first(static_cast<std::size_t>(o.vocabulary));
    return std::vector<float>(numbers.begin(), numbers.end());
  };
}

}  // namespace gpt
