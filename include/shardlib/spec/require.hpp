// Turns the verdict of a rule into the type of a result or into one readable compile error.
#pragma once

#include <cstddef>
#include <string_view>
#include <type_traits>
#include <utility>

#include "shardlib/spec/op.hpp"
#include "shardlib/spec/spec.hpp"
#include "shardlib/spec/text.hpp"

namespace shardlib::detail {

// The message should reach the user once, as the first error. Each compiler prints a different thing in full:
//   C++26 static_assert with a message object: clang >= 17 (-std=c++2c), clang >= 20, g++ >= 14 (-std=c++2c);
//   earlier g++: the line "In instantiation of" prints a char array among the template's arguments as text;
//   earlier clang: the failed condition prints short char arrays as text and cuts longer ones, hence an array of lines.
#if defined(__cpp_static_assert) && __cpp_static_assert >= 202306L
#if defined(__clang__)  // clang 20 has it in C++20, too, with a warning
#pragma clang diagnostic push
#pragma clang diagnostic ignored "-Wc++26-extensions"
#endif
template <MessageText Message, bool Legal = false>
struct require {
  static_assert(Legal, Message);
};
#if defined(__clang__)
#pragma clang diagnostic pop
#endif
#elif defined(__clang__)
/// A part of a message as lines, padded with spaces. clang prints an array as text only if all its elements are
/// initialized, up to 36 characters, and at most ten arrays in one.
inline constexpr std::size_t line_size = 34, most_lines = 10;
template <std::size_t Lines>
struct lines {
  char text[Lines][line_size + 1];
};
template <lines... Message>
struct says {
  static constexpr bool holds = false;
};
/// The start of line number `line`, or the message's end after the last line. Lines end after a space if possible.
constexpr std::size_t line_start(std::string_view message, std::size_t line) {
  std::size_t at = 0;
  for (; line > 0 && at < message.size(); --line) {
    std::size_t end = at + line_size;
    if (end < message.size())
      while (end > at + line_size / 2 && message[end - 1] != ' ') --end;
    at = end > at + line_size / 2 ? end : at + line_size;
  }
  return at < message.size() ? at : message.size();
}
constexpr std::size_t count_lines(std::string_view message) {
  std::size_t n = 0;
  while (line_start(message, n) < message.size()) ++n;
  return n;
}
template <MessageText Message, std::size_t Part>
constexpr auto lines_of() {
  constexpr std::string_view message(Message.data(), Message.size());
  constexpr std::size_t first = Part * most_lines, left = count_lines(message) - first;
  lines<(left < most_lines ? left : most_lines)> part{};
  for (std::size_t i = 0; i < sizeof part.text / sizeof part.text[0]; ++i) {
    const std::size_t begin = line_start(message, first + i), end = line_start(message, first + i + 1);
    for (std::size_t k = 0; k < line_size; ++k) part.text[i][k] = begin + k < end ? message[begin + k] : ' ';
  }
  return part;
}
template <MessageText Message>
inline constexpr std::size_t parts_of = (count_lines({Message.data(), Message.size()}) + most_lines - 1) / most_lines;
template <MessageText Message, class = std::make_index_sequence<parts_of<Message> > >
struct require;
template <MessageText Message, std::size_t... Part>
struct require<Message, std::index_sequence<Part...> > {
  static_assert(says<lines_of<Message, Part>()...>::holds);
};
#else
template <MessageText Message>
struct require {
  static_assert(Message.size() == 0, "see above, where it says: In instantiation of");
};
#endif

struct RuleOutcome {
  std::size_t complaint = 0;  ///< length of the message; 0 if the operation is legal
  Spec result{""};
};

// "?" is the spec of a result after an error. It fits everywhere, so that one mistake gives one error.
template <class T>
constexpr bool unknown(const T& arg) {
  if constexpr (std::is_same_v<T, Spec> || std::is_same_v<T, Literal>) return std::string_view(arg) == "?";
  return false;
}

/// A template argument with an address: a verdict has views into its text. (To g++ 16 `Arg` itself is a temporary.)
template <auto Arg>
inline constexpr auto held = Arg;
/// The argument that a rule gets for a template argument: for a Spec or an OpSpec the parsed one, otherwise the
/// argument itself.
template <auto Arg>
constexpr const auto& rule_argument() {
  using Kind = std::remove_cvref_t<decltype(Arg)>;
  if constexpr (std::is_same_v<Kind, Spec>)
    return parsed<Arg>;
  else if constexpr (std::is_same_v<Kind, OpSpec>)
    return parsed_op<Arg>;
  else
    return held<Arg>;
}

template <auto Rule, auto... Args>
constexpr RuleOutcome outcome() {
  if ((unknown(Args) || ...)) return {0, Spec(std::string_view("?"))};
  auto verdict = Rule(rule_argument<Args>()...);  // if it were const, clang would apply the rule again for a warning
  const bool lost = !verdict.ok() && verdict.result == TensorSpec();
  return {verdict.why.size(), Spec(lost ? std::string_view("?") : to_string(verdict.result).view())};
}

/// Applies a rule to its arguments. `result` is the spec of the result; a violation is a compile error. `ok` is true
/// even then, so that one mistake gives one error.
template <auto Rule, auto... Args>
struct checked {
  static constexpr RuleOutcome outcome = detail::outcome<Rule, Args...>();
  static constexpr Spec result = outcome.result;
  static constexpr bool ok = [] {
    if constexpr (outcome.complaint > 0)
      return sizeof(require<MessageText<outcome.complaint>(Rule(rule_argument<Args>()...).why.view())>) > 0;
    else
      return true;
  }();
};

/// The spec of a result, or a compile error. (`ok` is always true; its use triggers the check.)
template <auto Rule, auto... Args>
inline constexpr Spec result_of = checked<Rule, Args...>::ok ? checked<Rule, Args...>::result : Spec("");
/// As above, of a rule that takes the op's name first. It is a parameter of its own, because nvcc's front end loses the
/// type of one that is not.
template <auto Rule, OpName Name, auto... Args>
inline constexpr Spec named_result_of = result_of<Rule, Name, Args...>;
/// As above, of a rule that takes an op spec and the specs of the operands.
template <auto Rule, OpSpec O, Spec... S>
inline constexpr Spec op_result_of = result_of<Rule, O, S...>;

}  // namespace shardlib::detail

namespace shardlib {

/// True if the rule allows its arguments: `static_assert(!legal<rules::all_gather, OpSpec("A -> A"), Spec("A")>)`.
template <auto Rule, auto... Args>
inline constexpr bool legal = detail::outcome<Rule, Args...>().complaint == 0;

}  // namespace shardlib
