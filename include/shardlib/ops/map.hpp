// map: any function of scalars over broadcast operands, one fused loop forward and one backward through dual numbers.
#pragma once

#include <array>
#include <cstddef>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "shardlib/kernels/elementwise.hpp"
#include "shardlib/scalar.hpp"
#include "shardlib/shapes.hpp"
#include "shardlib/tape.hpp"

namespace shardlib::detail {

/// Strides of an operand as a loop over the dims of the result sees it: 0 along the dims that it lacks.
[[gnu::noinline]] inline Extents broadcast_strides(const Value& x, const TensorSpec& result) {
  Extents strides;
  for (int i = 0; i < result.rank(); ++i) {
    // Operands with integer dims are never broadcast; they match by position.
    const int at = x.spec->dims == result.dims ? i : x.spec->find(result.dims[i].name);
    std::int64_t stride = at < 0 ? 0 : 1;
    for (int k = at + 1; at >= 0 && k < x.local.size(); ++k) stride *= x.local[k];
    strides.push_back(stride);
  }
  return strides;
}
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

template <Op Name, class Out, class F, class... X>
struct Mapped;
template <Op Name, class R, Spec Out, class F, class... D, Spec... S>
struct Mapped<Name, Tensor<R, Out>, F, Tensor<D, S>...> {
  static constexpr std::size_t N = sizeof...(D);
  static constexpr bool differentiable = floating<R>;
  static constexpr Spec axes = axes_of<Out, S...>();
  using Ct = Dual<Tensor<R, Out>, axes>;

  [[gnu::cold]] static Buffer forward(const F& f, const std::vector<ValuePtr>& x, const Value& out) {
    Buffer result = allocate(out);
    [&]<std::size_t... K>(std::index_sequence<K...>) {
      kernels::apply(out.device->exec(), view(out.local), Forward{f}, broadcast_operand<const D>(*x[K], parsed<Out>)...,
                     whole_operand(result.as<R>(), out));
    }
    (std::make_index_sequence<N>{});
    return result;
  }

  /// The cotangent of operand I alone.
  template <std::size_t I>
  [[gnu::cold]] static ValuePtr pull(const F& f, const ValuePtr& ct, const std::vector<ValuePtr>& x) {
    using DI = std::tuple_element_t<I, std::tuple<D...>>;
    auto grad = cotangent<DI>(*ct);
    [&]<std::size_t... K>(std::index_sequence<K...>) {
      kernels::apply(ct->device->exec(), view(ct->local), Pull<I, DI>{f}, whole_operand(ct->as<const R>(), *ct),
                     broadcast_operand<const D>(*x[K], parsed<Out>)..., whole_operand(grad->template as<DI>(), *ct));
    }
    (std::make_index_sequence<N>{});
    return finish<I>(std::move(grad));
  }

  /// All cotangents in one loop.
  [[gnu::cold]] static std::vector<ValuePtr> pull_all(const F& f, const ValuePtr& ct, const std::vector<ValuePtr>& x) {
    return [&]<std::size_t... K>(std::index_sequence<K...>) {
      const std::array<std::shared_ptr<Value>, N> grads{cotangent<D>(*ct)...};
      kernels::apply(ct->device->exec(), view(ct->local), PullAll{f}, whole_operand(ct->as<const R>(), *ct),
                     broadcast_operand<const D>(*x[K], parsed<Out>)...,
                     whole_operand(grads[K]->template as<D>(), *ct)...);
      return std::vector<ValuePtr>{finish<K>(grads[K])...};
    }
    (std::make_index_sequence<N>{});
  }

  [[gnu::cold]] static Tensor<R, Out> record(const OpInfo& op, F f, const Tensor<D, S>&... x) {
    const std::shared_ptr<Device> device = std::get<0>(std::tie(x...)).device();
    Bindings names(op, device);
    (names.bind(*x.value()), ...);
    auto out = make_value(op, device, dtype_v<R>, parsed<Out>, names.sizes(parsed<Out>));
    const std::vector<ValuePtr> in{x.value()...};
    if constexpr (differentiable) {
      std::vector<ValuePtr> saved{detached(*x.value())...};
      std::vector<Node::Edge> edges(N);
      bool all = N > 1;
      [&]<std::size_t... I>(std::index_sequence<I...>) {
        (attach_operand<I, D>(edges[I], f, saved, *in[I]), ...);
        all = all && ((floating<D> && in[I]->slot) && ...);
      }
      (std::make_index_sequence<N>{});
      std::function<std::vector<ValuePtr>(const std::vector<ValuePtr>&)> joint;
      if constexpr (N > 1 && (floating<D> && ...)) {
        if (all)
          joint = [f, saved](const std::vector<ValuePtr>& cts) {
            return pull_all(f, typed<Ct>(cts[0]).value(), saved);
          };
      }
      attach(out, std::move(edges), std::move(joint));
    }
    evaluate(out, [f, in](const Value& shape) { return forward(f, in, shape); });
    return Tensor<R, Out>(std::move(out));
  }

 private:
  // Functors, not lambdas: g++ 12 loses parameter packs that lambdas capture.
  struct Forward {
    F f;
    void operator()(const D&... in, R& y) const { y = static_cast<R>(f(load(in)...)); }
  };
  template <std::size_t I, class DI>
  struct Pull {
    F f;
    void operator()(const R& c, const D&... in, DI& g) const {
      g = static_cast<DI>(load(c) * dual<1>(std::index_sequence_for<D...>{}, in...).by[0]);
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
      ((g = static_cast<D>(load(c) * y.by[K])), ...);
    }
  };

  template <std::size_t I, class DI>
  [[gnu::cold]] static void attach_operand(Node::Edge& edge, const F& f, const std::vector<ValuePtr>& saved, const Value& in) {
    if constexpr (floating<DI>) {
      edge.input = in.slot;
      if (!edge.input) return;
      edge.saved = saved;
      edge.vjp = [f](const ValuePtr& ct, const std::vector<ValuePtr>& x) {
        return pull<I>(f, typed<Ct>(ct).value(), x);
      };
    }
  }
  template <class DI>
  [[gnu::cold]] static std::shared_ptr<Value> cotangent(const Value& ct) {
    auto grad = detached(ct);
    grad->dtype = dtype_v<DI>;
    grad->storage = std::make_shared<Storage>(Storage{allocate(*grad), nullptr});
    return grad;
  }
  template <std::size_t I>
  [[gnu::cold]] static ValuePtr finish(const ValuePtr& grad) {
    using X = std::tuple_element_t<I, std::tuple<Tensor<D, S>...>>;
    using Full = Tensor<typename X::value_type, Ct::spec>;
    using Returned = decltype(unbroadcast<X>(std::declval<Full>()));
    static_assert(
        checked<rules::cotangent, Name, Returned::spec, dual_spec(X::spec, axes_of<X::spec, Ct::spec>())>::ok);
    return unbroadcast<X>(Full(grad)).value();
  }
};

template <Op Name, class Out, class F, class... X>
Out map_as(const OpInfo& op, F f, const X&... x) {
  return Mapped<Name, Out, F, X...>::record(op, std::move(f), x...);
}

template <class R>
requires any_result<R>
struct map_hook<R> {
  template <class F, class... X>
  static R run(const F& f, const X&... x) {
    return map_as<"map", R>(OpInfo{"map", {}, {}}, f, x...);
  }
};

}  // namespace shardlib::detail
