// map: any function of numbers over broadcast operands, as one fused loop forward and one backward through dual
// numbers. The loops over contiguous elements are in this header, because only here the function's type is known. All
// other code of map is type-erased.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "shardlib/ops/map/hyper_dual.hpp"
#include "shardlib/ops/map/number.hpp"
#include "shardlib/ops/record.hpp"
#include "shardlib/ops/reductions.hpp"
#include "shardlib/ops/result.hpp"
#include "shardlib/rules/all.hpp"
#include "shardlib/spec/dtype.hpp"
#include "shardlib/support/function.hpp"
#include "shardlib/support/handle.hpp"
#include "shardlib/support/loop.hpp"
#include "shardlib/types/numbers_in.hpp"
#if defined(SHARDLIB_TYPED_KERNELS)
#include "shardlib/ops/map/symbol.hpp"
#include "shardlib/support/error.hpp"
#endif

namespace shardlib {
#if defined(SHARDLIB_TYPED_KERNELS)
struct Exec;
namespace kernels::body {
struct ElementwiseLoops;
}
#endif
namespace detail {

inline constexpr std::size_t most_mapped = 4;

struct MadeWithOperand;

/// A type-erased function of numbers.
struct MapFunction : Counted {
#if defined(SHARDLIB_TYPED_KERNELS)
  /// Runs all loops over the arrays, by the launcher.
  using Launch = void (*)(const void* f, const Exec& exec, const kernels::body::ElementwiseLoops& loops,
                          std::byte* const* data);
#endif
  struct Loop {
    /// Runs over n contiguous elements of each array in `data`, on the host.
    void (*run)(const void* f, std::int64_t n, std::byte* const* data) = nullptr;
#if defined(SHARDLIB_TYPED_KERNELS)
    Launch launch = nullptr;
#endif
  };
  const void* f = nullptr;
  std::size_t f_bytes = 0;  ///< the size of a function whose bytes are a copy of it
  NumbersIn numbers;        ///< that it captures
  std::size_t operands = 0;
  DType result{};
  Loop forward;  ///< operands..., result
  /// Loops over the result's cotangent, operands..., cotangent of one operand. None: no derivative.
  std::array<Loop, most_mapped> vjp = {};
  /// Loops over the result's cotangent, operands..., all cotangents. None: an operand has no derivative.
  Loop vjp_all;
  /// The derivative by the operands `by`, one after another, whose elements are at `x`, on the host. None: the result
  /// is no floating-point number.
  double (*derivative)(const void* f, const Differentiations& by, const std::byte* const* x) = nullptr;
  Handle<MadeWithOperand> made_with_operand;  ///< of an operand whose kernel may make the result too
#if defined(SHARDLIB_TYPED_KERNELS)
  /// Calls a lambda with symbols of these dtypes. The launches of a lambda are null: its instructions run instead.
  /// Throws for a pointer.
  MapProgram (*trace)(const void* f, const std::array<DType, most_mapped>& dtypes) = nullptr;
  mutable MapProgram program;
#endif
};
#if defined(SHARDLIB_TYPED_KERNELS)
template <class F>
struct OnNumbers;
/// Whether no kernel holds F: a lambda, which nvcc cannot name, or the address of a function of the host.
template <class F>
#if defined(SHARDLIB_TRACED_LAMBDAS)
inline constexpr bool is_traced = is_closure<F>;
#else
inline constexpr bool is_traced = false;
#endif
template <class F>
inline constexpr bool is_traced<OnNumbers<F*>> = true;
/// Runs a kernel that has F inside. Defined in compute/map.hpp.
template <class F, class... T>
void launch_elements(const void* f, const Exec& exec, const kernels::body::ElementwiseLoops& loops,
                     std::byte* const* data);
template <class F, class... Elements>
constexpr MapFunction::Launch launch_of() {
  if constexpr (is_traced<F>)
    return nullptr;
  else
    return &launch_elements<Elements...>;
}
#endif

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

#if defined(SHARDLIB_TYPED_KERNELS)
#define SHARDLIB_MAP_LOOP(...) \
  { &kernels::ElementLoop<__VA_ARGS__>::run, launch_of<F, __VA_ARGS__>() }
#else
#define SHARDLIB_MAP_LOOP(...) \
  { &kernels::ElementLoop<__VA_ARGS__>::run }
#endif
/// The loops of F for operands of dtypes D... and a result of dtype R. Tensors of all specs share them.
template <class F, class R, class... D>
struct MapLoops : MapFunction {
  static constexpr std::size_t N = sizeof...(D);
  static_assert(N <= most_mapped);
  F function;

