// Integer arithmetic that is defined for all operands.
#pragma once

#include <limits>
#include <type_traits>

namespace shardlib::detail {

/// The type in which sums of T are computed. Integers wrap around, as in NumPy and XLA, where C++ has undefined
/// behavior.
template <class T, bool = std::is_integral_v<T>>
struct wrapping {
  using type = T;
};
template <class T>
struct wrapping<T, true> : std::make_unsigned<T> {};

struct WrappingSum {
  template <class T>
  constexpr T operator()(const T& a, const T& b) const {
    using U = typename wrapping<T>::type;
    return static_cast<T>(static_cast<U>(a) + static_cast<U>(b));
  }
};
struct WrappingDifference {
  template <class T>
  constexpr T operator()(const T& a, const T& b) const {
    using U = typename wrapping<T>::type;
    return static_cast<T>(static_cast<U>(a) - static_cast<U>(b));
  }
};
struct WrappingProduct {
  template <class T>
  constexpr T operator()(const T& a, const T& b) const {
    using U = typename wrapping<T>::type;
    return static_cast<T>(static_cast<U>(a) * static_cast<U>(b));
  }
};

/// A quotient that never traps. Division by zero gives 0: it occurs only in the padding, because ops reject it
/// elsewhere. The smallest integer divided by -1 wraps around.
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

/// The quotient rounded down, and its remainder, which has the sign of the divisor. Zero as a divisor gives 0, as
/// above.
struct FloorQuotient {
  template <class T>
  constexpr T operator()(T p, T q) const {
    const T quotient = Quotient{}(p, q);
    if (q == 0 || q == static_cast<T>(-1) || p % q == 0 || (p < 0) == (q < 0)) return quotient;
    return static_cast<T>(quotient - 1);
  }
};
struct FloorRemainder {
  template <class T>
  constexpr T operator()(T p, T q) const {
    if (q == 0 || (std::is_signed_v<T> && q == static_cast<T>(-1))) return 0;
    const T rest = static_cast<T>(p % q);
    if constexpr (std::is_signed_v<T>)
      return rest == 0 || (rest < 0) == (q < 0) ? rest : static_cast<T>(rest + q);
    else
      return rest;
  }
};

/// Converts a number to another type. Floating-point numbers outside an integer's range become its nearest bound, and
/// a NaN becomes 0, as in XLA, where C++ has undefined behavior. Integers keep their low bits.
template <class To, class From>
constexpr To converted(From x) {
  if constexpr (std::is_integral_v<To> && !std::is_same_v<To, bool> && std::is_floating_point_v<From>) {
    // These bounds are powers of two, because an f32 cannot represent the largest integer.
    constexpr From below = static_cast<From>(std::numeric_limits<To>::min());
    constexpr From above = static_cast<From>(std::numeric_limits<To>::max() / 2 + 1) * 2;
    if (!(x > below)) return x != x ? To{0} : std::numeric_limits<To>::min();
    if (x >= above) return std::numeric_limits<To>::max();
  }
  return static_cast<To>(x);
}

}  // namespace shardlib::detail
