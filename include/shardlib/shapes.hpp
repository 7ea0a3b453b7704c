// Types only: specs, rules, Tensor, and the declaration of every op with the type of its result.
// Needs the standard library alone. Checks the shapes of a whole model at compile time; shardlib.hpp makes it run.
#pragma once

#include <concepts>
#include <cstdint>
#include <source_location>
#include <type_traits>
#include <utility>

#include "shardlib/gradient.hpp"
#include "shardlib/scalar.hpp"
#include "shardlib/tensor.hpp"
#include "shardlib/tree.hpp"

namespace shardlib {

/// Where an op was called: for messages and for the report of what is kept for the backward pass.
using Site = std::source_location;

namespace detail {

template <class D>
using scalar_of =
    std::conditional_t<std::is_same_v<D, bf16>, f32, std::conditional_t<std::is_same_v<D, bool_>, bool, D>>;

/// The dtype of a map over D...: a lambda that returns a floating number, of whatever width its literals make it,
/// returns the widest floating dtype among the operands.
template <class Returned, class... D>
struct mapped {
  using type = Returned;
};
template <class... D>
struct mapped<bool, D...> {
  using type = bool_;
};
template <std::floating_point Returned, class... D>
struct mapped<Returned, D...> {
  template <class T>
  static constexpr bool among = (std::is_same_v<D, T> || ...);
  using type = std::conditional_t<
      among<f64>, f64,
      std::conditional_t<among<f32>, f32, std::conditional_t<among<bf16>, bf16, Returned>>>;
};
template <class F, class... D>
using mapped_t = typename mapped<std::remove_cvref_t<std::invoke_result_t<const F&, scalar_of<D>...>>, D...>::type;

template <class Out, class D>
using dtype_or = std::conditional_t<std::is_void_v<Out>, D, Out>;

template <Op Name, Spec... S>
constexpr Spec map_result() {
  if constexpr (sizeof...(S) == 1)
    return result_of<rules::map1, Name, S...>;
  else if constexpr (sizeof...(S) == 2)
    return result_of<rules::map2, Name, S...>;
  else if constexpr (sizeof...(S) == 3)
    return result_of<rules::map3, Name, S...>;
  else
    return result_of<rules::map4, Name, S...>;
}

template <Op Name, dtype D, dtype E>
inline constexpr bool one_dtype = checked<rules::same_dtype, Name, dtype_v<D>, dtype_v<E>>::ok;

// Ops that take a user's lambda have a body even here, since the compiler wants one for a function of a local type. It
// calls a hook, which the run-time headers specialise; a program that links without them misses `no_runtime`.
template <class R>
R no_runtime();
template <class R>
struct no_hook {
  template <class... X>
  static R run(const X&...) {
    return no_runtime<R>();
  }
};
template <class R>
concept any_result = true;
template <class R>
struct map_hook : no_hook<R> {};
template <class R>
struct checkpoint_hook : no_hook<R> {};
template <class R>
struct value_and_grad_hook : no_hook<R> {};

/// The spec of the sum of all elements.
template <Spec S>
constexpr Spec sum_all_result() {
  TensorSpec out;
  for (auto axis : parsed<S>.partial) out.add_partial(axis);
  for (const Dim& dim : parsed<S>.dims)
    for (auto axis : dim.axes) out.add_partial(axis);
  return Spec(to_string(out).view());
}

/// A type alias that makes a check before it names the type.
template <bool, class T>
struct after {
  using type = T;
};
template <bool Checked, class T>
using after_t = typename after<Checked, T>::type;

}  // namespace detail

// ---- collectives ---------------------------------------------------------------------------------------------------

/// Concatenates the blocks of the last axes of one or several dims. Backward: reduce_scatter.
/// `all_gather<"M/t/d H -> M/t H">(w)`
template <Op O, dtype D, Spec S>
auto all_gather(const Tensor<D, S>& x, Site site = Site::current())
    -> Tensor<D, detail::result_of<rules::all_gather, O, S>>;

/// Takes the pending sum and leaves each device its block. Backward: all_gather.
/// `reduce_scatter<"B/d L M +t -> B/d L M/t">(y)`
template <Op O, dtype D, Spec S>
auto reduce_scatter(const Tensor<D, S>& x, Site site = Site::current())
    -> Tensor<D, detail::result_of<rules::reduce_scatter, O, S>>;

/// Takes the pending sum and gives it to every device. Backward: all_reduce.
/// `all_reduce<"+d +t -> ">(loss)`
template <Op O, dtype D, Spec S>
auto all_reduce(const Tensor<D, S>& x, Site site = Site::current())
    -> Tensor<D, detail::result_of<rules::all_reduce, O, S>>;

/// Maximum over the dims that the result lacks, over all devices that share them. No derivative: take stop_gradient of
/// the operand first. `all_reduce_max<"B/d L V/t -> B/d L">(logits)`
template <Op O, dtype D, Spec S>
auto all_reduce_max(const Tensor<D, S>& x, Site site = Site::current())
    -> Tensor<D, detail::result_of<rules::all_reduce_max, O, S>>;

/// Moves the last axes of one dim to another. Backward: the inverse all_to_all. `all_to_all<"A/t B -> A B/t">(x)`
template <Op O, dtype D, Spec S>
auto all_to_all(const Tensor<D, S>& x, Site site = Site::current())
    -> Tensor<D, detail::result_of<rules::all_to_all, O, S>>;

/// Passes blocks round the ring of an axis: device i's block goes to device (i + by) mod n. `shift<"A/t", "t">(x, 1)`
template <Op O, Op Axis, dtype D, Spec S>
auto shift(const Tensor<D, S>& x, int by, Site site = Site::current())
    -> Tensor<D, detail::result_of<rules::shift, O, Axis, S>>;

/// Each device keeps its block of a replicated value; no traffic. Backward: zeros elsewhere. `slice<"A -> A/t">(x)`
template <Op O, dtype D, Spec S>
auto slice(const Tensor<D, S>& x, Site site = Site::current()) -> Tensor<D, detail::result_of<rules::slice, O, S>>;

/// A replicated value as a sum: the first device of the axis keeps it, the others hold zero. `to_partial<"A -> A
/// +t">(b)`
template <Op O, dtype D, Spec S>
auto to_partial(const Tensor<D, S>& x, Site site = Site::current())
    -> Tensor<D, detail::result_of<rules::to_partial, O, S>>;

// ---- einsum and index ----------------------------------------------------------------------------------------------

/// Multiplies and sums on each device; what has to be summed over devices stays pending. Accumulates in f32 (f64 for
/// f64), returns the operands' dtype or `Out`. `einsum_unreduced<"B/d L M/t, M/t H -> B/d L H +t">(x, w)`
template <Op O, class Out = void, dtype D, Spec S, dtype E, Spec T>
auto einsum_unreduced(const Tensor<D, S>& x, const Tensor<E, T>& y, Site site = Site::current())
    -> Tensor<detail::after_t<detail::one_dtype<"einsum_unreduced", D, E>, detail::dtype_or<Out, D>>,
              detail::result_of<rules::einsum, O, S, T>>;

/// One operand: sums away the dims that the result lacks and orders the others. `einsum_unreduced<"A B/t -> A +t">(x)`
template <Op O, class Out = void, dtype D, Spec S>
auto einsum_unreduced(const Tensor<D, S>& x, Site site = Site::current())
    -> Tensor<detail::dtype_or<Out, D>, detail::result_of<rules::einsum1, O, S>>;

/// Rows of the table by index along the bracketed dim; a row that lies on another device is 0, so the result is
/// partial. Indices are global. An index outside the dim is an error. `index_unreduced<"[V/t] M, B/d L -> B/d L M
/// +t">(table, ids)`
template <Op O, dtype D, Spec S, integral_dtype I, Spec T>
auto index_unreduced(const Tensor<D, S>& table, const Tensor<I, T>& indices, Site site = Site::current())
    -> Tensor<D, detail::result_of<rules::index, O, S, T>>;

// ---- elementwise: broadcasting by name -----------------------------------------------------------------------------
// The result has the dims of the widest operand, then what the others add; "M" and "B/d L M" make "B/d L M".

template <dtype D, Spec S, dtype E, Spec T>
auto operator+(const Tensor<D, S>& a, const Tensor<E, T>& b)
    -> Tensor<detail::after_t<detail::one_dtype<"+", D, E>, D>, detail::result_of<rules::add, Op("+"), S, T>>;
template <dtype D, Spec S, dtype E, Spec T>
auto operator-(const Tensor<D, S>& a, const Tensor<E, T>& b)
    -> Tensor<detail::after_t<detail::one_dtype<"-", D, E>, D>, detail::result_of<rules::add, Op("-"), S, T>>;
template <dtype D, Spec S, dtype E, Spec T>
auto operator*(const Tensor<D, S>& a, const Tensor<E, T>& b)
    -> Tensor<detail::after_t<detail::one_dtype<"*", D, E>, D>, detail::result_of<rules::multiply, S, T>>;
template <dtype D, Spec S, dtype E, Spec T>
auto operator/(const Tensor<D, S>& a, const Tensor<E, T>& b)
    -> Tensor<detail::after_t<detail::one_dtype<"/", D, E>, D>, detail::result_of<rules::divide, S, T>>;
template <dtype D, Spec S>
auto operator-(const Tensor<D, S>& x) -> Tensor<D, S>;
template <dtype D, Spec S>
auto operator*(const Tensor<D, S>& x, double factor) -> Tensor<D, S>;
template <dtype D, Spec S>
auto operator*(double factor, const Tensor<D, S>& x) -> Tensor<D, S>;
template <dtype D, Spec S>
auto operator/(const Tensor<D, S>& x, double divisor) -> Tensor<D, S>;
template <dtype D, Spec S>
auto operator+(const Tensor<D, S>& x, double constant) -> Tensor<D, detail::result_of<rules::add_constant, Op("+"), S>>;
template <dtype D, Spec S>
auto operator-(const Tensor<D, S>& x, double constant) -> Tensor<D, detail::result_of<rules::add_constant, Op("-"), S>>;

/// Any function of one to four operands, one fused loop forward and one backward (through dual numbers); the lambda is
/// a generic one over scalars: `map([](auto g, auto u) { return swish(g) * u; }, gate, up)`. f32 stands in for bf16.
template <class F, dtype... D, Spec... S>
requires(sizeof...(D) >= 1 && sizeof...(D) <= 4) auto map(F f, const Tensor<D, S>&... x)
    -> Tensor<detail::mapped_t<F, D...>, detail::map_result<"map", S...>()> {
  return detail::map_hook<Tensor<detail::mapped_t<F, D...>, detail::map_result<"map", S...>()>>::run(f, x...);
}

// Functions of one operand, which may not be partial: exp, relu, ... of a sum is not the sum of theirs.
#define SHARDLIB_UNARY(name)                                    \
  template <floating D, Spec S>                                 \
  auto name(const Tensor<D, S>& x, Site site = Site::current()) \
      ->Tensor<D, detail::result_of<rules::map1, Op(#name), S>>;
SHARDLIB_UNARY(exp)
SHARDLIB_UNARY(log)
SHARDLIB_UNARY(tanh)
SHARDLIB_UNARY(sigmoid)
SHARDLIB_UNARY(sqrt)
SHARDLIB_UNARY(rsqrt)
SHARDLIB_UNARY(square)
SHARDLIB_UNARY(abs)
SHARDLIB_UNARY(relu)
SHARDLIB_UNARY(gelu)   // the tanh approximation, as in GPT-2 (Hendrycks and Gimpel 2016)
SHARDLIB_UNARY(swish)  // x * sigmoid(x), also called SiLU (Ramachandran et al. 2017)
#undef SHARDLIB_UNARY

#define SHARDLIB_BINARY(name, Result)                                                  \
  template <dtype D, Spec S, dtype E, Spec T>                                          \
  auto name(const Tensor<D, S>& a, const Tensor<E, T>& b, Site site = Site::current()) \
      ->Tensor<detail::after_t<detail::one_dtype<#name, D, E>, Result>,                \
               detail::result_of<rules::map2, Op(#name), S, T>>;
SHARDLIB_BINARY(maximum, D)
SHARDLIB_BINARY(minimum, D)
SHARDLIB_BINARY(equal, bool_)
SHARDLIB_BINARY(not_equal, bool_)
SHARDLIB_BINARY(less, bool_)
SHARDLIB_BINARY(less_equal, bool_)
SHARDLIB_BINARY(greater, bool_)
SHARDLIB_BINARY(greater_equal, bool_)
SHARDLIB_BINARY(logical_and, bool_)
SHARDLIB_BINARY(logical_or, bool_)
#undef SHARDLIB_BINARY

/// Elements of a where c holds, else of b. c is never partial; a and b are both partial on an axis, or neither.
template <Spec C, dtype D, Spec S, dtype E, Spec T>
auto where(const Tensor<bool_, C>& c, const Tensor<D, S>& a, const Tensor<E, T>& b, Site site = Site::current())
    -> Tensor<detail::after_t<detail::one_dtype<"where", D, E>, D>, detail::result_of<rules::where, C, S, T>>;
/// Elements of a where c holds, else the constant; a partial `a` has masked().
template <Spec C, dtype D, Spec S>
auto where(const Tensor<bool_, C>& c, const Tensor<D, S>& a, double otherwise, Site site = Site::current())
    -> Tensor<D, detail::result_of<rules::map2, Op("where"), S, C>>;
/// Elements of a where c holds, else 0, which may be a summand: `a` may be partial.
template <Spec C, dtype D, Spec S>
auto masked(const Tensor<bool_, C>& c, const Tensor<D, S>& a, Site site = Site::current())
    -> Tensor<D, detail::result_of<rules::where, C, S, S>>;

/// The same values in another dtype. `cast<bf16>(w)`
template <dtype To, dtype D, Spec S>
auto cast(const Tensor<D, S>& x, Site site = Site::current())
    -> Tensor<To, detail::result_of<rules::cast, floating<To>, floating<D>, S>>;

/// The same values, of which nothing is differentiated.
template <dtype D, Spec S>
auto stop_gradient(const Tensor<D, S>& x) -> Tensor<D, S>;

// ---- reductions and ops along a dim --------------------------------------------------------------------------------

/// Sum over the dims that the result lacks; over a sharded one it stays pending. `sum<"B/d L -> L +d">(x)`
template <Op O, dtype D, Spec S>
auto sum(const Tensor<D, S>& x, Site site = Site::current()) -> Tensor<D, detail::result_of<rules::sum, O, S>>;
/// Sum of all elements, pending over every axis that shards a dim. `sum(square(g))` of "M/t/d" is "+d +t"
template <dtype D, Spec S>
auto sum(const Tensor<D, S>& x, Site site = Site::current()) -> Tensor<D, detail::sum_all_result<S>()>;
/// sum, divided by the global number of elements summed. `mean<"B/d L -> L +d">(x)`
template <Op O, floating D, Spec S>
auto mean(const Tensor<D, S>& x, Site site = Site::current()) -> Tensor<D, detail::result_of<rules::mean, O, S>>;
/// Maximum over unsharded dims; no derivative (take stop_gradient of the operand). `max<"B/d V -> B/d">(x)`
template <Op O, dtype D, Spec S>
auto max(const Tensor<D, S>& x, Site site = Site::current())
    -> Tensor<D, detail::result_of<rules::local_max, Op("max"), O, S>>;
/// Index of the first maximum along one unsharded dim. `argmax<"B/d V -> B/d">(x)`
template <Op O, dtype D, Spec S>
auto argmax(const Tensor<D, S>& x, Site site = Site::current())
    -> Tensor<i32, detail::result_of<rules::local_max, Op("argmax"), O, S>>;

/// exp(x) / sum(exp(x)) along an unsharded dim. `softmax<"Klen">(logits)`
template <Op Dim, floating D, Spec S>
auto softmax(const Tensor<D, S>& x, Site site = Site::current())
    -> Tensor<D, detail::result_of<rules::along, Op("softmax"), Dim, S>>;
/// x / sqrt(mean(x^2) + epsilon) along an unsharded dim (Zhang and Sennrich 2019), no scale. `rms_norm<"M">(x)`
template <Op Dim, floating D, Spec S>
auto rms_norm(const Tensor<D, S>& x, double epsilon = 1e-6, Site site = Site::current())
    -> Tensor<D, detail::result_of<rules::along, Op("rms_norm"), Dim, S>>;
/// (x - mean) / sqrt(variance + epsilon) along an unsharded dim (Ba et al. 2016), no scale, no bias.
/// `layer_norm<"M">(x)`
template <Op Dim, floating D, Spec S>
auto layer_norm(const Tensor<D, S>& x, double epsilon = 1e-5, Site site = Site::current())
    -> Tensor<D, detail::result_of<rules::along, Op("layer_norm"), Dim, S>>;

/// Rotary position embedding (Su et al. 2021): element i of the first half of `Dim` is turned against element i of the
/// second half by position / base^(2i/|Dim|); the position is the global index along `Length`. `rope<"L", "D">(q)`
template <Op Length, Op Dim, floating D, Spec S>
auto rope(const Tensor<D, S>& x, double base = 10000.0, Site site = Site::current())
    -> Tensor<D, detail::result_of<rules::rope, Length, Dim, S>>;

/// -log softmax(logits)[target] over a vocabulary that may be sharded (the last dim), without gathering it: two
/// all_reduces of the targets' size. The result is partial over the vocabulary's axes: sum it to the loss.
/// logits "B/d L V/t", targets "B/d L" -> "B/d L +t"
template <floating D, Spec S, integral_dtype I, Spec T>
auto cross_entropy(const Tensor<D, S>& logits, const Tensor<I, T>& targets, Site site = Site::current())
    -> Tensor<D, detail::result_of<rules::cross_entropy, S, T>>;

// ---- layout --------------------------------------------------------------------------------------------------------

/// New names for dims; free. `rename<"L -> Klen">(k)`
template <Op Names, dtype D, Spec S>
auto rename(const Tensor<D, S>& x, Site site = Site::current())
    -> Tensor<D, detail::result_of<rules::rename, Names, S>>;
/// The dims in another order; a local copy. `rearrange<"A B/t -> B/t A">(x)`
template <Op O, dtype D, Spec S>
auto rearrange(const Tensor<D, S>& x, Site site = Site::current())
    -> Tensor<D, detail::result_of<rules::rearrange, O, S>>;
/// Adjacent dims as one; free. `merge<"H/t D -> E/t">(x)`
template <Op O, dtype D, Spec S>
auto merge(const Tensor<D, S>& x, Site site = Site::current()) -> Tensor<D, detail::result_of<rules::merge, O, S>>;
/// One dim as several; all but one of the new sizes are given; free. `split<"E/t -> H/t D">(x, {{"H", 8}})`
template <Op O, dtype D, Spec S>
auto split(const Tensor<D, S>& x, Sizes sizes, Site site = Site::current())
    -> Tensor<D, detail::result_of<rules::split, O, S>>;
/// Two arrays one after the other along an unsharded dim. `concat<"L">(cache, k)`
template <Op Dim, dtype D, Spec S, dtype E, Spec T>
auto concat(const Tensor<D, S>& a, const Tensor<E, T>& b, Site site = Site::current())
    -> Tensor<detail::after_t<detail::one_dtype<"concat", D, E>, D>, detail::result_of<rules::concat, Dim, S, T>>;
/// The value repeated along new dims, whose sizes are given. Backward: sum. `broadcast<"M -> B/d M">(x, {{"B", 8}})`
template <Op O, dtype D, Spec S>
auto broadcast(const Tensor<D, S>& x, Sizes sizes, Site site = Site::current())
    -> Tensor<D, detail::result_of<rules::broadcast, O, S>>;

// ---- arrays from nothing; sizes are global -------------------------------------------------------------------------

/// `full<f32, "B/d L">(mesh, {{"B", 8}, {"L", 16}}, 1.0)`
template <dtype D, Spec S, Spec A>
auto full(const Mesh<A>& mesh, Sizes sizes, double value)
    -> Tensor<D, detail::result_of<rules::create, Op("full"), A, S>>;
template <dtype D, Spec S, Spec A>
auto zeros(const Mesh<A>& mesh, Sizes sizes) -> Tensor<D, detail::result_of<rules::create, Op("zeros"), A, S>>;
template <dtype D, Spec S, Spec A>
auto ones(const Mesh<A>& mesh, Sizes sizes) -> Tensor<D, detail::result_of<rules::create, Op("ones"), A, S>>;
/// 0, 1, 2, ... along one dim: global indices, whatever the sharding. `iota<"L/t">(mesh, 128)`
template <Spec S, Spec A>
auto iota(const Mesh<A>& mesh, std::int64_t size) -> Tensor<i32, detail::result_of<rules::iota, A, S>>;
/// True where the row may see the column: row >= column. `causal_mask<"Qlen Klen">(mesh, 128, 128)`
template <Spec S, Spec A>
auto causal_mask(const Mesh<A>& mesh, std::int64_t rows, std::int64_t columns)
    -> Tensor<bool_, detail::result_of<rules::create, Op("causal_mask"), A, S>>;

/// Names a sequence of random numbers: each array takes a stream of its own.
struct RandomKey {
  std::uint64_t seed = 0;
  std::uint64_t stream = 0;
};
// Numbers are keyed by the global index of the element: the same array on every mesh.
template <floating D, Spec S, Spec A>
auto random_normal(const Mesh<A>& mesh, Sizes sizes, RandomKey key)
    -> Tensor<D, detail::result_of<rules::create, Op("random_normal"), A, S>>;
/// Normal numbers within two standard deviations.
template <floating D, Spec S, Spec A>
auto random_truncated_normal(const Mesh<A>& mesh, Sizes sizes, RandomKey key)
    -> Tensor<D, detail::result_of<rules::create, Op("random_truncated_normal"), A, S>>;
/// Uniform in [0, 1).
template <floating D, Spec S, Spec A>
auto random_uniform(const Mesh<A>& mesh, Sizes sizes, RandomKey key)
    -> Tensor<D, detail::result_of<rules::create, Op("random_uniform"), A, S>>;

/// A scalar as a number on the host: only where every device reads the same one. `item(loss)` of ""
template <dtype D, Spec S>
auto item(const Tensor<D, S>& x) -> std::enable_if_t<detail::checked<rules::item, S>::ok, D>;

// ---- autodiff ------------------------------------------------------------------------------------------------------

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
}  // namespace detail

/// f(weights, args...) and its gradient by the weights. The loss is a scalar partial over every axis of the mesh, "+d
/// +t"; gradients have the type Dual<leaf>. `auto [loss, grads] = value_and_grad(mesh, f, weights, batch);`
template <Spec A, class F, class W, class... Args>
auto value_and_grad(const Mesh<A>& mesh, F&& f, const W& weights, const Args&... args) ->
    typename detail::loss_and_gradient<Mesh<A>, W, std::invoke_result_t<F&, const W&, const Args&...>>::type {
  using R = typename detail::loss_and_gradient<Mesh<A>, W, std::invoke_result_t<F&, const W&, const Args&...>>::type;
  return detail::value_and_grad_hook<R>::run(mesh, f, weights, args...);
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

}  // namespace shardlib
