// Elementwise arithmetic and functions, broadcasting by name.
#pragma once

#include <functional>

#include "shardlib/detail/wrapping.hpp"
#include "shardlib/kernels/elementwise.hpp"
#include "shardlib/kernels/strided.hpp"
#include "shardlib/ops/map.hpp"
#include "shardlib/ops/reductions.hpp"

namespace shardlib {
namespace detail {

/// The functions of the linear ops, of one scalar.
struct Negate {
  template <class T>
  T operator()(T v) const {
    if constexpr (std::is_integral_v<T>)
      return Wrapping<std::minus<>>{}(T{0}, v);
    else
      return -v;
  }
};
template <class T>
struct Multiply {
  T k;
  auto operator()(T v) const { return Wrapping<std::multiplies<>>{}(v, k); }
};
template <class T>
struct Divide {
  T k;
  auto operator()(T v) const { return Quotient{}(v, k); }
};
/// The kernel of a linear op. A named type, as Pointwise below, so that all specs share it.
template <class F, dtype D>
struct LinearKernel {
  F f;
  Buffer operator()(const Value& in, const Value& out) const {
    Buffer result = allocate(out);
    kernels::apply_flat(
        out.device->exec(), out.count(), [f = f](const D& a, D& y) { y = static_cast<D>(f(load(a))); },
        in.as<const D>(), result.as<D>());
    return result;
  }
};

/// A linear op of one operand: the same function of the cotangent, P -> P and R -> R.
template <Op Name, class X, class F>
X linear(const char* name, const X& x, F f, const Site& site = {}) {
  return record_unary<Name, X>(OpInfo{name, {}, site}, x, x.value()->global, LinearKernel<F, typename X::value_type>{f},
                               vjp(x, save(), [name, f](const auto& ct) { return linear<Name>(name, ct, f); }));
}

/// A broadcast loop without a derivative of its own: the kernel of + - * /.
template <class F, dtype D>
struct Pointwise {
  ValuePtr a, b;
  Buffer operator()(const Value& out) const {
    Buffer result = allocate(out);
    kernels::apply(
        out.device->exec(), view(out.local),
        [](const D& p, const D& q, D& r) { r = static_cast<D>(F{}(load(p), load(q))); },
        broadcast_operand<const D>(*a, *out.spec), broadcast_operand<const D>(*b, *out.spec),
        whole_operand(result.as<D>(), out));
    return result;
  }
};

/// a where the condition c holds, and a number elsewhere: the kernel of masked, and of where with a number.
template <dtype D>
struct Otherwise {
  ValuePtr c, a;
  D number;
  Buffer operator()(const Value& out) const {
    Buffer result = allocate(out);
    kernels::apply(
        out.device->exec(), view(out.local), [k = number](const bool_& m, const D& x, D& y) { y = m ? x : k; },
        broadcast_operand<const bool_>(*c, *out.spec), broadcast_operand<const D>(*a, *out.spec),
        whole_operand(result.as<D>(), out));
    return result;
  }
};

/// The kernel of / between integers.
template <dtype D>
struct IntegerDivision {
  ValuePtr a, b;
  Buffer operator()(const Value& out) const {
    const Extents extents = true_extents(*b);
    const auto strides = kernels::row_major(view(b->local));
    kernels::Nest<1> nest;
    for (int i = 0; i < extents.size(); ++i) nest.push(extents[i], {strides[i]});
    kernels::Walk<1> walk(nest, 0);
    const D* divisors = b->as<const D>();
    for (std::int64_t i = 0; i < nest.count(); ++i, walk.next())
      if (divisors[walk.offsets[0]] == 0)
        throw Error("the divisor `" + std::string(to_string(*b->spec).view()) +
                    "` has a zero in this block, by which integers cannot be divided; replace it, e.g. with `where`");
    return Pointwise<Quotient, D>{a, b}(out);
  }
};

/// A number beside the elements of x.
template <dtype D, Spec S>
scalar_of<D> beside(const OpInfo& op, const Tensor<D, S>& x, double value) {
  check_number(op, parsed<S>, *x.device(), dtype_v<D>, value);
  return static_cast<scalar_of<D>>(value);
}

}  // namespace detail

namespace detail {

template <class D, Spec S, class E, Spec T>
auto add(const Tensor<D, S>& a, const Tensor<E, T>& b, const Site& site) -> arithmetic_t<"+", D, S, E, T> {
  using Out = arithmetic_t<"+", D, S, E, T>;
  const Calling op{"+", {}, site};
  return record<"+", Out>(op, a.device(), broadcast_sizes(op, a.value(), b.value(), parsed<Out::spec>),
                          Pointwise<Wrapping<std::plus<>>, D>{a.value(), b.value()},
                          vjp(a, save(), [](const auto& ct) { return unbroadcast<Tensor<D, S>>(ct); }),
                          vjp(b, save(), [](const auto& ct) { return unbroadcast<Tensor<E, T>>(ct); }));
}

template <class D, Spec S, class E, Spec T>
auto subtract(const Tensor<D, S>& a, const Tensor<E, T>& b, const Site& site) -> arithmetic_t<"-", D, S, E, T> {
  using Out = arithmetic_t<"-", D, S, E, T>;
  const Calling op{"-", {}, site};
  return record<"-", Out>(op, a.device(), broadcast_sizes(op, a.value(), b.value(), parsed<Out::spec>),
                          Pointwise<Wrapping<std::minus<>>, D>{a.value(), b.value()},
                          vjp(a, save(), [](const auto& ct) { return unbroadcast<Tensor<D, S>>(ct); }),
                          vjp(b, save(), [](const auto& ct) { return unbroadcast<Tensor<E, T>>(-ct); }));
}

template <class D, Spec S, class E, Spec T>
auto multiply(const Tensor<D, S>& a, const Tensor<E, T>& b, const Site& site) -> arithmetic_t<"*", D, S, E, T> {
  using Out = arithmetic_t<"*", D, S, E, T>;
  const Calling op{"*", {}, site};
  return record<"*", Out>(
      op, a.device(), broadcast_sizes(op, a.value(), b.value(), parsed<Out::spec>),
      Pointwise<Wrapping<std::multiplies<>>, D>{a.value(), b.value()},
      vjp(a, save(b), [](const auto& ct, const auto& other) { return unbroadcast<Tensor<D, S>>(ct * other); }),
      vjp(b, save(a), [](const auto& ct, const auto& other) { return unbroadcast<Tensor<E, T>>(ct * other); }));
}

template <class D, Spec S, class E, Spec T>
auto divide(const Tensor<D, S>& a, const Tensor<E, T>& b, const Site& site) -> arithmetic_t<"/", D, S, E, T> {
  using Out = arithmetic_t<"/", D, S, E, T>;
  using Kernel = std::conditional_t<floating<D>, Pointwise<std::divides<>, D>, IntegerDivision<D>>;
  const Calling op{"/", {}, site};
  return record<"/", Out>(
      op, a.device(), broadcast_sizes(op, a.value(), b.value(), parsed<Out::spec>), Kernel{a.value(), b.value()},
      vjp(a, save(b), [](const auto& ct, const auto& other) { return unbroadcast<Tensor<D, S>>(ct / other); }),
      vjp(b, save(a, b),
          [](const auto& ct, const auto& x, const auto& y) { return unbroadcast<Tensor<E, T>>(-(ct * x / (y * y))); }));
}

template <class D, Spec S>
auto negate(const Tensor<D, S>& x, const Site& site)
    -> Tensor<std::enable_if_t<checked<rules::arithmetic_dtype, Op("-"), dtype_v<D>>::ok, D>, S> {
  const Calling op{"negate", {}, site};
  return linear<"negate">(op.name, x, Negate{}, site);
}

}  // namespace detail

template <dtype D, Spec S>
auto operator*(const Tensor<D, S>& x, detail::LocatedNumber factor)
    -> Tensor<detail::after_t<detail::is_number<"*", D>, D>, S> {
  const detail::Calling op{"*", {}, factor.site};
  return detail::linear<"scale">(
      "scale", x, detail::Multiply<detail::scalar_of<D>>{detail::beside(op, x, factor.operand)}, factor.site);
}
template <dtype D, Spec S>
auto operator*(detail::LocatedNumber factor, const Tensor<D, S>& x)
    -> Tensor<detail::after_t<detail::is_number<"*", D>, D>, S> {
  return x * factor;
}
template <dtype D, Spec S>
auto operator/(const Tensor<D, S>& x, detail::LocatedNumber divisor)
    -> Tensor<detail::after_t<detail::is_number<"/", D>, D>, S> {
  const detail::Calling op{"/", {}, divisor.site};
  if (!floating<D> && divisor.operand == 0)
    throw Error("/ of `" + std::string(std::string_view(S)) + "`" + op.at() + ": integers cannot be divided by zero (" +
                x.device()->describe() + ")");
  return detail::linear<"scale">(
      "scale", x, detail::Divide<detail::scalar_of<D>>{detail::beside(op, x, divisor.operand)}, divisor.site);
}
template <dtype D, Spec S>
auto operator+(const Tensor<D, S>& x, detail::LocatedNumber constant)
    -> Tensor<detail::after_t<detail::is_number<"+", D>, D>, detail::result_of<rules::add_constant, Op("+"), S>> {
  const detail::Calling op{"+", {}, constant.site};
  return detail::map_as<"+", Tensor<D, S>>(
      op,
      [k = detail::beside(op, x, constant.operand)](auto v) {
        return detail::Wrapping<std::plus<>>{}(v, decltype(v)(k));
      },
      x);
}
template <dtype D, Spec S>
auto operator-(const Tensor<D, S>& x, detail::LocatedNumber constant)
    -> Tensor<detail::after_t<detail::is_number<"-", D>, D>, detail::result_of<rules::add_constant, Op("-"), S>> {
  const detail::Calling op{"-", {}, constant.site};
  return detail::map_as<"-", Tensor<D, S>>(
      op,
      [k = detail::beside(op, x, constant.operand)](auto v) {
        return detail::Wrapping<std::minus<>>{}(v, decltype(v)(k));
      },
      x);
}
template <dtype D, Spec S>
auto operator+(detail::LocatedNumber constant, const Tensor<D, S>& x)
    -> Tensor<detail::after_t<detail::is_number<"+", D>, D>, detail::result_of<rules::add_constant, Op("+"), S>> {
  return x + constant;
}
template <dtype D, Spec S>
auto operator-(detail::LocatedNumber constant, const Tensor<D, S>& x)
    -> Tensor<detail::after_t<detail::is_number<"-", D>, D>, detail::result_of<rules::add_constant, Op("-"), S>> {
  const detail::Calling op{"-", {}, constant.site};
  return detail::map_as<"-", Tensor<D, S>>(
      op,
      [k = detail::beside(op, x, constant.operand)](auto v) {
        return detail::Wrapping<std::minus<>>{}(decltype(v)(k), v);
      },
      x);
}
template <dtype D, Spec S>
auto operator/(detail::LocatedNumber constant, const Tensor<D, S>& x)
    -> Tensor<detail::after_t<detail::is_float<"/", D>, D>, detail::result_of<rules::map1, Op("/"), S>> {
  return detail::map_as<"/", Tensor<D, S>>(
      detail::Calling{"/", {}, constant.site},
      [k = static_cast<detail::scalar_of<D>>(constant.operand)](auto v) { return decltype(v)(k) / v; }, x);
}

// The functions are named types, not lambdas, so that tensors of all specs share their loops.
#define SHARDLIB_UNARY(name)                                                                                    \
  namespace detail {                                                                                            \
  struct name##_function {                                                                                      \
    auto operator()(auto v) const { return name(v); }                                                           \
  };                                                                                                            \
  }                                                                                                             \
  template <dtype D, Spec S>                                                                                    \
  auto name(const Tensor<D, S>& x, Site site)                                                                   \
      ->Tensor<detail::after_t<detail::is_float<#name, D>, D>, detail::result_of<rules::map1, Op(#name), S>> {  \
    return detail::map_as<#name, Tensor<D, S>>(detail::Calling{#name, {}, site}, detail::name##_function{}, x); \
  }
