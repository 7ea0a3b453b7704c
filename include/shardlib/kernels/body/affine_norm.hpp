// Norms with a scale and a bias, forward and backward. Layer norm has a bias, RMS norm has none.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "shardlib/kernels/body/held_rows.hpp"
#include "shardlib/kernels/body/reduction.hpp"
#include "shardlib/kernels/body/rows.hpp"
#include "shardlib/spec/dtype.hpp"
#include "shardlib/support/function.hpp"

namespace shardlib::kernels::body {

/// Calls f(i, term(i)) for i in [0, n). Compilers cannot merge the last operation of `term` with what f does: so the
/// bits are those of two ops, of which the first stores its result.
template <class A, class Team, class Term, class F>
SHARDLIB_FUNCTION void lanes_rounded(const Team& team, std::int64_t n, const Term& term, const F& f) {
  if constexpr (Team::single) {
    constexpr std::int64_t tile_length = 512;
    A tile[tile_length];
    for (std::int64_t begin = 0; begin < n; begin += tile_length) {
      const std::int64_t length = std::min(tile_length, n - begin);
      independent(length, [&tile, term, begin](std::int64_t i) { tile[i] = term(begin + i); });
      independent(length, [&tile, f, begin](std::int64_t i) { f(begin + i, tile[i]); });
    }
  } else {
    team.lanes(n, [=](std::int64_t i) { f(i, detail::rounded<A>(term(i))); });
  }
}

/// A row of RowKernel: the norm, times the scale, plus the bias.
template <bool Centered, class W>
struct AffineNorm {
  const W* scale;
  const W* bias;
  std::int64_t n, counted;
  double eps;

  template <class Team, class A, class Out>
  SHARDLIB_FUNCTION void operator()(const Team& team, const std::array<const A*, 1>& in, Out* out) const {
    const A* const row = in[0];
    const auto m = moments<Centered>(team, row, counted, eps);
    const auto scaled = [=, w = scale](std::int64_t i) { return (row[i] - m.mean) * m.scale * static_cast<A>(w[i]); };
    if constexpr (Centered)
      lanes_rounded<A>(team, counted, scaled,
                       [=, b = bias](std::int64_t i, A x) { out[i] = static_cast<Out>(x + static_cast<A>(b[i])); });
    else
      team.lanes(counted, [=](std::int64_t i) { out[i] = static_cast<Out>(scaled(i)); });
    clear_padding(team, out + counted, n - counted);
  }
};

/// A row of HeldRows, as AffineNorm.
template <bool Centered, class W>
struct HeldAffineNorm {
  const W* scale;
  const W* bias;
  double eps;

  template <class Part, class Held>
  SHARDLIB_FUNCTION void operator()(const Part& part, Held (&rows)[1]) const {
    using A = std::remove_cvref_t<decltype(rows[0].values[0][0])>;
    Held& x = rows[0];
    const auto moments = held_moments<Centered>(part, x, eps);
    const A mean = moments[0], by = moments[1];
    part.each([&](int g, int c) {
      const int i = part.place(g, c);
      if (i >= part.counted) return;
      A& value = x.values[g][c];
      value = (value - mean) * by * static_cast<A>(scale[i]);
      if constexpr (Centered) value = detail::rounded<A>(value) + static_cast<A>(bias[i]);
    });
  }
};

/// The factor of Moments that makes the cotangent of the scale. Rows of padding hold zeros: with an epsilon of 0 their
/// factor is infinite, and the cotangent would be NaN. A factor that is NaN stays.
template <class A>
SHARDLIB_FUNCTION A zero_if_infinite(A scale) {
  return scale > std::numeric_limits<A>::max() ? A(0) : scale;
}

/// The arrays of a norm's backward pass. The cotangents of scale and bias are sums over rows. Each group of rows has a
/// row of `sums` for the scale's, and then one for the bias's. A null `dx` or `sums` is not wanted.
template <bool Centered, class T, class W, class R>
struct NormGradients {
  using A = accumulator_t<T>;
  static constexpr std::int64_t group = 16;                ///< rows whose cotangents are added one after the other
  static constexpr std::int64_t kinds = Centered ? 2 : 1;  ///< rows of sums
  const T* x;
  const W* scale;
  const R* ct;
  T* dx;
  A* sums;
  std::int64_t rows, n, counted;
  double eps;

