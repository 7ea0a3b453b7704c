// The numbers that functions of map receive, with derivatives (dual numbers, forward mode) or without, and the
// functions of these numbers.
#pragma once

#include <array>
#include <cstddef>
#include <type_traits>

#include "shardlib/rules/all.hpp"
#include "shardlib/spec/require.hpp"
#include "shardlib/support/math.hpp"

namespace shardlib {

namespace detail {
template <class T>
inline constexpr bool is_real = std::is_same_v<T, float> || std::is_same_v<T, double>;
}
/// The numbers that functions of `map` compute with: float and double.
template <class T>
concept real = detail::is_real<T>;

template <real T>
T exp(T x) {
  return kernels::fast_exp(x);
}
template <real T>
T log(T x) {
  return kernels::fast_log(x);
}
template <real T>
T tanh(T x) {
  return kernels::fast_tanh(x);
}
template <real T>
T sigmoid(T x) {
  return kernels::fast_sigmoid(x);
}
template <real T>
T sqrt(T x) {
  if constexpr (std::is_same_v<T, float>) {
    return __builtin_sqrtf(x);
  } else {
    return __builtin_sqrt(x);
  }
}
template <real T>
T abs(T x) {
  return x < T(0) ? -x : x;
}
/// The sine, for functions of `map`.
template <real T>
T sin(T x) {
  if constexpr (std::is_same_v<T, float>) {
    return __builtin_sinf(x);
  } else {
    return __builtin_sin(x);
  }
}
/// The cosine, for functions of `map`.
template <real T>
T cos(T x) {
  if constexpr (std::is_same_v<T, float>) {
    return __builtin_cosf(x);
  } else {
    return __builtin_cos(x);
  }
}
/// The error function, for functions of `map`.
template <real T>
T erf(T x) {
  return kernels::fast_erf(x);
}
/// The power of x with this `exponent`, for functions of `map`: `map([](auto v) { return pow(v, 3.0); }, x)`
template <real T>
T pow(T x, T exponent) {
  if constexpr (std::is_same_v<T, float>) {
    return __builtin_powf(x, exponent);
  } else {
    return __builtin_pow(x, exponent);
  }
}
/// log(1 + x), accurate for small x, for functions of `map`.
template <real T>
T log1p(T x) {
  if constexpr (std::is_same_v<T, float>) {
    return __builtin_log1pf(x);
  } else {
    return __builtin_log1p(x);
  }
}
/// exp(x) - 1, accurate for small x, for functions of `map`.
template <real T>
T expm1(T x) {
  if constexpr (std::is_same_v<T, float>) {
    return __builtin_expm1f(x);
  } else {
    return __builtin_expm1(x);
  }
}
/// log(1 + exp(x)), for functions of `map`.
template <real T>
T softplus(T x) {
  return (x < T(0) ? T(0) : x) + log1p(exp(-abs(x)));
}
/// -1, 0 or 1 by the sign, for functions of `map`.
template <real T>
T sign(T x) {
  return x > T(0) ? T(1) : x < T(0) ? T(-1) : x;
}
/// The largest whole number that is not above x, for functions of `map`.
template <real T>
T floor(T x) {
  if constexpr (std::is_same_v<T, float>) {
    return __builtin_floorf(x);
  } else {
    return __builtin_floor(x);
  }
}
/// The nearest whole number, of two the even one, for functions of `map`.
template <real T>
T round(T x) {
  if constexpr (std::is_same_v<T, float>) {
    return __builtin_rintf(x);
  } else {
    return __builtin_rint(x);
  }
}
namespace detail {
/// The remainder of a division that rounds towards 0, and whether one that rounds down has the next lower quotient.
template <real T>
struct Remainder {
  T rest;
  bool lower;
  Remainder(T a, T b) {
    if constexpr (std::is_same_v<T, float>) {
      rest = __builtin_fmodf(a, b);
    } else {
      rest = __builtin_fmod(a, b);
    }
    lower = rest != T(0) && (rest < T(0)) != (b < T(0));
  }
};
}  // namespace detail
/// The remainder with the sign of the divisor, like % in Python, for functions of `map`.
template <real T>
T mod(T a, T b) {
  const detail::Remainder<T> r(a, b);
  return r.lower ? r.rest + b : r.rest;
}
/// The quotient rounded down, like // in Python, for functions of `map`.
template <real T>
T floor_divide(T a, T b) {
  if (b == T(0)) return a / b;
  // floor(a / b) would be 1 too large where the quotient is rounded up to a whole number.
  const detail::Remainder<T> r(a, b);
  return round((a - r.rest) / b) - (r.lower ? T(1) : T(0));
}
template <real T>
T maximum(T a, T b) {
  return a < b ? b : a;
}
template <real T>
T minimum(T a, T b) {
  return b < a ? b : a;
}

namespace detail {
/// Two numbers of different types, such as a float and an integer constant. They convert like the operands of +.
template <class A, class B>
concept mixed_numbers =
    std::is_arithmetic_v<A> && std::is_arithmetic_v<B> && !std::is_same_v<A, B> && (is_real<A> || is_real<B>);
}  // namespace detail
template <class A, class B>
requires detail::mixed_numbers<A, B>
auto maximum(A a, B b) {
  using T = std::common_type_t<A, B>;
  return maximum(static_cast<T>(a), static_cast<T>(b));
}
template <class A, class B>
requires detail::mixed_numbers<A, B>
auto minimum(A a, B b) {
  using T = std::common_type_t<A, B>;
  return minimum(static_cast<T>(a), static_cast<T>(b));
}

namespace detail {
template <class T, std::size_t N>
struct Slopes {
  std::array<T, N> by{};
  T& operator[](std::size_t i) { return by[i]; }
  const T& operator[](std::size_t i) const { return by[i]; }
};
template <class T>
struct Slopes<T, 0> {};
}  // namespace detail

/// A dual number: a value and its derivatives by N inputs. In the forward pass a function of map receives Jet<T, 0>,
/// which has no derivatives and is as large as T. Both passes therefore find the same overloads. `value` is the value
/// and `by` holds the derivatives.
template <class T, std::size_t N>
struct Jet {
  T value{};
  [[no_unique_address]] detail::Slopes<T, N> by{};

