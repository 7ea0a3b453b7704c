// map: any function of scalars over broadcast operands, one fused loop forward and one backward through dual numbers.
#pragma once

#include <array>
#include <cstddef>
#include <functional>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "shardlib/detail/inline.hpp"
#include "shardlib/kernels/elementwise.hpp"
#include "shardlib/kernels/strided.hpp"
#include "shardlib/observe.hpp"
#include "shardlib/padding.hpp"
#include "shardlib/scalar.hpp"
#include "shardlib/shapes.hpp"
#include "shardlib/tape.hpp"

namespace shardlib::detail {

/// Strides of an operand as a loop over the dims of the result sees it: 0 along the dims that it lacks.
[[gnu::cold]] SHARDLIB_INLINE Extents broadcast_strides(const Value& x, const TensorSpec& result);
template <class D>
kernels::Operand<D> broadcast_operand(const Value& x, const TensorSpec& result) {
  return {x.as<D>(), view(broadcast_strides(x, result))};
}

/// The result of a loop, contiguous.
template <class D>
kernels::Operand<D> whole_operand(D* data, const Value& like) {
  return {data, kernels::row_major(view(like.local)).span()};
}

template <class D>
scalar_of<D> load(const D& x) {
  return static_cast<scalar_of<D>>(x);
}

/// Input I of the lambda: a dual number that carries d/dx at place `at`, or a plain number.
template <std::size_t N, int At, class D>
auto dual_input(const D& x) {
  if constexpr (floating<D>) {
    Jet<scalar_of<D>, N> jet(load(x));
    if constexpr (At >= 0) jet.by[static_cast<std::size_t>(At)] = 1;
    return jet;
  } else {
    return load(x);
  }
}

/// A value of the same shape, with data of its own.
[[gnu::cold]] SHARDLIB_INLINE Handle<Value> value_like(const Value& like, DType dtype);

/// A cotangent of the result's shape as one of the operand's: summed over what the broadcast repeated.
template <class X, class Ct>
auto unbroadcast(const Ct& ct) {
  constexpr Spec axes = axes_of<X::spec, Ct::spec>();
  constexpr Spec due = dual_spec(X::spec, axes);
  if constexpr (parsed<Ct::spec>.rank() == parsed<X::spec>.rank())
    return ct;
  else
    return sum<make_op(Ct::spec, due)>(ct);
}

using UnbroadcastFn = ValuePtr (*)(const ValuePtr&);

/// The loops of a map: F of numbers of types D..., with results of type R. Free of specs, so that tensors of many
/// shapes share them.
template <class F, class R, class... D>
struct MapLoops {
  static constexpr std::size_t N = sizeof...(D);
  using Values = std::vector<ValuePtr>;

  [[gnu::cold]] static Buffer forward(const F& f, const Values& x, const Value& out) {
    Buffer result = allocate(out);
    [&]<std::size_t... K>(std::index_sequence<K...>) {
      kernels::apply(out.device->exec(), view(out.local), Forward{f}, broadcast_operand<const D>(*x[K], *out.spec)...,
                     whole_operand(result.as<R>(), out));
    }(std::make_index_sequence<N>{});
    return result;
  }

  /// The cotangent of operand I alone, of the result's shape.
  template <std::size_t I>
  [[gnu::cold]] static ValuePtr pull(const F& f, const Value& ct, const Values& x) {
    using DI = std::tuple_element_t<I, std::tuple<D...>>;
    auto grad = value_like(ct, dtype_v<DI>);
    const Buffer& block = grad->storage->buffer;
    observed(*grad, [&] {
      [&]<std::size_t... K>(std::index_sequence<K...>) {
        kernels::apply(ct.device->exec(), view(ct.local), PullOne<I, DI>{f}, whole_operand(ct.as<const R>(), ct),
                       broadcast_operand<const D>(*x[K], *ct.spec)..., whole_operand(block.as<DI>(), ct));
      }(std::make_index_sequence<N>{});
      zero_padding(*grad, block);
      return block;
    });
    return grad;
  }

  /// All cotangents in one loop.
  [[gnu::cold]] static Values pull_all(const F& f, const Value& ct, const Values& x) {
    const Values grads{value_like(ct, dtype_v<D>)...};
    observed(*grads[0], [&] {
      [&]<std::size_t... K>(std::index_sequence<K...>) {
        kernels::apply(ct.device->exec(), view(ct.local), PullAll{f}, whole_operand(ct.as<const R>(), ct),
                       broadcast_operand<const D>(*x[K], *ct.spec)...,
                       whole_operand(grads[K]->storage->buffer.template as<D>(), ct)...);
      }(std::make_index_sequence<N>{});
      for (const ValuePtr& grad : grads) zero_padding(*grad, grad->storage->buffer);
      return grads[0]->storage->buffer;
    });
    for (std::size_t k = 1; k < N && state(ct.device).note_reads; ++k)
      observed(*grads[k], [&] {
        note_read(*grads[0]);
        return grads[k]->storage->buffer;
      });
    return grads;
  }