  [[nodiscard]] SHARDLIB_FUNCTION A* sums_of(std::int64_t at) const {
    return sums == nullptr ? nullptr : sums + at * kinds * n;
  }
};

/// An item is a group of rows, which may be columns of matrices of `inner` columns. Its scratch memory has four rows of
/// n numbers.
template <bool Centered, class T, class W, class R>
struct AffineNormBackward : NormGradients<Centered, T, W, R> {
  using Base = NormGradients<Centered, T, W, R>;
  using typename Base::A;
  std::int64_t inner;

  template <class Team>
  SHARDLIB_FUNCTION void operator()(const Team& team, std::int64_t item) const {
    constexpr std::int64_t size = Base::group;
    A* const of_scale = this->sums_of(item);
    if (of_scale != nullptr) team.lanes(Base::kinds * this->n, [=](std::int64_t i) { of_scale[i] = A(0); });
    for (std::int64_t r = item * size; r < std::min(this->rows, (item + 1) * size); ++r) row(team, r, of_scale);
  }

 private:
  template <class Team>
  SHARDLIB_FUNCTION void row(const Team& team, std::int64_t r, A* of_scale) const {
    const std::int64_t length = this->n, count = this->counted, stride = inner;
    const std::int64_t start = r / stride * length * stride + r % stride;
    A* const d = team.template scratch<A>() + 2 * length;
    const A* const x = numbers(team, this->x + start, d - 2 * length);
    const A* const c = numbers(team, this->ct + start, d - length);
    team.barrier();
    const auto m = moments<Centered>(team, x, count, this->eps);
    if (this->dx != nullptr) {
      team.lanes(count, [=, w = this->scale](std::int64_t i) { d[i] = c[i] * static_cast<A>(w[i]); });
      team.barrier();
      T* const to = this->dx + start;
      if (stride == 1) {
        norm_cotangent<Centered>(team, x, d, m, length, count, to);
      } else {
        A* const result = d + length;
        norm_cotangent<Centered>(team, x, d, m, length, count, result);
        team.barrier();
        team.lanes(length, [=](std::int64_t i) { to[i * stride] = T(result[i]); });
      }
    }
    if (of_scale != nullptr)
      lanes_rounded<A>(
          team, count, [=, by = zero_if_infinite(m.scale)](std::int64_t i) { return c[i] * ((x[i] - m.mean) * by); },
          [=](std::int64_t i, A term) {
            of_scale[i] += term;
            if constexpr (Centered) of_scale[length + i] += c[i];
          });
    team.barrier();  // the next row overwrites the scratch memory
  }
  /// A row in the accumulator's type: in place if it is contiguous and of that type, else a copy.
  template <class Team, class From>
  SHARDLIB_FUNCTION const A* numbers(const Team& team, const From* from, A* copy) const {
    const std::int64_t stride = inner;
    if constexpr (std::is_same_v<From, A>)
      if (stride == 1) return from;
    if (stride == 1)
      team.lanes(this->n, [=](std::int64_t i) { copy[i] = static_cast<A>(from[i]); });
    else
      team.lanes(this->n, [=](std::int64_t i) { copy[i] = static_cast<A>(from[i * stride]); });
    return copy;
  }
};

/// The same for devices, of contiguous rows: a part of a team has a group of rows, and holds its sums in registers. An
/// item is a few groups.
template <bool Centered, class T, class W, class R, int Groups>
struct HeldAffineNormBackward : NormGradients<Centered, T, W, R> {
  using Base = NormGradients<Centered, T, W, R>;
  using typename Base::A;
  static constexpr std::int64_t together = 4;