  Jet() = default;
  Jet(T v) : value(v) {}  // NOLINT(google-explicit-constructor): constants mix with dual numbers
  template <class U>
  requires(std::is_arithmetic_v<U> && !std::is_same_v<U, T>) Jet(U v)
      : value(static_cast<T>(v)) {}  // NOLINT(google-explicit-constructor)
  /// A compile error: a Jet does not convert to a plain number. std::exp and similar functions take a long double and
  /// would choose the implicit conversion. Casts and conditions would choose the explicit ones.
  template <class U>
  requires std::is_arithmetic_v<U>
  explicit(!std::is_same_v<U, long double>) operator U() const {
    static_assert(detail::checked<rules::plain_number, (sizeof(U) > 0)>::ok);
    return {};
  }

#define SHARDLIB_JET_OPERATOR(op, Result)        \
  template <class U>                             \
  requires std::is_arithmetic_v<U>               \
  friend Result operator op(const Jet& a, U b) { \
    return a op Jet(b);                          \
  }                                              \
  template <class U>                             \
  requires std::is_arithmetic_v<U>               \
  friend Result operator op(U a, const Jet& b) { \
    return Jet(a) op b;                          \
  }
#define SHARDLIB_JET_COMPARISON(op)                     \
  friend bool operator op(const Jet& a, const Jet& b) { \
    return a.value op b.value;                          \
  }                                                     \
  SHARDLIB_JET_OPERATOR(op, bool)
  SHARDLIB_JET_COMPARISON(<)
  SHARDLIB_JET_COMPARISON(>)
  SHARDLIB_JET_COMPARISON(<=)
  SHARDLIB_JET_COMPARISON(>=)
  SHARDLIB_JET_COMPARISON(==)
  SHARDLIB_JET_COMPARISON(!=)
  friend Jet operator+(const Jet& a, const Jet& b) { return combine(a.value + b.value, a, T(1), b, T(1)); }
  friend Jet operator-(const Jet& a, const Jet& b) { return combine(a.value - b.value, a, T(1), b, T(-1)); }
  friend Jet operator*(const Jet& a, const Jet& b) { return combine(a.value * b.value, a, b.value, b, a.value); }
  friend Jet operator/(const Jet& a, const Jet& b) {
    const T quotient = a.value / b.value;
    return combine(quotient, a, T(1) / b.value, b, -quotient / b.value);
  }
  SHARDLIB_JET_OPERATOR(+, Jet)
  SHARDLIB_JET_OPERATOR(-, Jet)
  SHARDLIB_JET_OPERATOR(*, Jet)
  SHARDLIB_JET_OPERATOR(/, Jet)
#undef SHARDLIB_JET_COMPARISON
#undef SHARDLIB_JET_OPERATOR
  friend Jet operator-(const Jet& a) { return chain(a, -a.value, T(-1)); }
  friend Jet operator+(const Jet& a) {
    return a;
  }
  Jet& operator+=(const Jet& b) {
    return *this = *this + b;
  }
  Jet& operator-=(const Jet& b) {
    return *this = *this - b;
  }
  Jet& operator*=(const Jet& b) {
    return *this = *this * b;
  }
  Jet& operator/=(const Jet& b) {
    return *this = *this / b;
  }

