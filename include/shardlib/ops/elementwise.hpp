// Elementwise arithmetic and functions, which broadcast by name; casts.
#pragma once

#include <type_traits>

#include "shardlib/ops/map.hpp"
#include "shardlib/ops/record.hpp"
#include "shardlib/ops/result.hpp"
#include "shardlib/rules/all.hpp"
#include "shardlib/support/wrapping.hpp"

namespace shardlib {

// ---- between tensors -----------------------------------------------------------------------------------------------
// The operators + - * / belong to Tensor (types/tensor.hpp) and call these functions. Integer division by zero is an
// error.

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
template <class D>
struct IntegerDivide {
  ValuePtr a, b;
  Buffer operator()(const Value& out) const;
};

template <class X>
inline constexpr auto add_vjp = [](const auto& ct) { return unbroadcast<X>(ct); };
template <class D, Spec S, class E, Spec T>
auto add(const Tensor<D, S>& a, const Tensor<E, T>& b, const Site& site) -> arithmetic_t<"+", D, S, E, T> {
  using Out = arithmetic_t<"+", D, S, E, T>;
  const Calling op{"+", {}, site};
  return record<"+", Out>(op, a.device(), sizes_by_name(op, parsed<Out::spec>, a.value(), b.value()),
                          Pointwise<WrappingSum, D>{a.value(), b.value()}, vjp(a, add_vjp<Tensor<D, S>>),
                          vjp(b, add_vjp<Tensor<E, T>>));
}

template <class X>
inline constexpr auto subtract_vjp = [](const auto& ct) { return unbroadcast<X>(-ct); };
template <class D, Spec S, class E, Spec T>
auto subtract(const Tensor<D, S>& a, const Tensor<E, T>& b, const Site& site) -> arithmetic_t<"-", D, S, E, T> {
  using Out = arithmetic_t<"-", D, S, E, T>;
  const Calling op{"-", {}, site};
  return record<"-", Out>(op, a.device(), sizes_by_name(op, parsed<Out::spec>, a.value(), b.value()),
                          Pointwise<WrappingDifference, D>{a.value(), b.value()}, vjp(a, add_vjp<Tensor<D, S>>),
                          vjp(b, subtract_vjp<Tensor<E, T>>));
}

template <class X>
inline constexpr auto multiply_vjp = [](const auto& ct, const auto& other) { return unbroadcast<X>(ct * other); };
template <class D, Spec S, class E, Spec T>
auto multiply(const Tensor<D, S>& a, const Tensor<E, T>& b, const Site& site) -> arithmetic_t<"*", D, S, E, T> {
  using Out = arithmetic_t<"*", D, S, E, T>;
  const Calling op{"*", {}, site};
  return record<"*", Out>(op, a.device(), sizes_by_name(op, parsed<Out::spec>, a.value(), b.value()),
                          Pointwise<WrappingProduct, D>{a.value(), b.value()},
                          vjp(a, save(b), multiply_vjp<Tensor<D, S>>), vjp(b, save(a), multiply_vjp<Tensor<E, T>>));
}

template <class X>
inline constexpr auto dividend_vjp = [](const auto& ct, const auto& other) { return unbroadcast<X>(ct / other); };
template <class X>
inline constexpr auto divisor_vjp =
    [](const auto& ct, const auto& x, const auto& y) { return unbroadcast<X>(-(ct * x / (y * y))); };
template <class D, Spec S, class E, Spec T>
auto divide(const Tensor<D, S>& a, const Tensor<E, T>& b, const Site& site) -> arithmetic_t<"/", D, S, E, T> {
  using Out = arithmetic_t<"/", D, S, E, T>;
  using Kernel = std::conditional_t<floating<D>, Pointwise<Divide, D>, IntegerDivide<D>>;
  const Calling op{"/", {}, site};
  return record<"/", Out>(op, a.device(), sizes_by_name(op, parsed<Out::spec>, a.value(), b.value()),
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
  return linear<"negate">(Calling{"negate", {}, site}, x, Negate{});
}

// ---- with a number -------------------------------------------------------------------------------------------------

/// Throws if an integer tensor's dtype cannot represent the number exactly. Floating dtypes round it.
void check_number(const OpInfo& op, const ValuePtr& x, double value);
void require_nonzero(const OpInfo& op, const ValuePtr& x, double divisor);
/// Converts a number to the dtype in which the op computes with the elements of x.
template <class D, Spec S>
scalar_of<D> beside(const OpInfo& op, const Tensor<D, S>& x, double value) {
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
  auto operator()(auto v) const { return F{}(v, decltype(v)(k)); }
};
template <class F, class T>
struct NumberWith {
  T k;
  auto operator()(auto v) const { return F{}(decltype(v)(k), v); }
};

}  // namespace detail

/// Each element times a number. A partial operand stays partial. `x * 0.5`
template <dtype D, Spec S>
auto operator*(const Tensor<D, S>& x, detail::LocatedNumber factor)
    -> Tensor<detail::after_t<detail::is_number<"*", D>, D>, S> {
  const detail::Calling op{"*", {}, factor.site};
  const detail::TimesNumber<detail::scalar_of<D>> f{detail::beside(op, x, factor.operand)};
  return detail::linear<"scale">(detail::OpInfo{"scale", {}, factor.site}, x, f);
}
template <dtype D, Spec S>
auto operator*(detail::LocatedNumber factor, const Tensor<D, S>& x)
    -> Tensor<detail::after_t<detail::is_number<"*", D>, D>, S> {
  return x * factor;
}
/// Each element divided by a number: `x / 2.0`. A number divided by each element: `1.0 / x`
template <dtype D, Spec S>
auto operator/(const Tensor<D, S>& x, detail::LocatedNumber divisor)
    -> Tensor<detail::after_t<detail::is_number<"/", D>, D>, S> {
  const detail::Calling op{"/", {}, divisor.site};
  if constexpr (!floating<D>) detail::require_nonzero(op, x.value(), divisor.operand);
  const detail::OverNumber<detail::scalar_of<D>> f{detail::beside(op, x, divisor.operand)};
  return detail::linear<"scale">(detail::OpInfo{"scale", {}, divisor.site}, x, f);
}
/// Each element plus a number. The operand may not be partial, because every device would add the number. `x + 1.0`
template <dtype D, Spec S>
auto operator+(const Tensor<D, S>& x, detail::LocatedNumber constant)
    -> Tensor<detail::after_t<detail::is_number<"+", D>, D>, detail::result_of<rules::add_constant, OpName("+"), S>> {
  using F = detail::WithNumber<detail::WrappingSum, detail::scalar_of<D>>;
  const detail::Calling op{"+", {}, constant.site};
  return detail::map_as<"+", Tensor<D, S>>(op, F{detail::beside(op, x, constant.operand)}, x);
}
/// Each element minus a number, or a number minus each element. The operand may not be partial. `1.0 - x`
template <dtype D, Spec S>
auto operator-(const Tensor<D, S>& x, detail::LocatedNumber constant)
    -> Tensor<detail::after_t<detail::is_number<"-", D>, D>, detail::result_of<rules::add_constant, OpName("-"), S>> {
  using F = detail::WithNumber<detail::WrappingDifference, detail::scalar_of<D>>;
  const detail::Calling op{"-", {}, constant.site};
  return detail::map_as<"-", Tensor<D, S>>(op, F{detail::beside(op, x, constant.operand)}, x);
}
template <dtype D, Spec S>
auto operator+(detail::LocatedNumber constant, const Tensor<D, S>& x)
    -> Tensor<detail::after_t<detail::is_number<"+", D>, D>, detail::result_of<rules::add_constant, OpName("+"), S>> {
  return x + constant;
}
template <dtype D, Spec S>
auto operator-(detail::LocatedNumber constant, const Tensor<D, S>& x)
    -> Tensor<detail::after_t<detail::is_number<"-", D>, D>, detail::result_of<rules::add_constant, OpName("-"), S>> {
  using F = detail::NumberWith<detail::WrappingDifference, detail::scalar_of<D>>;
  const detail::Calling op{"-", {}, constant.site};
  return detail::map_as<"-", Tensor<D, S>>(op, F{detail::beside(op, x, constant.operand)}, x);
}
template <dtype D, Spec S>
auto operator/(detail::LocatedNumber constant, const Tensor<D, S>& x)
    -> Tensor<detail::after_t<detail::is_float<"/", D>, D>, detail::result_of<rules::map1, OpName("/"), S>> {
  using F = detail::NumberWith<detail::Divide, detail::scalar_of<D>>;
  return detail::map_as<"/", Tensor<D, S>>(detail::Calling{"/", {}, constant.site},
                                           F{static_cast<detail::scalar_of<D>>(constant.operand)}, x);
}

// ---- functions of one and two operands -----------------------------------------------------------------------------

// Functions of one operand, which may not be partial, because f(a + b) is not f(a) + f(b). Each function is a named
// type, so that tensors of all specs share its loop.
#define SHARDLIB_UNARY(name)                                                                                       \
  namespace detail {                                                                                               \
  struct name##_function {                                                                                         \
    auto operator()(auto v) const { return name(v); }                                                              \
  };                                                                                                               \
  }                                                                                                                \
  template <dtype D, Spec S>                                                                                       \
  auto name(const Tensor<D, S>& x, Site site = Site::current())                                                    \
      ->Tensor<detail::after_t<detail::is_float<#name, D>, D>, detail::result_of<rules::map1, OpName(#name), S>> { \
    return detail::map_as<#name, Tensor<D, S>>(detail::Calling{#name, {}, site}, detail::name##_function{}, x);    \
  }
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
/// x * sigmoid(x) of each element, also called SiLU (Ramachandran et al. 2017). `swish(x)`
SHARDLIB_UNARY(swish)
#undef SHARDLIB_UNARY

