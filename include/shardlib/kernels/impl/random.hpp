// Definitions of random.hpp.
#pragma once

#include "shardlib/kernels/random.hpp"

#include <algorithm>

#include "shardlib/kernels/strided.hpp"

namespace shardlib::kernels {

namespace detail {

/// Fills a local shard of a global array. Element i is f(bits(seed, stream, its global linear index)).
template <class T, class F>
void fill(const Exec& exec, T* out, std::span<const std::int64_t> shape, std::span<const std::int64_t> global_strides,
          std::span<const std::int64_t> offsets, std::uint64_t seed, std::uint64_t stream, const F& f) {
  if (product(shape) == 0) return;
  constexpr std::int64_t tile_length = 1024;
  Nest<2> nest;
  const Dims strides = row_major(shape);
  std::int64_t base = 0;
  for (std::size_t d = 0; d < shape.size(); ++d) {
    nest.push(shape[d], {strides[static_cast<int>(d)], global_strides[d]});
    base += offsets[d] * global_strides[d];
  }
  const auto inner = nest.pop();
  const std::int64_t pieces = (inner.extent + tile_length - 1) / tile_length;
  exec.for_each(nest.count() * pieces, [&](std::int64_t item) {
    const Walk<2> walk(nest, item / pieces);
    const std::int64_t begin = item % pieces * tile_length;
    const std::int64_t n = std::min(tile_length, inner.extent - begin);
    const auto first = static_cast<std::uint64_t>(base + walk.offsets[1] + begin * inner.strides[1]);
    std::uint32_t words[tile_length];
    if (inner.strides[1] == 1) {
      const std::uint64_t last = first + static_cast<std::uint64_t>(n);
      for (std::uint64_t block = first >> 2; block << 2 < last; ++block) {
        const auto four = philox(seed, block, stream);
        for (std::uint64_t i = std::max(first, block << 2); i < std::min(last, (block + 1) << 2); ++i) {
          words[i - first] = four[i & 3U];
        }
      }
    } else {
      for (std::int64_t i = 0; i < n; ++i) {
        words[i] = bits(seed, stream, first + static_cast<std::uint64_t>(i * inner.strides[1]));
      }
    }
    T* to = out + walk.offsets[0] + begin;
    independent(n, [&words, to, f](std::int64_t i) { to[i] = T(f(words[i])); });
  });
}

}  // namespace detail

template <class T>
void fill_uniform(const Exec& exec, T* out, std::span<const std::int64_t> shape,
                  std::span<const std::int64_t> global_strides, std::span<const std::int64_t> offsets,
                  std::uint64_t seed, std::uint64_t stream) {
  detail::fill(exec, out, shape, global_strides, offsets, seed, stream,
               [](std::uint32_t word) { return detail::to_uniform(word); });
}
template <class T>
void fill_normal(const Exec& exec, T* out, std::span<const std::int64_t> shape,
                 std::span<const std::int64_t> global_strides, std::span<const std::int64_t> offsets,
                 std::uint64_t seed, std::uint64_t stream) {
  detail::fill(exec, out, shape, global_strides, offsets, seed, stream,
               [](std::uint32_t word) { return detail::to_normal(word); });
}
template <class T>
void fill_truncated_normal(const Exec& exec, T* out, std::span<const std::int64_t> shape,
                           std::span<const std::int64_t> global_strides, std::span<const std::int64_t> offsets,
                           std::uint64_t seed, std::uint64_t stream) {
  detail::fill(exec, out, shape, global_strides, offsets, seed, stream,
               [](std::uint32_t word) { return detail::to_truncated_normal(word); });
}

}  // namespace shardlib::kernels
