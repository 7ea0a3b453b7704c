// Batches of tokens as tensors.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "shardlib/io/data/token_batch.hpp"
#include "shardlib/ops/create.hpp"
#include "shardlib/types/tensor.hpp"

namespace shardlib::run {

/// This device's rows of `length` tokens as a Batch{inputs, targets, segments, weights} of tensors "B/d L", without a
/// copy. Another spec may be given; its first dim is sharded over Training::batch_axes.
/// `token_tensors<gpt::Batch>(mesh, rows, 128)`, `token_tensors<moe::Batch, "B/d/e L">(mesh, rows, 128)`
template <class Batch, Spec S = "B/d L", Spec A>
[[nodiscard]] Batch token_tensors(const Mesh<A>& mesh, const io::TokenBatch& rows, std::int64_t length) {
  const auto host = std::make_shared<io::TokenBatch>(rows);
  std::int64_t devices = 1;
  for (const auto axis : shardlib::detail::parsed<S>.dims[0].axes) devices *= mesh.size(axis);
  const Sizes sizes{{"B", std::ssize(rows.inputs) / length * devices}, {"L", length}};
  const auto tensor = [&]<class T>(const std::vector<T>& values) {
    return from_memory<T, S>(mesh, sizes, std::span<const T>(values), host);
  };
  return {tensor(host->inputs), tensor(host->targets), tensor(host->segments), tensor(host->weights)};
}

}  // namespace shardlib::run
