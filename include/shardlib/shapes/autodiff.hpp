// Declarations of differentiation and of what controls what it keeps.
#pragma once

#include <cstddef>
#include <tuple>
#include <type_traits>
#include <utility>

#include "shardlib/detail/owned.hpp"
#include "shardlib/gradient.hpp"
#include "shardlib/shapes/result.hpp"
#include "shardlib/shapes/signature.hpp"
#include "shardlib/tree.hpp"

namespace shardlib {

/// A loss function that need not depend on all of its weights: `allow_unused(f)`.
template <class F>
struct AllowUnused {
  F f;
  template <class... Args>
  auto operator()(const Args&... args) const -> std::invoke_result_t<const F&, const Args&...> {
    return f(args...);
  }
};
/// f, whose gradient is zero where its loss does not depend on a weight; without this word that is an error, since most
/// often the function uses something else in the weight's place. `value_and_grad(mesh, allow_unused(loss), w, batch)`
template <class F>
AllowUnused<F> allow_unused(F f) {
  return {std::move(f)};
}

namespace detail {

template <class F>
inline constexpr bool is_allow_unused = false;
template <class F>
inline constexpr bool is_allow_unused<AllowUnused<F>> = true;
template <class F>
struct written_function {
  using type = F;
};
template <class F>
struct written_function<AllowUnused<F>> : written_function<F> {};

/// What stands for a result that an error, already given, leaves unknown.
using Unknown = Tensor<f32, "?">;

template <class M, class W, class L, class... Auxiliary>
struct value_and_gradient {
  static_assert(is_tensor<L>,
                "value_and_grad: the function returns its loss, a Tensor, or std::pair(loss, what it returns besides)");
  using type = std::pair<Unknown, W>;
};
template <class M, class W, class D, Spec S, class... Auxiliary>
struct value_and_gradient<M, W, Tensor<D, S>, Auxiliary...> {
  static_assert(checked<rules::loss, M::axes, dtype_v<D>, S>::ok);
  static_assert(all_leaves<W>([]<class E, Spec T>(std::type_identity<Tensor<E, T>>) {
    return checked<rules::weight, M::axes, dtype_v<E>, T>::ok;
  }));
  using type = std::conditional_t<sizeof...(Auxiliary) == 0, std::pair<Tensor<D, S>, gradient_t<M, W>>,
                                  std::tuple<Tensor<D, S>, gradient_t<M, W>, Auxiliary...>>;
};
template <class M, class W, class L, class A>
struct value_and_gradient<M, W, std::pair<L, A>> : value_and_gradient<M, W, L, A> {};

/// The result of f(weights, args...), or a compile error of ours.
template <bool Callable, class F, class W, class... Args>
struct returned_by {
  using type = std::remove_cvref_t<std::invoke_result_t<F&, const W&, const Args&...>>;
};
template <class F, class W, class... Args>
struct returned_by<false, F, W, Args...> {
  static constexpr Misfit wrong = misfit<typename written_function<F>::type, W, Args...>();
  static_assert(checked<rules::callable, static_cast<int>(sizeof...(Args)), wrong.parameters, wrong.at, wrong.not_const,
                        as_op(wrong.declared), as_op(wrong.given)>::ok);
  using type = Unknown;
};

/// Stops at the first thing that is wrong, so that it is the only error.
template <bool Tree, class M, class F, class W, class... Args>
struct differentiated {
  using type = std::pair<Unknown, W>;
};
template <class M, class F, class W, class... Args>
struct differentiated<true, M, F, W, Args...> {
  using returned =
      typename returned_by<std::is_invocable_v<F&, const W&, const Args&...>, std::remove_cvref_t<F>, W, Args...>::type;
  using type = typename value_and_gradient<M, W, returned>::type;
};
template <class M, class F, class W, class... Args>
using value_and_grad_t = typename differentiated<checked_tree<"value_and_grad", W>, M, F, W, Args...>::type;

/// A function that runs again in the backward pass owns all that it uses.
template <Op Name, class F>
inline constexpr bool owned_function =
    checked<rules::owned_function, Name, self_contained<F>, std::is_trivially_copyable_v<F>>::ok;
/// So do its arguments, as far as that can be told: of what is no trivial copy its type takes care.
template <Op Name, class T>
inline constexpr bool owned_argument =
    checked<rules::owned_argument, Name, self_contained<T> || !std::is_trivially_copyable_v<T>, name_of_type<T>>::ok;

}  // namespace detail

/// f(weights, args...) and its gradient by the weights. The loss is a scalar partial over every axis of the mesh, "+d
/// +t"; gradients have the type Dual<leaf>. Within the call a name of a dim has one size. A weight that the loss does
/// not depend on is an error. `auto [loss, grads] = value_and_grad(mesh, f, weights, batch);`, and of a function that
/// returns std::pair(loss, accuracy): `auto [loss, grads, accuracy] = value_and_grad(mesh, f, weights, batch);`
template <Spec A, class F, class W, class... Args>
[[nodiscard]] auto value_and_grad(const Mesh<A>& mesh, F&& f, const W& weights, const Args&... args)
    -> detail::value_and_grad_t<Mesh<A>, F, W, Args...> {
  return detail::value_and_grad_hook<detail::value_and_grad_t<Mesh<A>, F, W, Args...>>::run(mesh, f, weights, args...);
}

template <class F>
struct Checkpointed {
  F f;
  template <class... Args>
  auto operator()(const Args&... args) const -> std::invoke_result_t<const F&, const Args&...> {
    static_assert((detail::owned_argument<"explicit_activation_checkpointing", Args> && ...));
    return detail::checkpoint_hook<std::invoke_result_t<const F&, const Args&...>>::run(f, args...);
  }
};
/// f, of which only the arguments and what passes through save_for_backward are kept for the backward pass; what else
/// its derivatives need is computed again, and nothing that they do not need. f runs again in the backward pass, so it
/// captures nothing, or numbers by value: tensors and configurations are arguments, of which a copy is kept.
/// `explicit_activation_checkpointing(layer)(x, w, config)`
template <class F>
auto explicit_activation_checkpointing(F f)
    -> std::enable_if_t<detail::owned_function<"explicit_activation_checkpointing", F>, Checkpointed<F>> {
  return {std::move(f)};
}
/// Keeps x for the backward pass inside explicit_activation_checkpointing; elsewhere everything is kept anyway.
template <dtype D, Spec S>
auto save_for_backward(const Tensor<D, S>& x, Site site = Site::current()) -> Tensor<D, S>;

/// x, before layer number `next` gets it (or none, behind the last layer). Forward it starts the all_gathers in
/// `gathers(layer)` of that layer and of the one after it; the backward pass, when it comes back to this point, those
/// of the two layers before. They run beside the computation until the layer itself calls all_gather for the same
/// weights. Sums of gradients, the transposes of gathers, then run beside the backward pass too. `gathers` captures
/// nothing, or numbers by value. `x = prefetch(x, gathers, w.layers, i)`
template <dtype D, Spec S, class F, Spec N, class Layer>
auto prefetch(const Tensor<D, S>& x, const F& gathers, const Array<N, Layer>& layers, std::size_t next,
              Site site = Site::current()) -> std::enable_if_t<detail::owned_function<"prefetch", F>, Tensor<D, S>> {
  return detail::prefetch_hook<Tensor<D, S>>::run(x, gathers, layers, next, site);
}

}  // namespace shardlib
