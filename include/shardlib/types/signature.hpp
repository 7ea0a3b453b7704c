// The parameters of a function that has exactly one signature, and their mismatches with the given arguments.
#pragma once

#include <cstddef>
#include <string_view>
#include <tuple>
#include <type_traits>

#include "shardlib/spec/dtype.hpp"
#include "shardlib/spec/require.hpp"
#include "shardlib/types/tensor.hpp"

namespace shardlib::detail {

template <class F>
struct signature;
template <class F>
requires requires {
  &F::operator();
}
struct signature<F> : signature<decltype(&F::operator())> {};
template <class R, class... P>
struct signature<R (*)(P...)> {
  using parameters = std::tuple<std::remove_cvref_t<P>...>;
  using declared = std::tuple<std::type_identity<P>...>;
};
template <class R, class... P>
struct signature<R(P...)> : signature<R (*)(P...)> {};
template <class C, class R, class... P>
struct signature<R (C::*)(P...) const> : signature<R (*)(P...)> {};
template <class C, class R, class... P>
struct signature<R (C::*)(P...)> : signature<R (*)(P...)> {};
template <class R, class... P>
struct signature<R (*)(P...) noexcept> : signature<R (*)(P...)> {};
template <class C, class R, class... P>
struct signature<R (C::*)(P...) const noexcept> : signature<R (*)(P...)> {};
template <class C, class R, class... P>
struct signature<R (C::*)(P...) noexcept> : signature<R (*)(P...)> {};
/// False for `auto` parameters, templates and overloaded functions.
template <class F>
concept has_signature = requires {
  typename signature<F>::parameters;
};

template <class T>
constexpr std::string_view spelled_type() {
  return __PRETTY_FUNCTION__;
}
/// The name of a type as the compiler prints it: "Weights". For a tensor: "f32[B/d M]".
template <class T>
constexpr Text type_name() {
  if constexpr (is_tensor<T>) {
    return Text(name(dtype_v<typename T::value_type>)) + "[" + std::string_view(T::spec) + "]";
  } else {
    constexpr std::string_view text = spelled_type<T>(), before = "T = ";
    constexpr std::size_t begin = find(text, before) + before.size();
    constexpr std::size_t semicolon = find(text, "; std::string_view", begin);
    return text.substr(begin, (semicolon == npos ? text.size() - 1 : semicolon) - begin);
  }
}

/// A text as an argument of a rule, cut to 100 characters.
constexpr Literal as_literal(const Text& text) {
  return Literal(text.view().substr(0, 100));
}
template <class T>
inline constexpr Literal name_of_type = as_literal(type_name<T>());

/// The first parameter of F that does not accept its argument.
struct Misfit {
  int parameters = -1;  ///< the number of parameters of F; -1: unknown
  int at = -1;          ///< the index of the parameter, from 0; -1: unknown, or the number of arguments is wrong
  bool not_const = false;
  Text declared, given;
};
template <class Declared, class Given>
constexpr void look_at(Misfit& misfit, int at) {
  if (misfit.at >= 0 || std::is_convertible_v<const Given&, Declared>) return;
  misfit.at = at;
  misfit.declared = type_name<std::remove_cvref_t<Declared>>();
  misfit.given = type_name<Given>();
  misfit.not_const = std::is_same_v<std::remove_cvref_t<Declared>, Given>;
}
template <class F, class... Given>
constexpr Misfit misfit() {
  Misfit result;
  if constexpr (has_signature<F>) {
    [&]<class... D>(std::type_identity<std::tuple<std::type_identity<D>...>>) {
      result.parameters = static_cast<int>(sizeof...(D));
      if constexpr (sizeof...(D) == sizeof...(Given)) {
        int at = 0;
        (look_at<D, Given>(result, at++), ...);
      }
    }(std::type_identity<typename signature<F>::declared>{});
  }
  return result;
}

}  // namespace shardlib::detail