  /// f(a), given the value and the derivative of f at a.
  friend Jet chain(const Jet& a, T value, T slope) {
    Jet r(value);
    if constexpr (N > 0)
      for (std::size_t i = 0; i < N; ++i) r.by[i] = slope * a.by[i];
    return r;
  }
  friend Jet combine(T value, const Jet& a, T by_a, const Jet& b, T by_b) {
    Jet r(value);
    if constexpr (N > 0)
      for (std::size_t i = 0; i < N; ++i) r.by[i] = by_a * a.by[i] + by_b * b.by[i];
    return r;
  }
  friend Jet exp(const Jet& a) {
    const T e = shardlib::exp(a.value);
    return chain(a, e, e);
  }
  friend Jet log(const Jet& a) { return chain(a, shardlib::log(a.value), T(1) / a.value); }
  friend Jet tanh(const Jet& a) {
    const T t = shardlib::tanh(a.value);
    return chain(a, t, T(1) - t * t);
  }
  friend Jet sigmoid(const Jet& a) {
    const T s = shardlib::sigmoid(a.value);
    return chain(a, s, s * (T(1) - s));
  }
  friend Jet sqrt(const Jet& a) {
    const T r = shardlib::sqrt(a.value);
    return chain(a, r, T(0.5) / r);
  }
  friend Jet abs(const Jet& a) { return a.value < T(0) ? -a : a; }
  friend Jet sin(const Jet& a) { return chain(a, shardlib::sin(a.value), shardlib::cos(a.value)); }
  friend Jet cos(const Jet& a) { return chain(a, shardlib::cos(a.value), -shardlib::sin(a.value)); }
  friend Jet erf(const Jet& a) {
    const T slope = T(1.1283791670955126) * shardlib::exp(-a.value * a.value);  // 2 / sqrt(pi)
    return chain(a, shardlib::erf(a.value), slope);
  }
  friend Jet log1p(const Jet& a) {
    return chain(a, shardlib::log1p(a.value), T(1) / (T(1) + a.value));
  }
  friend Jet expm1(const Jet& a) {
    const T e = shardlib::expm1(a.value);
    return chain(a, e, e + T(1));
  }
  /// A constant exponent has no derivative, so the base may be negative or zero.
  template <class U>
  requires std::is_arithmetic_v<U>
  friend Jet pow(const Jet& a, U exponent) {
    return pow(a, Jet(static_cast<T>(exponent)));
  }
  friend Jet pow(const Jet& a, const Jet& b) {
    Jet r(shardlib::pow(a.value, b.value));
    if constexpr (N > 0) {
      // Where a derivative would be 0 times infinity, it is 0, its limit: at the exponent 0, and by the exponent at
      // the base 0. An operand without a derivative contributes none, whatever the slope.
      const T by_a = b.value == T(0) ? T(0) : b.value * shardlib::pow(a.value, b.value - T(1));
      const T by_b = a.value == T(0) && b.value >= T(0) ? T(0) : r.value * shardlib::log(a.value);
      for (std::size_t i = 0; i < N; ++i)
        r.by[i] = (a.by[i] == T(0) ? T(0) : by_a * a.by[i]) + (b.by[i] == T(0) ? T(0) : by_b * b.by[i]);
    }
    return r;
  }
  friend Jet softplus(const Jet& a) {
    return chain(a, shardlib::softplus(a.value), shardlib::sigmoid(a.value));
  }
  friend Jet sign(const Jet& a) {
    return Jet(shardlib::sign(a.value));
  }
  friend Jet floor(const Jet& a) {
    return Jet(shardlib::floor(a.value));
  }
  friend Jet round(const Jet& a) {
    return Jet(shardlib::round(a.value));
  }
  friend Jet floor_divide(const Jet& a, const Jet& b) {
    return Jet(shardlib::floor_divide(a.value, b.value));
  }
  friend Jet mod(const Jet& a, const Jet& b) {
    return combine(shardlib::mod(a.value, b.value), a, T(1), b, -shardlib::floor_divide(a.value, b.value));
  }
  friend Jet maximum(const Jet& a, const Jet& b) { return a.value < b.value ? b : a; }
  friend Jet minimum(const Jet& a, const Jet& b) { return b.value < a.value ? b : a; }
  friend Jet clamp(const Jet& a, const Jet& low, const Jet& high) {
    return minimum(maximum(a, low), high);
  }
};

/// Whether the type is a Jet.
template <class T>
inline constexpr bool is_jet = false;
template <class T, std::size_t N>
inline constexpr bool is_jet<Jet<T, N>> = true;
/// The type of argument that a function of `map` receives: a `real` number or a Jet of one.
template <class T>
concept scalar = real<T> || is_jet<T>;

template <scalar T>
T square(const T& x) {
  return x * x;
}
template <scalar T>
T rsqrt(const T& x) {
  return T(1) / sqrt(x);
}
template <scalar T>
T relu(const T& x) {
  return x <= T(0) ? T(0) : x;
}
/// The product x * sigmoid(x), also called SiLU.
template <scalar T>
T swish(const T& x) {
  return x * sigmoid(x);
}
/// The tanh approximation: 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))).
template <scalar T>
T gelu(const T& x) {
  return T(0.5) * x * (T(1) + tanh(T(0.7978845608028654) * (x + T(0.044715) * x * x * x)));
}

}  // namespace shardlib
