// The declarations of all ops share these: checks of dtypes and functions, and the types of results.
#pragma once

#include <concepts>
#include <type_traits>

#include "shardlib/ops/map/number.hpp"
#include "shardlib/spec/dtype.hpp"
#include "shardlib/types/self_contained.hpp"
#include "shardlib/types/signature.hpp"
#include "shardlib/types/tensor.hpp"

namespace shardlib {

/// States the dtype in which the backward pass sums over devices: `all_gather<"M/d -> M", backward_sum<f32>>(w)`
template <dtype D>
struct backward_sum {};

namespace detail {

/// T, once the check is evaluated: `Tensor<after_t<is_float<"exp", D>, D>, S>`. A check is true or a compile error.
template <bool Checked, class T>
struct after {
  using type = T;
};
template <bool Checked, class T>
using after_t = typename after<Checked, T>::type;

// ---- checks of dtypes ----

template <OpName Name, dtype D>
inline constexpr bool is_float = checked<rules::floating_dtype, Name, dtype_v<D>>::ok;
/// D, the dtype of a result that takes it over from a floating-point operand.
template <OpName Name, dtype D>
using if_float = after_t<is_float<Name, D>, D>;
template <OpName Name, dtype D>
inline constexpr bool is_number = checked<rules::arithmetic_dtype, Name, dtype_v<D>>::ok;
template <OpName Name, dtype D>
inline constexpr bool is_index = checked<rules::index_dtype, Name, dtype_v<D>>::ok;
template <OpName Name, dtype D>
inline constexpr bool is_condition = checked<rules::condition_dtype, Name, dtype_v<D>>::ok;
template <OpName Name, dtype D, dtype E>
inline constexpr bool one_dtype = checked<rules::same_dtype, Name, dtype_v<D>, dtype_v<E>>::ok;
template <OpName Name, dtype D, dtype E, dtype F>
inline constexpr bool attention_dtypes = is_float<Name, D>&& one_dtype<Name, D, E>&& one_dtype<Name, D, F>;
template <dtype D, dtype Out>
inline constexpr bool einsum_dtypes = checked<rules::einsum_dtype, dtype_v<D>, dtype_v<Out>>::ok;

// ---- sums over devices, whose dtype a call may state: `void` states none ----

template <class Out, class D>
using dtype_or = std::conditional_t<std::is_void_v<Out>, D, Out>;
/// The dtype in which an op adds the values of different devices.
template <dtype D>
using sum_of = std::conditional_t<std::is_same_v<D, bf16>, f32, D>;
template <OpName Name, dtype D>
inline constexpr bool is_reduced = checked<rules::reduced_dtype, Name, dtype_v<D>>::ok;
template <OpName Name, dtype D, class Sum>
inline constexpr bool is_summed =
    is_reduced<Name, D>&& checked<rules::sum_dtype, Name, dtype_v<D>, dtype_v<dtype_or<Sum, D>>>::ok;
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
/// Checks the dtype that an all_gather states for its backward pass.
template <dtype D, class Sum>
inline constexpr bool backward_sums_in = [] {
  if constexpr (std::is_void_v<Sum>)
    return true;
  else
    return checked<rules::backward_sum_dtype, backward_sum_of<Sum>::named, dtype_v<D>,
                   dtype_v<typename backward_sum_of<Sum>::type>>::ok;
}();

// ---- functions as arguments of ops ----

/// A function that runs again in the backward pass must own everything that it uses.
template <OpName Name, class F>
inline constexpr bool owned_function =
    checked<rules::owned_function, Name, self_contained<F>, std::is_trivially_copyable_v<F>>::ok;
/// The arguments of such a function must own their data as well. This check covers trivially copyable types only;
/// other types own their data by their copy constructors.
template <OpName Name, class T>
inline constexpr bool owned_argument =
    checked<rules::owned_argument, Name, self_contained<T> || !std::is_trivially_copyable_v<T>, name_of_type<T>>::ok;

template <class D>
using scalar_of =
    std::conditional_t<std::is_same_v<D, bf16>, f32, std::conditional_t<std::is_same_v<D, bool_>, bool, D>>;
/// The number type that the function of a map receives for an element.
template <class D>
using number_of = std::conditional_t<floating<D>, Jet<scalar_of<D>, 0>, scalar_of<D>>;
/// The type that the function of a map over operands of D... returns.
template <class F, class... D>
constexpr auto map_returns() {
  constexpr bool takes_them = std::is_invocable_v<const F&, number_of<D>...>;
  constexpr bool takes_plain_ones = [] {
    if constexpr (takes_them)
      return false;  // skips the check, because the function's body may compile only with Jets
    else
      return std::is_invocable_v<const F&, scalar_of<D>...>;
  }();
  static_assert(checked<rules::map_function, takes_them, takes_plain_ones>::ok);
  if constexpr (takes_them)
    return std::type_identity<std::remove_cvref_t<std::invoke_result_t<const F&, number_of<D>...>>>();
  else
    return std::type_identity<f32>();
}
/// The dtype of a map over operands of D... whose function returns that. For a floating-point number of any width it is
/// the widest floating dtype among the operands: the literals in the function do not change it.
template <class Returned, class... D>
constexpr auto mapped_dtype() {
  static_assert(checked<rules::map_return, std::is_void_v<Returned>>::ok);
  if constexpr (std::is_void_v<Returned>)
    return std::type_identity<f32>();
  else if constexpr (is_jet<Returned>)
    return mapped_dtype<decltype(Returned::value), D...>();
  else if constexpr (std::is_same_v<Returned, bool>)
    return std::type_identity<bool_>();
  else if constexpr (std::floating_point<Returned> && (std::is_same_v<D, f64> || ...))
    return std::type_identity<f64>();
  else if constexpr (std::floating_point<Returned> && (std::is_same_v<D, f32> || ...))
    return std::type_identity<f32>();
  else if constexpr (std::floating_point<Returned> && (std::is_same_v<D, bf16> || ...))
    return std::type_identity<bf16>();
  else
    return std::type_identity<Returned>();
}
template <class F, class... D>
using mapped_t = typename decltype(mapped_dtype<typename decltype(map_returns<F, D...>())::type, D...>())::type;

// ---- specs ----

/// The full op spec of an op of one operand, for which the user gave only the result or the axes.
template <OpName Name, OpSpec O, Spec S>
inline constexpr OpSpec full_op = parsed_op<O>.form == ParsedOp::whole
                                      ? O
                                      : OpSpec(rules::completed(Name, parsed_op<O>, parsed<S>).view());

template <OpName Name, Spec... S>
inline constexpr Spec no_op_spec = result_of<rules::no_op_spec2, Name, S...>;
template <OpName Name, Spec S>
inline constexpr Spec no_op_spec<Name, S> = result_of<rules::no_op_spec, Name, S>;
/// The result type of an op that is called without its op spec. It is a compile error that asks for the op spec.
template <OpName Name, class D, Spec... S>
using needs_op_spec = Tensor<D, no_op_spec<Name, S...>>;

// ---- calls that fit none of an op's forms ----
// An op takes them by `(const Args&...)`, to which a function of the program with the same name is preferred. The
// compile error is in the body, so that it is none where such a function is called.

/// A compile error that gives a form. The result fits everywhere, so that one wrong call is one error.
template <OpName Name, Literal Form, class... Args>
auto wrong_call(const Args&...) -> Tensor<f32, result_of<rules::wrong_call, Name, Form, sizeof...(Args)>>;
template <class... Args>
inline constexpr bool tensor_first = false;
template <class D, Spec S, class... Args>
inline constexpr bool tensor_first<Tensor<D, S>, Args...> = true;
/// A compile error for an op along a dim that is called without its name. `More` is what follows the name.
template <OpName Name, Literal More = "", class D, Spec S, class... Args>
auto needs_dim(const Tensor<D, S>&, const Args&...) -> Tensor<D, result_of<rules::no_dim, Name, More, S>>;
/// The same, or with the name of the dim a compile error that gives a form: other libraries name dims by numbers.
template <OpName Name, Literal Form, DimName... Dim, class... Args>
auto wrong_along(const Args&... args) {
  if constexpr (sizeof...(Dim) == 0)
    return needs_dim<Name>(args...);
  else
    return wrong_call<Name, Form>(args...);
}
template <class X>
inline constexpr bool is_mesh = false;
template <Spec Axes>
inline constexpr bool is_mesh<Mesh<Axes>> = true;
/// The first argument of a call that fits no form. No text or number: a program may have its own `pad("loss", 10)`.
template <class X>
concept first_argument = tensor<X> || is_mesh<X>;

// A public op has one of these macros below it: a call that fits no form of the op is a compile error with one
// sentence. For an op along a dim:
#define SHARDLIB_NEEDS_DIM(op, form)                        \
  template <DimName... Dim, class... Args>                  \
  requires detail::tensor_first<Args...>                    \
  auto op(const Args&... args) {                            \
    return detail::wrong_along<#op, form, Dim...>(args...); \
  }                                                         \
  SHARDLIB_DTYPE_FIRST(op, form)
// For a dtype in front of the dim, or in its place. It counts as an argument, so that the sentence has the plural:
#define SHARDLIB_DTYPE_FIRST(op, form)                              \
  template <dtype Out, DimName... Dim, class... Args>               \
  requires detail::tensor_first<Args...>                            \
  auto op(const Args&... args) {                                    \
    return detail::wrong_call<#op, form>(args..., OpName("dtype")); \
  }
// For a call without its op spec, or with a number in its place:
#define SHARDLIB_NEEDS_OP_SPEC(op)                       \
  template <dtype D, Spec S>                             \
  auto op(const Tensor<D, S>& /*x*/, int /*axis*/ = 0) { \
    return detail::needs_op_spec<#op, D, S>();           \
  }
// For any other call. Overload resolution takes an ellipsis last, so a call that fits by conversions never comes here:
#define SHARDLIB_FORM(op, form)                      \
  template <OpSpec... O, detail::first_argument X>   \
  auto op(const X& x, ...) {                         \
    return detail::wrong_call<#op, form>(x, "more"); \
  }
// For an op spec in parentheses, as of other libraries. A program's own function of such a name is the better one:
#define SHARDLIB_SPEC_IN_PARENTHESES(op)       \
  template <tensor X>                          \
  auto op(const char* spec, const X& x, ...) { \
    return op(x, spec);                        \
  }
// The same for an op that takes sizes in braces, which g++ passes to no ellipsis:
#define SHARDLIB_FORM_WITH_SIZES(op, form)          \
  SHARDLIB_FORM(op, form)                           \
  template <detail::first_argument X>               \
  auto op(const X& x, const Sizes& sizes) {         \
    return detail::wrong_call<#op, form>(x, sizes); \
  }
// The same for a function that is not an op. Some wrong calls lack its first argument, such as the mesh:
#define SHARDLIB_FORM_OF_CALL(function, form)                        \
  template <class X>                                                 \
  auto function(const X& x, ...) {                                   \
    return shardlib::detail::wrong_call<#function, form>(x, "more"); \
  }

/// The base of InFlight and Gathering, which are not tensors yet. An op of one is the compile error of its conversion
/// to a tensor.
template <class Self>
struct Unfinished {
  static auto whole(const Self& x) {
    const Tensor<typename Self::value_type, Self::to> y = x;
    return y;
  }
#define SHARDLIB_UNFINISHED(op)                        \
  friend auto op(const Self& x, const auto&... more) { \
    return op(whole(x), more...);                      \
  }
  SHARDLIB_UNFINISHED(abs)
  SHARDLIB_UNFINISHED(exp)
  SHARDLIB_UNFINISHED(gelu)
  SHARDLIB_UNFINISHED(log)
  SHARDLIB_UNFINISHED(relu)
  SHARDLIB_UNFINISHED(sigmoid)
  SHARDLIB_UNFINISHED(square)
  SHARDLIB_UNFINISHED(swish)
  SHARDLIB_UNFINISHED(tanh)
#undef SHARDLIB_UNFINISHED
#define SHARDLIB_UNFINISHED(op)                                                       \
  friend auto operator op(const Self& x, const auto& y) {                             \
    return whole(x) op y;                                                             \
  }                                                                                   \
  template <class X>                                                                  \
  requires(!requires { X::to; }) friend auto operator op(const X& x, const Self& y) { \
    return x op whole(y);                                                             \
  }
  SHARDLIB_UNFINISHED(+)
  SHARDLIB_UNFINISHED(-)
  SHARDLIB_UNFINISHED(*)
  SHARDLIB_UNFINISHED(/)
#undef SHARDLIB_UNFINISHED
};
template <class X>
concept unfinished = !tensor<X> && std::is_base_of_v<Unfinished<X>, X>;
/// The argument. It is a compile error if it is not a tensor yet.
template <class X>
decltype(auto) finished(const X& x) {
  if constexpr (unfinished<X>)
    return Unfinished<X>::whole(x);
  else
    return (x);
}

}  // namespace detail

}  // namespace shardlib
