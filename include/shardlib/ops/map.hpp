// map: any function of numbers over broadcast operands, as one fused loop forward and one backward through dual
// numbers. The loops over contiguous elements are in this header, because only here the function's type is known. All
// other code of map is type-erased.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "shardlib/ops/number.hpp"
#include "shardlib/ops/record.hpp"
#include "shardlib/ops/reductions.hpp"
#include "shardlib/ops/result.hpp"
#include "shardlib/rules/all.hpp"
#include "shardlib/support/loop.hpp"

namespace shardlib {
namespace detail {

inline constexpr std::size_t most_mapped = 4;

/// A type-erased function of numbers. A loop runs over n contiguous elements of each array in `data`.
struct MapFunction : Counted {
  using Loop = void (*)(const void* f, std::int64_t n, std::byte* const* data);
  const void* f = nullptr;
  std::size_t operands = 0;
  DType result{};
  Loop forward = nullptr;  ///< operands..., result
  /// Loops over the result's cotangent, operands..., cotangent of one operand. Null: no derivative.
  std::array<Loop, most_mapped> vjp = {};
  /// Loops over the result's cotangent, operands..., all cotangents. Null: an operand has no derivative.
  Loop vjp_all = nullptr;
};
/// Sums an operand's cotangent from the result's shape to the operand's shape.
using UnbroadcastFn = ValuePtr (*)(const ValuePtr&);

/// Records a map. `ct_spec` is the spec of the result's cotangent.
ValuePtr record_map(const OpInfo& op, const TensorSpec& spec, const TensorSpec& ct_spec,
                    const Handle<const MapFunction>& function, const std::array<ValuePtr, most_mapped>& operands,
                    const std::array<UnbroadcastFn, most_mapped>& sums);

/// Converts an element to the number type that the loop computes with.
template <class D>
constexpr scalar_of<D> load(const D& x) {
  return static_cast<scalar_of<D>>(x);
}

/// The loops of F for operands of dtypes D... and a result of dtype R. Tensors of all specs share them.
template <class F, class R, class... D>
struct MapLoops : MapFunction {
  static constexpr std::size_t N = sizeof...(D);
  static_assert(N <= most_mapped);
  F function;

  explicit MapLoops(const F& g) : function(g) {
    f = &function;
    operands = N;
    result = dtype_v<R>;
    forward = &kernels::ElementLoop<Forward, const D..., R>::run;
    if constexpr (floating<R>) {
      [&]<std::size_t... I>(std::index_sequence<I...>) {
        (set_pull<I, D>(), ...);
      }
      (std::make_index_sequence<N>{});
      if constexpr (N > 1 && (floating<D> && ...))
        vjp_all = &kernels::ElementLoop<VjpAll, const R, const D..., D...>::run;
    }
  }

