// A parsed op spec: what the typing rules take.
#pragma once

#include <concepts>
#include <string_view>

#include "shardlib/spec/spec.hpp"
#include "shardlib/spec/text.hpp"

namespace shardlib {

namespace detail {
/// The axes of `over<"d t">`, which arrives as the text "over<d t>" (never a valid spec). Empty for other texts.
constexpr std::string_view over_axes(std::string_view op) {
  return op.starts_with("over<") && op.ends_with(">") ? op.substr(5, op.size() - 6) : std::string_view();
}
}  // namespace detail

/// A parsed op spec, as the typing rules take it. In place of the whole op spec, a call of an op of one operand may
/// name the result alone, `all_gather<"A">`, or the axes, `all_gather<over<"t">>`. `form` says which, of type `Form`.
struct ParsedOp {
  enum Form { whole, result, axes } form = whole;
  std::string_view text;  ///< for messages; empty if the op spec was not parsed, but made of tensor specs
  OpParts parts;          ///< the whole op spec, or the error that it is none
  ParsedTensor named;     ///< otherwise: the result, or the axes as dims

  constexpr ParsedOp() = default;
  /// Parses a text, which has to live as long. `ParsedOp("A/t -> A")`
  template <std::convertible_to<std::string_view> T>
  constexpr ParsedOp(const T& op)  // NOLINT(google-explicit-constructor): an op spec is written as its text
      : text(op), parts(parse_op(text)) {
    if (detail::find(text, "->") != detail::npos) return;
    const auto over = detail::over_axes(text);
    form = over.empty() ? result : axes;
    named = parse_tensor(over.empty() ? text : over);
  }
  /// The op spec of one operand. `ParsedOp("A/t", "A")`
  constexpr ParsedOp(const TensorSpec& from, const TensorSpec& to) {
    parts.in.push_back(from);
    parts.out = to;
  }
};

namespace detail {
/// The op spec, parsed once.
template <OpSpec O>
inline constexpr ParsedOp parsed_op{std::string_view(O)};

constexpr OpSpec op_spec_of(const Spec& in, const Spec& out) {
  return OpSpec((Text(in) + " -> " + out).view());
}
constexpr OpSpec op_spec_of(const Spec& a, const Spec& b, const Spec& out) {
  return OpSpec((Text(a) + ", " + b + " -> " + out).view());
}
}  // namespace detail

}  // namespace shardlib
