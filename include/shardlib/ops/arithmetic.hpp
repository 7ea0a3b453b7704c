// Elementwise arithmetic between tensors, which broadcast by name, and with numbers: + - * /, floor_divide, mod.
#pragma once

#include <concepts>
#include <type_traits>

#include "shardlib/ops/map.hpp"
#include "shardlib/ops/record.hpp"
#include "shardlib/ops/result.hpp"
#include "shardlib/rules/all.hpp"
#include "shardlib/spec/dtype.hpp"
#include "shardlib/support/function.hpp"
#include "shardlib/support/wrapping.hpp"

namespace shardlib {

// ---- between tensors -----------------------------------------------------------------------------------------------
// The operators + - * / belong to Tensor (types/tensor.hpp) and call these functions. Integer division by zero is an
// error.
//
// Their bodies name the result by decltype: the host code that nvcc 13 writes loses the "+" of an alias.

namespace detail {

/// A broadcast loop for + - * and for floating-point /. Its op supplies the VJPs.
template <class F, class D>
struct Pointwise {
  ValuePtr a, b;
  Buffer operator()(const Value& out) const;
};
struct Divide {
  template <class T>
  constexpr T operator()(const T& a, const T& b) const {
    return a / b;
  }
};
/// F of two integers. Throws if a divisor is zero.
template <class F, class D>
struct IntegerDivide {
  ValuePtr a, b;
  Buffer operator()(const Value& out) const;
};

template <class X>
inline constexpr auto add_vjp = [](const auto& ct) { return unbroadcast<X>(ct); };
template <class D, Spec S, class E, Spec T>
auto add(const Tensor<D, S>& a, const Tensor<E, T>& b, const Site& site) -> arithmetic_t<"+", D, S, E, T> {
  using Out = decltype(add(a, b, site));
  const Calling op{"+", {}, site};
  return record<"+", Out>(op, a.device(), sizes_by_name(op, parsed<Out::spec>, {&a.value(), &b.value()}),
                          Pointwise<WrappingSum, D>{a.value(), b.value()}, vjp(a, add_vjp<Tensor<D, S>>),
                          vjp(b, add_vjp<Tensor<E, T>>));
}

template <class X>
inline constexpr auto subtract_vjp = [](const auto& ct) { return unbroadcast<X>(-ct); };
template <class D, Spec S, class E, Spec T>
auto subtract(const Tensor<D, S>& a, const Tensor<E, T>& b, const Site& site) -> arithmetic_t<"-", D, S, E, T> {
  using Out = decltype(subtract(a, b, site));
  const Calling op{"-", {}, site};
  return record<"-", Out>(op, a.device(), sizes_by_name(op, parsed<Out::spec>, {&a.value(), &b.value()}),
                          Pointwise<WrappingDifference, D>{a.value(), b.value()}, vjp(a, add_vjp<Tensor<D, S>>),
                          vjp(b, subtract_vjp<Tensor<E, T>>));
}

template <class X>
inline constexpr auto multiply_vjp = [](const auto& ct, const auto& other) { return unbroadcast<X>(ct * other); };
template <class D, Spec S, class E, Spec T>
auto multiply(const Tensor<D, S>& a, const Tensor<E, T>& b, const Site& site) -> arithmetic_t<"*", D, S, E, T> {
  using Out = decltype(multiply(a, b, site));
  const Calling op{"*", {}, site};
  return record<"*", Out>(op, a.device(), sizes_by_name(op, parsed<Out::spec>, {&a.value(), &b.value()}),
                          Pointwise<WrappingProduct, D>{a.value(), b.value()},
                          vjp(a, save(b), multiply_vjp<Tensor<D, S>>), vjp(b, save(a), multiply_vjp<Tensor<E, T>>));
}

template <class X>
inline constexpr auto dividend_vjp = [](const auto& ct, const auto& other) { return unbroadcast<X>(ct / other); };
template <class X>
inline constexpr auto divisor_vjp =
    [](const auto& ct, const auto& x, const auto& y) { return unbroadcast<X>(-(ct / y * (x / y))); };
template <class D, Spec S, class E, Spec T>
auto divide(const Tensor<D, S>& a, const Tensor<E, T>& b, const Site& site) -> arithmetic_t<"/", D, S, E, T> {
  using Out = decltype(divide(a, b, site));
  using Kernel = std::conditional_t<floating<D>, Pointwise<Divide, D>, IntegerDivide<Quotient, D>>;
  const Calling op{"/", {}, site};
  return record<"/", Out>(op, a.device(), sizes_by_name(op, parsed<Out::spec>, {&a.value(), &b.value()}),
                          Kernel{a.value(), b.value()}, vjp(a, save(b), dividend_vjp<Tensor<D, S>>),
                          vjp(b, save(a, b), divisor_vjp<Tensor<E, T>>));
}

/// A linear op of one operand. Its VJP applies the same function to the cotangent. P -> P and R -> R.
template <class F, class D>
struct Linear {
  F f;
  Buffer operator()(const Value& in, const Value& out) const;
};
template <OpName Name, class F>
struct LinearVjp;
template <OpName Name, class X, class F>
X linear(const OpInfo& op, const X& x, const F& f) {
  return record_unary<Name, X>(op, x, sizes_of(x.value()), Linear<F, typename X::value_type>{f},
                               vjp(x, LinearVjp<Name, F>{op.name, f}));
}
template <OpName Name, class F>
struct LinearVjp {
  const char* name;
  F f;
  template <class Ct>
  auto operator()(const Ct& ct) const {
    return linear<Name>(OpInfo{name, {}, {}}, ct, f);
  }
};

struct Negate {
  template <class T>
  constexpr T operator()(const T& v) const {
    return WrappingDifference{}(T{0}, v);
  }
};
template <class D, Spec S>
auto negate(const Tensor<D, S>& x, const Site& site)
    -> Tensor<std::enable_if_t<checked<rules::arithmetic_dtype, OpName("-"), dtype_v<D>>::ok, D>, S> {
  return linear<"negate">(Calling{"-", {}, site}, x, Negate{});
}

// ---- with a number -------------------------------------------------------------------------------------------------

/// Throws if an integer tensor's dtype cannot represent the number exactly. Floating dtypes round it.
void check_number(const OpInfo& op, const ValuePtr& x, double value);
void require_nonzero(const OpInfo& op, const ValuePtr& x, double divisor);
/// Converts a number to the dtype in which the op computes with the elements of x.
template <class D, Spec S>
scalar_of<D> as_scalar(const OpInfo& op, const Tensor<D, S>& x, double value) {
  check_number(op, x.value(), value);
  return static_cast<scalar_of<D>>(value);
}
template <class T>
struct TimesNumber {
  T k;
  constexpr T operator()(const T& v) const { return WrappingProduct{}(v, k); }
};
template <class T>
struct OverNumber {
  T k;
  constexpr T operator()(const T& v) const { return Quotient{}(v, k); }
};
/// F(element, number). NumberWith below is F(number, element).
template <class F, class T>
struct WithNumber {
  T k;
  SHARDLIB_FUNCTION auto operator()(auto v) const { return F{}(v, decltype(v)(k)); }
};
template <class F, class T>
struct NumberWith {
  T k;
  SHARDLIB_FUNCTION auto operator()(auto v) const { return F{}(decltype(v)(k), v); }
};

}  // namespace detail

/// Each element times a number. A partial operand stays partial. `x * 0.5`
template <dtype D, Spec S>
auto operator*(const Tensor<D, S>& x, detail::LocatedNumber factor)
    -> Tensor<detail::after_t<detail::is_number<"*", D>, D>, S> {
  const detail::Calling op{"*", {}, factor.site};
  const detail::TimesNumber<detail::scalar_of<D>> f{detail::as_scalar(op, x, factor.operand)};
  return detail::linear<"scale">(op, x, f);
}
template <dtype D, Spec S>
auto operator*(detail::LocatedNumber factor, const Tensor<D, S>& x)
    -> Tensor<detail::after_t<detail::is_number<"*", D>, D>, S> {
  return x * factor;
}
/// Each element divided by a number: `x / 2.0`. A number divided by each element: `1.0 / x`. A partial operand stays
/// partial; of integers it is an error.
template <dtype D, Spec S>
auto operator/(const Tensor<D, S>& x, detail::LocatedNumber divisor)
    -> Tensor<detail::after_t<detail::is_number<"/", D>, D>,
              detail::result_of<rules::divide_by_number, floating<D>, S>> {
  const detail::Calling op{"/", {}, divisor.site};
  if constexpr (!floating<D>) detail::require_nonzero(op, x.value(), divisor.operand);
  const detail::OverNumber<detail::scalar_of<D>> f{detail::as_scalar(op, x, divisor.operand)};
  return detail::linear<"scale">(op, x, f);
}
/// A compile error: the quotients would be rounded to whole numbers, `images / 255.0` of u8 to 0 and 1.
template <dtype D, Spec S, std::floating_point N>
requires(!floating<D> && !std::is_same_v<D, bool_>) Tensor<D, S>
operator/(const Tensor<D, S>& x, N /*divisor*/) {
  static_assert(detail::checked<rules::rounds_quotient, dtype_v<D>, S>::ok);
  return x;
}
/// Each element plus a number. The operand may not be partial, because every device would add the number. `x + 1.0`
template <dtype D, Spec S>
auto operator+(const Tensor<D, S>& x, detail::LocatedNumber constant)
    -> Tensor<detail::after_t<detail::is_number<"+", D>, D>, detail::named_result_for<D, rules::add_constant, "+", S>> {
  using F = detail::WithNumber<detail::WrappingSum, detail::scalar_of<D>>;
  const detail::Calling op{"+", {}, constant.site};
  return detail::map_as<"+", Tensor<D, S>>(op, F{detail::as_scalar(op, x, constant.operand)}, x);
}
/// Each element minus a number, or a number minus each element. The operand may not be partial. `1.0 - x`
template <dtype D, Spec S>
auto operator-(const Tensor<D, S>& x, detail::LocatedNumber constant)
    -> Tensor<detail::after_t<detail::is_number<"-", D>, D>, detail::named_result_for<D, rules::add_constant, "-", S>> {
  using F = detail::WithNumber<detail::WrappingDifference, detail::scalar_of<D>>;
  const detail::Calling op{"-", {}, constant.site};
  return detail::map_as<"-", Tensor<D, S>>(op, F{detail::as_scalar(op, x, constant.operand)}, x);
}
template <dtype D, Spec S>
auto operator+(detail::LocatedNumber constant, const Tensor<D, S>& x)
    -> Tensor<detail::after_t<detail::is_number<"+", D>, D>, detail::named_result_for<D, rules::add_constant, "+", S>> {
  return x + constant;
}
template <dtype D, Spec S>
auto operator-(detail::LocatedNumber constant, const Tensor<D, S>& x)
    -> Tensor<detail::after_t<detail::is_number<"-", D>, D>, detail::named_result_for<D, rules::add_constant, "-", S>> {
  using F = detail::NumberWith<detail::WrappingDifference, detail::scalar_of<D>>;
  const detail::Calling op{"-", {}, constant.site};
  return detail::map_as<"-", Tensor<D, S>>(op, F{detail::as_scalar(op, x, constant.operand)}, x);
}
template <dtype D, Spec S>
auto operator/(detail::LocatedNumber constant, const Tensor<D, S>& x)
    -> Tensor<detail::if_float<"/", D>, detail::named_result_for<D, rules::map1, "/", S>> {
  using F = detail::NumberWith<detail::Divide, detail::scalar_of<D>>;
  return detail::map_as<"/", Tensor<D, S>>(detail::Calling{"/", {}, constant.site},
                                           F{static_cast<detail::scalar_of<D>>(constant.operand)}, x);
}

namespace detail {
template <class Y>
concept has_spec = requires {  // a tensor, or what a program derives from one
  Y::spec;
};
template <class Y>
concept no_operand = !has_spec<Y> && !std::is_convertible_v<const Y&, double> && !requires {
  Y::to;
};
}  // namespace detail
// Compile errors for what is neither a tensor nor a number.
#define SHARDLIB_NO_OPERAND(symbol)                                                                      \
  template <dtype D, Spec S, detail::no_operand Y>                                                       \
  auto operator symbol(const Tensor<D, S>&, const Y&) {                                                  \
    return Tensor<D, detail::named_result_of<rules::no_operand, #symbol, detail::name_of_type<Y>, S>>(); \
  }                                                                                                      \
  template <dtype D, Spec S, detail::no_operand Y>                                                       \
  auto operator symbol(const Y& y, const Tensor<D, S>& x) {                                              \
    return x symbol y;                                                                                   \
  }
/// A compile error that names what a tensor has no + with.
SHARDLIB_NO_OPERAND(+)
/// A compile error that names what a tensor has no - with.
SHARDLIB_NO_OPERAND(-)
/// A compile error that names what a tensor has no * with.
SHARDLIB_NO_OPERAND(*)
/// A compile error that names what a tensor has no / with.
SHARDLIB_NO_OPERAND(/)
#undef SHARDLIB_NO_OPERAND

// ---- division with the sign of the divisor --------------------------------------------------------------------------

namespace detail {

struct floor_divide_function {
  template <class T>
  SHARDLIB_FUNCTION T operator()(const T& p, const T& q) const {
    if constexpr (std::is_integral_v<T>)
      return FloorQuotient{}(p, q);
    else
      return floor_divide(p, q);
  }
};
struct mod_function {
  template <class T>
  SHARDLIB_FUNCTION T operator()(const T& p, const T& q) const {
    if constexpr (std::is_integral_v<T>)
      return FloorRemainder{}(p, q);
    else
      return mod(p, q);
  }
};
inline constexpr const char* zero_derivative = "its derivative is zero wherever it has one";

template <OpName Name, class D, Spec S, class E, Spec T>
using floor_divided_t =
    Tensor<after_t<is_number<Name, D> && one_dtype<Name, D, E>, D>, result_for<D, rules::map2, Name, S, T>>;
template <OpName Name, class F, class D, Spec S, class E, Spec T>
auto floor_divided(const OpInfo& op, const Tensor<D, S>& a, const Tensor<E, T>& b) {
  using Out = floor_divided_t<Name, D, S, E, T>;
  if constexpr (floating<D>)
    return map_as<Name, Out>(op, F{}, a, b);
  else
    return record<Name, Out>(op, a.device(), sizes_by_name(op, parsed<Out::spec>, {&a.value(), &b.value()}),
                             IntegerDivide<F, D>{a.value(), b.value()});
}
template <OpName Name, class F, class D, Spec S>
auto floor_divided(const OpInfo& op, const Tensor<D, S>& x, double divisor) {
  if constexpr (!floating<D>) require_nonzero(op, x.value(), divisor);
  return map_as<Name, Tensor<D, S>>(op, WithNumber<F, scalar_of<D>>{as_scalar(op, x, divisor)}, x);
}

}  // namespace detail

/// The quotient rounded down, like // in Python. Integer division by zero is an error. It has no derivative: pass it
/// `stop_gradient(x)`. `floor_divide(a, b)`, or by a number `floor_divide(x, 2.0)`
template <dtype D, Spec S, dtype E, Spec T>
auto floor_divide(const Tensor<D, S>& a, const Tensor<E, T>& b, Site site = Site::current())
    -> detail::floor_divided_t<"floor_divide", D, S, E, T> {
  const detail::Calling op{"floor_divide", {}, site};
  detail::require_no_gradient(op, a.value(), detail::zero_derivative);
  detail::require_no_gradient(op, b.value(), detail::zero_derivative);
  return detail::floor_divided<"floor_divide", detail::floor_divide_function>(op, a, b);
}
template <dtype D, Spec S>
auto floor_divide(const Tensor<D, S>& x, double divisor, Site site = Site::current())
    -> Tensor<detail::after_t<detail::is_number<"floor_divide", D>, D>,
              detail::named_result_for<D, rules::map1, "floor_divide", S>> {
  const detail::Calling op{"floor_divide", {}, site};
  detail::require_no_gradient(op, x.value(), detail::zero_derivative);
  return detail::floor_divided<"floor_divide", detail::floor_divide_function>(op, x, divisor);
}
/// A compile error for a number as the first operand.
template <dtype D, Spec S>
auto floor_divide(double a, const Tensor<D, S>& b) {
  return detail::wrong_call<"floor_divide", "floor_divide(x, 2.0)`, or of two tensors `floor_divide(a, b)">(a, b);
}

/// The remainder of floor_divide, with the sign of the divisor, like % in Python. Integer division by zero is an error.
/// `mod(a, b)`, or by a number `mod(x, 8.0)`
template <dtype D, Spec S, dtype E, Spec T>
auto mod(const Tensor<D, S>& a, const Tensor<E, T>& b, Site site = Site::current())
    -> detail::floor_divided_t<"mod", D, S, E, T> {
  return detail::floor_divided<"mod", detail::mod_function>(detail::Calling{"mod", {}, site}, a, b);
}
template <dtype D, Spec S>
auto mod(const Tensor<D, S>& x, double divisor, Site site = Site::current())
    -> Tensor<detail::after_t<detail::is_number<"mod", D>, D>, detail::named_result_for<D, rules::map1, "mod", S>> {
  return detail::floor_divided<"mod", detail::mod_function>(detail::Calling{"mod", {}, site}, x, divisor);
}
/// A compile error for a number as the first operand.
template <dtype D, Spec S>
auto mod(double a, const Tensor<D, S>& b) {
  return detail::wrong_call<"mod", "mod(x, 8.0)`, or of two tensors `mod(a, b)">(a, b);
}

}  // namespace shardlib
