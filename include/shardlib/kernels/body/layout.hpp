// Kernels of layout.hpp.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "shardlib/kernels/strided.hpp"
#include "shardlib/support/function.hpp"

namespace shardlib::kernels::body {

/// Rows of n elements, walked by `nest`. An item is one of the `pieces` of a row, or a group of short rows.
template <std::size_t K>
struct RowLoops {
  Nest<K> nest;
  typename Nest<K>::Loop inner;
  std::int64_t rows, pieces, group, grain;

  constexpr RowLoops(const Nest<K>& loops, std::int64_t longest) : nest(loops), inner(nest.pop()), grain(longest) {
    rows = nest.count();
    pieces = (inner.extent + grain - 1) / grain;
    group = std::max<std::int64_t>(1, grain / std::max<std::int64_t>(1, inner.extent));
  }
  [[nodiscard]] constexpr std::int64_t items() const { return (rows + group - 1) / group * pieces; }

  /// Calls row(offsets, begin, n) for each piece of a row of an item: n elements from `begin` on.
  template <class F>
  SHARDLIB_FUNCTION void for_rows(std::int64_t item, const F& row) const {
    const std::int64_t first = item / pieces * group, begin = item % pieces * grain;
    const std::int64_t n = std::min(std::int64_t{grain}, inner.extent - begin);
    Walk<K> walk(nest, first);
    for (std::int64_t r = first; r < std::min(rows, first + group); ++r, walk.next()) row(walk.offsets, begin, n);
  }
  /// Calls element(offsets, i) for each element i of each row of an item, divided among the lanes.
  template <class Team, class F>
  SHARDLIB_FUNCTION void for_elements(const Team& team, std::int64_t item, const F& element) const {
    constexpr std::int64_t shortest = 64;
    if (!Team::single && inner.extent < shortest) {  // the lanes share the elements of all rows
      const std::int64_t first = item * group, n = inner.extent;
      team.lanes((std::min(rows, first + group) - first) * n,
                 [=, this](std::int64_t i) { element(Walk<K>(nest, first + i / n).offsets, i % n); });
    } else {
      for_rows(item, [&](const auto& offsets, std::int64_t begin, std::int64_t n) {
        team.lanes(n, [=](std::int64_t i) { element(offsets, begin + i); });
      });
    }
  }
};

/// Copies rows.
template <class U>
struct CopyRows {
  static constexpr std::int64_t grain = 16384;
  RowLoops<2> loops;
  const U* in;
  U* out;

  template <class Team>
  SHARDLIB_FUNCTION void operator()(const Team& team, std::int64_t item) const {
    const std::int64_t in_stride = loops.inner.strides[0], out_stride = loops.inner.strides[1];
    if constexpr (Team::single) {
      loops.for_rows(item, [=, this](const auto& at, std::int64_t begin, std::int64_t n) {
        copy(n, in + at[0] + begin * in_stride, in_stride, out + at[1] + begin * out_stride, out_stride);
      });
    } else {
      loops.for_elements(team, item, [=, from = in, to = out](const auto& at, std::int64_t i) {
        to[at[1] + i * out_stride] = from[at[0] + i * in_stride];
      });
    }
  }

 private:
  SHARDLIB_FUNCTION static void copy(std::int64_t n, const U* from, std::int64_t in_stride, U* to,
                                     std::int64_t out_stride) {
    if (in_stride == 1 && out_stride == 1) {
      std::memcpy(to, from, static_cast<std::size_t>(n) * sizeof(U));
    } else if (in_stride == 0 && out_stride == 1) {
      std::fill_n(to, n, *from);
    } else {
      for (std::int64_t i = 0; i < n; ++i) to[i * out_stride] = from[i * in_stride];
    }
  }
};

/// Transposes, for each iteration of `nest`, a matrix of `rows` (unit stride in `in`) and `columns` (unit stride in
/// `out`). An item is a band of rows. It goes through a dense tile, so that reads of `in` and writes of `out` use whole
/// cache lines. Their strides are often a power of two, and the lines would otherwise evict each other.
template <class U>
struct Transpose {
  static constexpr std::int64_t height = 32;
  Nest<2> nest;
  std::int64_t rows, columns, bands, in_stride, out_stride;
  const U* in;
  U* out;

  template <class Team>
  SHARDLIB_FUNCTION void operator()(const Team& team, std::int64_t item) const {
    constexpr std::int64_t longest = height, width = Team::single || sizeof(U) <= 4 ? 32 : 16;
    const Walk<2> walk(nest, item / bands);
    const std::int64_t r0 = item % bands * longest, r_stride = out_stride, c_stride = in_stride;
    const std::int64_t band = std::min(longest, rows - r0);
    for (std::int64_t c0 = 0; c0 < columns; c0 += width) {
      const std::int64_t n = std::min(width, columns - c0);
      const U* const from = in + walk.offsets[0] + r0 + c0 * c_stride;
      U* const to = out + walk.offsets[1] + r0 * r_stride + c0;
      if constexpr (Team::single) {
        transpose(band, n, from, c_stride, to, r_stride);
      } else {
        // Row r of the tile stores its columns in the order c ^ r, so that neither loop has bank conflicts.
        auto* const tile = team.template tile<U, longest * width>();
        team.lanes(n * band, [=](std::int64_t i) {
          const std::int64_t c = i / band, r = i % band;
          tile[r * width + (c ^ (r % width))] = from[c * c_stride + r];
        });
        team.barrier();
        team.lanes(n * band, [=](std::int64_t i) {
          const std::int64_t r = i / n, c = i % n;
          to[r * r_stride + c] = tile[r * width + (c ^ (r % width))];
        });
        team.barrier();
      }
    }
  }

 private:
  // Not inlined: g++ then vectorizes its loops less well.
  [[gnu::noinline]] SHARDLIB_FUNCTION static void transpose(std::int64_t rows, std::int64_t columns, const U* in,
                                                            std::int64_t in_stride, U* out, std::int64_t out_stride) {
    constexpr std::int64_t width = 32;
    alignas(64) U tile[height * width];  // not the team's, which the compiler takes for a part of `in` or `out`
    for (std::int64_t c = 0; c < columns; ++c) {
      for (std::int64_t r = 0; r < rows; ++r) tile[r * width + c] = in[c * in_stride + r];
    }
    for (std::int64_t r = 0; r < rows; ++r) {
      std::memcpy(out + r * out_stride, tile + r * width, static_cast<std::size_t>(columns) * sizeof(U));
    }
  }
};

/// Clears the elements of rows. The strides of `loops` are bytes.
struct ZeroRows {
  RowLoops<1> loops;
  std::int64_t element;
  std::byte* out;

  template <class Team>
  SHARDLIB_FUNCTION void operator()(const Team& team, std::int64_t item) const {
    const std::int64_t stride = loops.inner.strides[0], size = element;
    const auto clear = [=](std::byte* to, std::int64_t n) {
      for (std::int64_t b = 0; b < n; ++b) to[b] = std::byte{0};
    };
    if constexpr (Team::single) {
      loops.for_rows(item, [=, this](const auto& at, std::int64_t begin, std::int64_t n) {
        std::byte* const to = out + at[0] + begin * stride;
        if (stride == size) {
          std::memset(to, 0, static_cast<std::size_t>(n * size));
        } else {
          for (std::int64_t i = 0; i < n; ++i) clear(to + i * stride, size);
        }
      });
    } else {
      loops.for_elements(team, item,
                         [=, to = out](const auto& at, std::int64_t i) { clear(to + at[0] + i * stride, size); });
    }
  }
};

}  // namespace shardlib::kernels::body
