// Definitions of scans.hpp.
#pragma once

#include "shardlib/kernels/scans.hpp"

#include <algorithm>
#include <cstdint>
#include <string>
#include <type_traits>

#include "shardlib/device/exec.hpp"
#include "shardlib/kernels/impl/floating.hpp"
#include "shardlib/spec/dtype.hpp"
#include "shardlib/support/error.hpp"
#include "shardlib/support/wrapping.hpp"

namespace shardlib::kernels {

namespace detail {

/// Walks along n, from either end, with a state of type A for each of up to 64 neighbouring columns: start(column) is
/// its first value, then step(i, element, state), and at last end(column, state).
template <class A, class Start, class F, class End>
void for_columns(const Exec& exec, std::int64_t outer, std::int64_t n, std::int64_t inner, bool reverse,
                 const Start& start, const F& step, const End& end) {
  constexpr std::int64_t width = 64;
  const std::int64_t blocks = (inner + width - 1) / width;
  exec.for_each(outer * blocks, [&](std::int64_t item) {
    const std::int64_t first = item % blocks * width, columns = std::min(width, inner - first);
    const std::int64_t column = item / blocks * inner + first;
    A states[width] = {};
    for (std::int64_t c = 0; c < columns; ++c) states[c] = start(column + c);
    for (std::int64_t s = 0; s < n; ++s) {
      const std::int64_t i = reverse ? n - 1 - s : s;
      const std::int64_t row = (item / blocks * n + i) * inner + first;
      for (std::int64_t c = 0; c < columns; ++c) step(i, row + c, states[c]);
    }
    for (std::int64_t c = 0; c < columns; ++c) end(column + c, states[c]);
  });
}
/// As above, from A().
template <class A, class F>
void for_columns(const Exec& exec, std::int64_t outer, std::int64_t n, std::int64_t inner, bool reverse,
                 const F& step) {
  for_columns<A>(
      exec, outer, n, inner, reverse, [](std::int64_t) { return A(); }, step, [](std::int64_t, const A&) {});
}

/// What the shards on one side pass on to this one: each multiplies the state by its first row and adds its second.
template <class A>
struct PassedOn {
  const A* ends;
  std::int64_t rows, shards, rank, columns;
  bool reverse;

