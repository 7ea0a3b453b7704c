// The spec language: one notation for tensor shapes, shardings and partial sums, parsed to plain values.
//
//   tensor spec :=  dim*  partial*                "batch/d hidden +t"       "" is a scalar
//   dim         :=  name ('/' axis)*              "M/t/d": sharded over t, then each shard over d
//                |  integer                       "2": exact size, never sharded
//   partial     :=  '+' axis                      "+t": partial over t; the sum over t is not yet complete
//   op spec     :=  tensor (',' tensor)* '->' tensor
//   index spec  :=  dims of the table in brackets: "[V/t] M, B/d L -> B/d L M +t"
//
// The order of '/' matters, the order of '+' does not. An axis occurs at most once in a tensor spec.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <string_view>

#include "shardlib/spec/small.hpp"
#include "shardlib/spec/text.hpp"

namespace shardlib {

inline constexpr int max_dims = 10;  ///< the maximum number of dims of a spec
inline constexpr int max_axes = 6;   ///< the maximum number of axes of a mesh

/// Mesh axes in order, major first.
using Axes = detail::Small<std::string_view, max_axes>;

/// One dim of a parsed spec: `V/t`, `2` or `[V/t]`. `is_integer` is true for the second.
struct Dim {
  std::string_view name;           ///< the digits, for an integer dim
  std::int64_t integer = -1;       ///< the exact size of an integer dim, else -1
  Axes axes = detail::none<Axes>;  ///< the axes that shard it, major first
  bool bracketed = false;          ///< true for `[V/t]`, a dim that index_unreduced looks up

  constexpr bool is_integer() const { return integer >= 0; }
  friend constexpr bool operator==(const Dim& a, const Dim& b) { return a.name == b.name && a.axes == b.axes; }
};

/// The part of a tensor on one device along one mesh axis: a replica, a shard of `dim`, or a summand of a partial sum.
/// `kind` is `replicated`, `sharded` or `partial`, of type `Kind`.
struct Placement {
  enum Kind { replicated, sharded, partial } kind = replicated;
  int dim = -1;
  friend constexpr bool operator==(Placement, Placement) = default;
};

/// A parsed tensor spec. Its names are views into the parsed text. `rank` is the number of `dims`. `placement` is the
/// placement on an axis. `has` and `find` look for a dim. `add_partial` makes the spec partial over an axis.
struct TensorSpec {
  detail::Small<Dim, max_dims> dims = detail::none<detail::Small<Dim, max_dims>>;
  Axes partial = detail::none<Axes>;  ///< axes of pending sums, sorted

  constexpr TensorSpec() = default;
  /// Parses a text that is a tensor spec, as parse_tensor does; for one that is none, ends the program. The text has to
  /// live as long. `TensorSpec("B/d M +t")`
  template <std::convertible_to<std::string_view> T>
  constexpr TensorSpec(const T& text);  // NOLINT(google-explicit-constructor): a spec is written as its text

