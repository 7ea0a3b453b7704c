// The dual numbers that functions of map receive, with derivatives (forward mode) or without, and the functions of
// these numbers.
#pragma once

#include <array>
#include <cstddef>
#include <type_traits>

#include "shardlib/ops/map/real.hpp"
#include "shardlib/rules/all.hpp"
#include "shardlib/spec/require.hpp"
#include "shardlib/support/function.hpp"

namespace shardlib {

namespace detail {
template <class T, std::size_t N>
struct Slopes {
  std::array<T, N> by{};
  SHARDLIB_FUNCTION T& operator[](std::size_t i) { return by[i]; }
  SHARDLIB_FUNCTION const T& operator[](std::size_t i) const { return by[i]; }
};
template <class T>
struct Slopes<T, 0> {};
/// Whether a number is 0, and so are its derivatives.
template <class T>
SHARDLIB_FUNCTION bool vanishes(const T& x) {
  if constexpr (requires { x.vanishes(); })
    return x.vanishes();
  else
    return x == T(0);
}
/// A derivative `by` of an operand times a slope. An operand without a derivative contributes none for any slope, also
/// an infinite one.
template <class T>
SHARDLIB_FUNCTION T of_slope(const T& slope, const T& by) {
  return vanishes(by) ? T(0) : slope * by;
}
}  // namespace detail

/// A dual number: a value and its derivatives by N inputs. In the forward pass a function of map receives Jet<T, 0>,
/// which has no derivatives and is as large as T. Both passes therefore find the same overloads. T may be a
/// HyperDual, for higher derivatives. `value` is the value and `by` holds the derivatives.
template <class T, std::size_t N>
struct Jet {
  T value{};
  [[no_unique_address]] detail::Slopes<T, N> by{};

  Jet() = default;
  SHARDLIB_FUNCTION Jet(T v) : value(v) {}  // NOLINT(google-explicit-constructor): constants mix with dual numbers
  template <class U>
  requires(std::is_arithmetic_v<U> && !std::is_same_v<U, T>) SHARDLIB_FUNCTION Jet(U v)
      : value(static_cast<T>(v)) {}  // NOLINT(google-explicit-constructor)
  /// A compile error: a Jet does not convert to a plain number. std::exp and similar functions take a long double and
  /// would choose the implicit conversion. Casts and conditions would choose the explicit ones.
  template <class U>
  requires std::is_arithmetic_v<U> SHARDLIB_FUNCTION explicit(!std::is_same_v<U, long double>) operator U() const {
    static_assert(detail::checked<rules::plain_number, (sizeof(U) > 0)>::ok);
    return {};
  }

#define SHARDLIB_JET_OPERATOR(op, Result)                          \
  template <class U>                                               \
  requires std::is_arithmetic_v<U>                                 \
  friend SHARDLIB_FUNCTION Result operator op(const Jet& a, U b) { \
    return a op Jet(b);                                            \
  }                                                                \
  template <class U>                                               \
  requires std::is_arithmetic_v<U>                                 \
  friend SHARDLIB_FUNCTION Result operator op(U a, const Jet& b) { \
    return Jet(a) op b;                                            \
  }
#define SHARDLIB_JET_COMPARISON(op)                                       \
  friend SHARDLIB_FUNCTION bool operator op(const Jet& a, const Jet& b) { \
    return a.value op b.value;                                            \
  }                                                                       \
  SHARDLIB_JET_OPERATOR(op, bool)
  SHARDLIB_JET_COMPARISON(<)
  SHARDLIB_JET_COMPARISON(>)
  SHARDLIB_JET_COMPARISON(<=)
  SHARDLIB_JET_COMPARISON(>=)
  SHARDLIB_JET_COMPARISON(==)
  SHARDLIB_JET_COMPARISON(!=)
  friend SHARDLIB_FUNCTION Jet operator+(const Jet& a, const Jet& b) {
    return combine(a.value + b.value, a, T(1), b, T(1));
  }
  friend SHARDLIB_FUNCTION Jet operator-(const Jet& a, const Jet& b) {
    return combine(a.value - b.value, a, T(1), b, T(-1));
  }
  friend SHARDLIB_FUNCTION Jet operator*(const Jet& a, const Jet& b) {
    return combine(a.value * b.value, a, b.value, b, a.value);
  }
  friend SHARDLIB_FUNCTION Jet operator/(const Jet& a, const Jet& b) {
    const T quotient = a.value / b.value;
    return combine(quotient, a, T(1) / b.value, b, -quotient / b.value);
  }
  SHARDLIB_JET_OPERATOR(+, Jet)
  SHARDLIB_JET_OPERATOR(-, Jet)
  SHARDLIB_JET_OPERATOR(*, Jet)
  SHARDLIB_JET_OPERATOR(/, Jet)
#undef SHARDLIB_JET_COMPARISON
#undef SHARDLIB_JET_OPERATOR
  friend SHARDLIB_FUNCTION Jet operator-(const Jet& a) {
    return chain(a, -a.value, T(-1));
  }
  friend SHARDLIB_FUNCTION Jet operator+(const Jet& a) {
    return a;
  }
  SHARDLIB_FUNCTION Jet& operator+=(const Jet& b) {
    return *this = *this + b;
  }
  SHARDLIB_FUNCTION Jet& operator-=(const Jet& b) {
    return *this = *this - b;
  }
  SHARDLIB_FUNCTION Jet& operator*=(const Jet& b) {
    return *this = *this * b;
  }
  SHARDLIB_FUNCTION Jet& operator/=(const Jet& b) {
    return *this = *this / b;
  }

