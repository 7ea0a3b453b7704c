// Definitions of random.hpp.
#pragma once

#include "shardlib/kernels/random.hpp"

#include "shardlib/kernels/body/random.hpp"
#include "shardlib/kernels/strided.hpp"

namespace shardlib::kernels {

// Element i is Draw{}(bits(seed, stream, its global linear index)).
template <class Draw, class T>
void fill_random(const Exec& exec, T* out, std::span<const std::int64_t> shape,
                 std::span<const std::int64_t> global_strides, std::span<const std::int64_t> offsets,
                 std::uint64_t seed, std::uint64_t stream) {
  if (product(shape) == 0) return;
  Nest<2> nest;
  const DimVector strides = row_major(shape);
  std::int64_t base = 0;
  for (std::size_t d = 0; d < shape.size(); ++d) {
    nest.push(shape[d], {strides[static_cast<int>(d)], global_strides[d]});
    base += offsets[d] * global_strides[d];
  }
  const auto inner = nest.pop();
  using Fill = body::Fill<T, Draw>;
  const std::int64_t pieces = (inner.extent + Fill::tile_length - 1) / Fill::tile_length;
  exec.for_items(nest.count() * pieces, 0, Fill{nest, inner, pieces, base, seed, stream, out});
}

}  // namespace shardlib::kernels