#define SHARDLIB_BINARY(name, Result, expression)                                                         \
  namespace detail {                                                                                      \
  struct name##_function {                                                                                \
    auto operator()(auto p, auto q) const { return expression; }                                          \
  };                                                                                                      \
  }                                                                                                       \
  template <dtype D, Spec S, dtype E, Spec T>                                                             \
  auto name(const Tensor<D, S>& a, const Tensor<E, T>& b, Site site = Site::current())                    \
      ->Tensor<detail::after_t<detail::one_dtype<#name, D, E>, Result>,                                   \
               detail::result_of<rules::map2, OpName(#name), S, T>> {                                     \
    using Out = Tensor<Result, detail::result_of<rules::map2, OpName(#name), S, T>>;                      \
    return detail::map_as<#name, Out>(detail::Calling{#name, {}, site}, detail::name##_function{}, a, b); \
  }
// The second operand may be a number: `greater(x, 0.0)`.
#define SHARDLIB_BINARY_WITH_NUMBER(name, Result, expression)                            \
  SHARDLIB_BINARY(name, Result, expression)                                              \
  template <dtype D, Spec S>                                                             \
  auto name(const Tensor<D, S>& a, double b, Site site = Site::current())                \
      ->Tensor<Result, detail::result_of<rules::map1, OpName(#name), S>> {               \
    using F = detail::WithNumber<detail::name##_function, detail::scalar_of<D>>;         \
    const detail::Calling op{#name, {}, site};                                           \
    return detail::map_as<#name, Tensor<Result, S>>(op, F{detail::beside(op, a, b)}, a); \
  }
/// The larger of two elements. Operands broadcast by name. `maximum(a, b)`, or with a number `maximum(x, 0.0)`
SHARDLIB_BINARY_WITH_NUMBER(maximum, D, (p < q ? q : p))
/// The smaller of two elements. Operands broadcast by name. `minimum(a, b)`, or with a number `minimum(x, 1.0)`
SHARDLIB_BINARY_WITH_NUMBER(minimum, D, (q < p ? q : p))
/// True where both elements are equal. `equal(a, b)`
SHARDLIB_BINARY_WITH_NUMBER(equal, bool_, p == q)
/// True where the elements differ. `not_equal(a, b)`
SHARDLIB_BINARY_WITH_NUMBER(not_equal, bool_, p != q)
/// True where a < b. `less(a, b)`
SHARDLIB_BINARY_WITH_NUMBER(less, bool_, p < q)
/// True where a <= b. `less_equal(a, b)`
SHARDLIB_BINARY_WITH_NUMBER(less_equal, bool_, p <= q)
/// True where a > b. `greater(x, 0.0)`
SHARDLIB_BINARY_WITH_NUMBER(greater, bool_, p > q)
/// True where a >= b. `greater_equal(a, b)`
SHARDLIB_BINARY_WITH_NUMBER(greater_equal, bool_, p >= q)
/// True where both bool_ elements are true. `logical_and(causal, same_segment)`
SHARDLIB_BINARY(logical_and, bool_, p&& q)
/// True where at least one of the bool_ elements is true. `logical_or(causal, is_prefix)`
SHARDLIB_BINARY(logical_or, bool_, p || q)
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
struct Where {
  ValuePtr c, a, b;
  Buffer operator()(const Value& out) const;
};
template <class X>
inline constexpr auto masked_vjp = [](const auto& ct, const auto& m) { return unbroadcast<X>(masked(m, ct)); };
struct Not {
  bool operator()(bool v) const { return !v; }
};
template <class X>
inline constexpr auto not_masked_vjp = [](const auto& ct, const auto& m) {
  using M = std::remove_cvref_t<decltype(m)>;
  return unbroadcast<X>(masked(map_as<"not", M>(OpInfo{"not", {}, {}}, Not{}, m), ct));
};
}  // namespace detail

/// Elements of a where c holds, else 0. `a` may be partial, because zeros do not change a sum. `masked(seen, scores)`
template <dtype B, Spec C, dtype D, Spec S>
auto masked(const Tensor<B, C>& c, const Tensor<D, S>& a, Site site = Site::current())
    -> Tensor<detail::after_t<detail::is_condition<"masked", B>, D>, detail::result_of<rules::where, C, S, S>> {
  using Out = Tensor<D, detail::result_of<rules::where, C, S, S>>;
  const detail::Calling op{"masked", {}, site};
  return detail::record<"masked", Out>(op, a.device(),
                                       detail::sizes_by_name(op, detail::parsed<Out::spec>, a.value(), c.value()),
                                       detail::WhereElseNumber<D>{c.value(), a.value(), D{}},
                                       detail::vjp(a, detail::save(c), detail::masked_vjp<Tensor<D, S>>));
}

/// Elements of a where c holds, else the constant. For a partial `a`, use masked(). `where(seen, scores, -1e30)`
template <dtype B, Spec C, dtype D, Spec S>
auto where(const Tensor<B, C>& c, const Tensor<D, S>& a, double otherwise, Site site = Site::current())
    -> Tensor<detail::after_t<detail::is_condition<"where", B>, D>,
              detail::result_of<rules::map2, OpName("where"), S, C>> {
  using Out = Tensor<D, detail::result_of<rules::map2, OpName("where"), S, C>>;
  const detail::Calling op{"where", {}, site};
  return detail::record<"where", Out>(
      op, a.device(), detail::sizes_by_name(op, detail::parsed<Out::spec>, a.value(), c.value()),
      detail::WhereElseNumber<D>{c.value(), a.value(), static_cast<D>(detail::beside(op, a, otherwise))},
      detail::vjp(a, detail::save(c), detail::masked_vjp<Tensor<D, S>>));
}
/// Elements of a where c holds, else of b. c may not be partial. On each axis, a and b are either both partial or
/// neither. `where(greater(x, 0.0), x, y)`
template <dtype B, Spec C, dtype D, Spec S, dtype E, Spec T>
auto where(const Tensor<B, C>& c, const Tensor<D, S>& a, const Tensor<E, T>& b, Site site = Site::current())
    -> Tensor<detail::after_t<detail::is_condition<"where", B> && detail::one_dtype<"where", D, E>, D>,
              detail::result_of<rules::where, C, S, T>> {
  using Out = Tensor<D, detail::result_of<rules::where, C, S, T>>;
  const detail::Calling op{"where", {}, site};
  return detail::record<"where", Out>(
      op, a.device(), detail::sizes_by_name(op, detail::parsed<Out::spec>, c.value(), a.value(), b.value()),
      detail::Where<D>{c.value(), a.value(), b.value()},
      detail::vjp(a, detail::save(c), detail::masked_vjp<Tensor<D, S>>),
      detail::vjp(b, detail::save(c), detail::not_masked_vjp<Tensor<E, T>>));
}

// ---- casts ---------------------------------------------------------------------------------------------------------

namespace detail {
template <class To, class D>
Buffer cast_kernel(const Value& in, const Value& out);
template <class D>
inline constexpr auto cast_vjp = [](const auto& ct) { return cast<D>(ct); };
}  // namespace detail

/// The same values in another dtype. `cast<bf16>(w)`
template <dtype To, dtype D, Spec S>
auto cast(const Tensor<D, S>& x, Site site = Site::current())
    -> Tensor<To, detail::result_of<rules::cast, floating<To>, floating<D>, S>> {
  const detail::Calling op{"cast", {}, site};
  if constexpr (std::is_same_v<To, D>)
    return x;
  else if constexpr (floating<To> && floating<D>)
    return detail::record_unary<"cast", Tensor<To, S>>(op, x, detail::sizes_of(x.value()), detail::cast_kernel<To, D>,
                                                       detail::vjp(x, detail::cast_vjp<D>));
  else
    return detail::record_unary<"cast", Tensor<To, S>>(op, x, detail::sizes_of(x.value()), detail::cast_kernel<To, D>);
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