 private:
  template <std::size_t I, class DI>
  void set_pull() {
    if constexpr (floating<DI>) vjp[I] = &kernels::ElementLoop<VjpOne<I, DI>, const R, const D..., DI>::run;
  }
  /// Input I of the function: a dual number with the derivative 1 at index `At`, or a plain number.
  template <std::size_t Size, int At, class X>
  static auto dual_input(const X& x) {
    if constexpr (floating<X>) {
      Jet<scalar_of<X>, Size> jet(load(x));
      if constexpr (At >= 0) jet.by[static_cast<std::size_t>(At)] = 1;
      return jet;
    } else {
      return load(x);
    }
  }
  /// The derivative by input `at`. It is zero for a result that depends on no input, such as `1.0`.
  template <class Y>
  static scalar_of<R> slope(const Y& y, std::size_t at) {
    if constexpr (is_jet<Y>)
      return y.by[at];
    else
      return 0;
  }
  // Functors, not lambdas: g++ 12 loses parameter packs that lambdas capture. Each functor holds only the function.
  struct Forward {
    F f;
    void operator()(const D&... in, R& y) const { y = static_cast<R>(f(load(in)...)); }
  };
  template <std::size_t I, class DI>
  struct VjpOne {
    F f;
    void operator()(const R& c, const D&... in, DI& g) const {
      g = static_cast<DI>(load(c) * slope(dual<1>(std::index_sequence_for<D...>{}, in...), 0));
    }
    template <std::size_t One, std::size_t... K>
    auto dual(std::index_sequence<K...>, const D&... in) const {
      return f(dual_input < One, K == I ? 0 : -1 > (in)...);
    }
  };
  struct VjpAll {
    F f;
    void operator()(const R& c, const D&... in, D&... g) const { run(std::index_sequence_for<D...>{}, c, in..., g...); }
    template <std::size_t... K>
    void run(std::index_sequence<K...>, const R& c, const D&... in, D&... g) const {
      const auto y = f(dual_input<N, static_cast<int>(K)>(in)...);
      ((g = static_cast<D>(load(c) * slope(y, K))), ...);
    }
  };
  static_assert(sizeof(Forward) == sizeof(F));
};

/// Sums a cotangent of the result's shape over the dims that the broadcast repeated. The result has the operand's
/// shape.
template <class X, class Ct>
auto unbroadcast(const Ct& ct) {
  constexpr Spec axes = axes_of<X::spec, Ct::spec>();
  constexpr Spec due = dual_spec(X::spec, axes);
  if constexpr (parsed<Ct::spec>.rank() == parsed<X::spec>.rank())
    return ct;
  else
    return sum<make_op(Ct::spec, due)>(ct);
}

/// Sums a cotangent of type Ct to the shape of the map's operand X, and checks the rules for it.
template <OpName Name, class X, class Ct>
ValuePtr unbroadcast_value(const ValuePtr& ct) {
  using Full = Tensor<typename X::value_type, Ct::spec>;
  using Returned = decltype(unbroadcast<X>(std::declval<Full>()));
  static_assert(checked<rules::cotangent, Name, Returned::spec, dual_spec(X::spec, axes_of<X::spec, Ct::spec>())>::ok);
  if constexpr (std::is_same_v<Returned, Full>)
    return ct;
  else
    return unbroadcast<X>(Full(ct)).value();
}
template <OpName Name, class X, class Ct>
constexpr UnbroadcastFn unbroadcast_fn() {
  if constexpr (floating<typename X::value_type>)
    return &unbroadcast_value<Name, X, Ct>;
  else
    return nullptr;
}

template <OpName Name, class Out, class F, class... X>
Out map_as(const OpInfo& op, const F& f, const X&... x) {
  using R = typename Out::value_type;
  using Ct = Dual<Out, axes_of<Out::spec, X::spec...>()>;
  std::array<UnbroadcastFn, most_mapped> sums{};
  if constexpr (floating<R>) sums = {unbroadcast_fn<Name, X, Ct>()...};
  return Out(record_map(op, parsed<Out::spec>, parsed<Ct::spec>,
                        Handle<MapLoops<F, R, typename X::value_type...>>::make(f), {x.value()...}, sums));
}

/// Calls a user's function with a Jet in both passes, so that `exp` in its body never means the C function.
template <class F>
struct OnNumbers {
  F f;
  template <class... X>
  auto operator()(const X&... x) const {
    return plain(f(number(x)...));
  }

 private:
  template <class X>
  static auto number(const X& x) {
    if constexpr (real<X>)
      return Jet<X, 0>(x);
    else
      return x;  // a Jet already, or not a floating-point number
  }
  template <class T>
  static T plain(const Jet<T, 0>& y) {
    return y.value;
  }
  template <class Y>
  static Y plain(const Y& y) {
    return y;
  }
};

template <class F, class... X>
using map_t =
    Tensor<after_t<owned_function<"map", F>, mapped_t<F, typename X::value_type...>>, map_result<"map", X::spec...>()>;

template <class F, class... X>
map_t<F, X...> mapped_by_user(const F& f, const Site& site, const X&... x) {
  return map_as<"map", map_t<F, X...>>(Calling{"map", {}, site}, OnNumbers<F>{f}, x...);
}

}  // namespace detail

/// Applies any function to one to four operands, as one fused loop forward and one backward (through dual numbers).
/// The function is generic over its number types and calls `exp`, `pow` and the like without std::. It captures
/// nothing, or numbers by value: `map([](auto g, auto u) { return swish(g) * u; }, gate, up)`. Elements of bf16 are
/// computed in f32.
template <class F, tensor X>
auto map(F f, const X& x, Site site = Site::current()) -> detail::map_t<F, X> {
  return detail::mapped_by_user(f, site, x);
}
template <class F, tensor X, tensor Y>
auto map(F f, const X& x, const Y& y, Site site = Site::current()) -> detail::map_t<F, X, Y> {
  return detail::mapped_by_user(f, site, x, y);
}
template <class F, tensor X, tensor Y, tensor Z>
auto map(F f, const X& x, const Y& y, const Z& z, Site site = Site::current()) -> detail::map_t<F, X, Y, Z> {
  return detail::mapped_by_user(f, site, x, y, z);
}
template <class F, tensor X, tensor Y, tensor Z, tensor W>
auto map(F f, const X& x, const Y& y, const Z& z, const W& w, Site site = Site::current())
    -> detail::map_t<F, X, Y, Z, W> {
  return detail::mapped_by_user(f, site, x, y, z, w);
}

}  // namespace shardlib
