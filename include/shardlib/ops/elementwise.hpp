// Elementwise functions, which broadcast by name; where, casts.
#pragma once

#include <concepts>
#include <type_traits>

#include "shardlib/ops/arithmetic.hpp"
#include "shardlib/ops/map.hpp"
#include "shardlib/ops/record.hpp"
#include "shardlib/ops/result.hpp"
#include "shardlib/rules/all.hpp"
#include "shardlib/spec/dtype.hpp"
#include "shardlib/support/function.hpp"
#include "shardlib/types/numbers_in.hpp"

namespace shardlib {

// ---- functions of one and two operands -----------------------------------------------------------------------------

// A function of one operand, which may not be partial, because f(a + b) is not f(a) + f(b). It is a named type, so that
// tensors of all specs share its loop.
#define SHARDLIB_OF_ONE(name, differentiable)                                                           \
  namespace detail {                                                                                    \
  struct name##_function {                                                                              \
    SHARDLIB_FUNCTION auto operator()(auto v) const { return name(v); }                                 \
  };                                                                                                    \
  }                                                                                                     \
  template <dtype D, Spec S>                                                                            \
  auto name(const Tensor<D, S>& x, Site site = Site::current())                                         \
      ->Tensor<detail::if_float<#name, D>, detail::named_result_for<D, rules::map1, #name, S>> {        \
    const detail::Calling op{#name, {}, site};                                                          \
    if constexpr (!differentiable) detail::require_no_gradient(op, x.value(), detail::zero_derivative); \
    return detail::map_as<#name, Tensor<D, S>>(op, detail::name##_function{}, x);                       \
  }
#define SHARDLIB_UNARY(name) SHARDLIB_OF_ONE(name, true)
/// The exponential of each element. `exp(x)`
SHARDLIB_UNARY(exp)
/// The natural logarithm of each element. `log(x)`
SHARDLIB_UNARY(log)
/// The hyperbolic tangent of each element. `tanh(x)`
SHARDLIB_UNARY(tanh)
/// 1 / (1 + exp(-x)) of each element. `sigmoid(x)`
SHARDLIB_UNARY(sigmoid)
/// The square root of each element. `sqrt(x)`
SHARDLIB_UNARY(sqrt)
/// 1 / sqrt(x) of each element. `rsqrt(x)`
SHARDLIB_UNARY(rsqrt)
/// Each element times itself. `square(x)`
SHARDLIB_UNARY(square)
/// The absolute value of each element. `abs(x)`
SHARDLIB_UNARY(abs)
/// The maximum of each element and 0. `relu(x)`
SHARDLIB_UNARY(relu)
/// The tanh approximation of GELU, as in GPT-2 (Hendrycks and Gimpel 2016). `gelu(x)`
SHARDLIB_UNARY(gelu)
SHARDLIB_FORM(gelu, "gelu(x)")
/// The product x * sigmoid(x) of each element, also called SiLU (Ramachandran et al. 2017). `swish(x)`
SHARDLIB_UNARY(swish)
/// The sine of each element. `sin(x)`
SHARDLIB_UNARY(sin)
/// The cosine of each element. `cos(x)`
SHARDLIB_UNARY(cos)
/// The error function of each element. `erf(x)`
SHARDLIB_UNARY(erf)
/// log(1 + x) of each element, accurate for small x. `log1p(x)`
SHARDLIB_UNARY(log1p)
/// exp(x) - 1 of each element, accurate for small x. `expm1(x)`
SHARDLIB_UNARY(expm1)
/// log(1 + exp(x)) of each element, which does not overflow. `softplus(x)`
SHARDLIB_UNARY(softplus)
#undef SHARDLIB_UNARY

// Functions that are constant between their steps. A gradient would silently be zero, so they reject it.
#define SHARDLIB_STEPS(name) SHARDLIB_OF_ONE(name, false)
/// -1, 0 or 1 by the sign of each element. It has no derivative: pass it `stop_gradient(x)`. `sign(x)`
SHARDLIB_STEPS(sign)
/// The largest whole number that is not above each element. It has no derivative: pass it `stop_gradient(x)`.
/// `floor(x)`
SHARDLIB_STEPS(floor)
/// The nearest whole number to each element; of two, the even one, like numpy. It has no derivative: pass it
/// `stop_gradient(x)`. `round(x)`
SHARDLIB_STEPS(round)
#undef SHARDLIB_STEPS
#undef SHARDLIB_OF_ONE

