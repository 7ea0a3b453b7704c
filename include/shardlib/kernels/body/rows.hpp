// Kernels of rows.hpp.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "shardlib/kernels/body/reduction.hpp"
#include "shardlib/spec/dtype.hpp"
#include "shardlib/support/function.hpp"
#include "shardlib/support/math.hpp"

namespace shardlib::kernels::body {

using detail::MaxOp, detail::SumOp, detail::team_reduce, detail::team_reduce_row;

/// Calls row(team, input rows, output row) for the rows of each item: `block` rows of n elements out of a slab of
/// `columns`, contiguous ones or columns of a matrix. Contiguous rows of f32 and f64 stay in place. Others are copied
/// to scratch memory in the accumulator type.
template <class T, std::size_t In, class Row, class Out = T>
struct RowKernel {
  using A = accumulator_t<T>;
  std::array<const T*, In> in;
  Out* out;
  std::int64_t n, columns, block, blocks;
  bool flat;
  Row row;

  template <class Team>
  SHARDLIB_FUNCTION void operator()(const Team& team, std::int64_t item) const {
    const std::int64_t slab = item / blocks, first = item % blocks * block;
    const std::int64_t count = std::min(block, columns - first), length = n, stride = columns;
    std::array<const A*, In> rows;
    if constexpr (std::is_same_v<T, A>) {
      if (flat) {
        for (std::int64_t c = first; c < first + count; ++c) {
          for (std::size_t k = 0; k < In; ++k) rows[k] = in[k] + c * length;
          row(team, rows, out + c * length);
        }
        return;
      }
    }
    const std::int64_t area = block * length, start = slab * columns * length + first * (flat ? length : 1);
    A* const scratch = team.template scratch<A>();
    A* const results = scratch + static_cast<std::int64_t>(In) * area;
    for (std::size_t k = 0; k < In; ++k) {
      const T* const from = in[k] + start;
      A* const to = scratch + static_cast<std::int64_t>(k) * area;
      if (flat) {
        team.lanes(count * length, [=](std::int64_t i) { to[i] = static_cast<A>(from[i]); });
      } else {
        team.lanes(length, [=](std::int64_t i) {
          for (std::int64_t c = 0; c < count; ++c) to[c * length + i] = static_cast<A>(from[i * stride + c]);
        });
      }
    }
    team.barrier();
    for (std::int64_t c = 0; c < count; ++c) {
      for (std::size_t k = 0; k < In; ++k) rows[k] = scratch + static_cast<std::int64_t>(k) * area + c * length;
      row(team, rows, results + c * length);
    }
    team.barrier();
    Out* const to = out + start;
    if (flat) {
      team.lanes(count * length, [=](std::int64_t i) { to[i] = Out(results[i]); });
    } else {
      team.lanes(length, [=](std::int64_t i) {
        for (std::int64_t c = 0; c < count; ++c) to[i * stride + c] = Out(results[c * length + i]);
      });
    }
  }
};

/// The padding of a row holds zeros.
template <class Team, class A>
SHARDLIB_FUNCTION void clear_padding(const Team& team, A* padding, std::int64_t n) {
  team.lanes(n, [=](std::int64_t i) { padding[i] = A(0); });
}

/// The statistics of a row: its mean (0 for RMS norm) and 1 / sqrt(variance + eps).
template <class A>
struct Moments {
  A mean;
  A scale;
};
template <bool Centered, class Team, class A>
SHARDLIB_FUNCTION Moments<A> moments(const Team& team, const A* x, std::int64_t n, double eps) {
  const A mean = Centered ? team_reduce_row<SumOp, A>(team, n, x) / static_cast<A>(n) : A(0);
  const A squares = team_reduce<SumOp, A>(team, n, [=](std::int64_t i) { return (x[i] - mean) * (x[i] - mean); });
  return {mean, A(1) / std::sqrt(squares / static_cast<A>(n) + static_cast<A>(eps))};
}

template <bool Centered>
struct Norm {
  std::int64_t n, counted;
  double eps;