  /// f(a), given the value and the derivative of f at a.
  friend SHARDLIB_FUNCTION Jet chain(const Jet& a, T value, T slope) {
    Jet r(value);
    if constexpr (N > 0)
      for (std::size_t i = 0; i < N; ++i) r.by[i] = slope * a.by[i];
    return r;
  }
  friend SHARDLIB_FUNCTION Jet combine(T value, const Jet& a, T by_a, const Jet& b, T by_b) {
    Jet r(value);
    if constexpr (N > 0)
      for (std::size_t i = 0; i < N; ++i) r.by[i] = by_a * a.by[i] + by_b * b.by[i];
    return r;
  }
  friend SHARDLIB_FUNCTION Jet exp(const Jet& a) {
    const T e = exp(a.value);
    return chain(a, e, e);
  }
  friend SHARDLIB_FUNCTION Jet log(const Jet& a) {
    return chain(a, log(a.value), T(1) / a.value);
  }
  friend SHARDLIB_FUNCTION Jet tanh(const Jet& a) {
    const T t = tanh(a.value);
    return chain(a, t, T(1) - t * t);
  }
  friend SHARDLIB_FUNCTION Jet sigmoid(const Jet& a) {
    const T s = sigmoid(a.value);
    return chain(a, s, s * (T(1) - s));
  }
  friend SHARDLIB_FUNCTION Jet sqrt(const Jet& a) {
    Jet r(sqrt(a.value));
    if constexpr (N > 0) {
      const T slope = T(0.5) / r.value;
      for (std::size_t i = 0; i < N; ++i) r.by[i] = detail::of_slope(slope, a.by[i]);
    }
    return r;
  }
  friend SHARDLIB_FUNCTION Jet abs(const Jet& a) {
    return a.value < T(0) ? -a : a;
  }
  friend SHARDLIB_FUNCTION Jet sin(const Jet& a) {
    return chain(a, sin(a.value), cos(a.value));
  }
  friend SHARDLIB_FUNCTION Jet cos(const Jet& a) {
    return chain(a, cos(a.value), -sin(a.value));
  }
  friend SHARDLIB_FUNCTION Jet erf(const Jet& a) {
    const T slope = T(1.1283791670955126) * exp(-a.value * a.value);  // 2 / sqrt(pi)
    return chain(a, erf(a.value), slope);
  }
  friend SHARDLIB_FUNCTION Jet log1p(const Jet& a) {
    return chain(a, log1p(a.value), T(1) / (T(1) + a.value));
  }
  friend SHARDLIB_FUNCTION Jet expm1(const Jet& a) {
    const T e = expm1(a.value);
    return chain(a, e, e + T(1));
  }
  /// A constant exponent has no derivative, so the base may be negative or zero.
  template <class U>
  requires std::is_arithmetic_v<U>
  friend SHARDLIB_FUNCTION Jet pow(const Jet& a, U exponent) {
    return pow(a, Jet(static_cast<T>(exponent)));
  }
  friend SHARDLIB_FUNCTION Jet pow(const Jet& a, const Jet& b) {
    Jet r(pow(a.value, b.value));
    if constexpr (N > 0) {
      // Where a derivative would be 0 times infinity, it is 0, its limit: at the exponent 0, and by the exponent at
      // the base 0.
      const T by_a = detail::vanishes(b.value) ? T(0) : b.value * pow(a.value, b.value - T(1));
      const T by_b = a.value == T(0) && b.value >= T(0) ? T(0) : r.value * log(a.value);
      for (std::size_t i = 0; i < N; ++i) r.by[i] = detail::of_slope(by_a, a.by[i]) + detail::of_slope(by_b, b.by[i]);
    }
    return r;
  }
  friend SHARDLIB_FUNCTION Jet softplus(const Jet& a) {
    return chain(a, softplus(a.value), sigmoid(a.value));
  }
  friend SHARDLIB_FUNCTION Jet sign(const Jet& a) {
    return Jet(sign(a.value));
  }
  friend SHARDLIB_FUNCTION Jet floor(const Jet& a) {
    return Jet(floor(a.value));
  }
  friend SHARDLIB_FUNCTION Jet round(const Jet& a) {
    return Jet(round(a.value));
  }
  friend SHARDLIB_FUNCTION Jet floor_divide(const Jet& a, const Jet& b) {
    return Jet(floor_divide(a.value, b.value));
  }
  friend SHARDLIB_FUNCTION Jet mod(const Jet& a, const Jet& b) {
    return combine(mod(a.value, b.value), a, T(1), b, -floor_divide(a.value, b.value));
  }
  friend SHARDLIB_FUNCTION Jet maximum(const Jet& a, const Jet& b) {
    return a.value < b.value || b.value != b.value ? b : a;
  }
  friend SHARDLIB_FUNCTION Jet minimum(const Jet& a, const Jet& b) {
    return b.value < a.value || b.value != b.value ? b : a;
  }
  friend SHARDLIB_FUNCTION Jet clamp(const Jet& a, const Jet& low, const Jet& high) {
    return minimum(maximum(a, low), high);
  }
  friend SHARDLIB_FUNCTION Jet where(bool condition, const Jet& a, const Jet& b) {
    return condition ? a : b;
  }
};

/// Whether the type is a Jet.
template <class T>
inline constexpr bool is_jet = false;
template <class T, std::size_t N>
inline constexpr bool is_jet<Jet<T, N>> = true;
/// Whether the type is the Symbol of ops/map/symbol.hpp, which stands for a number where a device traces the function.
template <class T>
inline constexpr bool is_symbol = false;
/// The type of argument that a function of `map` receives: a `real` number, a Jet of one, or a symbol.
template <class T>
concept scalar = real<T> || is_jet<T> || is_symbol<T>;

SHARDLIB_EITHER_SIDE template <scalar T>
SHARDLIB_FUNCTION T square(const T& x) {
  return x * x;
}
SHARDLIB_EITHER_SIDE template <scalar T>
SHARDLIB_FUNCTION T rsqrt(const T& x) {
  return T(1) / sqrt(x);
}
SHARDLIB_EITHER_SIDE template <scalar T>
SHARDLIB_FUNCTION T relu(const T& x) {
  return x <= T(0) ? T(0) : x;
}
/// The product x * sigmoid(x), also called SiLU.
SHARDLIB_EITHER_SIDE template <scalar T>
SHARDLIB_FUNCTION T swish(const T& x) {
  return x * sigmoid(x);
}
/// The tanh approximation: 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))).
SHARDLIB_EITHER_SIDE template <scalar T>
SHARDLIB_FUNCTION T gelu(const T& x) {
  return T(0.5) * x * (T(1) + tanh(T(0.7978845608028654) * (x + T(0.044715) * x * x * x)));
}

}  // namespace shardlib
