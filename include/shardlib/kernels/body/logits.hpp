// Kernels of linear_cross_entropy on devices: each reads the logits once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>

#include "shardlib/kernels/body/elementwise.hpp"
#include "shardlib/kernels/body/reduction.hpp"
#include "shardlib/support/function.hpp"
#include "shardlib/support/math.hpp"

namespace shardlib::kernels::body {

/// The maximum of some numbers, and the sum of their exp(x - maximum).
template <class A>
struct SumOfExponentials {
  A top = -std::numeric_limits<A>::infinity(), sum = 0;

  /// The number that exponents subtract. It is finite, because -inf - -inf would be NaN.
  SHARDLIB_FUNCTION A shift() const { return top == -std::numeric_limits<A>::infinity() ? A(0) : top; }
  SHARDLIB_FUNCTION void add(const SumOfExponentials& other) {
    const SumOfExponentials mine = *this;
    top = detail::MaxOp::combine(mine.top, other.top);
    sum = mine.sum * fast_exp(mine.top - shift()) + other.sum * fast_exp(other.top - shift());
  }
};

/// Computes for each row of n logits the maximum and the sum of exponentials that the backward pass of a loss reads,
/// and minus the logit of the target, or 0 where another shard has the target. Rows are `stride` apart. The order of a
/// sum depends only on n: packs of numbers are dealt out to 128 columns, which a tree adds. An item is a row.
template <class A, class I>
struct LogitSums {
  static constexpr std::int64_t columns = 128;
  static constexpr int some = 16 / sizeof(A), packs = 4;
  const A* x;
  std::int64_t stride;
  const I* targets;
  A *highest, *sum, *loss;
  std::int64_t n, first;

  template <class Team>
  SHARDLIB_FUNCTION void operator()(const Team& team, std::int64_t r) const {
    constexpr std::int64_t all = columns;
    const A* const row = x + r * stride;
    A* const tops = team.template tile<A, 2 * all>();
    A* const sums = tops + all;
    team.lanes(all, [=, this](std::int64_t column) {
      const auto column_sum = add_column(row, column);
      tops[column] = column_sum.top;
      sums[column] = column_sum.sum;
    });
    for (std::int64_t half = all / 2; half > 0; half /= 2) {
      team.barrier();
      team.lanes(half, [=](std::int64_t j) {
        SumOfExponentials<A> whole{tops[j], sums[j]};
        whole.add({tops[j + half], sums[j + half]});
        tops[j] = whole.top;
        sums[j] = whole.sum;
      });
    }
    team.barrier();
    team.one([=, this] {
      const std::int64_t target = static_cast<std::int64_t>(targets[r]) - first;
      highest[r] = tops[0];
      sum[r] = sums[0];
      loss[r] = target >= 0 && target < n ? -row[target] : A(0);
    });
  }

 private:
  SHARDLIB_FUNCTION SumOfExponentials<A> add_column(const A* row, std::int64_t column) const {
    constexpr std::int64_t step = columns * some;
    const bool in_packs = takes_packs<some, const A>(reinterpret_cast<const std::byte*>(row), 1);
    SumOfExponentials<A> whole;
    std::int64_t at = column * some;
    if (in_packs) {
      for (; at + (packs - 1) * step + some <= n; at += packs * step) {
        Pack<A, some> x[packs];
        SHARDLIB_UNROLL
        for (int k = 0; k < packs; ++k) x[k] = load_pack<some>(row + at + k * step, 1);
        add_numbers(whole, x);
      }
    }
    for (; at < n; at += packs * step) {
      Pack<A, some> x[packs];
      SHARDLIB_UNROLL
      for (int k = 0; k < packs; ++k) SHARDLIB_UNROLL
      for (int j = 0; j < some; ++j) {
        const std::int64_t i = at + k * step + j;
        x[k].values[j] = i < n ? row[i] : -std::numeric_limits<A>::infinity();
      }
      add_numbers(whole, x);
    }
    return whole;
  }
  SHARDLIB_FUNCTION static void add_numbers(SumOfExponentials<A>& whole, const Pack<A, some> (&x)[packs]) {
    const A before = whole.top;
    SHARDLIB_UNROLL
    for (int k = 0; k < packs; ++k) {
      SHARDLIB_UNROLL
      for (int j = 0; j < some; ++j) whole.top = detail::MaxOp::combine(whole.top, x[k].values[j]);
    }
    const A shift = whole.shift();
    whole.sum *= fast_exp(before - shift);
    SHARDLIB_UNROLL
    for (int k = 0; k < packs; ++k) {
      A sum = 0;
      SHARDLIB_UNROLL
      for (int j = 0; j < some; ++j) sum += fast_exp(x[k].values[j] - shift);
      whole.sum += sum;
    }
  }
};

/// slopes = dy * (exp(x - shift) / total - (1 at the target)), as CrossEntropyBackward, for rows that are `stride`
/// apart: a multiple of a pack. The numbers between the rows are overwritten. `slopes` may be x. An item is a row.
template <class A, class I, class T>
struct LogitSlopes {
  static constexpr int some = 16 / sizeof(A);
  const A* x;
  std::int64_t stride;
  const A *shift, *total;
  const I* targets;
  const A* dy;
  T* slopes;
  std::int64_t n, first;

  template <class Team>
  SHARDLIB_FUNCTION void operator()(const Team& team, std::int64_t r) const {
    constexpr int each = some;
    const A* const row = x + r * stride;
    T* const out = slopes + r * stride;
    const A top = shift[r], slope = dy[r], scale = slope / total[r];
    const std::int64_t target = static_cast<std::int64_t>(targets[r]) - first;
    team.template stream<4>((n + each - 1) / each, [=](std::int64_t i) { return load_pack<each>(row + i * each, 1); },
                            [=](std::int64_t i, const Pack<A, each>& logits) {
                              Pack<T, each> pack;
                              SHARDLIB_UNROLL
                              for (int k = 0; k < each; ++k) {
                                const A hit = i * each + k == target ? slope : A(0);
                                pack.values[k] = T(scale * fast_exp(logits.values[k] - top) - hit);
                              }
                              store_pack<each>(out + i * each, pack);
                            });
  }
};

}  // namespace shardlib::kernels::body