  template <class Team, class A>
  SHARDLIB_FUNCTION void operator()(const Team& team, const std::array<const A*, 1>& in, A* out) const {
    const A* const row = in[0];
    const auto m = moments<Centered>(team, row, counted, eps);
    team.lanes(counted, [=](std::int64_t i) { out[i] = (row[i] - m.mean) * m.scale; });
    clear_padding(team, out + counted, n - counted);
  }
};

/// Writes the cotangent of a norm's row from `d`, that of its result.
template <bool Centered, class Team, class A, class Out>
SHARDLIB_FUNCTION void norm_cotangent(const Team& team, const A* row, const A* d, const Moments<A>& m, std::int64_t n,
                                      std::int64_t counted, Out* out) {
  const auto size = static_cast<A>(counted);
  const A shift = Centered ? team_reduce_row<SumOp, A>(team, counted, d) / size : A(0);
  const auto term = [=](std::int64_t i) { return d[i] * ((row[i] - m.mean) * m.scale); };
  const A slope = team_reduce<SumOp, A>(team, counted, term) / size;
  team.lanes(counted,
             [=](std::int64_t i) { out[i] = Out(m.scale * ((d[i] - shift) - (row[i] - m.mean) * m.scale * slope)); });
  clear_padding(team, out + counted, n - counted);
}

template <bool Centered>
struct NormBackward {
  std::int64_t n, counted;
  double eps;

  template <class Team, class A>
  SHARDLIB_FUNCTION void operator()(const Team& team, const std::array<const A*, 2>& in, A* out) const {
    norm_cotangent<Centered>(team, in[0], in[1], moments<Centered>(team, in[0], counted, eps), n, counted, out);
  }
};

struct Softmax {
  std::int64_t n, counted;

  template <class Team, class A>
  SHARDLIB_FUNCTION void operator()(const Team& team, const std::array<const A*, 1>& in, A* out) const {
    const A* const row = in[0];
    const A top = team_reduce_row<MaxOp, A>(team, counted, row);
    team.lanes(counted, [=](std::int64_t i) { out[i] = fast_exp(row[i] - top); });
    const A scale = A(1) / team_reduce_row<SumOp, A>(team, counted, out);
    team.lanes(counted, [=](std::int64_t i) { out[i] *= scale; });
    clear_padding(team, out + counted, n - counted);
  }
};

struct SoftmaxBackward {
  std::int64_t n;

  template <class Team, class A>
  SHARDLIB_FUNCTION void operator()(const Team& team, const std::array<const A*, 2>& in, A* out) const {
    const A* const p = in[0];
    const A* const d = in[1];
    const A dot = team_reduce<SumOp, A>(team, n, [=](std::int64_t i) { return p[i] * d[i]; });
    team.lanes(n, [=](std::int64_t i) { out[i] = p[i] * (d[i] - dot); });
  }
};

template <class T>
struct SumExp {
  const T* x;
  const T* shift;
  T* out;
  std::int64_t n, counted;

  template <class Team>
  SHARDLIB_FUNCTION void operator()(const Team& team, std::int64_t r) const {
    using A = accumulator_t<T>;
    const T* const row = x + r * n;
    const A top = static_cast<A>(shift[r]);
    const A sum =
        team_reduce<SumOp, A>(team, counted, [=](std::int64_t i) { return fast_exp(static_cast<A>(row[i]) - top); });
    team.one([=, to = out + r] { *to = T(sum); });
  }
};

template <class T, class I>
struct CrossEntropyBackward {
  const T* x;
  const T* shift;
  const T* total;
  const I* targets;
  const T* dy;
  T* dx;
  std::int64_t n, first;

  template <class Team>
  SHARDLIB_FUNCTION void operator()(const Team& team, std::int64_t r) const {
    using A = accumulator_t<T>;
    const T* const row = x + r * n;
    T* const out = dx + r * n;
    const A top = static_cast<A>(shift[r]), slope = static_cast<A>(dy[r]), scale = slope / static_cast<A>(total[r]);
    const std::int64_t target = static_cast<std::int64_t>(targets[r]) - first;
    const bool here = target >= 0 && target < n;
    const A hit = here ? scale * fast_exp(static_cast<A>(row[target]) - top) - slope : A(0);
    team.barrier();  // all lanes have read the target's element, which may be overwritten now
    team.lanes(n, [=](std::int64_t i) { out[i] = T(scale * fast_exp(static_cast<A>(row[i]) - top)); });
    team.barrier();
    if (here) team.one([=] { out[target] = T(hit); });
  }
};

/// Minus the logit of each row's target, or 0 where another shard has the target. Rows of n logits; an item is a group
/// of rows.
template <class T, class I>
struct TargetLogits {
  static constexpr std::int64_t group = 64;
  const T* x;
  const I* targets;
  T* out;
  std::int64_t rows, n, first;

  template <class Team>
  SHARDLIB_FUNCTION void operator()(const Team& team, std::int64_t item) const {
    constexpr std::int64_t most = group;
    const std::int64_t begin = item * most;
    team.lanes(std::min(most, rows - begin), [=, this](std::int64_t i) {
      const std::int64_t r = begin + i, target = static_cast<std::int64_t>(targets[r]) - first;
      out[r] = target >= 0 && target < n ? -x[r * n + target] : T(0);
    });
  }
};

}  // namespace shardlib::kernels::body
