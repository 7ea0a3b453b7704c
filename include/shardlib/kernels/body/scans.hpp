// Kernels of scans.hpp.
#pragma once

#include <algorithm>
#include <cstdint>

#include "shardlib/kernels/body/reduction.hpp"
#include "shardlib/spec/dtype.hpp"
#include "shardlib/support/function.hpp"
#include "shardlib/support/loop.hpp"
#include "shardlib/support/wrapping.hpp"

namespace shardlib::kernels::body {

/// Walks along n, from either end, with a state for each of up to 64 neighboring columns, an item: scan.start(column)
/// is its first value, then scan.step(i, element, state), and at last scan.end(column, state).
template <class Scan>
struct ScanColumns {
  using State = typename Scan::State;
  static constexpr std::int64_t width = 64;
  std::int64_t n, inner, blocks;
  bool reverse;
  Scan scan;

  template <class Team>
  SHARDLIB_FUNCTION void operator()(const Team& team, std::int64_t item) const {
    constexpr std::int64_t longest = width;
    const std::int64_t first = item % blocks * longest, columns = std::min(longest, inner - first);
    const std::int64_t column = item / blocks * inner + first, element = item / blocks * n * inner + first;
    if constexpr (Team::single) {
      const Scan f = scan;  // a copy, so that stores cannot change it
      State states[width] = {};
      State* const to = states;
      for (std::int64_t c = 0; c < columns; ++c) states[c] = f.start(column + c);
      for (std::int64_t s = 0; s < n; ++s) {
        const std::int64_t i = reverse ? n - 1 - s : s, row = element + i * inner;
        independent(columns, [=](std::int64_t c) { f.step(i, row + c, to[c]); });
      }
      for (std::int64_t c = 0; c < columns; ++c) f.end(column + c, states[c]);
    } else {
      team.lanes(columns, [=, this](std::int64_t c) {
        State state = scan.start(column + c);
        for (std::int64_t s = 0; s < n; ++s) {
          const std::int64_t i = reverse ? n - 1 - s : s;
          scan.step(i, element + i * inner + c, state);
          state = detail::rounded(state);  // as if stored
        }
        scan.end(column + c, state);
      });
    }
  }
};

/// A scan whose states begin at 0 and are of no use at the end.
template <class S>
struct FromZero {
  using State = S;
  constexpr State start(std::int64_t /*column*/) const { return State(); }
  constexpr void end(std::int64_t /*column*/, const State& /*state*/) const {}
};

/// The sum, product or maximum of the elements so far.
template <class Op, class T>
struct Cumulative {
  using State = accumulator_t<T>;
  const T* x;
  T* y;
  constexpr State start(std::int64_t /*column*/) const { return Op::template identity<State>(); }
  constexpr void step(std::int64_t /*i*/, std::int64_t at, State& state) const {
    state = Op::combine(state, static_cast<State>(x[at]));
    y[at] = static_cast<T>(state);
  }
  constexpr void end(std::int64_t /*column*/, const State& /*state*/) const {}
};

/// From the last element on. The state is x_(i+1) * s_(i+1).
template <class T>
struct CumulativeProductBackward : FromZero<accumulator_t<T>> {
  using A = accumulator_t<T>;
  const T *x, *y, *ct;
  T* out;
  std::int64_t inner;
  constexpr void step(std::int64_t i, std::int64_t at, A& state) const {
    const A s = static_cast<A>(ct[at]) + state;
    state = static_cast<A>(x[at]) * s;
    out[at] = static_cast<T>(i == 0 ? s : s * static_cast<A>(y[at - inner]));
  }
};

/// A maximum so far, and the sum of the cotangents of those that equal it.
template <class A>
struct BestSoFar {
  A value, sum;
  std::int64_t at;
};
template <class T>
struct CumulativeMaximumBackward : FromZero<BestSoFar<accumulator_t<T>>> {
  using A = accumulator_t<T>;
  const T *x, *ct;
  T* out;
  constexpr void step(std::int64_t i, std::int64_t at, BestSoFar<A>& best) const {
    const auto v = static_cast<A>(x[at]);
    out[at] = T(0);
    if (i == 0 || v > best.value || (v != v && best.value == best.value)) best = {v, A(0), at};
    best.sum += static_cast<A>(ct[at]);
    out[best.at] = static_cast<T>(best.sum);
  }
};

/// The state that the shards on one side hand over. Each shard multiplies it by its first row and adds its second row.
template <class A>
struct PassedOn {
  const A* ends;
  std::int64_t rows, shards, rank, columns;
  bool reverse;

