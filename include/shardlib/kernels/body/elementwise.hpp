// Kernels of elementwise.hpp.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "shardlib/kernels/strided.hpp"
#include "shardlib/spec/dtype.hpp"
#include "shardlib/support/function.hpp"

namespace shardlib::kernels::body {

inline constexpr std::size_t max_operands = 10;

/// Converts an element, over its accumulator's type.
struct ConvertElement {
  template <class From, class To>
  SHARDLIB_FUNCTION void operator()(const From& x, To& y) const {
    y = static_cast<To>(static_cast<accumulator_t<From>>(x));
  }
};

/// The loops of an elementwise op: an item is a piece of a row, or a group of short rows.
struct ElementwiseLoops {
  static constexpr std::int64_t grain = 8192;
  Nest<max_operands> nest;
  Nest<max_operands>::Loop inner;
  std::int64_t rows = 0, pieces = 0, group = 0;

  [[nodiscard]] constexpr std::int64_t items() const { return group == 0 ? 0 : (rows + group - 1) / group * pieces; }
};

/// Calls row(team, offsets, strides, start, n) for each piece of a row: elements start to start + n of the innermost
/// loop.
template <class Row>
struct Elementwise {
  ElementwiseLoops loops;
  Row row;

  template <class Team>
  SHARDLIB_FUNCTION void operator()(const Team& team, std::int64_t item) const {
    constexpr std::int64_t grain = ElementwiseLoops::grain;
    const std::int64_t first = item / loops.pieces * loops.group, start = item % loops.pieces * grain;
    const std::int64_t n = std::min(grain, loops.inner.extent - start);
    Walk<max_operands> walk(loops.nest, first);
    for (std::int64_t r = first; r < std::min(loops.rows, first + loops.group); ++r, walk.next())
      row(team, walk.offsets, loops.inner.strides, start, n);
  }
};

/// A row that applies F to elements of types T..., each lane to its own.
template <class F, class... T>
struct ElementRow {
  F f;
  std::array<std::byte*, sizeof...(T)> data;

  template <class Team>
  SHARDLIB_FUNCTION void operator()(const Team& team, const std::array<std::int64_t, max_operands>& offsets,
                                    const std::array<std::int64_t, max_operands>& strides, std::int64_t start,
                                    std::int64_t n) const {
    run(team, offsets, strides, start, n, std::index_sequence_for<T...>{});
  }

 private:
  template <class Team, std::size_t... I>
  SHARDLIB_FUNCTION void run(const Team& team, const std::array<std::int64_t, max_operands>& offsets,
                             const std::array<std::int64_t, max_operands>& strides, std::int64_t start, std::int64_t n,
                             std::index_sequence<I...> /*operands*/) const {
    const std::array<std::byte*, sizeof...(T)> at{data[I] + (offsets[I] + start * strides[I]) *
                                                                static_cast<std::int64_t>(sizeof(T))...};
    team.lanes(n, [at, steps = strides, g = f](std::int64_t i) { g(reinterpret_cast<T*>(at[I])[i * steps[I]]...); });
  }
};

/// Applies F to n contiguous elements of arrays that are not in the caches, `grain` of them an item.
template <class F, class... T>
struct Nontemporal {
  static constexpr std::int64_t grain = 1 << 14;
  std::int64_t n;
  F f;
  std::array<std::byte*, sizeof...(T)> data;

  template <class Team>
  SHARDLIB_FUNCTION void operator()(const Team& team, std::int64_t item) const {
    run(team, item, std::index_sequence_for<T...>{});
  }

 private:
  template <class Team, std::size_t... I>
  SHARDLIB_FUNCTION void run(const Team& team, std::int64_t item, std::index_sequence<I...> /*operands*/) const {
    constexpr std::int64_t block = 128;  // longer ones would evict each other from the first-level cache
    const std::int64_t end = std::min(n, (item + 1) * grain);
    for (std::int64_t begin = item * grain; begin < end; begin += block) {
      if constexpr (Team::single) (load_ahead(reinterpret_cast<const T*>(data[I]), begin + block, block), ...);
      unit(team, std::min(block, end - begin), f, reinterpret_cast<T*>(data[I]) + begin...);
    }
  }
  template <class Team>
  SHARDLIB_FUNCTION static void unit(const Team& team, std::int64_t n, const F& f, T*... p) {
    team.lanes(n, [f, p...](std::int64_t i) { f(p[i]...); });  // copies f, so that stores cannot change it
  }
};

}  // namespace shardlib::kernels::body