namespace detail {
struct pow_function {
  template <class T>
  SHARDLIB_FUNCTION T operator()(const T& base, const T& exponent) const {
    return pow(base, exponent);
  }
};
template <class T>
struct Clamp {
  T low, high;
  SHARDLIB_FUNCTION auto operator()(auto v) const {
    using V = decltype(v);
    return v < V(low) ? V(low) : V(high) < v ? V(high) : v;
  }
};
void check_bounds(const OpInfo& op, const ValuePtr& x, double low, double high);
void require_exponent(const OpInfo& op, const ValuePtr& x, double exponent);
}  // namespace detail

/// Each element to a power. Operands broadcast by name. Either may be a number. The derivative by an exponent
/// that is not negative is 0 where the base is 0. Throws for the integer 0, which 1 / 2 is. `pow(a, b)`,
/// `pow(x, 3.0)`, `pow(2.0, x)`
template <dtype D, Spec S, dtype E, Spec T>
auto pow(const Tensor<D, S>& base, const Tensor<E, T>& exponent, Site site = Site::current())
    -> Tensor<detail::after_t<detail::is_float<"pow", D> && detail::one_dtype<"pow", D, E>, D>,
              detail::named_result_for<D, rules::map2, "pow", S, T>> {
  using Out = Tensor<D, detail::named_result_for<D, rules::map2, "pow", S, T>>;
  return detail::map_as<"pow", Out>(detail::Calling{"pow", {}, site}, detail::pow_function{}, base, exponent);
}
template <dtype D, Spec S>
auto pow(const Tensor<D, S>& base, double exponent, Site site = Site::current())
    -> Tensor<detail::if_float<"pow", D>, detail::named_result_for<D, rules::map1, "pow", S>> {
  using F = detail::WithNumber<detail::pow_function, detail::scalar_of<D>>;
  const detail::Calling op{"pow", {}, site};
  return detail::map_as<"pow", Tensor<D, S>>(op, F{detail::as_scalar(op, base, exponent)}, base);
}
template <dtype D, Spec S, std::integral N>
auto pow(const Tensor<D, S>& base, N exponent, Site site = Site::current())
    -> Tensor<detail::if_float<"pow", D>, detail::named_result_for<D, rules::map1, "pow", S>> {
  const auto number = static_cast<double>(exponent);
  detail::require_exponent(detail::Calling{"pow", {}, site}, base.value(), number);
  return pow(base, number, site);
}
template <dtype D, Spec S>
auto pow(double base, const Tensor<D, S>& exponent, Site site = Site::current())
    -> Tensor<detail::if_float<"pow", D>, detail::named_result_for<D, rules::map1, "pow", S>> {
  using F = detail::NumberWith<detail::pow_function, detail::scalar_of<D>>;
  const detail::Calling op{"pow", {}, site};
  return detail::map_as<"pow", Tensor<D, S>>(op, F{detail::as_scalar(op, exponent, base)}, exponent);
}

/// Each element, or the nearest bound if it is outside of [low, high]. There the derivative is 0. Throws if low is
/// above high. `clamp(x, -1.0, 1.0)`
template <dtype D, Spec S>
auto clamp(const Tensor<D, S>& x, double low, double high, Site site = Site::current())
    -> Tensor<detail::after_t<detail::is_number<"clamp", D>, D>, detail::named_result_for<D, rules::map1, "clamp", S>> {
  const detail::Calling op{"clamp", {}, site};
  detail::check_bounds(op, x.value(), low, high);
  const detail::Clamp<detail::scalar_of<D>> f{detail::as_scalar(op, x, low), detail::as_scalar(op, x, high)};
  return detail::map_as<"clamp", Tensor<D, S>>(op, f, x);
}
/// A compile error for one bound alone.
template <dtype D, Spec S>
auto clamp(const Tensor<D, S>& x, double bound) {
  return detail::wrong_call<"clamp", "clamp(x, low, high)">(x, bound);
}

#define SHARDLIB_BINARY(name, Result, expression)                                                         \
  namespace detail {                                                                                      \
  struct name##_function {                                                                                \
    SHARDLIB_FUNCTION auto operator()(auto p, auto q) const { return expression; }                        \
  };                                                                                                      \
  }                                                                                                       \
  template <dtype D, Spec S, dtype E, Spec T>                                                             \
  auto name(const Tensor<D, S>& a, const Tensor<E, T>& b, Site site = Site::current())                    \
      ->Tensor<detail::after_t<detail::one_dtype<#name, D, E>, Result>,                                   \
               detail::named_result_for<D, rules::map2, #name, S, T>> {                                   \
    using Out = Tensor<Result, detail::named_result_for<D, rules::map2, #name, S, T>>;                    \
    return detail::map_as<#name, Out>(detail::Calling{#name, {}, site}, detail::name##_function{}, a, b); \
  }