SHARDLIB_UNARY(exp)
SHARDLIB_UNARY(log)
SHARDLIB_UNARY(tanh)
SHARDLIB_UNARY(sigmoid)
SHARDLIB_UNARY(sqrt)
SHARDLIB_UNARY(rsqrt)
SHARDLIB_UNARY(square)
SHARDLIB_UNARY(abs)
SHARDLIB_UNARY(relu)
SHARDLIB_UNARY(gelu)
SHARDLIB_UNARY(swish)
#undef SHARDLIB_UNARY

#define SHARDLIB_BINARY(name, Result, expression)                                                         \
  namespace detail {                                                                                      \
  struct name##_function {                                                                                \
    auto operator()(auto p, auto q) const { return expression; }                                          \
  };                                                                                                      \
  }                                                                                                       \
  template <dtype D, Spec S, dtype E, Spec T>                                                             \
  auto name(const Tensor<D, S>& a, const Tensor<E, T>& b, Site site)                                      \
      ->Tensor<detail::after_t<detail::one_dtype<#name, D, E>, Result>,                                   \
               detail::result_of<rules::map2, Op(#name), S, T>> {                                         \
    using Out = Tensor<Result, detail::result_of<rules::map2, Op(#name), S, T>>;                          \
    return detail::map_as<#name, Out>(detail::Calling{#name, {}, site}, detail::name##_function{}, a, b); \
  }
#define SHARDLIB_BINARY_WITH_NUMBER(name, Result, expression)                                                    \
  SHARDLIB_BINARY(name, Result, expression)                                                                      \
  template <dtype D, Spec S>                                                                                     \
  auto name(const Tensor<D, S>& a, double b, Site site)                                                          \
      ->Tensor<Result, detail::result_of<rules::map1, Op(#name), S>> {                                           \
    const detail::Calling op{#name, {}, site};                                                                   \
    return detail::map_as<#name, Tensor<Result, S>>(                                                             \
        op, [k = detail::beside(op, a, b)](auto v) { return detail::name##_function{}(v, decltype(v)(k)); }, a); \
  }
SHARDLIB_BINARY_WITH_NUMBER(maximum, D, (p < q ? q : p))
SHARDLIB_BINARY_WITH_NUMBER(minimum, D, (q < p ? q : p))
SHARDLIB_BINARY_WITH_NUMBER(equal, bool_, p == q)
SHARDLIB_BINARY_WITH_NUMBER(not_equal, bool_, p != q)
SHARDLIB_BINARY_WITH_NUMBER(less, bool_, p < q)
SHARDLIB_BINARY_WITH_NUMBER(less_equal, bool_, p <= q)
SHARDLIB_BINARY_WITH_NUMBER(greater, bool_, p > q)
SHARDLIB_BINARY_WITH_NUMBER(greater_equal, bool_, p >= q)
SHARDLIB_BINARY(logical_and, bool_, p&& q)
SHARDLIB_BINARY(logical_or, bool_, p || q)
#undef SHARDLIB_BINARY_WITH_NUMBER
#undef SHARDLIB_BINARY

template <dtype B, Spec C, dtype D, Spec S>
auto masked(const Tensor<B, C>& c, const Tensor<D, S>& a, Site site)
    -> Tensor<detail::after_t<detail::is_condition<"masked", B>, D>, detail::result_of<rules::where, C, S, S>> {
  using Out = Tensor<D, detail::result_of<rules::where, C, S, S>>;
  const detail::Calling op{"masked", {}, site};
  return detail::record<"masked", Out>(
      op, a.device(), detail::broadcast_sizes(op, a.value(), c.value(), detail::parsed<Out::spec>),
      detail::Otherwise<D>{c.value(), a.value(), D{}},
      detail::vjp(a, detail::save(c),
                  [](const auto& ct, const auto& m) { return detail::unbroadcast<Tensor<D, S>>(masked(m, ct)); }));
}

template <dtype B, Spec C, dtype D, Spec S>
auto where(const Tensor<B, C>& c, const Tensor<D, S>& a, double otherwise, Site site)
    -> Tensor<detail::after_t<detail::is_condition<"where", B>, D>, detail::result_of<rules::map2, Op("where"), S, C>> {
  using Out = Tensor<D, detail::result_of<rules::map2, Op("where"), S, C>>;
  const detail::Calling op{"where", {}, site};
  const auto number = static_cast<D>(detail::beside(op, a, otherwise));
  return detail::record<"where", Out>(
      op, a.device(), detail::broadcast_sizes(op, a.value(), c.value(), detail::parsed<Out::spec>),
      detail::Otherwise<D>{c.value(), a.value(), number},
      detail::vjp(a, detail::save(c),
                  [](const auto& ct, const auto& m) { return detail::unbroadcast<Tensor<D, S>>(masked(m, ct)); }));
}

template <dtype B, Spec C, dtype D, Spec S, dtype E, Spec T>
auto where(const Tensor<B, C>& c, const Tensor<D, S>& a, const Tensor<E, T>& b, Site site)
    -> Tensor<detail::after_t<detail::is_condition<"where", B> && detail::one_dtype<"where", D, E>, D>,
              detail::result_of<rules::where, C, S, T>> {
  using Out = Tensor<D, detail::result_of<rules::where, C, S, T>>;
  const detail::Calling op{"where", {}, site};
  detail::Bindings names(op, a.device());
  names.bind(*c.value());
  names.bind(*a.value());
  names.bind(*b.value());
  const auto kernel = [c = c.value(), a = a.value(), b = b.value()](const detail::Value& out) {
    Buffer result = detail::allocate(out);
    kernels::apply(
        out.device->exec(), detail::view(out.local),
        [](const bool_& m, const D& x, const D& y, D& z) { z = m ? x : y; },
        detail::broadcast_operand<const bool_>(*c, detail::parsed<Out::spec>),
        detail::broadcast_operand<const D>(*a, detail::parsed<Out::spec>),
        detail::broadcast_operand<const D>(*b, detail::parsed<Out::spec>), detail::whole_operand(result.as<D>(), out));
    return result;
  };
  const auto not_c = [](const auto& m) {
    return detail::map_as<"not", std::remove_cvref_t<decltype(m)>>(
        detail::OpInfo{"not", {}, {}}, [](bool v) { return !v; }, m);
  };
  return detail::record<"where", Out>(
      op, a.device(), names.sizes(detail::parsed<Out::spec>), kernel,
      detail::vjp(a, detail::save(c),
                  [](const auto& ct, const auto& m) { return detail::unbroadcast<Tensor<D, S>>(masked(m, ct)); }),
      detail::vjp(b, detail::save(c), [not_c](const auto& ct, const auto& m) {
        return detail::unbroadcast<Tensor<E, T>>(masked(not_c(m), ct));
      }));
}

template <dtype To, dtype D, Spec S>
auto cast(const Tensor<D, S>& x, Site site)
    -> Tensor<To, detail::result_of<rules::cast, floating<To>, floating<D>, S>> {
  using Out = Tensor<To, S>;
  if constexpr (std::is_same_v<To, D>) return x;
  const auto kernel = [](const detail::Value& in, const detail::Value& out) {
    Buffer result = detail::allocate(out);
    kernels::apply_flat(
        out.device->exec(), out.count(),
        [](const D& a, To& y) { y = static_cast<To>(detail::converted<detail::scalar_of<To>>(detail::load(a))); },
        in.as<const D>(), result.as<To>());
    return result;
  };
  const detail::Calling op{"cast", {}, site};
  if constexpr (floating<To> && floating<D>)
    return detail::record_unary<"cast", Out>(
        op, x, x.value()->global, kernel, detail::vjp(x, detail::save(), [](const auto& ct) { return cast<D>(ct); }));
  else
    return detail::record_unary<"cast", Out>(op, x, x.value()->global, kernel);
}

template <dtype D, Spec S>
auto stop_gradient(const Tensor<D, S>& x, Site site) -> Tensor<D, S> {
  const detail::Calling op{"stop_gradient", {}, site};
  detail::stop_below(x.value()->slot);
  return Tensor<D, S>(detail::stopped(*x.value()));
}

}  // namespace shardlib
