// Kernels of rows.hpp for devices: each part of a team holds rows of up to 2048 numbers in its lanes' registers, and
// reads them once. Sums have the order of reduction.hpp, so the bits equal those of RowKernel.
#pragma once

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "shardlib/kernels/body/elementwise.hpp"
#include "shardlib/kernels/body/reduction.hpp"
#include "shardlib/spec/dtype.hpp"
#include "shardlib/support/function.hpp"
#include "shardlib/support/math.hpp"

namespace shardlib::kernels::body {

/// How a lane holds its share of a row: of each group of 64 numbers those of its columns, which are neighbors.
template <class Team, class A, int Groups>
struct HeldRow {
  static constexpr int columns = 64 / Team::part_lanes;
  A values[Groups][columns];
};

/// A part of a team, and the row of n numbers that it holds, of which the first `counted` count.
template <class Team, class A, int Groups>
struct RowPart {
  using Held = HeldRow<Team, A, Groups>;
  static constexpr int columns = Held::columns;
  const Team& team;
  int n, counted;

  /// The place in the row of the number in column c of group g.
  [[nodiscard]] SHARDLIB_FUNCTION int place(int g, int c) const { return g * 64 + team.part_lane() * columns + c; }
  /// Calls f(g, c) for each number that the lane may hold.
  template <class F>
  SHARDLIB_FUNCTION void each(const F& f) const {
    SHARDLIB_UNROLL
    for (int g = 0; g < Groups; ++g) {
      SHARDLIB_UNROLL
      for (int c = 0; c < columns; ++c) f(g, c);
    }
  }
  /// Combines term(g, c) of all numbers of the row that count, for all lanes of the part, as team_reduce does.
  template <class Op, class F>
  SHARDLIB_FUNCTION A reduce(const F& term) const {
    A sums[columns] = {};
    each([&](int g, int c) {
      if (g > 0 && g * 64 >= counted) return;
      const A x = place(g, c) < counted ? detail::rounded<A>(term(g, c)) : Op::template identity<A>();
      sums[c] = g == 0 ? x : Op::combine(sums[c], x);
    });
    SHARDLIB_UNROLL
    for (int distance = Team::part_lanes / 2; distance > 0; distance /= 2) {
      const bool first = (team.part_lane() & distance) == 0;
      SHARDLIB_UNROLL
      for (int c = 0; c < columns; ++c) {
        const A other = team.exchange(sums[c], distance);
        sums[c] = first ? Op::combine(sums[c], other) : Op::combine(other, sums[c]);
      }
    }
    SHARDLIB_UNROLL
    for (int half = columns / 2; half > 0; half /= 2) {
      SHARDLIB_UNROLL
      for (int c = 0; c < half; ++c) sums[c] = Op::combine(sums[c], sums[c + half]);
    }
    return sums[0];
  }
  template <class Op>
  SHARDLIB_FUNCTION A reduce(const Held& row) const {
    return reduce<Op>([&](int g, int c) { return row.values[g][c]; });
  }
  /// Reads a row.
  template <class T>
  SHARDLIB_FUNCTION void load(const T* from, Held& held) const {
    if (in_packs(from)) {
      Pack<T, columns> packs[Groups];  // all are on their way before the first is used
      SHARDLIB_UNROLL
      for (int g = 0; g < Groups; ++g)
        if (place(g, 0) < n) packs[g] = load_pack<columns>(from + place(g, 0), 1);
      each([&](int g, int c) { held.values[g][c] = place(g, 0) < n ? static_cast<A>(packs[g].values[c]) : A(0); });
    } else {
      each([&](int g, int c) { held.values[g][c] = place(g, c) < n ? static_cast<A>(from[place(g, c)]) : A(0); });
    }
  }
  /// Writes a row, with zeros for what does not count.
  template <class T>
  SHARDLIB_FUNCTION void store(const Held& held, T* to) const {
    const auto value = [&](int g, int c) { return place(g, c) < counted ? static_cast<T>(held.values[g][c]) : T(0); };
    if (in_packs(to)) {
      SHARDLIB_UNROLL
      for (int g = 0; g < Groups; ++g) {
        if (place(g, 0) >= n) continue;
        Pack<T, columns> pack;
        SHARDLIB_UNROLL
        for (int c = 0; c < columns; ++c) pack.values[c] = value(g, c);
        store_pack<columns>(to + place(g, 0), pack);
      }
    } else {
      each([&](int g, int c) {
        if (place(g, c) < n) to[place(g, c)] = value(g, c);
      });
    }
  }