// The second operand may be a number: `greater(x, 0.0)`.
#define SHARDLIB_BINARY_WITH_NUMBER(name, Result, expression)                               \
  SHARDLIB_BINARY(name, Result, expression)                                                 \
  template <dtype D, Spec S>                                                                \
  auto name(const Tensor<D, S>& a, double b, Site site = Site::current())                   \
      ->Tensor<Result, detail::named_result_for<D, rules::map1, #name, S>> {                \
    using F = detail::WithNumber<detail::name##_function, detail::scalar_of<D>>;            \
    const detail::Calling op{#name, {}, site};                                              \
    return detail::map_as<#name, Tensor<Result, S>>(op, F{detail::as_scalar(op, a, b)}, a); \
  }
// Either operand may be a number: `maximum(0.0, x)`.
#define SHARDLIB_SYMMETRIC(name, expression)                              \
  SHARDLIB_BINARY_WITH_NUMBER(name, D, expression)                        \
  template <dtype D, Spec S>                                              \
  auto name(double a, const Tensor<D, S>& b, Site site = Site::current()) \
      ->Tensor<D, detail::named_result_for<D, rules::map1, #name, S>> {   \
    return name(b, a, site);                                              \
  }
/// The larger of two elements, or a NaN where one is. Operands broadcast by name. Either may be a number. `maximum(a,
/// b)`, `maximum(x, 0.0)`, `maximum(0.0, x)`
SHARDLIB_SYMMETRIC(maximum, (p < q || q != q ? q : p))
/// The smaller of two elements, or a NaN where one is. Operands broadcast by name. Either may be a number. `minimum(a,
/// b)`, `minimum(x, 1.0)`, `minimum(1.0, x)`
SHARDLIB_SYMMETRIC(minimum, (q < p || q != q ? q : p))
#undef SHARDLIB_SYMMETRIC
// A number as the first operand is a compile error that names the comparison with the operands exchanged.
#define SHARDLIB_COMPARISON(name, other, expression)              \
  SHARDLIB_BINARY_WITH_NUMBER(name, bool_, expression)            \
  template <dtype D, Spec S>                                      \
  auto name(double a, const Tensor<D, S>& b) {                    \
    return detail::wrong_call<#name, #other "(x, number)">(a, b); \
  }
