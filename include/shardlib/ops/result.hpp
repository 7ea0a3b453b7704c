// Code that the declarations of all ops share: checks of dtypes, and the types of results.
#pragma once

#include <concepts>
#include <type_traits>

#include "shardlib/ops/number.hpp"
#include "shardlib/spec/dtype.hpp"
#include "shardlib/types/owned.hpp"
#include "shardlib/types/signature.hpp"
#include "shardlib/types/tensor.hpp"

namespace shardlib {

/// States the dtype in which the backward pass sums over devices: `all_gather<"M/d -> M", backward_sum<f32>>(w)`
template <dtype D>
struct backward_sum {};

namespace detail {

template <class D>
using scalar_of =
    std::conditional_t<std::is_same_v<D, bf16>, f32, std::conditional_t<std::is_same_v<D, bool_>, bool, D>>;

/// The dtype of a map over operands of D... If the function returns a floating-point number of any width, the result
/// has the widest floating dtype among the operands. The literals in the function do not change it.
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
  using type = std::conditional_t<among<f64>, f64,
                                  std::conditional_t<among<f32>, f32, std::conditional_t<among<bf16>, bf16, Returned>>>;
};
template <class T, class... D>
struct mapped<Jet<T, 0>, D...> : mapped<T, D...> {};
/// The number type that the function of a map receives for an element.
template <class D>
using number_of = std::conditional_t<floating<D>, Jet<scalar_of<D>, 0>, scalar_of<D>>;
template <class F, class... D>
struct mapped_by {
  static constexpr bool takes_them = std::is_invocable_v<const F&, number_of<D>...>;
  static constexpr bool takes_plain_ones = [] {
    if constexpr (takes_them)
      return false;  // skips the check, because the function's body may compile only with Jets
    else
      return std::is_invocable_v<const F&, scalar_of<D>...>;
  }();
  static_assert(checked<rules::map_function, takes_them, takes_plain_ones>::ok);
  using type = std::conditional_t<takes_them, std::invoke_result<const F&, number_of<D>...>, std::type_identity<f32>>;
};
template <class F, class... D>
using mapped_t = typename mapped<std::remove_cvref_t<typename mapped_by<F, D...>::type::type>, D...>::type;

/// The full op spec of an op of one operand, for which the user gave only the result or the axes.
template <OpName Name, OpSpec O, Spec S>
inline constexpr OpSpec full_op = OpSpec(rules::completed(Name, O, parsed<S>).view());

template <class Out, class D>
using dtype_or = std::conditional_t<std::is_void_v<Out>, D, Out>;

template <OpName Name, Spec... S>
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

template <OpName Name, dtype D>
inline constexpr bool is_float = checked<rules::floating_dtype, Name, dtype_v<D>>::ok;
template <OpName Name, dtype D>
inline constexpr bool is_number = checked<rules::arithmetic_dtype, Name, dtype_v<D>>::ok;
template <OpName Name, dtype D>
inline constexpr bool is_reduced = checked<rules::reduced_dtype, Name, dtype_v<D>>::ok;
/// The dtype in which an op adds the values of different devices.
template <dtype D>
using sum_of = std::conditional_t<std::is_same_v<D, bf16>, f32, D>;
template <OpName Name, dtype D, class Sum>
inline constexpr bool sums_in = checked<rules::sum_dtype, Name, dtype_v<D>, dtype_v<Sum>>::ok;
template <class Sum>
struct backward_sum_of {
  static constexpr bool named = false;
  using type = Sum;
};
template <class Sum>
struct backward_sum_of<backward_sum<Sum>> {
  static constexpr bool named = true;
  using type = Sum;
};
/// Checks the dtype that an all_gather states for its backward pass. `void` states none.
template <dtype D, class Sum>
inline constexpr bool backward_sums_in = [] {
  if constexpr (std::is_void_v<Sum>)
    return true;
  else
    return checked<rules::backward_sum_dtype, backward_sum_of<Sum>::named, dtype_v<D>,
                   dtype_v<typename backward_sum_of<Sum>::type>>::ok;
}();
template <OpName Name, dtype D, class Sum>
inline constexpr bool is_summed = is_reduced<Name, D>&& sums_in<Name, D, dtype_or<Sum, D>>;
template <OpName Name, dtype D>
inline constexpr bool is_index = checked<rules::index_dtype, Name, dtype_v<D>>::ok;
template <OpName Name, dtype D>
inline constexpr bool is_condition = checked<rules::condition_dtype, Name, dtype_v<D>>::ok;
template <dtype D, dtype Out>
inline constexpr bool einsum_dtypes = checked<rules::einsum_dtype, dtype_v<D>, dtype_v<Out>>::ok;
template <OpName Name, dtype D, dtype E>
inline constexpr bool one_dtype = checked<rules::same_dtype, Name, dtype_v<D>, dtype_v<E>>::ok;
template <OpName Name, dtype D, dtype E, dtype F>
inline constexpr bool attention_dtypes = is_float<Name, D>&& one_dtype<Name, D, E>&& one_dtype<Name, D, F>;

/// A function that runs again in the backward pass must own everything that it uses.
template <OpName Name, class F>
inline constexpr bool owned_function =
    checked<rules::owned_function, Name, self_contained<F>, std::is_trivially_copyable_v<F>>::ok;
/// The arguments of such a function must own their data as well. This check covers trivially copyable types only;
/// other types own their data by their copy constructors.
template <OpName Name, class T>
inline constexpr bool owned_argument =
    checked<rules::owned_argument, Name, self_contained<T> || !std::is_trivially_copyable_v<T>, name_of_type<T>>::ok;

/// The spec of the sum of all elements.
template <Spec S>
constexpr Spec sum_all_result() {
  TensorSpec out;
  for (auto axis : parsed<S>.partial) out.add_partial(axis);
  for (const Dim& dim : parsed<S>.dims)
    for (auto axis : dim.axes) out.add_partial(axis);
  return Spec(to_string(out).view());
}

/// The result type of an op that is called without its op spec. It is a compile error that asks for the op spec.
template <OpName Name, class D, Spec... S>
struct without_op_spec;
template <OpName Name, class D, Spec S>
struct without_op_spec<Name, D, S> {
  using type = Tensor<D, result_of<rules::no_op_spec, Name, S>>;
};
template <OpName Name, class D, Spec S, Spec T>
struct without_op_spec<Name, D, S, T> {
  using type = Tensor<D, result_of<rules::no_op_spec2, Name, S, T>>;
};
template <OpName Name, class D, Spec... S>
using needs_op_spec = typename without_op_spec<Name, D, S...>::type;

/// A type alias that evaluates a check before it gives the type.
template <bool, class T>
struct after {
  using type = T;
};
template <bool Checked, class T>
using after_t = typename after<Checked, T>::type;

}  // namespace detail

}  // namespace shardlib
