// Turns the verdict of a rule into the type of a result, or into one readable compile error.
#pragma once

#include <cstddef>
#include <type_traits>
#include <utility>

#include "shardlib/detail/text.hpp"
#include "shardlib/spec.hpp"

namespace shardlib::detail {

// How the text of a message reaches the user, by what each compiler prints whole:
//   C++26 static_assert with a message object: clang >= 17 (-std=c++2c), g++ >= 14;
//   g++ before: the note about the false condition prints a char array as text;
//   clang before: a char array is printed as numbers, a pack of characters as characters.
#if defined(__cpp_static_assert) && __cpp_static_assert >= 202306L
template <text Message>
struct require {
  static_assert(Message.size() == 0, Message);
};
#elif defined(__clang__)
template <char... Message>
struct says {
  static constexpr bool holds = false;
};
template <text Message, class = std::make_index_sequence<Message.size()> >
struct require;
template <text Message, std::size_t... I>
struct require<Message, std::index_sequence<I...> > {
  static_assert(says<Message.chars[I]...>::holds);
};
#else
template <text Message>
struct because {
  static constexpr bool holds = false;
};
template <text Message>
struct require {
  static_assert(because<Message>::holds);
};
#endif

struct Outcome {
  std::size_t complaint = 0;  ///< length of the message, 0 if legal
  Spec result{""};
};

// The spec of a result after an error about it: it fits everywhere, so that one mistake makes one error.
template <class T>
constexpr bool unknown(const T& arg) {
  if constexpr (std::is_same_v<T, Spec>) return std::string_view(arg) == "?";
  return false;
}

template <auto Rule, auto... Args>
constexpr Outcome outcome() {
  if ((unknown(Args) || ...)) return {0, Spec(std::string_view("?"))};
  const auto verdict = Rule(Args...);
  const bool lost = !verdict.ok() && verdict.result.empty();
  return {verdict.why.size(), Spec(lost ? std::string_view("?") : verdict.result.view())};
}

/// Applies a rule to its arguments: `result` is the spec of the result; a broken rule does not compile. `ok` is true
/// even then, so that one mistake makes one error.
template <auto Rule, auto... Args>
struct checked {
  static constexpr Outcome outcome = detail::outcome<Rule, Args...>();
  static constexpr Spec result = outcome.result;
  static constexpr bool ok = [] {
    if constexpr (outcome.complaint > 0)
      return sizeof(require<text<outcome.complaint>(Rule(Args...).why.view())>) > 0;
    else
      return true;
  }();
};

/// The spec of a result, or a compile error. (`ok` is always true: naming it makes the check happen.)
template <auto Rule, auto... Args>
inline constexpr Spec result_of = checked<Rule, Args...>::ok ? checked<Rule, Args...>::result : Spec("");

}  // namespace shardlib::detail

namespace shardlib {

/// True if the rule allows its arguments: `static_assert(!legal<rules::all_gather, Op("A -> A"), Spec("A")>)`.
template <auto Rule, auto... Args>
inline constexpr bool legal = detail::outcome<Rule, Args...>().complaint == 0;

}  // namespace shardlib
