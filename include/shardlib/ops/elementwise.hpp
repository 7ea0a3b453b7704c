// Elementwise arithmetic and functions, broadcasting by name.
#pragma once

#include <functional>

#include "shardlib/ops/map.hpp"
#include "shardlib/ops/reductions.hpp"

namespace shardlib {
namespace detail {

/// The functions of the linear ops, of one scalar.
struct Negate {
  auto operator()(auto v) const { return -v; }
};
template <class T>
struct Multiply {
  T k;
  auto operator()(T v) const { return v * k; }
};
template <class T>
struct Divide {
  T k;
  auto operator()(T v) const { return v / k; }
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
X linear(const char* name, const X& x, F f, Site site = {}) {
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

[[gnu::noinline]] inline Extents broadcast_sizes(const OpInfo& op, const ValuePtr& x, const ValuePtr& y,
                                                 const TensorSpec& out) {
  Bindings names(op, x->device);
  names.bind(*x);
  names.bind(*y);
  return names.sizes(out);
}

}  // namespace detail

template <dtype D, Spec S, dtype E, Spec T>
auto operator+(const Tensor<D, S>& a, const Tensor<E, T>& b)
    -> Tensor<detail::after_t<detail::one_dtype<"+", D, E>, D>, detail::result_of<rules::add, Op("+"), S, T>> {
  using Out = Tensor<D, detail::result_of<rules::add, Op("+"), S, T>>;
  const detail::OpInfo op{"+", {}, {}};
  return detail::record<"+", Out>(
      op, a.device(), detail::broadcast_sizes(op, a.value(), b.value(), detail::parsed<Out::spec>),
      detail::Pointwise<std::plus<>, D>{a.value(), b.value()},
      detail::vjp(a, detail::save(), [](const auto& ct) { return detail::unbroadcast<Tensor<D, S>>(ct); }),
      detail::vjp(b, detail::save(), [](const auto& ct) { return detail::unbroadcast<Tensor<E, T>>(ct); }));
}

template <dtype D, Spec S, dtype E, Spec T>
auto operator-(const Tensor<D, S>& a, const Tensor<E, T>& b)
    -> Tensor<detail::after_t<detail::one_dtype<"-", D, E>, D>, detail::result_of<rules::add, Op("-"), S, T>> {
  using Out = Tensor<D, detail::result_of<rules::add, Op("-"), S, T>>;
  const detail::OpInfo op{"-", {}, {}};
  return detail::record<"-", Out>(
      op, a.device(), detail::broadcast_sizes(op, a.value(), b.value(), detail::parsed<Out::spec>),
      detail::Pointwise<std::minus<>, D>{a.value(), b.value()},
      detail::vjp(a, detail::save(), [](const auto& ct) { return detail::unbroadcast<Tensor<D, S>>(ct); }),
      detail::vjp(b, detail::save(), [](const auto& ct) { return detail::unbroadcast<Tensor<E, T>>(-ct); }));
}

template <dtype D, Spec S, dtype E, Spec T>
auto operator*(const Tensor<D, S>& a, const Tensor<E, T>& b)
    -> Tensor<detail::after_t<detail::one_dtype<"*", D, E>, D>, detail::result_of<rules::multiply, S, T>> {
  using Out = Tensor<D, detail::result_of<rules::multiply, S, T>>;
  const detail::OpInfo op{"*", {}, {}};
  return detail::record<"*", Out>(
      op, a.device(), detail::broadcast_sizes(op, a.value(), b.value(), detail::parsed<Out::spec>),
      detail::Pointwise<std::multiplies<>, D>{a.value(), b.value()},
      detail::vjp(a, detail::save(b),
                  [](const auto& ct, const auto& other) { return detail::unbroadcast<Tensor<D, S>>(ct * other); }),
      detail::vjp(b, detail::save(a),
                  [](const auto& ct, const auto& other) { return detail::unbroadcast<Tensor<E, T>>(ct * other); }));
}

template <dtype D, Spec S, dtype E, Spec T>
auto operator/(const Tensor<D, S>& a, const Tensor<E, T>& b)
    -> Tensor<detail::after_t<detail::one_dtype<"/", D, E>, D>, detail::result_of<rules::divide, S, T>> {
  using Out = Tensor<D, detail::result_of<rules::divide, S, T>>;
  const detail::OpInfo op{"/", {}, {}};
  return detail::record<"/", Out>(
      op, a.device(), detail::broadcast_sizes(op, a.value(), b.value(), detail::parsed<Out::spec>),
      detail::Pointwise<std::divides<>, D>{a.value(), b.value()},
      detail::vjp(a, detail::save(b),
                  [](const auto& ct, const auto& other) { return detail::unbroadcast<Tensor<D, S>>(ct / other); }),
      detail::vjp(b, detail::save(a, b), [](const auto& ct, const auto& x, const auto& y) {
        return detail::unbroadcast<Tensor<E, T>>(-(ct * x / (y * y)));
      }));
}

template <dtype D, Spec S>
auto operator-(const Tensor<D, S>& x) -> Tensor<D, S> {
  return detail::linear<"negate">("negate", x, detail::Negate{});
}
template <dtype D, Spec S>
auto operator*(const Tensor<D, S>& x, double factor) -> Tensor<D, S> {
  using T = detail::scalar_of<D>;
  return detail::linear<"scale">("scale", x, detail::Multiply<T>{static_cast<T>(factor)});
}
template <dtype D, Spec S>
auto operator*(double factor, const Tensor<D, S>& x) -> Tensor<D, S> {
  return x * factor;
}
template <dtype D, Spec S>
auto operator/(const Tensor<D, S>& x, double divisor) -> Tensor<D, S> {
  using T = detail::scalar_of<D>;
  return detail::linear<"scale">("scale", x, detail::Divide<T>{static_cast<T>(divisor)});
}
template <dtype D, Spec S>
auto operator+(const Tensor<D, S>& x, double constant)
    -> Tensor<D, detail::result_of<rules::add_constant, Op("+"), S>> {
  return detail::map_as<"+", Tensor<D, S>>(
      detail::OpInfo{"+", {}, {}},
      [k = static_cast<detail::scalar_of<D>>(constant)](auto v) { return v + decltype(v)(k); }, x);
}
template <dtype D, Spec S>
auto operator-(const Tensor<D, S>& x, double constant)
    -> Tensor<D, detail::result_of<rules::add_constant, Op("-"), S>> {
  return x + -constant;
}

// The functions are named types, not lambdas, so that tensors of all specs share their loops.
#define SHARDLIB_UNARY(name)                                                                                   \
  namespace detail {                                                                                           \
  struct name##_function {                                                                                     \
    auto operator()(auto v) const { return name(v); }                                                          \
  };                                                                                                           \
  }                                                                                                            \
  template <floating D, Spec S>                                                                                \
  auto name(const Tensor<D, S>& x, Site site)->Tensor<D, detail::result_of<rules::map1, Op(#name), S>> {       \
    return detail::map_as<#name, Tensor<D, S>>(detail::OpInfo{#name, {}, site}, detail::name##_function{}, x); \
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

#define SHARDLIB_BINARY(name, Result, expression)                                                        \
  namespace detail {                                                                                     \
  struct name##_function {                                                                               \
    auto operator()(auto p, auto q) const { return expression; }                                         \
  };                                                                                                     \
  }                                                                                                      \
  template <dtype D, Spec S, dtype E, Spec T>                                                            \
  auto name(const Tensor<D, S>& a, const Tensor<E, T>& b, Site site)                                     \
      ->Tensor<detail::after_t<detail::one_dtype<#name, D, E>, Result>,                                  \
               detail::result_of<rules::map2, Op(#name), S, T>> {                                        \
    using Out = Tensor<Result, detail::result_of<rules::map2, Op(#name), S, T>>;                         \
    return detail::map_as<#name, Out>(detail::OpInfo{#name, {}, site}, detail::name##_function{}, a, b); \
  }
SHARDLIB_BINARY(maximum, D, (p < q ? q : p))
SHARDLIB_BINARY(minimum, D, (q < p ? q : p))
SHARDLIB_BINARY(equal, bool_, p == q)
SHARDLIB_BINARY(not_equal, bool_, p != q)
SHARDLIB_BINARY(less, bool_, p < q)
SHARDLIB_BINARY(less_equal, bool_, p <= q)
SHARDLIB_BINARY(greater, bool_, p > q)
SHARDLIB_BINARY(greater_equal, bool_, p >= q)
SHARDLIB_BINARY(logical_and, bool_, p&& q)
SHARDLIB_BINARY(logical_or, bool_, p || q)
#undef SHARDLIB_BINARY

template <Spec C, dtype D, Spec S>
auto masked(const Tensor<bool_, C>& c, const Tensor<D, S>& a, Site site)
    -> Tensor<D, detail::result_of<rules::where, C, S, S>> {
  using Out = Tensor<D, detail::result_of<rules::where, C, S, S>>;
  const detail::OpInfo op{"masked", {}, site};
  const auto kernel = [c = c.value(), a = a.value()](const detail::Value& out) {
    Buffer result = detail::allocate(out);
    kernels::apply(
        out.device->exec(), detail::view(out.local), [](const bool_& m, const D& x, D& y) { y = m ? x : D{}; },
        detail::broadcast_operand<const bool_>(*c, detail::parsed<Out::spec>),
        detail::broadcast_operand<const D>(*a, detail::parsed<Out::spec>), detail::whole_operand(result.as<D>(), out));
    return result;
  };
  return detail::record<"masked", Out>(
      op, a.device(), detail::broadcast_sizes(op, a.value(), c.value(), detail::parsed<Out::spec>), kernel,
      detail::vjp(a, detail::save(c),
                  [](const auto& ct, const auto& m) { return detail::unbroadcast<Tensor<D, S>>(masked(m, ct)); }));
}

template <Spec C, dtype D, Spec S>
auto where(const Tensor<bool_, C>& c, const Tensor<D, S>& a, double otherwise, Site site)
    -> Tensor<D, detail::result_of<rules::map2, Op("where"), S, C>> {
  using Out = Tensor<D, detail::result_of<rules::map2, Op("where"), S, C>>;
  const detail::OpInfo op{"where", {}, site};
  const auto kernel = [c = c.value(), a = a.value(),
                       k = static_cast<D>(static_cast<detail::scalar_of<D>>(otherwise))](const detail::Value& out) {
    Buffer result = detail::allocate(out);
    kernels::apply(
        out.device->exec(), detail::view(out.local), [k](const bool_& m, const D& x, D& y) { y = m ? x : k; },
        detail::broadcast_operand<const bool_>(*c, detail::parsed<Out::spec>),
        detail::broadcast_operand<const D>(*a, detail::parsed<Out::spec>), detail::whole_operand(result.as<D>(), out));
    return result;
  };
  return detail::record<"where", Out>(
      op, a.device(), detail::broadcast_sizes(op, a.value(), c.value(), detail::parsed<Out::spec>), kernel,
      detail::vjp(a, detail::save(c),
                  [](const auto& ct, const auto& m) { return detail::unbroadcast<Tensor<D, S>>(masked(m, ct)); }));
}

template <Spec C, dtype D, Spec S, dtype E, Spec T>
auto where(const Tensor<bool_, C>& c, const Tensor<D, S>& a, const Tensor<E, T>& b, Site site)
    -> Tensor<detail::after_t<detail::one_dtype<"where", D, E>, D>, detail::result_of<rules::where, C, S, T>> {
  using Out = Tensor<D, detail::result_of<rules::where, C, S, T>>;
  const detail::OpInfo op{"where", {}, site};
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
  const auto kernel = [](const detail::Value& in, const detail::Value& out) {
    Buffer result = detail::allocate(out);
    kernels::apply_flat(
        out.device->exec(), out.count(),
        [](const D& a, To& y) { y = static_cast<To>(static_cast<detail::scalar_of<To>>(detail::load(a))); },
        in.as<const D>(), result.as<To>());
    return result;
  };
  const detail::OpInfo op{"cast", {}, site};
  if constexpr (floating<To> && floating<D>)
    return detail::record_unary<"cast", Out>(
        op, x, x.value()->global, kernel, detail::vjp(x, detail::save(), [](const auto& ct) { return cast<D>(ct); }));
  else
    return detail::record_unary<"cast", Out>(op, x, x.value()->global, kernel);
}

template <dtype D, Spec S>
auto stop_gradient(const Tensor<D, S>& x) -> Tensor<D, S> {
  return Tensor<D, S>(detail::detached(*x.value()));
}

}  // namespace shardlib
