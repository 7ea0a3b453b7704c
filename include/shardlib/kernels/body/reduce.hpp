// Kernels of reduce.hpp.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "shardlib/kernels/body/reduction.hpp"
#include "shardlib/kernels/strided.hpp"
#include "shardlib/spec/dtype.hpp"
#include "shardlib/support/function.hpp"

namespace shardlib::kernels::body {

using detail::Cascade, detail::SumOp;

/// Where results go: into the output, or where a reduction is split into pieces, into a row of `outs` for each piece.
template <class T, class Acc>
struct Results {
  T* out;
  Acc* pieces;
  std::int64_t outs;

  SHARDLIB_FUNCTION void put(std::int64_t piece, std::int64_t first, const Acc* values, std::int64_t n) const {
    if (pieces != nullptr) {
      for (std::int64_t i = 0; i < n; ++i) pieces[piece * outs + first + i] = values[i];
    } else {
      for (std::int64_t i = 0; i < n; ++i) out[first + i] = T(values[i]);
    }
  }
};

/// Reduces contiguous runs of n elements, in chunks, to one value for each element of `kept`. An item is one piece of a
/// group of results.
template <class Op, class Acc, class In, class Out>
struct ReduceRuns {
  static constexpr std::int64_t chunk = 4096;
  const In* in;
  Nest<1> kept, reduced;
  std::int64_t n, chunks, rows, outs, group, pieces;
  Results<Out, Acc> results;

  template <class Team>
  SHARDLIB_FUNCTION void operator()(const Team& team, std::int64_t item) const {
    const std::int64_t piece = item % pieces, begin = item / pieces * group;
    Walk<1> out(kept, begin);
    for (std::int64_t o = begin; o < std::min(outs, begin + group); ++o, out.next()) {
      const In* const from = in + out.offsets[0];
      if constexpr (Team::single) {
        Cascade<Op, Acc, 64> cascade;
        for_chunks(piece, [&](std::int64_t at, std::int64_t length) { detail::add_lanes(cascade, from + at, length); });
        const Acc value = detail::fold_lanes(cascade);
        results.put(piece, o, &value, 1);
      } else {
        Acc* const board = team.template board<Acc>();
        team.barrier();
        team.lanes(64, [=, this](std::int64_t column) {
          Cascade<Op, Acc, 1> cascade;
          for_chunks(piece, [&](std::int64_t at, std::int64_t length) {
            detail::add_column(cascade, column, length, [=](std::int64_t i) { return static_cast<Acc>(from[at + i]); });
          });
          board[column] = *cascade.finish(1);
        });
        const Acc value = detail::fold_board<Op, Acc>(team);
        team.one([=, this] { results.put(piece, o, &value, 1); });
      }
    }
  }

 private:
  template <class F>
  SHARDLIB_FUNCTION void for_chunks(std::int64_t piece, const F& f) const {
    constexpr std::int64_t longest = chunk;
    const std::int64_t first = rows * piece / pieces;
    Walk<1> row(reduced, first / chunks);
    for (std::int64_t r = first; r < rows * (piece + 1) / pieces; ++r) {
      const std::int64_t start = r % chunks * longest;
      f(row.offsets[0] + start, std::min(longest, n - start));
      if (r % chunks == chunks - 1) row.next();
    }
  }
};

/// Reduces rows of n contiguous elements to one row for each element of `kept`. An item is one piece of `width`
/// columns.
template <class Op, class Acc, class In, class Out>
struct ReduceColumns {
  static constexpr std::int64_t width = 256;
  const In* in;
  Nest<1> kept, reduced;
  std::int64_t n, tiles, rows, pieces;
  Results<Out, Acc> results;

  template <class Team>
  SHARDLIB_FUNCTION void operator()(const Team& team, std::int64_t item) const {
    constexpr std::int64_t longest = width;
    const std::int64_t piece = item % pieces, outer = item / pieces / tiles, start = item / pieces % tiles * longest;
    const std::int64_t length = std::min(longest, n - start);
    const Walk<1> out(kept, outer);
    const In* const from = in + out.offsets[0] + start;
    if constexpr (Team::single)
      reduce<static_cast<std::size_t>(longest)>(from, length, piece, outer * n + start);
    else
      team.lanes(length, [=, this](std::int64_t j) { reduce<1>(from + j, 1, piece, outer * n + start + j); });
  }

