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

/// Walks along n, from either end, with a state of type A (0 at first) for each of up to 64 neighbouring columns:
/// step(i, element, state).
template <class A, class F>
void for_columns(const Exec& exec, std::int64_t outer, std::int64_t n, std::int64_t inner, bool reverse,
                 const F& step) {
  constexpr std::int64_t width = 64;
  const std::int64_t blocks = (inner + width - 1) / width;
  exec.for_each(outer * blocks, [&](std::int64_t item) {
    const std::int64_t first = item % blocks * width, columns = std::min(width, inner - first);
    A states[width] = {};
    for (std::int64_t s = 0; s < n; ++s) {
      const std::int64_t i = reverse ? n - 1 - s : s;
      const std::int64_t row = (item / blocks * n + i) * inner + first;
      for (std::int64_t c = 0; c < columns; ++c) step(i, row + c, states[c]);
    }
  });
}

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
                 std::int64_t n, std::int64_t inner) {
  detail::visit_floating(dtype, "linear_scan", [&]<class T>(T) {
    using A = accumulator_t<T>;
    detail::for_columns<A>(exec, outer, n, inner, false,
                           [a = static_cast<const T*>(a), b = static_cast<const T*>(b), h = static_cast<T*>(h)](
                               auto, std::int64_t at, A& state) {
                             state = static_cast<A>(a[at]) * state + static_cast<A>(b[at]);
                             h[at] = static_cast<T>(state);
                           });
  });
}

template <class AnyDType>
void linear_scan_backward(const Exec& exec, AnyDType dtype, const void* a, const void* h, const void* ct, void* out,
                          std::int64_t outer, std::int64_t n, std::int64_t inner) {
  detail::visit_floating(dtype, "linear_scan", [&]<class T>(T) {
    using A = accumulator_t<T>;
    // The state is a_(i+1) * s_(i+1).
    detail::for_columns<A>(
        exec, outer, n, inner, true,
        [inner, a = static_cast<const T*>(a), h = static_cast<const T*>(h), ct = static_cast<const T*>(ct),
         out = static_cast<T*>(out)](std::int64_t i, std::int64_t at, A& state) {
          const A s = static_cast<A>(ct[at]) + state;
          state = static_cast<A>(a[at]) * s;
          out[at] = static_cast<T>(h == nullptr ? s : i == 0 ? A(0) : s * static_cast<A>(h[at - inner]));
        });
  });
}

}  // namespace shardlib::kernels
