// Definitions of layout.hpp.
#pragma once

#include "shardlib/kernels/layout.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include "shardlib/kernels/strided.hpp"

namespace shardlib::kernels {

namespace detail {

/// Copies one run of n elements.
template <class U>
void copy_run(std::int64_t n, const U* in, std::int64_t in_stride, U* out, std::int64_t out_stride) {
  if (in_stride == 1 && out_stride == 1) {
    std::memcpy(out, in, static_cast<std::size_t>(n) * sizeof(U));
  } else if (in_stride == 0 && out_stride == 1) {
    std::fill_n(out, n, *in);
  } else {
    for (std::int64_t i = 0; i < n; ++i) out[i * out_stride] = in[i * in_stride];
  }
}

/// A block has at most transpose_block rows (unit stride in `in`) and as many columns (unit stride in `out`).
inline constexpr std::int64_t transpose_block = 32;

template <class U>
void transpose(std::int64_t rows, std::int64_t columns, const U* in, std::int64_t in_stride, U* out,
               std::int64_t out_stride) {
  // Copies through a dense tile in the L1 cache, so that reads of `in` and writes of `out` use whole cache lines.
  // Their strides are often a power of two, and the lines would otherwise evict each other.
  U tile[transpose_block * transpose_block];
  for (std::int64_t c = 0; c < columns; ++c) {
    for (std::int64_t r = 0; r < rows; ++r) tile[r * transpose_block + c] = in[c * in_stride + r];
  }
  for (std::int64_t r = 0; r < rows; ++r) {
    std::memcpy(out + r * out_stride, tile + r * transpose_block, static_cast<std::size_t>(columns) * sizeof(U));
  }
}

template <class U>
void copy_nest(const Exec& exec, Nest<2> nest, const U* in, U* out) {
  constexpr std::int64_t grain = 16384;
  const auto inner = nest.pop();
  int fastest = -1;  // the loop along which `in` is contiguous, if it is not the innermost one
  for (int d = 0; d < nest.depth; ++d) {
    if (nest.loop(d).strides[0] == 1 && inner.strides[0] > 1 && inner.strides[1] == 1) fastest = d;
  }
  if (fastest < 0) {
    const std::int64_t pieces = (inner.extent + grain - 1) / grain;
    const std::int64_t rows = nest.count();
    const std::int64_t group = std::max<std::int64_t>(1, grain / inner.extent);
    exec.for_each((rows + group - 1) / group * pieces, [&](std::int64_t item) {
      const std::int64_t first = item / pieces * group;
      const std::int64_t begin = item % pieces * grain;
      const std::int64_t n = std::min(grain, inner.extent - begin);
      Walk<2> walk(nest, first);
      for (std::int64_t row = first; row < std::min(rows, first + group); ++row, walk.next()) {
        copy_run(n, in + walk.offsets[0] + begin * inner.strides[0], inner.strides[0],
                 out + walk.offsets[1] + begin * inner.strides[1], inner.strides[1]);
      }
    });
    return;
  }
  const auto row = nest.loop(fastest);
  for (int d = fastest; d + 1 < nest.depth; ++d) nest.loop(d) = nest.loop(d + 1);
  --nest.depth;
  const std::int64_t bands = (row.extent + transpose_block - 1) / transpose_block;
  exec.for_each(nest.count() * bands, [&](std::int64_t item) {
    const Walk<2> walk(nest, item / bands);
    const std::int64_t r = item % bands * transpose_block;
    const std::int64_t rows = std::min(transpose_block, row.extent - r);
    for (std::int64_t c = 0; c < inner.extent; c += transpose_block) {
      transpose(rows, std::min(transpose_block, inner.extent - c), in + walk.offsets[0] + r + c * inner.strides[0],
                inner.strides[0], out + walk.offsets[1] + r * row.strides[1] + c, row.strides[1]);
    }
  });
}

}  // namespace detail

SHARDLIB_INLINE void copy_strided(const Exec& exec, std::size_t element_size, std::span<const std::int64_t> shape,
                                  const void* in, std::span<const std::int64_t> in_strides, void* out,
                                  std::span<const std::int64_t> out_strides) {
  if (product(shape) == 0) return;
  const bool word = element_size == 1 || element_size == 2 || element_size == 4 || element_size == 8;
  const auto unit = word ? std::int64_t{1} : static_cast<std::int64_t>(element_size);
  // Sorts the loops by the output's strides (insertion sort), so that they run in the order of its memory.
  Dims order;
  const auto stride = [&](std::int64_t d) { return out_strides[static_cast<std::size_t>(d)]; };
  for (std::size_t d = 0; d < shape.size(); ++d) {
    order.push(static_cast<std::int64_t>(d));
    for (int i = order.count - 1; i > 0 && stride(order[i]) > stride(order[i - 1]); --i) {
      std::swap(order.at(i), order.at(i - 1));
    }
  }
  Nest<2> nest;
  for (const std::int64_t i : order.span()) {
    const auto d = static_cast<std::size_t>(i);
    nest.push(shape[d], {in_strides[d] * unit, out_strides[d] * unit});
  }
  if (!word) nest.push(unit, {1, 1});  // an element without a matching word type is a run of bytes
  const auto run = [&]<class U>(U) { detail::copy_nest(exec, nest, static_cast<const U*>(in), static_cast<U*>(out)); };
  switch (element_size) {
    case 2:
      return run(Word<2>{});
    case 4:
      return run(Word<4>{});
    case 8:
      return run(Word<8>{});
    default:
      return run(Word<1>{});
  }
}

SHARDLIB_INLINE void zero_strided(const Exec& exec, std::size_t element_size, std::span<const std::int64_t> shape,
                                  void* out, std::span<const std::int64_t> out_strides) {
  if (product(shape) == 0) return;
  constexpr std::int64_t grain = 16384;
  const auto element = static_cast<std::int64_t>(element_size);
  Nest<1> nest;
  for (std::size_t d = 0; d < shape.size(); ++d) nest.push(shape[d], {out_strides[d] * element});
  const auto inner = nest.pop();
  const bool dense = inner.strides[0] == element;
  const std::int64_t rows = nest.count(), group = std::max<std::int64_t>(1, grain / inner.extent);
  exec.for_each((rows + group - 1) / group, [&](std::int64_t item) {
    Walk<1> walk(nest, item * group);
    for (std::int64_t row = item * group; row < std::min(rows, (item + 1) * group); ++row, walk.next()) {
      std::byte* const to = static_cast<std::byte*>(out) + walk.offsets[0];
      if (dense) {
        std::memset(to, 0, static_cast<std::size_t>(inner.extent * element));
      } else {
        for (std::int64_t i = 0; i < inner.extent; ++i) std::memset(to + i * inner.strides[0], 0, element_size);
      }
    }
  });
}

SHARDLIB_INLINE void permute(const Exec& exec, std::size_t element_size, const void* in,
                             std::span<const std::int64_t> shape, std::span<const int> perm, void* out) {
  const Dims strides = row_major(shape);
  Dims out_shape;
  Dims in_strides;
  for (const int d : perm) {
    out_shape.push(shape[static_cast<std::size_t>(d)]);
    in_strides.push(strides[d]);
  }
  copy_strided(exec, element_size, out_shape, in, in_strides, out, row_major(out_shape));
}

}  // namespace shardlib::kernels