  /// Records the op; `sums` bring each operand's cotangent to its own shape, from the result's (under `ct_spec`).
  [[gnu::noinline, gnu::cold]] static ValuePtr record(const OpInfo& op, const TensorSpec& spec,
                                                      const TensorSpec& ct_spec, const F& f, Values x,
                                                      const std::array<UnbroadcastFn, N>& sums) {
    Bindings names(op, x[0]->device);
    for (const ValuePtr& operand : x) names.bind(*operand);
    auto out = make_value(op, x[0]->device, dtype_v<R>, spec, names.sizes(spec));
    if constexpr (floating<R>) {
      std::vector<Node::Edge> edges(N);
      Values saved;
      for (const ValuePtr& operand : x) saved.push_back(detached(*operand));
      bool all = N > 1;
      [&]<std::size_t... I>(std::index_sequence<I...>) {
        (attach_operand<I, D>(edges[I], f, saved, x[I]->slot, ct_spec, sums[I]), ...);
        all = all && ((floating<D> && x[I]->slot) && ...);
      }(std::make_index_sequence<N>{});
      std::function<Values(const Values&)> joint;
      if constexpr (N > 1 && (floating<D> && ...)) {
        if (all)
          joint = [f, saved, &ct_spec, sums](const Values& cts) {
            auto grads = pull_all(f, *with_spec(cts[0], ct_spec), saved);
            for (std::size_t i = 0; i < N; ++i) grads[i] = sums[i](grads[i]);
            return grads;
          };
      }
      attach(out, std::move(edges), std::move(joint));
    }
    evaluate(out, [f, x = std::move(x)](const Value& shape) { return forward(f, x, shape); });
    return out;
  }

 private:
  /// The derivative by input `at`; of a result that depends on none, such as `1.0`, zero.
  template <class Y>
  static scalar_of<R> slope(const Y& y, std::size_t at) {
    if constexpr (is_jet<Y>)
      return y.by[at];
    else
      return 0;
  }
  // Functors, not lambdas: g++ 12 loses parameter packs that lambdas capture.
  struct Forward {
    F f;
    void operator()(const D&... in, R& y) const { y = static_cast<R>(f(load(in)...)); }
  };
  template <std::size_t I, class DI>
  struct PullOne {
    F f;
    void operator()(const R& c, const D&... in, DI& g) const {
      g = static_cast<DI>(load(c) * slope(dual<1>(std::index_sequence_for<D...>{}, in...), 0));
    }
    template <std::size_t One, std::size_t... K>
    auto dual(std::index_sequence<K...>, const D&... in) const {
      return f(dual_input < One, K == I ? 0 : -1 > (in)...);
    }
  };
  struct PullAll {
    F f;
    void operator()(const R& c, const D&... in, D&... g) const { run(std::index_sequence_for<D...>{}, c, in..., g...); }
    template <std::size_t... K>
    void run(std::index_sequence<K...>, const R& c, const D&... in, D&... g) const {
      const auto y = f(dual_input<N, static_cast<int>(K)>(in)...);
      ((g = static_cast<D>(load(c) * slope(y, K))), ...);
    }
  };

  template <std::size_t I, class DI>
  static void attach_operand(Node::Edge& edge, const F& f, const Values& saved, const Slot& slot,
                             const TensorSpec& ct_spec, UnbroadcastFn sum) {
    if constexpr (floating<DI>) {
      edge.input = slot;
      if (!slot) return;
      edge.saved.values = saved;
      edge.vjp = [f, &ct_spec, sum](const ValuePtr& ct, const Residuals& x) {
        return sum(pull<I>(f, *with_spec(ct, ct_spec), x.values));
      };
    }
  }
};

/// Brings a cotangent of type Ct to the operand X of the map, whose rules are checked here.
template <Op Name, class X, class Ct>
ValuePtr unbroadcast_value(const ValuePtr& ct) {
  using Full = Tensor<typename X::value_type, Ct::spec>;
  using Returned = decltype(unbroadcast<X>(std::declval<Full>()));
  static_assert(checked<rules::cotangent, Name, Returned::spec, dual_spec(X::spec, axes_of<X::spec, Ct::spec>())>::ok);
  if constexpr (std::is_same_v<Returned, Full>)
    return ct;
  else
    return unbroadcast<X>(Full(ct)).value();
}

template <Op Name, class X, class Ct>
constexpr UnbroadcastFn unbroadcast_fn() {
  if constexpr (floating<typename X::value_type>)
    return &unbroadcast_value<Name, X, Ct>;
  else
    return nullptr;
}

template <Op Name, class Out, class F, class... X>
Out map_as(const OpInfo& op, F f, const X&... x) {
  using Ct = Dual<Out, axes_of<Out::spec, X::spec...>()>;
  using Loops = MapLoops<F, typename Out::value_type, typename X::value_type...>;
  std::array<UnbroadcastFn, sizeof...(X)> sums{};
  if constexpr (floating<typename Out::value_type>) sums = {unbroadcast_fn<Name, X, Ct>()...};
  return Out(Loops::record(op, parsed<Out::spec>, parsed<Ct::spec>, f, {x.value()...}, sums));
}

/// A user's function, which sees numbers of ours also where there is no derivative: `exp` is then never that of C.
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
      return x;  // with a derivative, or no floating number
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

template <class R>
  requires any_result<R>
struct map_hook<R> {
  template <class F, class... X>
  static R run(const F& f, const Site& site, const X&... x) {
    return map_as<"map", R>(Calling{"map", {}, site}, OnNumbers<F>{f}, x...);
  }
};

}  // namespace shardlib::detail

#ifndef SHARDLIB_COMPILED
#include "shardlib/ops/map_inl.hpp"
#endif