  explicit MapLoops(const F& g) : function(g) {
    f = &function;
    if (std::is_trivially_copyable_v<F>) f_bytes = sizeof(F);
    numbers = numbers_in(function);
    operands = N;
    result = dtype_v<R>;
#if defined(SHARDLIB_TYPED_KERNELS)
    if constexpr (is_traced<F>)
      trace = [](const void* g, const std::array<DType, most_mapped>& dtypes) {
        return trace_of(*static_cast<const F*>(g), dtypes, std::make_index_sequence<N>{});
      };
#endif
    forward = SHARDLIB_MAP_LOOP(Forward, const D..., R);
    if constexpr (floating<R>) {
      [&]<std::size_t... I>(std::index_sequence<I...>) {
        (set_vjp<I, D>(), ...);
      }
      (std::make_index_sequence<N>{});
      derivative = &derivative_of;
      if constexpr (N > 1 && (floating<D> && ...)) vjp_all = SHARDLIB_MAP_LOOP(VjpAll, const R, const D..., D...);
    }
  }

 private:
  template <std::size_t I, class DI>
  void set_vjp() {
    if constexpr (floating<DI>) vjp[I] = SHARDLIB_MAP_LOOP(VjpOne<I, DI>, const R, const D..., DI);
  }
  template <class X>
  static auto element_input(const std::byte* element, std::size_t operand, const Differentiations& by) {
    const auto x = load(*reinterpret_cast<const X*>(element));
    if constexpr (floating<X>)
      return higher_input(static_cast<double>(x), static_cast<int>(operand), by);
    else
      return x;
  }
  [[gnu::cold]] static double derivative_of(const void* f, const Differentiations& by, const std::byte* const* x) {
    return derivative_of(*static_cast<const F*>(f), by, x, std::index_sequence_for<D...>{});
  }
  template <std::size_t... K>
  [[gnu::cold]] static double derivative_of(const F& f, const Differentiations& by, const std::byte* const* x,
                                            std::index_sequence<K...> /*operands*/) {
    const auto y = f(element_input<D>(x[K], K, by)...);
    if constexpr (std::is_same_v<std::remove_cv_t<decltype(y)>, HigherJet>)
      return y.by[0].mixed(by.size() - 1);
    else
      return 0;
  }
  /// Input I of the function: a dual number with the derivative 1 at index `At`, or a plain number.
  template <std::size_t Size, int At, class X>
  SHARDLIB_FUNCTION static auto dual_input(const X& x) {
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
  SHARDLIB_FUNCTION static scalar_of<R> slope(const Y& y, std::size_t at) {
    if constexpr (is_jet<Y>)
      return y.by[at];
    else
      return 0;
  }

 public:
  // Functors, not lambdas: g++ 12 loses parameter packs that lambdas capture. Each functor holds only the function.
  // Public, as nvcc asks of types in a kernel's name.
  struct Forward {
    F f;
    SHARDLIB_FUNCTION void operator()(const D&... in, R& y) const { y = static_cast<R>(f(load(in)...)); }
  };
  template <std::size_t I, class DI>
  struct VjpOne {
    F f;
    SHARDLIB_FUNCTION void operator()(const R& c, const D&... in, DI& g) const {
      g = static_cast<DI>(load(c) * slope(dual<1>(std::index_sequence_for<D...>{}, in...), 0));
    }
    template <std::size_t One, std::size_t... K>
    SHARDLIB_FUNCTION auto dual(std::index_sequence<K...>, const D&... in) const {
      return f(dual_input < One, K == I ? 0 : -1 > (in)...);
    }
  };
  struct VjpAll {
    F f;
    SHARDLIB_FUNCTION void operator()(const R& c, const D&... in, D&... g) const {
      run(std::index_sequence_for<D...>{}, c, in..., g...);
    }
    template <std::size_t... K>
    SHARDLIB_FUNCTION void run(std::index_sequence<K...>, const R& c, const D&... in, D&... g) const {
      const auto y = f(dual_input<N, static_cast<int>(K)>(in)...);
      ((g = static_cast<D>(load(c) * slope(y, K))), ...);
    }
  };
  static_assert(sizeof(Forward) == sizeof(F));
};
#undef SHARDLIB_MAP_LOOP

/// Sums a cotangent of the result's shape over the dims that the broadcast repeated. The result has the operand's
/// shape.
template <class X, class Ct>
auto unbroadcast(const Ct& ct) {
  constexpr Spec axes = axes_of<X::spec, Ct::spec>();
  constexpr Spec due = dual_spec<X::spec, axes>();
  if constexpr (parsed<Ct::spec>.rank() == parsed<X::spec>.rank())
    return ct;
  else
    return sum<op_spec_of(Ct::spec, due)>(ct);
}

/// Sums a cotangent of type Ct to the shape of the map's operand X, and checks the rules for it.
template <OpName Name, class X, class Ct>
ValuePtr unbroadcast_value(const ValuePtr& ct) {
  using Full = Tensor<typename X::value_type, Ct::spec>;
  using Returned = decltype(unbroadcast<X>(std::declval<Full>()));
  static_assert(
      checked<rules::cotangent, Name, Returned::spec, dual_spec<X::spec, axes_of<X::spec, Ct::spec>()>()>::ok);
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

template <OpName Name, class Out, class... X>
Out map_by(const OpInfo& op, const Handle<const MapFunction>& function, const X&... x) {
  using Ct = Dual<Out, axes_of<Out::spec, X::spec...>()>;
  std::array<UnbroadcastFn, most_mapped> sums{};
  if constexpr (floating<typename Out::value_type>) sums = {unbroadcast_fn<Name, X, Ct>()...};
  return Out(record_map(op, parsed<Out::spec>, parsed<Ct::spec>, function, {x.value()...}, sums));
}
template <OpName Name, class Out, class F, class... X>
Out map_as(const OpInfo& op, const F& f, const X&... x) {
  return map_by<Name, Out>(op, Handle<MapLoops<F, typename Out::value_type, typename X::value_type...>>::make(f), x...);
}

/// Calls a user's function with a Jet in both passes, so that `exp` in its body never means the C function.
template <class F>
struct OnNumbers {
  F f;
  template <class... X>
  SHARDLIB_FUNCTION auto operator()(const X&... x) const {
    return plain(f(number(x)...));
  }

 private:
  template <class X>
  SHARDLIB_FUNCTION static auto number(const X& x) {
    if constexpr (real<X>)
      return Jet<X, 0>(x);
    else
      return x;  // a Jet already, or not a floating-point number
  }
  template <class T>
  SHARDLIB_FUNCTION static T plain(const Jet<T, 0>& y) {
    return y.value;
  }
  template <class Y>
  SHARDLIB_FUNCTION static Y plain(const Y& y) {
    return y;
  }
};
template <class F>
NumbersIn numbers_in(const OnNumbers<F>& function) {
  return numbers_in(function.f);
}

#if defined(SHARDLIB_TYPED_KERNELS)
template <class F, std::size_t... I>
MapProgram trace_of(const OnNumbers<F>& on, const std::array<DType, most_mapped>& dtypes,
                    std::index_sequence<I...> /*operands*/) {
  if constexpr (std::is_pointer_v<F>)
    throw Error(
        "a device cannot call the host's function through a pointer: write a lambda, as in map([](auto v) { "
        "return f(v); }, x) with a generic f");
  else if constexpr (std::is_invocable_v<const F&, std::enable_if_t<(I < most_mapped), Symbol>...>)
    return traced(on.f, dtypes[I]...);
  else
    throw Error("a device traces the function, whose parameters must be `auto` for that");
}
#endif

/// The dtype of the operand whose sum is pending, for `result_for`: bf16, or else f32, whose sums need no dtype.
template <class... X>
using summed_operand =
    std::conditional_t<((std::is_same_v<typename X::value_type, bf16> && !parsed<X::spec>.partial.empty()) || ...),
                       bf16, f32>;
/// The name is a parameter, as in names_dim, because nvcc's front end loses the type of one that is not.
template <class F, OpName Name = "map">
struct mapping {
  template <class... X>
  using result =
      Tensor<after_t<owned_function<Name, F>, mapped_t<F, typename X::value_type...>>,
             result_for<summed_operand<X...>, rules::map_of<decltype(parsed<X::spec>)...>, Name, X::spec...>>;
};
template <class F, class... X>
using map_t = typename mapping<F>::template result<X...>;

template <class... Args>
inline constexpr bool maps = false;
template <class F, class... X>
inline constexpr bool maps<F, X...> = !tensor<F> && ((tensor<X> || std::is_same_v<X, Site>)&&...);
template <class D, Spec S>
inline constexpr bool owned_function<"map", Tensor<D, S>> = true;  // no function: see the last form

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

/// A compile error for other arguments.
template <class... Args>
requires(!detail::maps<Args...> && (tensor<Args> || ...)) auto map(const Args&... args) {
  return detail::wrong_call<"map", "map([k](auto v) { return k * v; }, x)">(args...);
}

}  // namespace shardlib
