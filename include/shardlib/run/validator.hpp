// Conditions for the values of a program's options.
#pragma once

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <string>
#include <utility>
#include <vector>

namespace shardlib::run {

/// The condition for an option's value, and how --help describes it. Validators join with |, as in at_least(1) |
/// unit("s").
struct Validator {
  double least = -std::numeric_limits<double>::infinity();  ///< the least value allowed
  double most = std::numeric_limits<double>::infinity();    ///< the largest value allowed
  bool exclusive = false;                                   ///< `least` itself is not allowed
  bool exclusive_most = false;                              ///< `most` itself is not allowed
  std::vector<std::string> choices = {};                    ///< if not empty, the value must be one of these
  std::string ending = {};                                  ///< what a value, unless it is empty, must end in
  std::string unit = {};                                    ///< shown after the default: "tokens"
  std::string value_name = {};                              ///< stands for the value in --help: "FILE"
  bool required = false;                                    ///< must be given, on the command line or in a file
  bool command_line_only = false;  ///< not a setting of the run: neither read from a file nor stored
};

/// A validator that requires both.
[[nodiscard]] inline Validator operator|(Validator a, const Validator& b) {
  const bool other_least = b.least > a.least, other_most = b.most < a.most;
  a.exclusive = other_least ? b.exclusive : a.exclusive;
  a.exclusive_most = other_most ? b.exclusive_most : a.exclusive_most;
  a.least = std::max(a.least, b.least);
  a.most = std::min(a.most, b.most);
  if (!b.choices.empty()) a.choices = b.choices;
  if (!b.ending.empty()) a.ending = b.ending;
  if (!b.unit.empty()) a.unit = b.unit;
  if (!b.value_name.empty()) a.value_name = b.value_name;
  a.required = a.required || b.required;
  a.command_line_only = a.command_line_only || b.command_line_only;
  return a;
}

/// The largest size, chosen so that products of a few sizes fit 64 bits.
inline constexpr std::int64_t largest_size = std::int64_t{1} << 24;
/// The largest number of layers: even a dry run records a few ten KB for each.
inline constexpr std::int64_t most_layers = std::int64_t{1} << 12;

/// Accepts numbers from `least` on.
[[nodiscard]] inline Validator at_least(double least) {
  return {.least = least};
}
/// Accepts numbers larger than the bound.
[[nodiscard]] inline Validator above(double bound) {
  return {.least = bound, .exclusive = true};
}
/// Accepts numbers smaller than the bound.
[[nodiscard]] inline Validator below(double bound) {
  return {.most = bound, .exclusive_most = true};
}
/// Accepts numbers from `least` to `most`. `between(0, 1)`
[[nodiscard]] inline Validator between(double least, double most) {
  return {.least = least, .most = most};
}
/// Accepts a size, which is multiplied with others: from `least` to `most`. `size()`
[[nodiscard]] inline Validator size(std::int64_t least = 1, std::int64_t most = largest_size) {
  return between(static_cast<double>(least), static_cast<double>(most));
}
/// Accepts one of these words. `one_of({"f32", "bf16"})`
[[nodiscard]] inline Validator one_of(std::initializer_list<const char*> choices) {
  return {.choices = {choices.begin(), choices.end()}};
}
/// Accepts names of files of one kind. `ends_in(".svg")`
[[nodiscard]] inline Validator ends_in(std::string ending) {
  return {.ending = std::move(ending)};
}
/// The unit that --help shows after the default: "tokens".
[[nodiscard]] inline Validator unit(std::string name) {
  return {.unit = std::move(name)};
}
/// The placeholder for the value in --help: "FILE".
[[nodiscard]] inline Validator value_name(std::string name) {
  return {.value_name = std::move(name)};
}
/// The option must be given.
[[nodiscard]] inline Validator required() {
  return {.required = true};
}
/// The option is not a setting of the run: it is neither read from a file nor stored.
[[nodiscard]] inline Validator command_line_only() {
  return {.command_line_only = true};
}

}  // namespace shardlib::run
