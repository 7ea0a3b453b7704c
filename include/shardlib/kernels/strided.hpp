// Loop nests over several strided arrays at once: merges dims, and walks in chunks.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "shardlib/support/error.hpp"
#include "shardlib/support/function.hpp"
#include "shardlib/support/loop.hpp"

namespace shardlib::kernels {

/// The maximum number of loops in a nest. It exceeds the dims of a spec (max_dims), because collectives split dims into
/// shards.
inline constexpr int max_rank = 12;

/// A size, a stride or a position for each dim of an array.
struct DimVector {
  std::array<std::int64_t, max_rank> values{};
  int count = 0;

  constexpr DimVector() = default;
  constexpr explicit DimVector(std::span<const std::int64_t> list) {
    for (const std::int64_t v : list) push(v);
  }
  constexpr void push(std::int64_t v) {
    if (count == max_rank) throw Error("kernels: a tensor has more than 12 dims; merge some of them");
    at(count++) = v;
  }
  constexpr std::int64_t& at(int i) { return values[static_cast<std::size_t>(i)]; }
  [[nodiscard]] constexpr std::int64_t operator[](int i) const { return values[static_cast<std::size_t>(i)]; }
  [[nodiscard]] constexpr std::span<const std::int64_t> span() const {
    return {values.data(), static_cast<std::size_t>(count)};
  }
  constexpr operator std::span<const std::int64_t>() const { return span(); }  // NOLINT(google-explicit-constructor)
};

/// The number of elements.
constexpr std::int64_t product(std::span<const std::int64_t> shape) {
  std::int64_t n = 1;
  for (const std::int64_t e : shape) n *= e;
  return n;
}

/// Strides of a dense row-major array.
constexpr DimVector row_major(std::span<const std::int64_t> shape) {
  DimVector strides(shape);
  std::int64_t stride = 1;
  for (int d = strides.count; d-- > 0;) {
    strides.at(d) = stride;
    stride *= shape[static_cast<std::size_t>(d)];
  }
  return strides;
}

/// A dense array along its middle dim, (outer, n, inner). A row is what it has there for one outer and one inner index.
/// The last `padding` elements of each row are padding.
struct Along {
  std::int64_t outer = 1, n = 1, inner = 1, padding = 0;

  [[nodiscard]] constexpr std::int64_t rows() const { return outer * inner; }
  [[nodiscard]] constexpr std::int64_t counted() const { return n - padding; }  ///< elements of a row
  /// Where the element i of a row is.
  [[nodiscard]] constexpr std::int64_t offset(std::int64_t row, std::int64_t i = 0) const {
    return row / inner * n * inner + row % inner + i * inner;
  }
};

/// Nested loops over K arrays. Removes dims of size 1, and merges dims that are contiguous in every array.
template <std::size_t K>
struct Nest {
  struct Loop {
    std::int64_t extent = 1;
    std::array<std::int64_t, K> strides{};
  };
  std::array<Loop, max_rank + 1> loops{};
  int depth = 0;

  /// Adds a loop inside the existing ones.
  constexpr void push(std::int64_t extent, const std::array<std::int64_t, K>& strides) {
    if (extent == 1) return;
    if (depth > 0 && merges(loop(depth - 1), extent, strides)) {
      loop(depth - 1) = {loop(depth - 1).extent * extent, strides};
      return;
    }
    if (depth > max_rank) throw Error("kernels: a tensor has more than 12 dims; merge some of them");
    loop(depth++) = {extent, strides};
  }
  constexpr Loop& loop(int d) { return loops[static_cast<std::size_t>(d)]; }
  [[nodiscard]] constexpr const Loop& loop(int d) const { return loops[static_cast<std::size_t>(d)]; }
  [[nodiscard]] constexpr std::int64_t count() const {
    std::int64_t n = 1;
    for (int d = 0; d < depth; ++d) n *= loop(d).extent;
    return n;
  }
  /// The offsets of an iteration.
  [[nodiscard]] constexpr std::array<std::int64_t, K> offsets(std::int64_t iteration) const {
    std::array<std::int64_t, K> sums{};
    for (int d = depth; d-- > 0;) {
      const std::int64_t rest = iteration / loop(d).extent, i = iteration - rest * loop(d).extent;
      for (std::size_t k = 0; k < K; ++k) sums[k] += i * loop(d).strides[k];
      iteration = rest;
    }
    return sums;
  }
  /// Removes the innermost loop and returns it (a loop of size 1 if there is none).
  constexpr Loop pop() { return depth > 0 ? loop(--depth) : Loop{}; }

 private:
  static constexpr bool merges(const Loop& outer, std::int64_t extent, const std::array<std::int64_t, K>& strides) {
    for (std::size_t k = 0; k < K; ++k) {
      if (outer.strides[k] != extent * strides[k]) return false;
    }
    return true;
  }
};

/// Walks a nest in order, from a given iteration. `offsets` are the current offsets in the arrays, in elements.
template <std::size_t K>
class Walk {
 public:
  std::array<std::int64_t, K> offsets{};

  constexpr Walk(const Nest<K>& nest, std::int64_t start) : nest_(nest) {
    for (int d = nest.depth; d-- > 0;) {
      const auto& loop = nest.loop(d);
      const std::int64_t i = start % loop.extent;
      start /= loop.extent;
      position(d) = i;
      for (std::size_t k = 0; k < K; ++k) offsets[k] += i * loop.strides[k];
    }
  }
  constexpr void next() {
    for (int d = nest_.depth; d-- > 0;) {
      const auto& loop = nest_.loop(d);
      if (++position(d) < loop.extent) {
        for (std::size_t k = 0; k < K; ++k) offsets[k] += loop.strides[k];
        return;
      }
      position(d) = 0;
      for (std::size_t k = 0; k < K; ++k) offsets[k] -= (loop.extent - 1) * loop.strides[k];
    }
  }

 private:
  constexpr std::int64_t& position(int d) { return position_[static_cast<std::size_t>(d)]; }
  const Nest<K>& nest_;
  std::array<std::int64_t, max_rank + 1> position_{};
};

/// An element as plain bytes. Unlike std::uint32_t, it may alias a float. Compilers rely on the aliasing rules when
/// they inline such code next to the code that wrote the float.
template <std::size_t Bytes>
struct Word;
template <>
struct [[gnu::may_alias]] Word<1> {
  std::uint8_t bits;
};
template <>
struct [[gnu::may_alias]] Word<2> {
  std::uint16_t bits;
};
template <>
struct [[gnu::may_alias]] Word<4> {
  std::uint32_t bits;
};
template <>
struct [[gnu::may_alias]] Word<8> {
  std::uint64_t bits;
};

/// Loads the elements [begin, begin + n) into the caches ahead of use. Some may be outside the array. The hardware
/// alone is late at the start of every page.
template <class T>
SHARDLIB_FUNCTION inline void load_ahead([[maybe_unused]] const T* data, [[maybe_unused]] std::int64_t begin,
                                         [[maybe_unused]] std::int64_t n) {
#if !defined(__CUDA_ARCH__)
  const auto at = [data](std::int64_t i) {  // an integer and not a pointer, because it may be outside the array
    return reinterpret_cast<std::uintptr_t>(data) + static_cast<std::uintptr_t>(i) * sizeof(T);
  };
  constexpr std::uintptr_t line = 64;
  for (std::uintptr_t i = at(begin); i < at(begin + n); i += line) __builtin_prefetch(reinterpret_cast<const void*>(i));
#endif
}

}  // namespace shardlib::kernels
