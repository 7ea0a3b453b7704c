// Arithmetic of integers that is defined for all of them.
#pragma once

#include <limits>
#include <type_traits>

namespace shardlib::detail {

/// F of two values; integers wrap around, as in NumPy and XLA, where C++ leaves it undefined.
template <class F, class T>
constexpr T wrapping(const F& f, const T& a, const T& b) {
  if constexpr (std::is_integral_v<T>) {
    using U = std::make_unsigned_t<T>;
    return static_cast<T>(f(static_cast<U>(a), static_cast<U>(b)));
  } else {
    return f(a, b);
  }
}
struct WrappingSum {
  template <class T>
  constexpr T operator()(const T& a, const T& b) const {
    return wrapping([](const auto& p, const auto& q) { return p + q; }, a, b);
  }
};
struct WrappingDifference {
  template <class T>
  constexpr T operator()(const T& a, const T& b) const {
    return wrapping([](const auto& p, const auto& q) { return p - q; }, a, b);
  }
};
struct WrappingProduct {
  template <class T>
  constexpr T operator()(const T& a, const T& b) const {
    return wrapping([](const auto& p, const auto& q) { return p * q; }, a, b);
  }
};

/// A quotient that traps nowhere: by zero (in the padding; elsewhere it is refused before), or of the least integer by
/// -1, which wraps.
struct Quotient {
  template <class T>
  constexpr T operator()(T p, T q) const {
    if constexpr (std::is_integral_v<T>) {
      if (q == 0) return 0;
      if constexpr (std::is_signed_v<T>)
        if (q == -1) return static_cast<T>(0U - static_cast<std::make_unsigned_t<T>>(p));
    }
    return static_cast<T>(p / q);
  }
};

/// A number as another type. A floating number beyond an integer's range becomes its nearest bound and a NaN 0, as in
/// XLA, where C++ leaves it undefined; integers keep their low bits.
template <class To, class From>
constexpr To converted(From x) {
  if constexpr (std::is_integral_v<To> && !std::is_same_v<To, bool> && std::is_floating_point_v<From>) {
    // Bounds that are powers of two: the greatest integer itself is no f32.
    constexpr From below = static_cast<From>(std::numeric_limits<To>::min());
    constexpr From above = static_cast<From>(std::numeric_limits<To>::max() / 2 + 1) * 2;
    if (!(x > below)) return x != x ? To{0} : std::numeric_limits<To>::min();
    if (x >= above) return std::numeric_limits<To>::max();
  }
  return static_cast<To>(x);
}

}  // namespace shardlib::detail
