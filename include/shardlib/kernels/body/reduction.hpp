// Reductions inside a kernel. Their order depends only on the sizes, so every number of lanes gives the same bits.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "shardlib/device/team.hpp"
#include "shardlib/support/function.hpp"
#include "shardlib/support/loop.hpp"
#include "shardlib/support/wrapping.hpp"

namespace shardlib::kernels::detail {

struct SumOp {
  static constexpr const char* name = "sum";
  template <class T>
  static constexpr T identity() {
    return T(0);
  }
  template <class T>
  static constexpr T combine(T a, T b) {
    return shardlib::detail::WrappingSum{}(a, b);
  }
};

struct ProdOp {
  static constexpr const char* name = "prod";
  template <class T>
  static constexpr T identity() {
    return T(1);
  }
  template <class T>
  static constexpr T combine(T a, T b) {
    return shardlib::detail::WrappingProduct{}(a, b);
  }
};

struct MaxOp {
  static constexpr const char* name = "max";
  template <class T>
  static constexpr T identity() {
    if constexpr (std::is_floating_point_v<T>) return -std::numeric_limits<T>::infinity();
    return std::numeric_limits<T>::lowest();
  }
  template <class T>
  static constexpr T combine(T a, T b) {
    return b > a || b != b ? b : a;  // a NaN is the maximum
  }
};

struct MinOp {
  static constexpr const char* name = "min";
  template <class T>
  static constexpr T identity() {
    if constexpr (std::is_floating_point_v<T>) return std::numeric_limits<T>::infinity();
    return std::numeric_limits<T>::max();
  }
  template <class T>
  static constexpr T combine(T a, T b) {
    return b < a || b != b ? b : a;  // a NaN is the minimum, too
  }
};

/// Combines rows of W columns. Every 32 rows of one level give one row of the next level. The rounding error of long
/// sums is then close to that of a pairwise sum.
template <class Op, class Acc, std::size_t W>
class Cascade {
 public:
  template <class T>
  SHARDLIB_FUNCTION void add(const T* row, std::size_t width) {
    Acc* sum = levels_[0];
    if (counts_[0] == 0) {
      for (std::size_t j = 0; j < width; ++j) sum[j] = static_cast<Acc>(row[j]);
    } else {
      for (std::size_t j = 0; j < width; ++j) sum[j] = Op::combine(sum[j], static_cast<Acc>(row[j]));
    }
    ++counts_[0];
    for (std::size_t l = 0; l + 1 < depth && counts_[l] == 32; ++l) carry(l, width);
  }
  /// Adds term(0) to term(n - 1), each a row of one column. They are combined in a register.
  template <class F>
  SHARDLIB_FUNCTION void add_terms(std::int64_t n, const F& term) {
    static_assert(W == 1);
    for (std::int64_t i = 0; i < n;) {
      const std::int64_t left = 32 - counts_[0], some = left < n - i ? left : n - i;
      const bool begins = counts_[0] == 0;
      Acc sum = begins ? term(i) : levels_[0][0];
      for (std::int64_t k = begins ? 1 : 0; k < some; ++k) sum = Op::combine(sum, term(i + k));
      levels_[0][0] = sum;
      counts_[0] += some;
      i += some;
      for (std::size_t l = 0; l + 1 < depth && counts_[l] == 32; ++l) carry(l, 1);
    }
  }
  /// The combined row, valid until the next call. At least one row must have been added.
  SHARDLIB_FUNCTION Acc* finish(std::size_t width) {
    Acc* result = nullptr;
    for (std::size_t l = 0; l < depth; ++l) {
      if (counts_[l] == 0) continue;
      if (result != nullptr) combine_rows(result, levels_[l], width);
      result = levels_[l];
    }
    return result;
  }

