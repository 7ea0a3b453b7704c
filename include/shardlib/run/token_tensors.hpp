// Batches of tokens as tensors.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "shardlib/io/data/token_batch.hpp"
#include "shardlib/ops/create.hpp"
#include "shardlib/ops/sequences.hpp"
#include "shardlib/runtime/value.hpp"
#include "shardlib/support/error.hpp"
#include "shardlib/types/tensor.hpp"

namespace shardlib::run {

namespace detail {
/// The tokens of part `index` of `parts` of each row of `length` tokens.
[[nodiscard]] inline io::TokenBatch part_of_rows(const io::TokenBatch& rows, std::int64_t length, std::int64_t parts,
                                                 std::int64_t index, SequenceOrder order) {
  const auto runs = shardlib::detail::positions_of_shard(order, index, parts, length / parts);
  const auto of = [&](const auto& values) {
    std::remove_cvref_t<decltype(values)> taken;
    taken.reserve(values.size() / static_cast<std::size_t>(parts));
    for (auto row = values.begin(); row != values.end(); row += length)
      for (const auto [first, size] : runs) taken.insert(taken.end(), row + first, row + first + size);
    return taken;
  };
  return {of(rows.inputs), of(rows.targets), of(rows.segments), of(rows.weights)};
}
}  // namespace detail

/// This device's rows of `length` tokens as a Batch{inputs, targets, segments, weights} of tensors "B/d L", without a
/// copy. Another spec may be given, with any names; its first dim is sharded over Training::batch_axes. If its second
/// one is sharded too, the device takes its part of each row, which the axes must divide: one run of tokens, or the two
/// of zigzag order. `token_tensors<gpt::Batch>(mesh, rows, 128)`, `token_tensors<moe::Batch, "B/d/e L/s">(mesh, rows,
/// 128, order)`, `token_tensors<gpt::Batch, "B/d L/s">(mesh, rows, 128, SequenceOrder::zigzag)`
template <class Batch, Spec S = "B/d L", Spec A>
[[nodiscard]] Batch token_tensors(const Mesh<A>& mesh, const io::TokenBatch& rows, std::int64_t length,
                                  SequenceOrder order = SequenceOrder::contiguous) {
  constexpr const auto& dims = shardlib::detail::parsed<S>.dims;
  static_assert(dims.size() == 2, "token_tensors: the spec has two dims, rows and the tokens of a row");
  const Device& device = *mesh.device();
  const std::int64_t devices = shardlib::detail::shard_count(device, dims[0].axes);
  const std::int64_t parts = shardlib::detail::shard_count(device, dims[1].axes);
  const bool zigzag = order == SequenceOrder::zigzag && parts > 1;
  if (const std::int64_t runs = zigzag ? 2 * parts : parts; length % runs != 0)
    throw UsageError("token_tensors: rows of " + std::to_string(length) + " tokens do not divide into " +
                     std::to_string(runs) + " parts" + (zigzag ? ", two for each device in zigzag order" : "") + " (" +
                     device.describe() + "); choose a length that does" +
                     (zigzag ? ", or SequenceOrder::contiguous" : ""));
  const auto host = std::make_shared<io::TokenBatch>(
      parts == 1
          ? rows
          : detail::part_of_rows(rows, length, parts, shardlib::detail::shard_index(device, dims[1].axes), order));
  const Sizes sizes{{std::string(dims[0].name), std::ssize(rows.inputs) / length * devices},
                    {std::string(dims[1].name), length}};
  const auto tensor = [&]<class T>(const std::vector<T>& values) {
    return from_memory<T, S>(mesh, sizes, std::span<const T>(values), host);
  };
  return {tensor(host->inputs), tensor(host->targets), tensor(host->segments), tensor(host->weights)};
}

}  // namespace shardlib::run
