// Kernels of reduce.hpp: cotangents.
#pragma once

#include <algorithm>
#include <cstdint>

#include "shardlib/kernels/body/reduction.hpp"
#include "shardlib/kernels/strided.hpp"
#include "shardlib/spec/dtype.hpp"
#include "shardlib/support/function.hpp"

namespace shardlib::kernels::body {

/// The results of a reduction and what each of them reduces. An item is up to 64 neighboring results.
struct ReducedResults {
  static constexpr std::int64_t width = 64;
  Nest<1> kept, taken;
  std::int64_t rows, columns, tiles;

  /// `columns` are the results whose elements are neighbors, too.
  constexpr ReducedResults(const Nest<1>& results, const Nest<1>& reduced)
      : kept(results), taken(reduced), rows(taken.count()), columns(1) {
    if (kept.depth > 0 && kept.loop(kept.depth - 1).strides[0] == 1) columns = kept.pop().extent;
    tiles = (columns + width - 1) / width;
  }
  [[nodiscard]] constexpr std::int64_t items() const { return rows == 0 ? 0 : kept.count() * tiles; }
  /// The first result of an item, the offset of its first element, and how many results there are.
  struct Tile {
    std::int64_t result, element, count;
  };
  [[nodiscard]] constexpr Tile tile(std::int64_t item) const {
    constexpr std::int64_t longest = width;
    const std::int64_t outer = item / tiles, start = item % tiles * longest;
    return {outer * columns + start, Walk<1>(kept, outer).offsets[0] + start, std::min(longest, columns - start)};
  }
  /// Calls f(offset) in order for each element of a result, counted from its first one.
  template <class F>
  SHARDLIB_FUNCTION void for_rows(const F& f) const {
    Walk<1> row(taken, 0);
    for (std::int64_t r = 0; r < rows; ++r, row.next()) f(row.offsets[0]);
  }
  [[nodiscard]] constexpr std::int64_t row(std::int64_t r) const { return Walk<1>(taken, r).offsets[0]; }
};

/// Gives the cotangent of a maximum or minimum to the first of the elements that equal it.
template <class T>
struct ExtremumBackward {
  using Acc = accumulator_t<T>;
  ReducedResults results;
  const T *in, *extrema, *ct;
  T* out;

  template <class Team>
  SHARDLIB_FUNCTION void operator()(const Team& team, std::int64_t item) const {
    const auto tile = results.tile(item);
    if constexpr (Team::single) {
      pass_on<ReducedResults::width>(tile.result, tile.element, tile.count);
    } else if (results.columns > 1) {
      team.lanes(tile.count, [=, this](std::int64_t c) { pass_on<1>(tile.result + c, tile.element + c, 1); });
    } else {  // the lanes share the elements of the result
      const T* const x = in + tile.element;
      T* const dx = out + tile.element;
      const auto best = static_cast<Acc>(extrema[tile.result]);
      const T slope = ct[tile.result];
      const std::int64_t end = results.rows;
      const std::int64_t first = detail::team_reduce<detail::MinOp, std::int64_t>(
          team, end, [=, this](std::int64_t r) { return equal(static_cast<Acc>(x[results.row(r)]), best) ? r : end; });
      team.lanes(end, [=, this](std::int64_t r) { dx[results.row(r)] = r == first ? slope : T(0); });
    }
  }

 private:
  static constexpr bool equal(Acc v, Acc best) { return v == best || (v != v && best != best); }
  template <std::int64_t Width>
  SHARDLIB_FUNCTION void pass_on(std::int64_t result, std::int64_t element, std::int64_t n) const {
    const T* const best = extrema + result;
    const T* const cts = ct + result;
    bool found[Width] = {};
    results.for_rows([&](std::int64_t at) {
      const T* const x = in + element + at;
      T* const dx = out + element + at;
      for (std::int64_t c = 0; c < n; ++c) {
        const bool here = !found[c] && equal(static_cast<Acc>(x[c]), static_cast<Acc>(best[c]));
        dx[c] = here ? cts[c] : T(0);
        found[c] = found[c] || here;
      }
    });
  }
};

/// Multiplies the product of the elements before an element by that of the elements behind it. It does not divide,
/// because elements may be 0. A lane takes a result.
template <class T>
struct ProdBackward {
  using Acc = accumulator_t<T>;
  ReducedResults results;
  const T *in, *ct;
  T* out;

  template <class Team>
  SHARDLIB_FUNCTION void operator()(const Team& team, std::int64_t item) const {
    const auto tile = results.tile(item);
    if constexpr (Team::single)
      multiply<ReducedResults::width>(tile.result, tile.element, tile.count);
    else
      team.lanes(tile.count, [=, this](std::int64_t c) { multiply<1>(tile.result + c, tile.element + c, 1); });
  }

 private:
  template <std::int64_t Width>
  SHARDLIB_FUNCTION void multiply(std::int64_t result, std::int64_t element, std::int64_t n) const {
    const T* const cts = ct + result;
    Acc product[Width];
    for (std::int64_t c = 0; c < n; ++c) product[c] = Acc(1);
    results.for_rows([&](std::int64_t at) {
      const T* const x = in + element + at;
      T* const dx = out + element + at;
      for (std::int64_t c = 0; c < n; ++c) {
        dx[c] = static_cast<T>(product[c]);
        product[c] *= static_cast<Acc>(x[c]);
      }
    });
    for (std::int64_t c = 0; c < n; ++c) product[c] = static_cast<Acc>(cts[c]);
    for (std::int64_t r = results.rows; r-- > 0;) {
      const std::int64_t at = element + results.row(r);
      const T* const x = in + at;
      T* const dx = out + at;
      for (std::int64_t c = 0; c < n; ++c) {
        dx[c] = static_cast<T>(static_cast<Acc>(dx[c]) * product[c]);
        product[c] *= static_cast<Acc>(x[c]);
      }
    }
  }
};

}  // namespace shardlib::kernels::body
