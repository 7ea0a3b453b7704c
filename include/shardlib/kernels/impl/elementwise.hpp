// Definitions of elementwise.hpp.
#pragma once

#include "shardlib/kernels/elementwise.hpp"

#include <algorithm>

namespace shardlib::kernels::detail {

SHARDLIB_INLINE Strides padded(std::span<const std::int64_t> strides) {
  Strides all{};
  std::copy(strides.begin(), strides.end(), all.begin());
  return all;
}

/// Copies n elements between a strided row and a dense tile.
template <class U>
void copy_tile(std::byte* row, std::int64_t stride, std::byte* tile, std::int64_t n, bool to_tile) {
  U* a = reinterpret_cast<U*>(row);
  U* b = reinterpret_cast<U*>(tile);
  if (!to_tile) {
    for (std::int64_t i = 0; i < n; ++i) a[i * stride] = b[i];
  } else if (stride == 0) {
    std::fill_n(b, n, *a);
  } else {
    for (std::int64_t i = 0; i < n; ++i) b[i] = a[i * stride];
  }
}
inline void copy_tile(const ErasedOperand& o, std::byte* row, std::byte* tile, std::int64_t n, bool to_tile) {
  if (o.element == 4)
    copy_tile<Word<4>>(row, o.stride, tile, n, to_tile);
  else if (o.element == 2)
    copy_tile<Word<2>>(row, o.stride, tile, n, to_tile);
  else if (o.element == 8)
    copy_tile<Word<8>>(row, o.stride, tile, n, to_tile);
  else
    copy_tile<Word<1>>(row, o.stride, tile, n, to_tile);
}

SHARDLIB_INLINE void apply_erased(const Exec& exec, std::span<const std::int64_t> shape,
                                  std::span<ErasedOperand> operands, UnitLoop loop, const void* f) {
  if (product(shape) == 0) return;
  const std::size_t count = operands.size();
  Nest<max_operands> nest;
  for (std::size_t d = 0; d < shape.size(); ++d) {
    std::array<std::int64_t, max_operands> strides{};
    for (std::size_t k = 0; k < count; ++k) strides[k] = (*operands[k].strides)[d];
    nest.push(shape[d], strides);
  }
  constexpr std::int64_t grain = 8192;
  const auto inner = nest.pop();
  bool dense = true;
  for (std::size_t k = 0; k < count; ++k) {
    operands[k].stride = inner.strides[k];
    dense = dense && inner.strides[k] == 1;
  }
  const std::int64_t rows = nest.count();
  const std::int64_t pieces = (inner.extent + grain - 1) / grain;
  const std::int64_t group = std::max<std::int64_t>(1, grain / inner.extent);
  const std::int64_t step = dense ? grain : tile_size;
  exec.for_each((rows + group - 1) / group * pieces, [&](std::int64_t item) {
    const std::int64_t first = item / pieces * group;
    const std::int64_t start = item % pieces * grain;
    const std::int64_t n = std::min(grain, inner.extent - start);
    alignas(64) std::byte tiles[max_operands][tile_size * 8];
    std::byte* data[max_operands];
    Walk<max_operands> walk(nest, first);
    for (std::int64_t row = first; row < std::min(rows, first + group); ++row, walk.next()) {
      for (std::int64_t begin = 0; begin < n; begin += step) {
        const std::int64_t length = std::min(step, n - begin);
        const auto place = [&](std::size_t k) {
          const std::int64_t offset = walk.offsets[k] + (start + begin) * operands[k].stride;
          return operands[k].data + offset * static_cast<std::int64_t>(operands[k].element);
        };
        for (std::size_t k = 0; k < count; ++k) {
          data[k] = operands[k].stride == 1 ? place(k) : tiles[k];
          // A broadcast element fills its tile once for the whole row.
          if (operands[k].stride != 1 && (operands[k].stride != 0 || begin == 0))
            copy_tile(operands[k], place(k), tiles[k], length, true);
        }
        loop(f, length, data);
        for (std::size_t k = 0; k < count; ++k)
          if (operands[k].output && operands[k].stride != 1) copy_tile(operands[k], place(k), tiles[k], length, false);
      }
    }
  });
}

}  // namespace shardlib::kernels::detail