  PassedOn(const ScanEnds& all, std::int64_t columns, bool reverse)
      : ends(static_cast<const A*>(all.all)),
        rows(all.rows),
        shards(all.shards),
        rank(all.rank),
        columns(columns),
        reverse(reverse) {}
  [[nodiscard]] A at(std::int64_t shard, std::int64_t row, std::int64_t column) const {
    return ends[(shard * rows + row) * columns + column];
  }
  A operator()(std::int64_t column) const {
    A state(0);
    if (ends == nullptr) return state;
    for (std::int64_t s = reverse ? shards - 1 : 0; s != rank; s += reverse ? -1 : 1)
      state = at(s, 0, column) * state + at(s, 1, column);
    return state;
  }
  /// The third row of the neighbour on the other side, or 0.
  [[nodiscard]] A neighbour(std::int64_t column) const {
    const std::int64_t s = rank + (reverse ? -1 : 1);
    return ends == nullptr || s < 0 || s == shards ? A(0) : at(s, 2, column);
  }
};
/// A product so far, and a state.
template <class A>
struct ScanEnd {
  A product = A(1), state = A(0);
};

}  // namespace detail

template <class AnyDType>
void cumsum(const Exec& exec, AnyDType dtype, const void* x, void* y, std::int64_t outer, std::int64_t n,
            std::int64_t inner, bool reverse) {
  visit_dtype(dtype, [&]<class T>(T) {
    using A = accumulator_t<T>;
    if constexpr (std::is_same_v<A, bool_>) {
      throw Error("cumsum: bool_ has no arithmetic; cast it to i32");
    } else {
      detail::for_columns<A>(exec, outer, n, inner, reverse,
                             [x = static_cast<const T*>(x), y = static_cast<T*>(y)](auto, std::int64_t at, A& sum) {
                               sum = shardlib::detail::WrappingSum{}(sum, static_cast<A>(x[at]));
                               y[at] = static_cast<T>(sum);
                             });
    }
  });
}

template <class AnyDType>
void cumprod(const Exec& exec, AnyDType dtype, const void* x, void* y, std::int64_t outer, std::int64_t n,
             std::int64_t inner) {
  visit_dtype(dtype, [&]<class T>(T) {
    using A = accumulator_t<T>;
    if constexpr (std::is_same_v<A, bool_>) {
      throw Error("cumprod: bool_ has no arithmetic; cast it to i32");
    } else {
      detail::for_columns<A>(
          exec, outer, n, inner, false,
          [x = static_cast<const T*>(x), y = static_cast<T*>(y)](std::int64_t i, std::int64_t at, A& product) {
            const auto v = static_cast<A>(x[at]);
            product = i == 0 ? v : shardlib::detail::WrappingProduct{}(product, v);
            y[at] = static_cast<T>(product);
          });
    }
  });
}

template <class AnyDType>
void cumprod_backward(const Exec& exec, AnyDType dtype, const void* x, const void* y, const void* ct, void* out,
                      std::int64_t outer, std::int64_t n, std::int64_t inner) {
  detail::visit_floating(dtype, "cumprod", [&]<class T>(T) {
    using A = accumulator_t<T>;
    // The state is x_(i+1) * s_(i+1).
    detail::for_columns<A>(
        exec, outer, n, inner, true,
        [inner, x = static_cast<const T*>(x), y = static_cast<const T*>(y), ct = static_cast<const T*>(ct),
         out = static_cast<T*>(out)](std::int64_t i, std::int64_t at, A& state) {
          const A s = static_cast<A>(ct[at]) + state;
          state = static_cast<A>(x[at]) * s;
          out[at] = static_cast<T>(i == 0 ? s : s * static_cast<A>(y[at - inner]));
        });
  });
}

template <class AnyDType>
void cummax(const Exec& exec, AnyDType dtype, const void* x, void* y, std::int64_t outer, std::int64_t n,
            std::int64_t inner) {
  visit_dtype(dtype, [&]<class T>(T) {
    using A = accumulator_t<T>;
    if constexpr (std::is_same_v<A, bool_>) {
      throw Error("cummax: bool_ has no order; cast it to i32");
    } else {
      detail::for_columns<A>(
          exec, outer, n, inner, false,
          [x = static_cast<const T*>(x), y = static_cast<T*>(y)](std::int64_t i, std::int64_t at, A& best) {
            const auto v = static_cast<A>(x[at]);
            if (i == 0 || v > best || v != v) best = v;
            y[at] = static_cast<T>(best);
          });
    }
  });
}

template <class AnyDType>
void cummax_backward(const Exec& exec, AnyDType dtype, const void* x, const void* ct, void* out, std::int64_t outer,
                     std::int64_t n, std::int64_t inner) {
  detail::visit_floating(dtype, "cummax", [&]<class T>(T) {
    using A = accumulator_t<T>;
    struct Best {
      A value, sum;
      std::int64_t at;
    };
    detail::for_columns<Best>(exec, outer, n, inner, false,
                              [x = static_cast<const T*>(x), ct = static_cast<const T*>(ct),
                               out = static_cast<T*>(out)](std::int64_t i, std::int64_t at, Best& best) {
                                const auto v = static_cast<A>(x[at]);
                                out[at] = T(0);
                                if (i == 0 || v > best.value || (v != v && best.value == best.value))
                                  best = {v, A(0), at};
                                best.sum += static_cast<A>(ct[at]);
                                out[best.at] = static_cast<T>(best.sum);
                              });
  });
}

template <class AnyDType>
void linear_scan(const Exec& exec, AnyDType dtype, const void* a, const void* b, void* h, std::int64_t outer,
                 std::int64_t n, std::int64_t inner, bool reverse, const ScanEnds& ends) {
  detail::visit_floating(dtype, "linear_scan", [&]<class T>(T) {
    using A = accumulator_t<T>;
    detail::for_columns<A>(
        exec, outer, n, inner, reverse, detail::PassedOn<A>(ends, outer * inner, reverse),
        [a = static_cast<const T*>(a), b = static_cast<const T*>(b), h = static_cast<T*>(h)](auto, std::int64_t at,
                                                                                             A& state) {
          state = static_cast<A>(a[at]) * state + static_cast<A>(b[at]);
          h[at] = static_cast<T>(state);
        },
        [](std::int64_t, A) {});
  });
}

template <class AnyDType>
void linear_scan_ends(const Exec& exec, AnyDType dtype, const void* a, const void* b, void* ends, std::int64_t outer,
                      std::int64_t n, std::int64_t inner, bool reverse) {
  detail::visit_floating(dtype, "linear_scan", [&]<class T>(T) {
    using A = accumulator_t<T>;
    using End = detail::ScanEnd<A>;
    detail::for_columns<End>(
        exec, outer, n, inner, reverse, [](std::int64_t) { return End(); },
        [a = static_cast<const T*>(a), b = static_cast<const T*>(b)](auto, std::int64_t at, End& end) {
          const auto factor = static_cast<A>(a[at]);
          end.product *= factor;
          end.state = factor * end.state + static_cast<A>(b[at]);
        },
        [columns = outer * inner, to = static_cast<A*>(ends)](std::int64_t column, const End& end) {
          to[column] = end.product;
          to[columns + column] = end.state;
        });
  });
}

template <class AnyDType>
void linear_scan_backward(const Exec& exec, AnyDType dtype, const void* a, const void* h, const void* ct, void* out,
                          std::int64_t outer, std::int64_t n, std::int64_t inner, bool reverse, const ScanEnds& ends) {
  detail::visit_floating(dtype, "linear_scan", [&]<class T>(T) {
    using A = accumulator_t<T>;
    const detail::PassedOn<A> passed(ends, outer * inner, !reverse);
    // The state is a_(i+1) * s_(i+1), or with i-1 if `reverse`.
    detail::for_columns<A>(
        exec, outer, n, inner, !reverse, passed,
        [&passed, n, inner, before = reverse ? inner : -inner, first = reverse ? n - 1 : 0,
         a = static_cast<const T*>(a), h = static_cast<const T*>(h), ct = static_cast<const T*>(ct),
         out = static_cast<T*>(out)](std::int64_t i, std::int64_t at, A& state) {
          const A s = static_cast<A>(ct[at]) + state;
          state = static_cast<A>(a[at]) * s;
          if (h == nullptr)
            out[at] = static_cast<T>(s);
          else if (i != first)
            out[at] = static_cast<T>(s * static_cast<A>(h[at + before]));
          else
            out[at] = static_cast<T>(s * passed.neighbour(at / (n * inner) * inner + at % inner));
        },
        [](std::int64_t, A) {});
  });
}

template <class AnyDType>
void linear_scan_backward_ends(const Exec& exec, AnyDType dtype, const void* a, const void* h, const void* ct,
                               void* ends, std::int64_t outer, std::int64_t n, std::int64_t inner, bool reverse) {
  detail::visit_floating(dtype, "linear_scan", [&]<class T>(T) {
    using A = accumulator_t<T>;
    using End = detail::ScanEnd<A>;
    detail::for_columns<End>(
        exec, outer, n, inner, !reverse, [](std::int64_t) { return End(); },
        [a = static_cast<const T*>(a), ct = static_cast<const T*>(ct)](auto, std::int64_t at, End& end) {
          const auto factor = static_cast<A>(a[at]);
          end.product *= factor;
          end.state = factor * (end.state + static_cast<A>(ct[at]));
        },
        [n, inner, reverse, columns = outer * inner, h = static_cast<const T*>(h), to = static_cast<A*>(ends)](
            std::int64_t column, const End& end) {
          to[column] = end.product;
          to[columns + column] = end.state;
          const std::int64_t last = column / inner * n * inner + (reverse ? 0 : n - 1) * inner + column % inner;
          if (h != nullptr) to[2 * columns + column] = static_cast<A>(h[last]);
        });
  });
}

}  // namespace shardlib::kernels