  constexpr int rank() const { return dims.size(); }
  /// The position of the named dim, or -1.
  constexpr int find(std::string_view name) const {
    for (int i = 0; i < dims.size(); ++i)
      if (dims[i].name == name) return i;
    return -1;
  }
  constexpr bool has(std::string_view name) const { return find(name) >= 0; }
  /// The placement of the tensor on the axis: replicated, sharded along a dim, or partial.
  constexpr Placement placement(std::string_view axis) const {
    if (partial.contains(axis)) return {Placement::partial, -1};
    for (int i = 0; i < dims.size(); ++i)
      if (dims[i].axes.contains(axis)) return {Placement::sharded, i};
    return {};
  }
  constexpr void add_partial(std::string_view axis) {
    int at = 0;
    while (at < partial.size() && partial[at] < axis) ++at;
    partial.push_back(axis);
    for (int i = partial.size() - 1; i > at; --i) partial[i] = partial[i - 1];
    partial[at] = axis;
  }
  friend constexpr bool operator==(const TensorSpec&, const TensorSpec&) = default;
};

/// The result of `parse_tensor`: a spec, or an error.
struct ParsedTensor {
  TensorSpec spec;
  detail::Text error;  ///< empty if the text is a tensor spec
};

/// The result of `parse_op`: the operands `in`, the result `out`, or an error.
struct OpParts {
  detail::Small<TensorSpec, 4> in = detail::none<detail::Small<TensorSpec, 4>>;
  TensorSpec out;
  detail::Text error;  ///< empty if the text is an op spec
};

namespace detail {

constexpr bool is_letter(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_';
}
constexpr bool is_digit(char c) {
  return c >= '0' && c <= '9';
}

constexpr bool is_name(std::string_view s) {
  if (s.empty() || !is_letter(s[0])) return false;
  for (char c : s)
    if (!is_letter(c) && !is_digit(c)) return false;
  return true;
}

/// Checks that the axis may be added to a dim that has the axes `current` and is not yet part of `so_far`. Returns
/// the error, or nothing.
constexpr Text add_axis(const TensorSpec& so_far, const Axes& current, std::string_view axis, std::string_view token) {
  if (!is_name(axis)) return "in " + quoted(token) + ": " + quoted(axis) + " is not an axis name (letters, digits, _)";
  if (so_far.placement(axis).kind != Placement::replicated || current.contains(axis))
    return "axis " + quoted(axis) + " appears twice: a mesh axis can act once in a tensor";
  int axes = current.size() + so_far.partial.size();
  for (const Dim& dim : so_far.dims) axes += dim.axes.size();
  if (axes == max_axes) return "axis " + quoted(axis) + " is one too many: a spec has at most " + number(max_axes);
  return "";
}

constexpr Text parse_dim(std::string_view token, TensorSpec& spec) {
  Dim dim;
  std::string_view rest = token;
  if (rest.size() >= 2 && rest.front() == '[' && rest.back() == ']') {
    dim.bracketed = true;
    rest = rest.substr(1, rest.size() - 2);
  }
  const auto slash = find(rest, "/");
  dim.name = rest.substr(0, slash);
  if (!dim.name.empty() && is_digit(dim.name[0])) {
    dim.integer = 0;
    for (char c : dim.name) {
      if (!is_digit(c)) return quoted(token) + " is neither a name (it starts with a digit) nor an integer";
      dim.integer = dim.integer * 10 + (c - '0');
      if (dim.integer > 1'000'000'000) return "the integer dim " + quoted(token) + " is too large";
    }
    if (dim.name[0] == '0' && dim.name.size() > 1) return "the integer dim " + quoted(token) + " has a leading zero";
    if (slash != npos) return "integer dim " + quoted(token) + " cannot be sharded: give the dim a name";
  } else {
    if (!is_name(dim.name))
      return quoted(token) + " is not a dim: write a name, `name/axis`, an integer or `+axis`, separated by spaces";
    if (spec.has(dim.name)) return "dim " + quoted(dim.name) + " appears twice: rename one of the two";
  }
  while (!dim.is_integer() && find(rest, "/") != npos) {
    rest = rest.substr(find(rest, "/") + 1);
    const auto axis = rest.substr(0, find(rest, "/"));
    if (auto error = add_axis(spec, dim.axes, axis, token); !error.empty()) return error;
    dim.axes.push_back(axis);
  }
  if (!spec.partial.empty()) return "dim " + quoted(token) + " comes after a `+axis`: dims come first";
  if (spec.dims.full()) return "dim " + quoted(token) + " is one too many: a spec has at most " + number(max_dims);
  spec.dims.push_back(dim);
  return "";
}

}  // namespace detail

/// Parses one tensor spec. It accepts brackets and marks the dim.
constexpr ParsedTensor parse_tensor(std::string_view text) {
  ParsedTensor result;
  std::size_t i = 0;
  while (result.error.empty()) {
    while (i < text.size() && text[i] == ' ') ++i;
    if (i == text.size()) break;
    std::size_t end = i;
    while (end < text.size() && text[end] != ' ') ++end;
    const auto token = text.substr(i, end - i);
    i = end;
    if (token[0] == '+') {
      const auto axis = token.substr(1);
      result.error = detail::add_axis(result.spec, {}, axis, token);
      if (result.error.empty()) result.spec.add_partial(axis);
    } else {
      result.error = detail::parse_dim(token, result.spec);
    }
  }
  return result;
}

namespace detail {
// Not constexpr on purpose: the compiler stops here and shows this name.
[[noreturn]] inline void the_text_is_no_tensor_spec() {
  std::terminate();
}
}  // namespace detail

template <std::convertible_to<std::string_view> T>
constexpr TensorSpec::TensorSpec(const T& text) {
  const ParsedTensor parsed = parse_tensor(text);
  if (!parsed.error.empty()) detail::the_text_is_no_tensor_spec();
  *this = parsed.spec;
}

constexpr detail::Text to_string(const Dim& dim) {
  detail::Text s(dim.name);
  for (auto axis : dim.axes) {
    s += '/';
    s += axis;
  }
  return dim.bracketed ? "[" + s + "]" : s;
}

/// The canonical text of a spec.
constexpr detail::Text to_string(const TensorSpec& spec) {
  detail::Text s;
  for (const Dim& dim : spec.dims) {
    if (!s.empty()) s += ' ';
    s += to_string(dim);
  }
  for (auto axis : spec.partial) {
    if (!s.empty()) s += ' ';
    s += '+';
    s += axis;
  }
  return s;
}

namespace detail {

/// The axes with a text between them: "d t", "d, t".
constexpr Text joined(const Axes& axes, std::string_view between) {
  Text text;
  for (auto axis : axes) text = text + (text.empty() ? std::string_view() : between) + axis;
  return text;
}

// Templates, so that no text becomes a spec here.
template <class S>
requires(std::same_as<S, TensorSpec> || std::same_as<S, Dim>) constexpr Text quoted(const S& spec) {
  return quoted(to_string(spec).view());
}
template <std::same_as<TensorSpec> S>
constexpr Text operator+(const Text& text, const S& spec) {
  return text + to_string(spec);
}

}  // namespace detail

/// Splits and parses `tensor, tensor -> tensor`.
constexpr OpParts parse_op(std::string_view text) {
  OpParts op;
  const auto arrow = detail::find(text, "->");
  if (arrow == detail::npos || detail::find(text, "->", arrow + 2) != detail::npos) {
    op.error = "an op spec has exactly one `->`: `operand, operand -> result`";
    return op;
  }
  std::string_view left = text.substr(0, arrow);
  if (detail::find(text, ",", arrow) != detail::npos) {
    op.error = "an op has one result: commas are between operands only";
    return op;
  }
  const auto out = parse_tensor(text.substr(arrow + 2));
  op.out = out.spec;
  op.error = out.error;
  while (op.error.empty()) {
    const auto comma = detail::find(left, ",");
    if (op.in.full()) {
      op.error = "an op spec has at most " + detail::number(op.in.size()) + " operands";
      break;
    }
    const auto part = parse_tensor(left.substr(0, comma));
    op.in.push_back(part.spec);
    op.error = part.error;
    if (comma == detail::npos) break;
    left = left.substr(comma + 1);
  }
  return op;
}

constexpr detail::Text to_string(const OpParts& op) {
  detail::Text s;
  for (int i = 0; i < op.in.size(); ++i) s += (i > 0 ? ", " : "") + to_string(op.in[i]);
  return s + (s.empty() ? "-> " : " -> ") + to_string(op.out);
}

namespace detail {

// Not constexpr on purpose: the compile error at this call shows the function's name.
inline void the_spec_is_longer_than_shardlib_allows() {}

template <std::size_t N>
constexpr void assign(char (&to)[N], std::string_view s) {
  if (s.size() >= N) the_spec_is_longer_than_shardlib_allows();
  for (std::size_t i = 0; i < s.size(); ++i) to[i] = s[i];
}

/// True only for a text that is its own canonical text, or no spec at all. False says nothing. Most literals are
/// written in canonical form, and in a constant expression this costs far less than parsing them.
constexpr bool looks_canonical(std::string_view s) {
  int sums = 0;
  for (std::size_t i = 0; i < s.size(); ++i) {
    const bool inside = i > 0 && i + 1 < s.size(), word_ends = i > 0 && s[i - 1] != ' ';
    if (s[i] == '+') {
      if (++sums > 1) return false;  // which may have to be sorted
    } else if (s[i] == ' ') {
      if (!inside || !word_ends) return false;
    } else if (s[i] == ',' || s[i] == '-') {
      // One space after a comma and around the arrow, and a dim or a sum next to them.
      const std::size_t next = s[i] == ',' ? i + 1 : i + 2;
      if (i == 0 || word_ends != (s[i] == ',') || next + 1 >= s.size() || s[next] != ' ' || s[next + 1] == '-')
        return false;
      sums = 0;
    }
  }
  return true;
}

/// Writes the canonical text of a tensor or op spec. A text that is neither stays unchanged, so that the op's error
/// can quote it.
template <std::size_t N>
constexpr void assign_canonical(char (&to)[N], std::string_view s) {
  if (looks_canonical(s)) {
    assign(to, s);
  } else if (find(s, "->") != npos) {
    const auto op = parse_op(s);
    assign(to, op.error.empty() ? to_string(op).view() : s);
  } else {
    const auto tensor = parse_tensor(s);
    assign(to, tensor.error.empty() ? to_string(tensor.spec).view() : s);
  }
}

}  // namespace detail

/// A tensor spec as a template argument, in canonical form, so that equal specs give one C++ type. `text` is that
/// form.
struct Spec {
  char text[96]{};