 private:
  template <std::size_t Width>
  SHARDLIB_FUNCTION void reduce(const In* from, std::int64_t length, std::int64_t piece, std::int64_t at) const {
    Cascade<Op, Acc, Width> cascade;
    const std::int64_t first = rows * piece / pieces, last = rows * (piece + 1) / pieces;
    if constexpr (Width == 1) {
      if (reduced.depth <= 1) {  // rows at a constant distance, whose loads do not wait for each other
        const std::int64_t stride = reduced.loop(0).strides[0];
        const In* const start = from + first * stride;
        cascade.add_terms(last - first, [=](std::int64_t r) { return static_cast<Acc>(start[r * stride]); });
        return results.put(piece, at, cascade.finish(1), 1);
      }
    }
    Walk<1> row(reduced, first);
    for (std::int64_t r = first; r < last; ++r, row.next())
      cascade.add(from + row.offsets[0], static_cast<std::size_t>(length));
    results.put(piece, at, cascade.finish(static_cast<std::size_t>(length)), length);
  }
};

/// Sums the squares of a piece of n numbers.
template <class T>
struct SquaresOfPiece {
  using Acc = accumulator_t<T>;
  static constexpr std::int64_t piece = 1 << 16;
  const T* in;
  std::int64_t n;
  Acc* sums;

  template <class Team>
  SHARDLIB_FUNCTION void operator()(const Team& team, std::int64_t item) const {
    constexpr std::int64_t row = 64, rows = 32, ahead = 512;
    const std::int64_t first = item * piece, end = std::min(n, first + piece);
    const T* const x = in;
    if constexpr (Team::single) {
      Cascade<SumOp, Acc, row> cascade;
      for (std::int64_t begin = first; begin < end; begin += rows * row) {
        // Sums like the cascade's first level, but without its stores.
        Acc squares[row] = {};
        for (std::int64_t r = begin; r < std::min(end, begin + rows * row); r += row) {
          const auto add = [&, from = x + r](std::int64_t i) {
            squares[i] += static_cast<Acc>(from[i]) * static_cast<Acc>(from[i]);
          };
          load_ahead(x, r + ahead, row);
          independent(std::min(row, end - r), add);
        }
        cascade.add(squares, row);
      }
      sums[item] = detail::fold_lanes(cascade);
    } else {
      Acc* const board = team.template board<Acc>();
      team.lanes(row, [=](std::int64_t column) {
        Cascade<SumOp, Acc, 1> cascade;
        for (std::int64_t begin = first; begin < end; begin += rows * row) {
          Acc square = 0;
          for (std::int64_t i = begin + column; i < std::min(end, begin + rows * row); i += row)
            square = detail::rounded(square + static_cast<Acc>(x[i]) * static_cast<Acc>(x[i]));  // as if stored
          cascade.add(&square, 1);
        }
        board[column] = *cascade.finish(1);
      });
      const Acc sum = detail::fold_board<SumOp, Acc>(team);
      team.one([=, to = sums + item] { *to = sum; });
    }
  }
};

/// On devices, the first part of SquaresOfPiece, whose order of sums it keeps: sums the squares of 64 interleaved
/// columns of each group of 2048 numbers, so that as many lanes are busy as there are columns. An item is two groups.
template <class T>
struct SquaresOfGroups {
  using Acc = accumulator_t<T>;
  static constexpr std::int64_t columns = 64, rows = 32, group = columns * rows, together = 2;
  const T* in;
  std::int64_t n;
  Acc* sums;  ///< 64 for each group