/// True where both elements are equal. `equal(a, b)`
SHARDLIB_COMPARISON(equal, equal, p == q)
/// True where the elements differ. `not_equal(a, b)`
SHARDLIB_COMPARISON(not_equal, not_equal, p != q)
/// True where a < b. `less(a, b)`
SHARDLIB_COMPARISON(less, greater, p < q)
/// True where a <= b. `less_equal(a, b)`
SHARDLIB_COMPARISON(less_equal, greater_equal, p <= q)
/// True where a > b. `greater(x, 0.0)`
SHARDLIB_COMPARISON(greater, less, p > q)
/// True where a >= b. `greater_equal(a, b)`
SHARDLIB_COMPARISON(greater_equal, less_equal, p >= q)
// An operator would be taken for one bool, as in `if (x > 0.0)`.
#define SHARDLIB_NO_OPERATOR(symbol, name)                     \
  template <dtype D, Spec S, class Y>                          \
  auto operator symbol(const Tensor<D, S>& x, const Y& number) \
      ->Tensor<bool_, detail::result_of<rules::no_operator, OpName(#symbol), OpName(#name), S>>;
/// A compile error that names `equal`. `equal(a, b)`
SHARDLIB_NO_OPERATOR(==, equal)
/// A compile error that names `not_equal`. `not_equal(a, b)`
SHARDLIB_NO_OPERATOR(!=, not_equal)
/// A compile error that names `less`. `less(a, b)`
SHARDLIB_NO_OPERATOR(<, less)
/// A compile error that names `less_equal`. `less_equal(a, b)`
SHARDLIB_NO_OPERATOR(<=, less_equal)
/// A compile error that names `greater`. `greater(a, b)`
SHARDLIB_NO_OPERATOR(>, greater)
/// A compile error that names `greater_equal`. `greater_equal(a, b)`
SHARDLIB_NO_OPERATOR(>=, greater_equal)
#undef SHARDLIB_NO_OPERATOR
// Compile errors that name the op. Only of two tensors, as a program may have its own `x | layer`.
#define SHARDLIB_NO_OPERATOR(symbol, name)                           \
  template <dtype D, Spec S, dtype E, Spec T>                        \
  auto operator symbol(const Tensor<D, S>& x, const Tensor<E, T>& y) \
      ->Tensor<D, detail::result_of<rules::no_symbol, OpName(#symbol), OpName(#name), S>>;
/// A compile error that names `logical_and`. `logical_and(a, b)`
SHARDLIB_NO_OPERATOR(&, logical_and)
/// A compile error that names `logical_or`. `logical_or(a, b)`
SHARDLIB_NO_OPERATOR(|, logical_or)
#undef SHARDLIB_NO_OPERATOR
/// True where both bool_ elements are true. `logical_and(causal, same_segment)`
SHARDLIB_BINARY(logical_and, bool_, p&& q)
/// True where at least one of the bool_ elements is true. `logical_or(causal, is_prefix)`
SHARDLIB_BINARY(logical_or, bool_, p || q)
#undef SHARDLIB_COMPARISON
#undef SHARDLIB_BINARY_WITH_NUMBER
#undef SHARDLIB_BINARY

// ---- where ---------------------------------------------------------------------------------------------------------

namespace detail {
/// a where the condition c holds, else a number. Masked, and where with a number, use this kernel.
template <class D>
struct WhereElseNumber {
  ValuePtr c, a;
  D number;
  Buffer operator()(const Value& out) const;
};
template <class D>
NumbersIn numbers_in(const WhereElseNumber<D>& kernel) {
  return numbers_in(kernel.number);
}
template <class D>
struct Where {
  ValuePtr c, a, b;
  Buffer operator()(const Value& out) const;
};
template <class X>
inline constexpr auto masked_vjp = [](const auto& ct, const auto& m) { return unbroadcast<X>(masked(m, ct)); };
struct Not {
  SHARDLIB_FUNCTION bool operator()(bool v) const { return !v; }
};
template <dtype B, Spec C>
auto inverted(const Tensor<B, C>& condition) {
  return map_as<"not", Tensor<B, C>>(OpInfo{"not", {}, {}}, Not{}, condition);
}
template <class X>
inline constexpr auto not_masked_vjp =
    [](const auto& ct, const auto& m) { return unbroadcast<X>(masked(inverted(m), ct)); };
}  // namespace detail

/// Elements of a where c holds, else 0. `a` may be partial, because zeros do not change a sum. `masked(seen, scores)`
template <dtype B, Spec C, dtype D, Spec S>
auto masked(const Tensor<B, C>& c, const Tensor<D, S>& a, Site site = Site::current())
    -> Tensor<detail::after_t<detail::is_condition<"masked", B>, D>, detail::result_for<D, rules::where, C, S, S>> {
  using Out = Tensor<D, detail::result_for<D, rules::where, C, S, S>>;
  const detail::Calling op{"masked", {}, site};
  return detail::record<"masked", Out>(op, a.device(),
                                       detail::sizes_by_name(op, detail::parsed<Out::spec>, {&a.value(), &c.value()}),
                                       detail::WhereElseNumber<D>{c.value(), a.value(), D{}},
                                       detail::vjp(a, detail::save(c), detail::masked_vjp<Tensor<D, S>>));
}
SHARDLIB_FORM(masked, "masked(c, x)`, or with another number than 0 where c is false `where(c, x, -1e30)")

/// Elements of a where c holds, else the constant. For a partial `a`, use masked(). `where(seen, scores, -1e30)`. The
/// constant may stand first: `where(hidden, -1e30, scores)`
template <dtype B, Spec C, dtype D, Spec S>
auto where(const Tensor<B, C>& c, const Tensor<D, S>& a, double otherwise, Site site = Site::current())
    -> Tensor<detail::after_t<detail::is_condition<"where", B>, D>,
              detail::named_result_for<D, rules::map2, "where", S, C>> {
  using Out = Tensor<D, detail::named_result_for<D, rules::map2, "where", S, C>>;
  const detail::Calling op{"where", {}, site};
  return detail::record<"where", Out>(
      op, a.device(), detail::sizes_by_name(op, detail::parsed<Out::spec>, {&a.value(), &c.value()}),
      detail::WhereElseNumber<D>{c.value(), a.value(), static_cast<D>(detail::as_scalar(op, a, otherwise))},
      detail::vjp(a, detail::save(c), detail::masked_vjp<Tensor<D, S>>));
}
template <dtype B, Spec C, dtype D, Spec S>
auto where(const Tensor<B, C>& c, double constant, const Tensor<D, S>& b, Site site = Site::current())
    -> Tensor<detail::after_t<detail::is_condition<"where", B>, D>,
              detail::named_result_for<D, rules::map2, "where", S, C>> {
  return where(detail::inverted(c), b, constant, site);
}
/// A compile error: a number has no dtype.
template <dtype B, Spec C>
auto where(const Tensor<B, C>& /*c*/, double /*a*/, double /*b*/) {
  return Tensor<f32, detail::result_of<rules::where_of_numbers, C>>();
}
/// Elements of a where c holds, else of b. c may not be partial. On each axis, a and b are either both partial or
/// neither. `where(greater(x, 0.0), x, y)`
template <dtype B, Spec C, dtype D, Spec S, dtype E, Spec T>
auto where(const Tensor<B, C>& c, const Tensor<D, S>& a, const Tensor<E, T>& b, Site site = Site::current())
    -> Tensor<detail::after_t<detail::is_condition<"where", B> && detail::one_dtype<"where", D, E>, D>,
              detail::result_for<D, rules::where, C, S, T>> {
  using Out = Tensor<D, detail::result_for<D, rules::where, C, S, T>>;
  const detail::Calling op{"where", {}, site};
  return detail::record<"where", Out>(
      op, a.device(), detail::sizes_by_name(op, detail::parsed<Out::spec>, {&c.value(), &a.value(), &b.value()}),
      detail::Where<D>{c.value(), a.value(), b.value()},
      detail::vjp(a, detail::save(c), detail::masked_vjp<Tensor<D, S>>),
      detail::vjp(b, detail::save(c), detail::not_masked_vjp<Tensor<E, T>>));
}

// ---- casts ---------------------------------------------------------------------------------------------------------

namespace detail {
template <class To, class D>
Buffer cast_kernel(const Value& in, const Value& out);
/// The value in another floating dtype, and its VJP, which casts the cotangent back. Both dtypes are floating.
ValuePtr cast_floating(const OpInfo& op, const ValuePtr& x, DType to);
// A variable, as nvcc 13 deduces nothing from concepts that stand in a result type.
template <class To, class D, Spec S>
inline constexpr Spec cast_spec = result_of<rules::cast, floating<To>, floating<D>, S>;
}  // namespace detail

/// The same values in another dtype. A cast of a floating tensor to integers has no derivative: pass it
/// `stop_gradient(x)`. (One to bool_ is a comparison.) `cast<bf16>(w)`
template <dtype To, dtype D, Spec S>
auto cast(const Tensor<D, S>& x, Site site = Site::current()) -> Tensor<To, detail::cast_spec<To, D, S>> {
  const detail::Calling op{"cast", {}, site};
  if constexpr (std::is_same_v<To, D>)
    return x;
  else if constexpr (floating<To> && floating<D>)
    return Tensor<To, S>(detail::cast_floating(op, x.value(), dtype_v<To>));
  else {
    if constexpr (floating<D> && !std::is_same_v<To, bool_>)
      detail::require_no_gradient(op, x.value(), detail::zero_derivative);
    return detail::record_unary<"cast", Tensor<To, S>>(op, x, detail::sizes_of(x.value()), detail::cast_kernel<To, D>);
  }
}
SHARDLIB_FORM(cast, "cast<bf16>(x)")
/// A compile error for another dtype than those of a tensor.
template <class To, tensor X>
requires(!dtype<To>) auto cast(const X& x) {
  return detail::wrong_call<"cast", "cast<f32>(x)`, where f32 is one of f32, bf16, f64, i32, u32, u8 and bool_">(x);
}

namespace detail {
/// Records that the program wants no gradient of the value through this use, nor of the values behind it.
void stop_below(const ValuePtr& x);
}  // namespace detail

/// The same values, without a gradient. `stop_gradient(x)`
template <dtype D, Spec S>
auto stop_gradient(const Tensor<D, S>& x, Site site = Site::current()) -> Tensor<D, S> {
  const detail::Calling op{"stop_gradient", {}, site};
  detail::stop_below(x.value());
  return Tensor<D, S>(detail::without_gradient(x.value()));
}

}  // namespace shardlib