  [[nodiscard]] constexpr A at(std::int64_t shard, std::int64_t row, std::int64_t column) const {
    return ends[(shard * rows + row) * columns + column];
  }
  [[nodiscard]] constexpr A state(std::int64_t column) const {
    A state(0);
    if (ends == nullptr) return state;
    for (std::int64_t s = reverse ? shards - 1 : 0; s != rank; s += reverse ? -1 : 1)
      // A shard's product may overflow, where no state is 0 in its place.
      state = state == A(0) ? at(s, 1, column) : at(s, 0, column) * state + at(s, 1, column);
    return state;
  }
  /// The third row of the neighbor on the other side, or 0.
  [[nodiscard]] constexpr A neighbor(std::int64_t column) const {
    const std::int64_t s = rank + (reverse ? -1 : 1);
    return ends == nullptr || s < 0 || s == shards ? A(0) : at(s, 2, column);
  }
};
/// A product so far, and a state.
template <class A>
struct ScanEnd {
  A product = A(1), state = A(0);
};

template <class T>
struct LinearScan {
  using State = accumulator_t<T>;
  PassedOn<State> passed;
  const T *a, *b;
  T* h;

  constexpr State start(std::int64_t column) const { return passed.state(column); }
  constexpr void step(std::int64_t /*i*/, std::int64_t at, State& state) const {
    state = static_cast<State>(a[at]) * state + static_cast<State>(b[at]);
    h[at] = static_cast<T>(state);
  }
  constexpr void end(std::int64_t /*column*/, const State& /*state*/) const {}
};

template <class T>
struct LinearScanEnds {
  using A = accumulator_t<T>;
  using State = ScanEnd<A>;
  const T *a, *b;
  A* ends;
  std::int64_t columns;

  constexpr State start(std::int64_t /*column*/) const { return State(); }
  constexpr void step(std::int64_t /*i*/, std::int64_t at, State& end) const {
    const auto factor = static_cast<A>(a[at]);
    end.product *= factor;
    end.state = factor * end.state + static_cast<A>(b[at]);
  }
  constexpr void end(std::int64_t column, const State& end) const {
    ends[column] = end.product;
    ends[columns + column] = end.state;
  }
};

/// The state is a_(i+1) * s_(i+1), or with i-1 for a reversed scan.
template <class T>
struct LinearScanBackward {
  using State = accumulator_t<T>;
  PassedOn<State> passed;
  const T *a, *h, *ct;
  T* out;
  std::int64_t n, inner, before, first;  // `before`: offset of the step before; the step `first` has none

  constexpr State start(std::int64_t column) const { return passed.state(column); }
  constexpr void step(std::int64_t i, std::int64_t at, State& state) const {
    const State s = static_cast<State>(ct[at]) + state;
    state = static_cast<State>(a[at]) * s;
    if (h == nullptr)
      out[at] = static_cast<T>(s);
    else if (i != first)
      out[at] = static_cast<T>(s * static_cast<State>(h[at + before]));
    else
      out[at] = static_cast<T>(s * passed.neighbor(at / (n * inner) * inner + at % inner));
  }
  constexpr void end(std::int64_t /*column*/, const State& /*state*/) const {}
};

template <class T>
struct LinearScanBackwardEnds {
  using A = accumulator_t<T>;
  using State = ScanEnd<A>;
  const T *a, *h, *ct;
  A* ends;
  std::int64_t n, inner, columns, last;  // `last` is the last step of the scan

  constexpr State start(std::int64_t /*column*/) const { return State(); }
  constexpr void step(std::int64_t /*i*/, std::int64_t at, State& end) const {
    const auto factor = static_cast<A>(a[at]);
    end.product *= factor;
    end.state = factor * (end.state + static_cast<A>(ct[at]));
  }
  constexpr void end(std::int64_t column, const State& end) const {
    ends[column] = end.product;
    ends[columns + column] = end.state;
    if (h == nullptr) return;
    const std::int64_t at = column / inner * n * inner + last * inner + column % inner;
    ends[2 * columns + column] = n == 0 ? A(0) : static_cast<A>(h[at]);
  }
};

}  // namespace shardlib::kernels::body