  template <std::size_t N>
  consteval Spec(const char (&literal)[N]) {  // NOLINT(google-explicit-constructor): a literal is a spec
    detail::assign_canonical(text, {literal, N - 1});
  }
  constexpr explicit Spec(std::string_view canonical) { detail::assign(text, canonical); }
  constexpr operator std::string_view() const { return text; }  // NOLINT(google-explicit-constructor)
  friend constexpr bool operator==(const Spec&, const Spec&) = default;
};

namespace detail {

/// An op spec, or names of dims or axes, as a template argument: `all_gather<"A/t -> A">`. `text` is the canonical
/// form.
template <class Kind>
struct TextOf {
  char text[256]{};

  template <std::size_t N>
  consteval TextOf(const char (&literal)[N]) {  // NOLINT(google-explicit-constructor): the literal is the argument
    assign_canonical(text, {literal, N - 1});
  }
  /// A number is no name, as the rule of the op then says: other libraries name dims by numbers.
  template <std::integral I>
  consteval TextOf(I axis) {  // NOLINT(google-explicit-constructor): meant to catch such an argument
    assign(text, (Text("axis ") + number(axis)).view());
  }
  constexpr explicit TextOf(std::string_view canonical) { assign(text, canonical); }
  constexpr TextOf(const Spec& spec) { assign(text, spec); }    // NOLINT(google-explicit-constructor): a short form
  constexpr operator std::string_view() const { return text; }  // NOLINT(google-explicit-constructor)
  friend constexpr bool operator==(const TextOf&, const TextOf&) = default;
};
/// A text that may not be a spec; a rule still has to check it.
using Literal = TextOf<class AnyText>;

}  // namespace detail

/// An op spec as a template argument, in canonical form: `all_gather<"A/t -> A">`
using OpSpec = detail::TextOf<class OpSpecText>;
/// The name of an op as a template argument: `OpName("all_gather")`
using OpName = detail::TextOf<class OpNameText>;
/// The name of a dim as a template argument: `softmax<"V">(x)`
using DimName = detail::TextOf<class DimNameText>;
/// The name of a mesh axis as a template argument, or several separated by spaces: `over<"d t">`
using AxisName = detail::TextOf<class AxisNameText>;

namespace detail {

/// The spec, parsed once.
template <Spec S>
inline constexpr TensorSpec parsed = parse_tensor(S).spec;

constexpr Spec spec_of(const TensorSpec& spec) {
  return Spec(to_string(spec).view());
}

}  // namespace detail

}  // namespace shardlib