  template <class Team>
  SHARDLIB_FUNCTION void operator()(const Team& team, std::int64_t item) const {
    const std::int64_t first = item * together * columns, groups = (n + group - 1) / group;
    team.lanes(std::min(together * columns, groups * columns - first), [=, this](std::int64_t i) {
      const std::int64_t begin = (first + i) / columns * group + i % columns;
      Acc square = 0;
      const auto add = [&](Acc x) { square = detail::rounded(square + x * x); };  // as if stored
      if (begin - i % columns + group <= n) {
        SHARDLIB_UNROLL
        for (std::int64_t r = 0; r < rows; ++r) add(static_cast<Acc>(in[begin + r * columns]));
      } else {
        for (std::int64_t at = begin; at < n; at += columns) add(static_cast<Acc>(in[at]));
      }
      sums[first + i] = square;
    });
  }
};

/// The rest of SquaresOfPiece: an item adds the columns of one piece's groups.
template <class Acc>
struct SumOfGroups {
  static constexpr std::int64_t columns = 64, groups_of_piece = 32;
  const Acc* columns_of_groups;
  std::int64_t groups;
  Acc* sums;

  template <class Team>
  SHARDLIB_FUNCTION void operator()(const Team& team, std::int64_t item) const {
    constexpr std::int64_t most = groups_of_piece;
    const std::int64_t count = std::min(most, groups - item * most);
    const Acc* const from = columns_of_groups + item * most * columns;
    Acc* const board = team.template board<Acc>();
    team.lanes(columns, [=](std::int64_t column) {
      Acc sum = from[column];
      if (count == most) {
        SHARDLIB_UNROLL
        for (std::int64_t g = 1; g < most; ++g) sum += from[g * columns + column];
      } else {
        for (std::int64_t g = 1; g < count; ++g) sum += from[g * columns + column];
      }
      board[column] = sum;
    });
    const Acc sum = detail::fold_board<SumOp, Acc>(team);
    team.one([=, to = sums + item] { *to = sum; });
  }
};

/// The place of the first maximum, or of the first NaN, of a row, which is an item. Several lanes share its elements.
template <class T>
struct Argmax {
  using Acc = std::conditional_t<std::is_same_v<T, bool_>, u8, accumulator_t<T>>;
  struct Best {
    Acc value;
    std::int64_t at;

    SHARDLIB_FUNCTION void meet(const Best& other) {
      const bool nan = value != value, other_nan = other.value != other.value;
      const bool ties = value == other.value || (nan && other_nan);
      if (ties ? other.at < at : other_nan || (!nan && other.value > value)) *this = other;
    }
  };
  static constexpr std::int64_t columns = 128;
  const T* in;
  i32* out;
  Along along;

  template <class Team>
  SHARDLIB_FUNCTION void operator()(const Team& team, std::int64_t item) const {
    const T* const x = in + along.offset(item);
    i32* const to = out + item;
    const std::int64_t inner = along.inner, counted = along.counted();
    if constexpr (Team::single) {
      Best best{static_cast<Acc>(x[0]), 0};
      for (std::int64_t i = 1; i < counted; ++i) {
        const auto v = static_cast<Acc>(x[i * inner]);
        if (v > best.value || (v != v && best.value == best.value)) best = {v, i};
      }
      *to = static_cast<i32>(best.at);
    } else {
      constexpr std::int64_t most = columns;
      Best* const tile = team.template tile<Best, most>();
      std::int64_t width = most;  // of the tree; short rows take a short one
      while (width / 2 >= counted) width /= 2;
      team.lanes(width, [=](std::int64_t column) {
        Best best{static_cast<Acc>(x[0]), 0};
        for (std::int64_t i = column; i < counted; i += width) best.meet({static_cast<Acc>(x[i * inner]), i});
        tile[column] = best;
      });
      for (std::int64_t half = width / 2; half > 0; half /= 2) {
        team.barrier();
        team.lanes(half, [=](std::int64_t column) { tile[column].meet(tile[column + half]); });
      }
      team.barrier();
      team.one([=] { *to = static_cast<i32>(tile[0].at); });
    }
  }
};

}  // namespace shardlib::kernels::body
