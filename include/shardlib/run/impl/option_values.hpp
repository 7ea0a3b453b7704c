// Reads, checks and writes option values. toml++ reads TOML, and keeps types and lines.
#pragma once

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

// toml++ 3.0 asserts (or with NDEBUG assumes) that a table's name begins well, before it looks whether it does.
#pragma push_macro("NDEBUG")
#undef NDEBUG
// HIP defines __noinline__ as an attribute, by whose name toml++ asks the compiler for it.
#pragma push_macro("__noinline__")
#undef __noinline__
#ifndef TOML_ASSERT
#define TOML_ASSERT(expression) static_assert(true)
#endif
#include <toml++/toml.h>
#pragma pop_macro("__noinline__")
#pragma pop_macro("NDEBUG")

#include "shardlib/io/file.hpp"
#include "shardlib/run/validator.hpp"
#include "shardlib/support/error.hpp"
#include "shardlib/support/print.hpp"
#include "shardlib/support/text.hpp"

namespace shardlib::run::detail {

using shardlib::detail::parse_number;

/// "did you mean X?" behind a semicolon, or nothing.
inline std::string hint(const std::string& nearest_name) {
  return nearest_name.empty() ? "" : "; did you mean " + nearest_name + "?";
}

/// A bound as --help shows it: 1, 0.5, 16777216.
inline std::string bound(double x) {
  return std::abs(x) < 1e15 && x == std::floor(x) ? fmt::format("{:.0f}", x) : fmt::format("{}", x);
}

/// "at least 1", "from 1 to 8", "from 0 to below 1", "above 0" or nothing.
inline std::string range_text(const Validator& validator) {
  const bool least = std::isfinite(validator.least), most = std::isfinite(validator.most);
  if (least && most)
    return fmt::format("{} {} to {}{}", validator.exclusive ? "above" : "from", bound(validator.least),
                       validator.exclusive_most ? "below " : "", bound(validator.most));
  if (least) return (validator.exclusive ? "above " : "at least ") + bound(validator.least);
  return most ? (validator.exclusive_most ? "below " : "at most ") + bound(validator.most) : "";
}

inline std::string expected_number(const char* kind, const Validator& validator) {
  const std::string range = range_text(validator);
  return fmt::format("{}{}{}", kind, range.starts_with("at ") ? " of " : range.empty() ? "" : " ", range);
}

inline bool in_range(double x, const Validator& validator) {
  return (validator.exclusive ? x > validator.least : x >= validator.least) &&
         (validator.exclusive_most ? x < validator.most : x <= validator.most);
}

/// A TOML value. 64-bit numbers beyond TOML's integers are quoted; numbers are the shortest that read back the same.
struct TomlText {
  std::string operator()(const std::int64_t* x) const { return fmt::format("{}", *x); }
  std::string operator()(const std::uint64_t* x) const {
    const bool fits = *x <= static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max());
    return fits ? fmt::format("{}", *x) : fmt::format("\"{}\"", *x);
  }
  std::string operator()(const double* x) const {
    std::string text = fmt::format("{}", *x);
    return text.find_first_of(".en") == std::string::npos ? text + ".0" : text;
  }
  std::string operator()(const std::string* x) const { return quote(*x); }
  std::string operator()(const bool* x) const { return *x ? "true" : "false"; }
  std::string operator()(const std::vector<std::string>* x) const {
    std::vector<std::string> parts;
    for (const std::string& one : *x) parts.push_back(quote(one));
    return fmt::format("[{}]", fmt::join(parts, ", "));
  }
};

/// Describes an option's values in messages: "a whole number of at least 1".
struct ExpectedText {
  const Validator& validator;
  std::string operator()(const std::int64_t*) const { return expected_number("a whole number", validator); }
  std::string operator()(const std::uint64_t*) const {
    Validator from_zero = validator;
    from_zero.least = std::max(validator.least, 0.0);
    if (std::isfinite(validator.most)) return expected_number("a whole number", from_zero);
    // A hash of 16 bytes as a seed is the likely mistake.
    return fmt::format("a whole number from {} to {}", bound(from_zero.least),
                       std::numeric_limits<std::uint64_t>::max());
  }
  std::string operator()(const double*) const { return expected_number("a finite number", validator); }
  std::string operator()(const bool*) const { return "true or false"; }
  std::string operator()(const std::string*) const { return text(); }
  std::string operator()(const std::vector<std::string>*) const { return text(); }
  [[nodiscard]] std::string text() const {
    if (!validator.ending.empty()) return "a name that ends in " + validator.ending;
    return validator.choices.empty() ? "a text" : fmt::format("one of {}", fmt::join(validator.choices, ", "));
  }
};

