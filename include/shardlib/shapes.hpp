// Types only: specs, rules, Tensor, and the declaration of every op with the type of its result.
// Needs the standard library alone. Checks the shapes of a whole model at compile time; shardlib.hpp makes it run.
#pragma once

#include <cstdint>
#include <optional>
#include <type_traits>
#include <vector>

#include "shardlib/gradient.hpp"
#include "shardlib/scalar.hpp"
#include "shardlib/shapes/autodiff.hpp"
#include "shardlib/shapes/create.hpp"
#include "shardlib/shapes/missing_spec.hpp"
#include "shardlib/shapes/result.hpp"
#include "shardlib/spec_functions.hpp"
#include "shardlib/tensor.hpp"
#include "shardlib/tree.hpp"

namespace shardlib {

// ---- collectives ---------------------------------------------------------------------------------------------------

// The op spec of an op of one operand may be its result alone, `all_gather<"M F/t">(w)`, or the axes that it acts over,
// `all_gather<over<"d">>(w)`, where the operand says the rest.
// `Sum` is the dtype in which devices' parts are summed: f32 for bf16, which stays bf16 on the wire and is rounded
// once, otherwise the operand's. The sum of bf16 has to state it.

/// Concatenates the blocks of the last axes of one or several dims. Backward: reduce_scatter; the dtype in which that
/// sums may be stated, `all_gather<"M/t/d H -> M/t H", backward_sum<f32>>(w)`. `all_gather<"M/t/d H -> M/t H">(w)`
template <Op O, class Sum = void, dtype D, Spec S>
auto all_gather(const Tensor<D, S>& x, Site site = Site::current())
    -> Tensor<detail::after_t<detail::backward_sums_in<D, Sum>, D>, detail::result_of<rules::all_gather, O, S>>;

/// Takes the pending sum and leaves each device its block. Backward: all_gather.
/// `reduce_scatter<"B/d L M +t -> B/d L M/t", f32>(y)`, of f32 without the dtype
template <Op O, class Sum = void, dtype D, Spec S>
auto reduce_scatter(const Tensor<D, S>& x, Site site = Site::current())
    -> Tensor<detail::after_t<detail::is_summed<"reduce_scatter", D, Sum>, D>,
              detail::result_of<rules::reduce_scatter, O, S>>;

/// Takes the pending sum and gives it to every device. Backward: all_reduce.
/// `all_reduce<"+d +t -> ">(loss)`
template <Op O, class Sum = void, dtype D, Spec S>
auto all_reduce(const Tensor<D, S>& x, Site site = Site::current())
    -> Tensor<detail::after_t<detail::is_summed<"all_reduce", D, Sum>, D>, detail::result_of<rules::all_reduce, O, S>>;

/// Maximum over the dims that the result lacks, over all devices that share them. No derivative: take stop_gradient of
/// the operand first. `all_reduce_max<"B/d L V/t -> B/d L">(logits)`
template <Op O, dtype D, Spec S>
auto all_reduce_max(const Tensor<D, S>& x, Site site = Site::current())
    -> Tensor<detail::after_t<detail::is_reduced<"all_reduce_max", D>, D>,
              detail::result_of<rules::all_reduce_max, O, S>>;

/// Moves the last axes of one dim to another. Backward: the inverse all_to_all. `all_to_all<"A/t B -> A B/t">(x)`
template <Op O, dtype D, Spec S>
auto all_to_all(const Tensor<D, S>& x, Site site = Site::current())
    -> Tensor<D, detail::result_of<rules::all_to_all, O, S>>;

/// Passes blocks round the ring of an axis: device i's block goes to device (i + by) mod n. A dim that the axis shards
/// may not be padded. `shift<"A/t", "t">(x, 1)`
template <Op O, Op Axis, dtype D, Spec S>
auto shift(const Tensor<D, S>& x, int by, Site site = Site::current())
    -> Tensor<D, detail::result_of<rules::shift, O, Axis, S>>;

/// The same of the one dim that the axis shards. `shift<over<"t">>(x, 1)`
template <Op O, dtype D, Spec S>
auto shift(const Tensor<D, S>& x, int by, Site site = Site::current())
    -> Tensor<D, detail::result_of<rules::shift_over, O, S>>;

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
auto einsum_unreduced(const Tensor<D, S>& x, const Tensor<E, T>& y, Site site = Site::current()) -> Tensor<
    detail::after_t<detail::one_dtype<"einsum_unreduced", D, E> && detail::einsum_dtypes<D, detail::dtype_or<Out, D>>,
                    detail::dtype_or<Out, D>>,
    detail::result_of<rules::einsum, O, S, T>>;

/// One operand: sums away the dims that the result lacks and orders the others. `einsum_unreduced<"A B/t -> A +t">(x)`
template <Op O, class Out = void, dtype D, Spec S>
auto einsum_unreduced(const Tensor<D, S>& x, Site site = Site::current())
    -> Tensor<detail::after_t<detail::einsum_dtypes<D, detail::dtype_or<Out, D>>, detail::dtype_or<Out, D>>,
              detail::result_of<rules::einsum1, O, S>>;

/// Rows of the table by index along the bracketed dim; a row that lies on another device is 0, so the result is
/// partial. Indices are global. An index outside the dim is an error. `index_unreduced<"[V/t] M, B/d L -> B/d L M
/// +t">(table, ids)`
template <Op O, dtype D, Spec S, dtype I, Spec T>
auto index_unreduced(const Tensor<D, S>& table, const Tensor<I, T>& indices, Site site = Site::current())
    -> Tensor<detail::after_t<detail::is_index<"index_unreduced", I>, D>, detail::result_of<rules::index, O, S, T>>;

// ---- elementwise: broadcasting by name -----------------------------------------------------------------------------
// Between tensors + - * / are Tensor's own (tensor.hpp). Integers divide by no zero, and take only numbers that they
// hold exactly (an Error otherwise); floating ones round.

template <dtype D, Spec S>
auto operator*(const Tensor<D, S>& x, detail::LocatedNumber factor)
    -> Tensor<detail::after_t<detail::is_number<"*", D>, D>, S>;
template <dtype D, Spec S>
auto operator*(detail::LocatedNumber factor, const Tensor<D, S>& x)
    -> Tensor<detail::after_t<detail::is_number<"*", D>, D>, S>;
template <dtype D, Spec S>
auto operator/(const Tensor<D, S>& x, detail::LocatedNumber divisor)
    -> Tensor<detail::after_t<detail::is_number<"/", D>, D>, S>;
template <dtype D, Spec S>
auto operator+(const Tensor<D, S>& x, detail::LocatedNumber constant)
    -> Tensor<detail::after_t<detail::is_number<"+", D>, D>, detail::result_of<rules::add_constant, Op("+"), S>>;
template <dtype D, Spec S>
auto operator-(const Tensor<D, S>& x, detail::LocatedNumber constant)
    -> Tensor<detail::after_t<detail::is_number<"-", D>, D>, detail::result_of<rules::add_constant, Op("-"), S>>;
template <dtype D, Spec S>
auto operator+(detail::LocatedNumber constant, const Tensor<D, S>& x)
    -> Tensor<detail::after_t<detail::is_number<"+", D>, D>, detail::result_of<rules::add_constant, Op("+"), S>>;
template <dtype D, Spec S>
auto operator-(detail::LocatedNumber constant, const Tensor<D, S>& x)
    -> Tensor<detail::after_t<detail::is_number<"-", D>, D>, detail::result_of<rules::add_constant, Op("-"), S>>;
template <dtype D, Spec S>
auto operator/(detail::LocatedNumber constant, const Tensor<D, S>& x)
    -> Tensor<detail::after_t<detail::is_float<"/", D>, D>, detail::result_of<rules::map1, Op("/"), S>>;

namespace detail {
template <class F, class... X>
using map_t =
    Tensor<after_t<owned_function<"map", F>, mapped_t<F, typename X::value_type...>>, map_result<"map", X::spec...>()>;
}  // namespace detail

/// Any function of one to four operands, one fused loop forward and one backward (through dual numbers). It is a
/// generic one of numbers, whose functions (exp, pow, ...) it calls without std::, and captures nothing, or numbers by
/// value: `map([](auto g, auto u) { return swish(g) * u; }, gate, up)`. f32 stands in for bf16.
template <class F, tensor X>
auto map(F f, const X& x, Site site = Site::current()) -> detail::map_t<F, X> {
  return detail::map_hook<detail::map_t<F, X>>::run(f, site, x);
}
template <class F, tensor X, tensor Y>
auto map(F f, const X& x, const Y& y, Site site = Site::current()) -> detail::map_t<F, X, Y> {
  return detail::map_hook<detail::map_t<F, X, Y>>::run(f, site, x, y);
}
template <class F, tensor X, tensor Y, tensor Z>
auto map(F f, const X& x, const Y& y, const Z& z, Site site = Site::current()) -> detail::map_t<F, X, Y, Z> {
  return detail::map_hook<detail::map_t<F, X, Y, Z>>::run(f, site, x, y, z);
}
template <class F, tensor X, tensor Y, tensor Z, tensor W>
auto map(F f, const X& x, const Y& y, const Z& z, const W& w, Site site = Site::current())
    -> detail::map_t<F, X, Y, Z, W> {
  return detail::map_hook<detail::map_t<F, X, Y, Z, W>>::run(f, site, x, y, z, w);
}

// Functions of one operand, which may not be partial: exp, relu, ... of a sum is not the sum of theirs.
#define SHARDLIB_UNARY(name)                                    \
  template <dtype D, Spec S>                                    \
  auto name(const Tensor<D, S>& x, Site site = Site::current()) \
      -> Tensor<detail::after_t<detail::is_float<#name, D>, D>, detail::result_of<rules::map1, Op(#name), S>>;
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
      -> Tensor<detail::after_t<detail::one_dtype<#name, D, E>, Result>,               \
                detail::result_of<rules::map2, Op(#name), S, T>>;
// The second operand may be a number: `greater(x, 0.0)`.
#define SHARDLIB_BINARY_WITH_NUMBER(name, Result)                         \
  SHARDLIB_BINARY(name, Result)                                           \
  template <dtype D, Spec S>                                              \
  auto name(const Tensor<D, S>& a, double b, Site site = Site::current()) \
      -> Tensor<Result, detail::result_of<rules::map1, Op(#name), S>>;
SHARDLIB_BINARY_WITH_NUMBER(maximum, D)
SHARDLIB_BINARY_WITH_NUMBER(minimum, D)
SHARDLIB_BINARY_WITH_NUMBER(equal, bool_)
SHARDLIB_BINARY_WITH_NUMBER(not_equal, bool_)
SHARDLIB_BINARY_WITH_NUMBER(less, bool_)
SHARDLIB_BINARY_WITH_NUMBER(less_equal, bool_)
SHARDLIB_BINARY_WITH_NUMBER(greater, bool_)
SHARDLIB_BINARY_WITH_NUMBER(greater_equal, bool_)
SHARDLIB_BINARY(logical_and, bool_)
SHARDLIB_BINARY(logical_or, bool_)
#undef SHARDLIB_BINARY_WITH_NUMBER
#undef SHARDLIB_BINARY

/// Elements of a where c holds, else of b. c is never partial; a and b are both partial on an axis, or neither.
template <dtype B, Spec C, dtype D, Spec S, dtype E, Spec T>
auto where(const Tensor<B, C>& c, const Tensor<D, S>& a, const Tensor<E, T>& b, Site site = Site::current())
    -> Tensor<detail::after_t<detail::is_condition<"where", B> && detail::one_dtype<"where", D, E>, D>,
              detail::result_of<rules::where, C, S, T>>;
/// Elements of a where c holds, else the constant; a partial `a` has masked().
template <dtype B, Spec C, dtype D, Spec S>
auto where(const Tensor<B, C>& c, const Tensor<D, S>& a, double otherwise, Site site = Site::current())
    -> Tensor<detail::after_t<detail::is_condition<"where", B>, D>, detail::result_of<rules::map2, Op("where"), S, C>>;
/// Elements of a where c holds, else 0, which may be a summand: `a` may be partial.
template <dtype B, Spec C, dtype D, Spec S>
auto masked(const Tensor<B, C>& c, const Tensor<D, S>& a, Site site = Site::current())
    -> Tensor<detail::after_t<detail::is_condition<"masked", B>, D>, detail::result_of<rules::where, C, S, S>>;

/// The same values in another dtype. `cast<bf16>(w)`
template <dtype To, dtype D, Spec S>
auto cast(const Tensor<D, S>& x, Site site = Site::current())
    -> Tensor<To, detail::result_of<rules::cast, floating<To>, floating<D>, S>>;

/// The same values, of which nothing is differentiated.
template <dtype D, Spec S>
auto stop_gradient(const Tensor<D, S>& x, Site site = Site::current()) -> Tensor<D, S>;

// ---- reductions and ops along a dim --------------------------------------------------------------------------------

/// Sum over the dims that the result lacks; over a sharded one it stays pending. `sum<"B/d L -> L +d">(x)`
template <Op O, dtype D, Spec S>
auto sum(const Tensor<D, S>& x, Site site = Site::current())
    -> Tensor<detail::after_t<detail::is_reduced<"sum", D>, D>, detail::result_of<rules::sum, O, S>>;
/// Sum of all elements, pending over every axis that shards a dim. `sum(square(g))` of "M/t/d" is "+d +t"
template <dtype D, Spec S>
auto sum(const Tensor<D, S>& x, Site site = Site::current())
    -> Tensor<detail::after_t<detail::is_reduced<"sum", D>, D>, detail::sum_all_result<S>()>;
/// sum, divided by the global number of elements summed, padding not counted. `mean<"B/d L -> L +d">(x)`
template <Op O, dtype D, Spec S>
auto mean(const Tensor<D, S>& x, Site site = Site::current())
    -> Tensor<detail::after_t<detail::is_float<"mean", D>, D>, detail::result_of<rules::mean, O, S>>;
/// Maximum over unsharded dims; no derivative (take stop_gradient of the operand). `max<"B/d V -> B/d">(x)`
template <Op O, dtype D, Spec S>
auto max(const Tensor<D, S>& x, Site site = Site::current())
    -> Tensor<detail::after_t<detail::is_reduced<"max", D>, D>, detail::result_of<rules::local_max, Op("max"), O, S>>;
/// Index of the first maximum along one unsharded dim. `argmax<"B/d V -> B/d">(x)`
template <Op O, dtype D, Spec S>
auto argmax(const Tensor<D, S>& x, Site site = Site::current())
    -> Tensor<i32, detail::result_of<rules::local_max, Op("argmax"), O, S>>;

/// exp(x) / sum(exp(x)) along an unsharded dim. `softmax<"Klen">(logits)`
template <Op Dim, dtype D, Spec S>
auto softmax(const Tensor<D, S>& x, Site site = Site::current())
    -> Tensor<detail::after_t<detail::is_float<"softmax", D>, D>,
              detail::result_of<rules::along, Op("softmax"), Dim, S>>;
/// x / sqrt(mean(x^2) + epsilon) along an unsharded dim (Zhang and Sennrich 2019), no scale. `rms_norm<"M">(x)`
template <Op Dim, dtype D, Spec S>
auto rms_norm(const Tensor<D, S>& x, double epsilon = 1e-6, Site site = Site::current())
    -> Tensor<detail::after_t<detail::is_float<"rms_norm", D>, D>,
              detail::result_of<rules::along, Op("rms_norm"), Dim, S>>;
/// (x - mean) / sqrt(variance + epsilon) along an unsharded dim (Ba et al. 2016), no scale, no bias.
/// `layer_norm<"M">(x)`
template <Op Dim, dtype D, Spec S>
auto layer_norm(const Tensor<D, S>& x, double epsilon = 1e-5, Site site = Site::current())
    -> Tensor<detail::after_t<detail::is_float<"layer_norm", D>, D>,
              detail::result_of<rules::along, Op("layer_norm"), Dim, S>>;

/// Rotary position embedding (Su et al. 2021): element i of the first half of `Dim` is turned against element i of the
/// second half by position / base^(2i/|Dim|); the position is `offset` + the global index along `Length`. `Dim` may not
/// be padded. `rope<"L", "D">(q)`
template <Op Length, Op Dim, dtype D, Spec S>
auto rope(const Tensor<D, S>& x, double base = 10000.0, std::int64_t offset = 0, Site site = Site::current())
    -> Tensor<detail::after_t<detail::is_float<"rope", D>, D>, detail::result_of<rules::rope, Length, Dim, S>>;

/// softmax(scale q k') v along `Length`, each position seeing itself and those before it; `Dim` is the width of a head,
/// and scale 1/sqrt(|Dim|) unless given. Scores are in f32 (f64 for f64) and never stored for all positions; both dims
/// are whole on each device, all others are batch. Keys and values may lack dims of the queries: query heads that share
/// a head of keys. `causal_attention<"L", "D">(q, k, v)` of q "B/d L Q K/t D", k and v "B/d L K/t D"
template <Op Length, Op Dim, dtype D, Spec Q, dtype E, Spec K, dtype F, Spec V>
auto causal_attention(const Tensor<D, Q>& q, const Tensor<E, K>& k, const Tensor<F, V>& v,
                      std::optional<double> scale = {}, Site site = Site::current())
    -> Tensor<detail::after_t<detail::attention_dtypes<D, E, F>, D>,
              detail::result_of<rules::causal_attention, Length, Dim, Q, K, V>>;
/// The same, where a position sees those of its own segment alone. `causal_attention<"L", "D">(q, k, v, segments)` with
/// segments "B/d L"
template <Op Length, Op Dim, dtype D, Spec Q, dtype E, Spec K, dtype F, Spec V, dtype I, Spec S>
auto causal_attention(const Tensor<D, Q>& q, const Tensor<E, K>& k, const Tensor<F, V>& v, const Tensor<I, S>& segments,
                      std::optional<double> scale = {}, Site site = Site::current())
    -> Tensor<
        detail::after_t<detail::attention_dtypes<D, E, F> && detail::is_index<"causal_attention of segments", I>, D>,
        detail::result_of<rules::causal_attention_in_segments, Length, Dim, Q, K, V, S>>;

namespace detail {
/// Bytes of a device's logits up to which linear_cross_entropy stores them. Tests lower it.
inline std::int64_t most_logits = std::int64_t{256} << 20;
}  // namespace detail

/// -log softmax(logits)[target] over a vocabulary that may be sharded (the last dim), without gathering it: two
/// all_reduces of the targets' size. The result is partial over the vocabulary's axes: sum it to the loss.
/// logits "B/d L V/t", targets "B/d L" -> "B/d L +t"
template <dtype D, Spec S, dtype I, Spec T>
auto cross_entropy(const Tensor<D, S>& logits, const Tensor<I, T>& targets, Site site = Site::current())
    -> Tensor<detail::after_t<detail::is_float<"cross_entropy", D> && detail::is_index<"cross_entropy", I>, D>,
              detail::result_of<rules::cross_entropy, S, T>>;

/// cross_entropy of the logits einsum_unreduced<O>(x, table), which are in f32 (f64 of f64). Where they take more than
/// `stored` bytes of a device, 256 MiB unless given, they are never all there: each piece of them is made, used, and
/// made once more in the backward pass, which is one product more; operands of bf16 are copied as f32 then.
/// Communicates as cross_entropy does. `linear_cross_entropy<"B/d L M, V/t M -> B/d L V/t">(x, table, targets)`
/// with targets "B/d L" -> "B/d L +t"
template <Op O, dtype D, Spec S, dtype E, Spec T, dtype I, Spec R>
auto linear_cross_entropy(const Tensor<D, S>& x, const Tensor<E, T>& table, const Tensor<I, R>& targets,
                          std::int64_t stored = detail::most_logits, Site site = Site::current())
    -> Tensor<
        detail::after_t<detail::one_dtype<"linear_cross_entropy", D, E> &&
                            detail::is_float<"linear_cross_entropy", D> && detail::is_index<"linear_cross_entropy", I>,
                        accumulator_t<D>>,
        detail::result_of<rules::linear_cross_entropy, O, S, T, R>>;

// ---- layout --------------------------------------------------------------------------------------------------------

/// New names for dims; free. `rename<"L -> Klen">(k)`
template <Op Names, dtype D, Spec S>
auto rename(const Tensor<D, S>& x, Site site = Site::current())
    -> Tensor<D, detail::result_of<rules::rename, Names, S>>;
/// The dims in another order; a local copy. `rearrange<"A B/t -> B/t A">(x)`
template <Op O, dtype D, Spec S>
auto rearrange(const Tensor<D, S>& x, Site site = Site::current())
    -> Tensor<D, detail::result_of<rules::rearrange, O, S>>;
/// The dims in reverse order, as numpy's .T; a local copy. `transpose(x)` of "A B/t" is "B/t A"
template <dtype D, Spec S>
auto transpose(const Tensor<D, S>& x, Site site = Site::current()) -> Tensor<D, detail::result_of<rules::transpose, S>>;
/// Two dims in each other's place; a local copy. `transpose<"A", "B">(x)`
template <Op A, Op B, dtype D, Spec S>
auto transpose(const Tensor<D, S>& x, Site site = Site::current())
    -> Tensor<D, detail::result_of<rules::transpose2, A, B, S>>;
/// Adjacent dims as one, of which only the first may be padded; free. `merge<"H/t D -> E/t">(x)`
template <Op O, dtype D, Spec S>
auto merge(const Tensor<D, S>& x, Site site = Site::current()) -> Tensor<D, detail::result_of<rules::merge, O, S>>;
/// One dim as several; all but one of the new sizes are given; padding goes to the first, and must be a whole number of
/// its elements; free. `split<"E/t -> H/t D">(x, {{"H", 8}})`
template <Op O, dtype D, Spec S>
auto split(const Tensor<D, S>& x, Sizes sizes, Site site = Site::current())
    -> Tensor<D, detail::result_of<rules::split, O, S>>;
/// Two arrays one after the other along an unsharded dim, which may be padded in the second. A name has one size, so
/// each of the three lengths has a name of its own. `concat<"Past, L -> Klen">(cache, k)`
template <Op O, dtype D, Spec S, dtype E, Spec T>
auto concat(const Tensor<D, S>& a, const Tensor<E, T>& b, Site site = Site::current())
    -> Tensor<detail::after_t<detail::one_dtype<"concat", D, E>, D>, detail::result_of<rules::concat, O, S, T>>;
/// Arrays of one type along a new dim, the first of the result. `stack<"layer">(std::vector{a, b, c})`
template <Op Dim, dtype D, Spec S>
auto stack(const std::vector<Tensor<D, S>>& parts, Site site = Site::current())
    -> Tensor<D, detail::result_of<rules::stack, Dim, S, S>>;
/// `stack<"part">(a, b)`
template <Op Dim, dtype D, Spec S, dtype E, Spec T>
auto stack(const Tensor<D, S>& a, const Tensor<E, T>& b, Site site = Site::current())
    -> Tensor<detail::after_t<detail::one_dtype<"stack", D, E>, D>, detail::result_of<rules::stack, Dim, S, T>>;
/// The value repeated along new dims, whose sizes are given. Backward: sum. `broadcast<"M -> B/d M">(x, {{"B", 8}})`
template <Op O, dtype D, Spec S>
auto broadcast(const Tensor<D, S>& x, Sizes sizes, Site site = Site::current())
    -> Tensor<D, detail::result_of<rules::broadcast, O, S>>;

}  // namespace shardlib