 private:
  static constexpr std::size_t depth = 4;
  SHARDLIB_FUNCTION static void combine_rows(const Acc* from, Acc* to, std::size_t width) {
    for (std::size_t j = 0; j < width; ++j) to[j] = Op::combine(to[j], from[j]);
  }
  SHARDLIB_FUNCTION void carry(std::size_t l, std::size_t width) {
    if (counts_[l + 1] == 0) {
      for (std::size_t j = 0; j < width; ++j) levels_[l + 1][j] = levels_[l][j];  // nvcc 13 drops std::copy_n here
    } else {
      combine_rows(levels_[l], levels_[l + 1], width);
    }
    ++counts_[l + 1];
    counts_[l] = 0;
  }
  Acc levels_[depth][W];
  std::array<std::int64_t, depth> counts_{};
};

/// Combines n contiguous elements, as 64 interleaved lanes.
template <class Op, class Acc, class T>
SHARDLIB_FUNCTION void add_lanes(Cascade<Op, Acc, 64>& cascade, const T* x, std::int64_t n) {
  std::int64_t i = 0;
  for (; i + 64 <= n; i += 64) cascade.add(x + i, 64);
  if (i == n) return;
  Acc tail[64];
  std::fill_n(tail, 64, Op::template identity<Acc>());
  for (std::int64_t j = i; j < n; ++j) tail[j - i] = static_cast<Acc>(x[j]);
  cascade.add(tail, 64);
}

template <class Op, class Acc>
SHARDLIB_FUNCTION Acc fold_lanes(Cascade<Op, Acc, 64>& cascade) {
  Acc* lanes = cascade.finish(64);
  for (std::size_t half = 32; half > 0; half /= 2) {
    for (std::size_t j = 0; j < half; ++j) lanes[j] = Op::combine(lanes[j], lanes[j + half]);
  }
  return lanes[0];
}

/// Reduces one contiguous row.
template <class Op, class Acc, class T>
SHARDLIB_FUNCTION Acc reduce_row(const T* x, std::int64_t n) {
  if (n == 0) return Op::template identity<Acc>();
  Cascade<Op, Acc, 64> cascade;
  add_lanes(cascade, x, n);
  return fold_lanes(cascade);
}

/// A value that the compiler has rounded to its type: it cannot merge the operation that made it with the next one, as
/// it cannot where a host's team stores its terms.
template <class A>
SHARDLIB_FUNCTION inline A rounded(A value) {
#if !defined(__CUDA_ARCH__) && !defined(__HIP_DEVICE_COMPILE__)
  asm("" : "+m"(value));
#endif
  return value;
}

/// The elements [0, n) of one of 64 interleaved columns, added as add_lanes does.
template <class Op, class Acc, class F>
SHARDLIB_FUNCTION void add_column(Cascade<Op, Acc, 1>& cascade, std::int64_t column, std::int64_t n, const F& term) {
  cascade.add_terms((n + 63) / 64, [=, &term](std::int64_t row) {
    const std::int64_t i = row * 64 + column;
    return i < n ? rounded<Acc>(term(i)) : Op::template identity<Acc>();
  });
}

/// Combines the 64 columns on a team's board, as fold_lanes does. All lanes get the result.
template <class Op, class Acc, class Team>
SHARDLIB_FUNCTION Acc fold_board(const Team& team) {
  Acc* const board = team.template board<Acc>();
  for (std::int64_t half = 32; half > 0; half /= 2) {
    team.barrier();
    team.lanes(half, [=](std::int64_t j) { board[j] = Op::combine(board[j], board[j + half]); });
  }
  team.barrier();
  return board[0];
}

/// term(0) combined with ... term(n - 1), for all lanes of a team. It begins and ends with a barrier.
template <class Op, class Acc, class Team, class F>
SHARDLIB_FUNCTION Acc team_reduce(const Team& team, std::int64_t n, const F& term) {
  if (n == 0) return Op::template identity<Acc>();
  if constexpr (Team::single) {
    constexpr std::int64_t tile_length = 512;
    Acc tile[tile_length];
    Cascade<Op, Acc, 64> cascade;
    for (std::int64_t begin = 0; begin < n; begin += tile_length) {
      const std::int64_t length = std::min(tile_length, n - begin);
      independent(length, [&tile, term, begin](std::int64_t i) { tile[i] = term(begin + i); });
      add_lanes(cascade, tile, length);
    }
    return fold_lanes(cascade);
  } else {
    Acc* const board = team.template board<Acc>();
    team.barrier();
    team.lanes(64, [=](std::int64_t column) {
      Cascade<Op, Acc, 1> cascade;
      add_column(cascade, column, n, term);
      board[column] = *cascade.finish(1);
    });
    return fold_board<Op, Acc>(team);
  }
}

/// As above, of n contiguous elements.
template <class Op, class Acc, class Team, class T>
SHARDLIB_FUNCTION Acc team_reduce_row(const Team& team, std::int64_t n, const T* x) {
  if constexpr (Team::single)
    return reduce_row<Op, Acc>(x, n);
  else
    return team_reduce<Op, Acc>(team, n, [=](std::int64_t i) { return static_cast<Acc>(x[i]); });
}

}  // namespace shardlib::kernels::detail