  template <class Team>
  SHARDLIB_FUNCTION void operator()(const Team& team, std::int64_t item) const {
    using Held = HeldRow<Team, A, Groups>;
    constexpr std::int64_t size = Base::group;
    const std::int64_t length = std::min(size, this->rows);
    const RowPart<Team, A, Groups> part{team, static_cast<int>(this->n), static_cast<int>(this->counted)};
    for (int g = team.part(); g - team.part() < together; g += Team::parts) {  // all lanes exchange numbers
      const std::int64_t at = item * together + g;
      const bool mine = team.part() < Team::parts && g < together && at * size < this->rows;
      Held totals[Base::kinds] = {};
      // A compiler that knew the length of this loop would unroll it, and lanes would run out of registers.
      for (std::int64_t r = at * size; r < at * size + length; ++r) row(part, r, mine && r < this->rows, totals);
      if (A* const to = this->sums_of(at); mine && to != nullptr) {
        part.store(totals[0], to);
        if constexpr (Centered) part.store(totals[1], to + this->n);
      }
    }
  }

 private:
  /// Adds to the totals and writes the cotangent of a row if it is `mine`.
  template <class Part, class Held>
  SHARDLIB_FUNCTION void row(const Part& part, std::int64_t r, bool mine, Held* totals) const {
    const std::int64_t start = (mine ? r : this->rows - 1) * this->n;
    Held x, d;
    part.load(this->x + start, x);
    part.load(this->ct + start, d);
    const auto moments = held_moments<Centered>(part, x, this->eps);
    const A mean = moments[0], finite = zero_if_infinite(moments[1]);
    part.each([&](int g, int c) {
      const int i = part.place(g, c);
      if (i >= part.counted) return;
      A& value = d.values[g][c];
      if (mine) {
        totals[0].values[g][c] += detail::rounded<A>(value * ((x.values[g][c] - mean) * finite));
        if constexpr (Centered) totals[1].values[g][c] += value;
      }
      value = detail::rounded<A>(value * static_cast<A>(this->scale[i]));
    });
    if (this->dx == nullptr) return;
    held_norm_cotangent<Centered>(part, x, d, moments);
    if (mine) part.store(x, this->dx + start);
  }
};

/// Adds the sums of all groups of rows. An item is a few columns of one kind of sums, whose result may be null: then
/// it is not wanted. Every 8th group belongs to one of 8 slices, which are added last.
template <class A, class W>
struct SumGroups {
  static constexpr std::int64_t columns = 16, slices = 8;
  const A* sums;
  std::array<W*, 2> out;
  std::int64_t groups, n, kinds, tiles;

  template <class Team>
  SHARDLIB_FUNCTION void operator()(const Team& team, std::int64_t item) const {
    constexpr std::int64_t width = columns, parts = slices;
    const std::int64_t kind = item / tiles, first = item % tiles * width, count = std::min(width, n - first);
    const std::int64_t stride = kinds * n, all = groups, used = std::min(parts, groups);
    W* const to = kind == 0 ? out[0] : out[1];
    if (to == nullptr) return;
    const A* const from = sums + kind * n + first;
    A* const board = team.template tile<A, width * parts>();
    if constexpr (Team::single) {
      detail::Cascade<SumOp, A, static_cast<std::size_t>(width)> cascades[parts];
      for (std::int64_t g = 0; g < all; ++g)
        cascades[g % parts].add(from + g * stride, static_cast<std::size_t>(count));
      for (std::int64_t s = 0; s < used; ++s)
        std::copy_n(cascades[s].finish(static_cast<std::size_t>(count)), count, board + s * width);
    } else {
      team.lanes(width * used, [=](std::int64_t i) {
        const std::int64_t s = i / width, c = i % width;
        if (c >= count) return;
        detail::Cascade<SumOp, A, 1> cascade;
        cascade.add_terms((all - s + parts - 1) / parts,
                          [=](std::int64_t k) { return from[(s + k * parts) * stride + c]; });
        board[i] = *cascade.finish(1);
      });
      team.barrier();
    }
    team.lanes(count, [=](std::int64_t c) {
      A sum = used > 0 ? board[c] : A(0);
      for (std::int64_t s = 1; s < used; ++s) sum += board[s * width + c];
      to[first + c] = W(sum);
    });
  }
};

}  // namespace shardlib::kernels::body