/// Whether a text is one that the validator allows.
inline bool allowed(const std::string& x, const Validator& validator) {
  if (!x.empty() && !x.ends_with(validator.ending)) return false;
  return validator.choices.empty() ||
         std::find(validator.choices.begin(), validator.choices.end(), x) != validator.choices.end();
}

/// Whether the validator allows a default. An empty text stands for none.
struct AllowsDefault {
  const Validator& validator;
  template <class T>
  bool operator()(const T* number) const {
    return in_range(static_cast<double>(*number), validator);
  }
  bool operator()(const bool* /*flag*/) const { return true; }
  bool operator()(const std::string* text) const { return text->empty() || allowed(*text, validator); }
  bool operator()(const std::vector<std::string>* texts) const {
    return std::all_of(texts->begin(), texts->end(), [this](const std::string& x) { return (*this)(&x); });
  }
};

/// Sets the target from texts; false when one of them is not such a value.
struct Assign {
  const std::vector<std::string>& texts;
  const Validator& validator;
  template <class T>
  bool number(T* target) const {
    T value{};
    if (!parse_number(texts[0], value) || !std::isfinite(static_cast<double>(value))) return false;
    if (!in_range(static_cast<double>(value), validator)) return false;
    *target = value;
    return true;
  }
  bool operator()(std::int64_t* target) const { return number(target); }
  bool operator()(std::uint64_t* target) const { return number(target); }
  bool operator()(double* target) const { return number(target); }
  bool operator()(bool* target) const {
    *target = texts[0] == "true";
    return *target || texts[0] == "false";
  }
  bool operator()(std::string* target) const {
    *target = texts[0];
    return allowed(texts[0], validator);
  }
  bool operator()(std::vector<std::string>* target) const {
    *target = texts;
    return std::all_of(texts.begin(), texts.end(), [this](const std::string& x) { return allowed(x, validator); });
  }
};

/// Parses; a syntax error becomes a UsageError with file and line.
inline toml::table parse_toml(std::string_view text, const std::string& name) {
  try {
    return toml::parse(text, name);
  } catch (const toml::parse_error& error) {
    throw UsageError(fmt::format("{}:{}: this is not TOML: {}", name, error.source().begin.line,
                                 shardlib::detail::excerpt(error.description(), 200)));
  }
}

inline std::string read_config_file(const std::string& path) {
  try {
    return std::string(io::as_text(io::read_file(path)));
  } catch (const StorageError& error) {  // also of a file that may not be read: no start again would help
    throw UsageError(error.what());
  }
}

/// A value as command-line texts, if it has one of the TOML types that the target takes.
struct FromToml {
  const toml::node& node;
  std::vector<std::string>& texts;
  bool operator()(const std::int64_t*) const { return integer(); }
  // The quoted form is what to_toml writes for numbers beyond TOML's integers.
  bool operator()(const std::uint64_t*) const { return integer() || string(node); }
  bool operator()(const double*) const {
    if (const auto* x = node.as_floating_point()) return texts.push_back(fmt::format("{}", x->get())), true;
    return integer();
  }
  bool operator()(const std::string*) const { return string(node); }
  bool operator()(const bool*) const {
    if (const auto* x = node.as_boolean()) return texts.emplace_back(x->get() ? "true" : "false"), true;
    return false;
  }
  bool operator()(const std::vector<std::string>*) const {
    const toml::array* const array = node.as_array();
    return array != nullptr && std::all_of(array->begin(), array->end(), [this](const auto& x) { return string(x); });
  }
  [[nodiscard]] bool integer() const {
    if (const auto* x = node.as_integer()) return texts.push_back(std::to_string(x->get())), true;
    return false;
  }
  [[nodiscard]] bool string(const toml::node& one) const {
    if (const auto* x = one.as_string()) return texts.push_back(x->get()), true;
    return false;
  }
};

/// A node as one line of TOML.
inline std::string line_of(const toml::node& node) {
  if (const auto* x = node.as_string()) return quote(x->get());
  if (const auto* x = node.as_floating_point()) return TomlText()(&x->get());
  if (const auto* array = node.as_array()) {
    std::vector<std::string> parts;
    for (const toml::node& one : *array) parts.push_back(line_of(one));
    return fmt::format("[{}]", fmt::join(parts, ", "));
  }
  std::ostringstream out;
  out << toml::node_view<const toml::node>(node);
  return out.str();
}

}  // namespace shardlib::run::detail