 private:
  template <class T>
  [[nodiscard]] SHARDLIB_FUNCTION bool in_packs(const T* from) const {
    return n % columns == 0 && takes_packs<columns, T>(reinterpret_cast<const std::byte*>(from), 1);
  }
};

/// Calls row(part, held rows) for contiguous rows of n numbers, which leaves its result in the first held row. What
/// does not count gets zeros. An item is a few rows.
template <class T, std::size_t In, class Row, int Groups, class Out = T>
struct HeldRows {
  using A = accumulator_t<T>;
  static constexpr std::int64_t together = 4;
  std::array<const T*, In> in;
  Out* out;
  int n, counted;
  std::int64_t rows;
  Row row;

  template <class Team>
  SHARDLIB_FUNCTION void operator()(const Team& team, std::int64_t item) const {
    using Held = HeldRow<Team, A, Groups>;
    const RowPart<Team, A, Groups> part{team, n, counted};
    for (int r = team.part(); r - team.part() < together; r += Team::parts) {  // all lanes exchange numbers
      const std::int64_t at = item * together + r;
      const bool mine = team.part() < Team::parts && r < together && at < rows;
      const std::int64_t start = (mine ? at : rows - 1) * n;
      Held held[In];
      SHARDLIB_UNROLL
      for (std::size_t k = 0; k < In; ++k) part.load(in[k] + start, held[k]);
      row(part, held);
      if (mine) part.store(held[0], out + start);
    }
  }
};

/// The numbers of Moments, of a held row.
template <bool Centered, class Part, class Held>
SHARDLIB_FUNCTION auto held_moments(const Part& part, const Held& x, double eps) {
  using A = std::remove_cvref_t<decltype(x.values[0][0])>;
  const auto size = static_cast<A>(part.counted);
  const A mean = Centered ? part.template reduce<detail::SumOp>(x) / size : A(0);
  const A squares = part.template reduce<detail::SumOp>(
      [&](int g, int c) { return (x.values[g][c] - mean) * (x.values[g][c] - mean); });
  return std::array<A, 2>{mean, A(1) / std::sqrt(squares / size + static_cast<A>(eps))};
}

/// As Norm.
template <bool Centered>
struct HeldNorm {
  double eps;

  template <class Part, class Held>
  SHARDLIB_FUNCTION void operator()(const Part& part, Held (&rows)[1]) const {
    Held& x = rows[0];
    const auto [mean, scale] = held_moments<Centered>(part, x, eps);
    part.each([&, m = mean, s = scale](int g, int c) { x.values[g][c] = (x.values[g][c] - m) * s; });
  }
};

/// As norm_cotangent: makes the row x, of these moments, its cotangent.
template <bool Centered, class Part, class Held, class A>
SHARDLIB_FUNCTION void held_norm_cotangent(const Part& part, Held& x, const Held& d, const std::array<A, 2>& moments) {
  const A mean = moments[0], scale = moments[1], size = static_cast<A>(part.counted);
  const A shift = Centered ? part.template reduce<detail::SumOp>(d) / size : A(0);
  const A slope = part.template reduce<detail::SumOp>([&](int g, int c) {
    return d.values[g][c] * ((x.values[g][c] - mean) * scale);
  }) / size;
  part.each([&](int g, int c) {
    x.values[g][c] = scale * ((d.values[g][c] - shift) - (x.values[g][c] - mean) * scale * slope);
  });
}

/// As NormBackward.
template <bool Centered>
struct HeldNormBackward {
  double eps;

  template <class Part, class Held>
  SHARDLIB_FUNCTION void operator()(const Part& part, Held (&rows)[2]) const {
    held_norm_cotangent<Centered>(part, rows[0], rows[1], held_moments<Centered>(part, rows[0], eps));
  }
};

/// As Softmax.
struct HeldSoftmax {
  template <class Part, class Held>
  SHARDLIB_FUNCTION void operator()(const Part& part, Held (&rows)[1]) const {
    using A = std::remove_cvref_t<decltype(rows[0].values[0][0])>;
    Held& x = rows[0];
    const A top = part.template reduce<detail::MaxOp>(x);
    part.each([&](int g, int c) { x.values[g][c] = fast_exp(x.values[g][c] - top); });
    const A scale = A(1) / part.template reduce<detail::SumOp>(x);
    part.each([&](int g, int c) { x.values[g][c] *= scale; });
  }
};

/// As SoftmaxBackward.
struct HeldSoftmaxBackward {
  template <class Part, class Held>
  SHARDLIB_FUNCTION void operator()(const Part& part, Held (&rows)[2]) const {
    using A = std::remove_cvref_t<decltype(rows[0].values[0][0])>;
    Held& p = rows[0];
    const Held& d = rows[1];
    const A dot = part.template reduce<detail::SumOp>([&](int g, int c) { return p.values[g][c] * d.values[g][c]; });
    part.each([&](int g, int c) { p.values[g][c] *= d.values[g][c] - dot; });
  }
};

}  // namespace shardlib::kernels::body
