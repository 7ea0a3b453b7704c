// The functions of plain numbers, float and double, that functions of map call.
#pragma once

#include <concepts>
#include <type_traits>

#include "shardlib/support/function.hpp"
#include "shardlib/support/math.hpp"

namespace shardlib {

namespace detail {
template <class T>
inline constexpr bool is_real = std::is_same_v<T, float> || std::is_same_v<T, double>;
}
/// The numbers that functions of `map` compute with: float and double.
template <class T>
concept real = detail::is_real<T>;

// A function of the C library; that of float has an f at the end of its name.
#define SHARDLIB_OF_C(name, c)              \
  template <real T>                         \
  SHARDLIB_FUNCTION T name(T x) {           \
    if constexpr (std::is_same_v<T, float>) \
      return SHARDLIB_C(c##f)(x);           \
    else                                    \
      return SHARDLIB_C(c)(x);              \
  }

template <real T>
SHARDLIB_FUNCTION T exp(T x) {
  return kernels::fast_exp(x);
}
template <real T>
SHARDLIB_FUNCTION T log(T x) {
  return kernels::fast_log(x);
}
template <real T>
SHARDLIB_FUNCTION T tanh(T x) {
  return kernels::fast_tanh(x);
}
template <real T>
SHARDLIB_FUNCTION T sigmoid(T x) {
  return kernels::fast_sigmoid(x);
}
SHARDLIB_OF_C(sqrt, sqrt)
template <real T>
SHARDLIB_FUNCTION T abs(T x) {
  return x < T(0) ? -x : x;
}
/// The sine, for functions of `map`.
SHARDLIB_OF_C(sin, sin)
/// The cosine, for functions of `map`.
SHARDLIB_OF_C(cos, cos)
/// The error function, for functions of `map`.
template <real T>
SHARDLIB_FUNCTION T erf(T x) {
  return kernels::fast_erf(x);
}
/// The power of x with this `exponent`, for functions of `map`: `map([](auto v) { return pow(v, 3.0); }, x)`
template <real T>
SHARDLIB_FUNCTION T pow(T x, T exponent) {
  if constexpr (std::is_same_v<T, float>) {
    return SHARDLIB_C(powf)(x, exponent);
  } else {
    return SHARDLIB_C(pow)(x, exponent);
  }
}
/// log(1 + x), accurate for small x, for functions of `map`.
SHARDLIB_OF_C(log1p, log1p)
/// exp(x) - 1, accurate for small x, for functions of `map`.
SHARDLIB_OF_C(expm1, expm1)
/// log(1 + exp(x)), for functions of `map`.
template <real T>
SHARDLIB_FUNCTION T softplus(T x) {
  return (x < T(0) ? T(0) : x) + log1p(exp(-abs(x)));
}
/// -1, 0 or 1 by the sign, for functions of `map`.
template <real T>
SHARDLIB_FUNCTION T sign(T x) {
  return x > T(0) ? T(1) : x < T(0) ? T(-1) : x;
}
/// The largest whole number that is not above x, for functions of `map`.
SHARDLIB_OF_C(floor, floor)
/// The nearest whole number, of two the even one, for functions of `map`.
SHARDLIB_OF_C(round, rint)
#undef SHARDLIB_OF_C
namespace detail {
/// The remainder of a division that rounds towards 0, and whether one that rounds down has the next lower quotient.
template <real T>
struct Remainder {
  T rest;
  bool lower;
  SHARDLIB_FUNCTION Remainder(T a, T b) {
    if constexpr (std::is_same_v<T, float>) {
      rest = SHARDLIB_C(fmodf)(a, b);
    } else {
      rest = SHARDLIB_C(fmod)(a, b);
    }
    lower = rest != T(0) && (rest < T(0)) != (b < T(0));
  }
};
}  // namespace detail
/// The remainder with the sign of the divisor, like % in Python, for functions of `map`.
template <real T>
SHARDLIB_FUNCTION T mod(T a, T b) {
  const detail::Remainder<T> r(a, b);
  return r.lower ? r.rest + b : r.rest;
}
/// The quotient rounded down, like // in Python, for functions of `map`.
template <real T>
SHARDLIB_FUNCTION T floor_divide(T a, T b) {
  if (b == T(0)) return a / b;
  // floor(a / b) would be 1 too large where the quotient is rounded up to a whole number.
  const detail::Remainder<T> r(a, b);
  return round((a - r.rest) / b) - (r.lower ? T(1) : T(0));
}
template <real T>
SHARDLIB_FUNCTION T maximum(T a, T b) {
  return a < b || b != b ? b : a;
}
template <real T>
SHARDLIB_FUNCTION T minimum(T a, T b) {
  return b < a || b != b ? b : a;
}

namespace detail {
/// Two numbers of different types, such as a float and an integer constant. They convert like the operands of +.
template <class A, class B>
concept mixed_numbers =
    std::is_arithmetic_v<A> && std::is_arithmetic_v<B> && !std::is_same_v<A, B> && (is_real<A> || is_real<B>);
}  // namespace detail
template <class A, class B>
requires detail::mixed_numbers<A, B> SHARDLIB_FUNCTION auto maximum(A a, B b) {
  using T = std::common_type_t<A, B>;
  return maximum(static_cast<T>(a), static_cast<T>(b));
}
template <class A, class B>
requires detail::mixed_numbers<A, B> SHARDLIB_FUNCTION auto minimum(A a, B b) {
  using T = std::common_type_t<A, B>;
  return minimum(static_cast<T>(a), static_cast<T>(b));
}

/// The number a where the condition holds, else b, for functions of `map`. Unlike `?:`, a device can run it.
/// `map([](auto v) { return where(v > 0, v, 0.1 * v); }, x)`
template <std::same_as<bool> C, class A, class B>
requires(std::is_arithmetic_v<A>&& std::is_arithmetic_v<B>)
    SHARDLIB_FUNCTION std::common_type_t<A, B> where(C condition, A a, B b) {
  using T = std::common_type_t<A, B>;
  return condition ? static_cast<T>(a) : static_cast<T>(b);
}

}  // namespace shardlib
