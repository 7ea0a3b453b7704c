// Declarations of differentiation and of what controls what it keeps.
#pragma once

#include <cstddef>
#include <type_traits>
#include <utility>

#include "shardlib/gradient.hpp"
#include "shardlib/shapes/result.hpp"
#include "shardlib/tree.hpp"

namespace shardlib {

namespace detail {
template <class M, class W, class L>
struct loss_and_gradient {
  static_assert(is_tensor<L>, "value_and_grad: the function returns its loss, a Tensor, and nothing else");
  using type = std::pair<L, gradient_t<M, W>>;
};
template <class M, class W, class D, Spec S>
struct loss_and_gradient<M, W, Tensor<D, S>> {
  static_assert(checked<rules::loss, M::axes, dtype_v<D>, S>::ok);
  static_assert(all_leaves<W>([]<class E, Spec T>(std::type_identity<Tensor<E, T>>) {
    return checked<rules::weight, M::axes, dtype_v<E>, T>::ok;
  }));
  using type = std::pair<Tensor<D, S>, gradient_t<M, W>>;
};
/// The type of f(weights, args...), or a compile error of ours.
template <bool Callable, class F, class W, class... Args>
struct loss_of {
  using type = std::invoke_result_t<F&, const W&, const Args&...>;
};
template <class F, class W, class... Args>
struct loss_of<false, F, W, Args...> {
  static_assert(checked<rules::callable, false, static_cast<int>(sizeof...(Args))>::ok);
  using type = Tensor<f32, "?">;
};
template <class M, class F, class W, class... Args>
using value_and_grad_t = typename loss_and_gradient<
    M, W, typename loss_of<std::is_invocable_v<F&, const W&, const Args&...>, F, W, Args...>::type>::type;
}  // namespace detail

/// f(weights, args...) and its gradient by the weights. The loss is a scalar partial over every axis of the mesh, "+d
/// +t"; gradients have the type Dual<leaf>. `auto [loss, grads] = value_and_grad(mesh, f, weights, batch);`
template <Spec A, class F, class W, class... Args>
auto value_and_grad(const Mesh<A>& mesh, F&& f, const W& weights, const Args&... args)
    -> detail::value_and_grad_t<Mesh<A>, F, W, Args...> {
  return detail::value_and_grad_hook<detail::value_and_grad_t<Mesh<A>, F, W, Args...>>::run(mesh, f, weights, args...);
}

template <class F>
struct Checkpointed {
  F f;
  template <class... Args>
  auto operator()(const Args&... args) const -> std::invoke_result_t<const F&, const Args&...> {
    return detail::checkpoint_hook<std::invoke_result_t<const F&, const Args&...>>::run(f, args...);
  }
};
/// f, of which only the arguments and what passes through save_for_backward are kept for the backward pass; what else
/// its derivatives need is computed again, and nothing that they do not need.
/// `explicit_activation_checkpointing(layer)(x, w)`
template <class F>
Checkpointed<F> explicit_activation_checkpointing(F f) {
  return {std::move(f)};
}
/// Keeps x for the backward pass inside explicit_activation_checkpointing; elsewhere everything is kept anyway.
template <dtype D, Spec S>
auto save_for_backward(const Tensor<D, S>& x, Site site = Site::current()) -> Tensor<D, S>;

/// x, before layer number `next` gets it (or none, behind the last layer). Forward it starts the all_gathers in
/// `gathers(layer)` of that layer and of the one after it; the backward pass, when it comes back to this point, those
/// of the two layers before. They run beside the computation until the layer itself calls all_gather for the same
/// weights. Sums of gradients, the transposes of gathers, then run beside the backward pass too. `x = prefetch(x,
/// gathers, w.layers, i)`
template <dtype D, Spec S, class F, Spec N, class Layer>
auto prefetch(const Tensor<D, S>& x, const F& gathers, const Array<N, Layer>& layers, std::size_t next,
              Site site = Site::current()) -> Tensor<D, S> {
  return detail::prefetch_hook<Tensor<D, S>>::run(x, gathers, layers, next, site);
}

}  // namespace shardlib
