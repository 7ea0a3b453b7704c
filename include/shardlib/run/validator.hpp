// Conditions for the values of a program's options.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <limits>
#include <string>
#include <vector>

#include "shardlib/support/inline.hpp"

namespace shardlib::run {

/// The condition for an option's value, and how --help describes it. Validators join with |, as in at_least(1) |
/// unit("s").
struct Validator {
  double least = -std::numeric_limits<double>::infinity();  ///< the least value allowed
  double most = std::numeric_limits<double>::infinity();    ///< the largest value allowed
  bool exclusive = false;                                   ///< `least` itself is not allowed
  bool exclusive_most = false;                              ///< `most` itself is not allowed
  std::vector<std::string> choices;                         ///< if not empty, the value must be one of these
  std::string ending;                                       ///< what a value, unless it is empty, must end in
  std::string unit;                                         ///< shown after the default: "tokens"
  std::string value_name;                                   ///< stands for the value in --help: "FILE"
  bool required = false;                                    ///< must be given, on the command line or in a file
  bool command_line_only = false;  ///< not a setting of the run: neither read from a file nor stored
};

/// A validator that requires both.
[[nodiscard]] SHARDLIB_INLINE Validator operator|(Validator a, const Validator& b);

/// The largest size, chosen so that products of a few sizes fit 64 bits.
inline constexpr std::int64_t largest_size = std::int64_t{1} << 24;
/// The largest number of layers: even a dry run records a few ten KB for each.
inline constexpr std::int64_t most_layers = std::int64_t{1} << 12;

/// Accepts numbers from `least` on.
[[nodiscard]] SHARDLIB_INLINE Validator at_least(double least);
/// Accepts numbers larger than the bound.
[[nodiscard]] SHARDLIB_INLINE Validator above(double bound);
/// Accepts numbers smaller than the bound.
[[nodiscard]] SHARDLIB_INLINE Validator below(double bound);
/// Accepts numbers from `least` to `most`. `between(0, 1)`
[[nodiscard]] SHARDLIB_INLINE Validator between(double least, double most);
/// Accepts a size, which is multiplied with others: from `least` to `most`. `size()`
[[nodiscard]] SHARDLIB_INLINE Validator size(std::int64_t least = 1, std::int64_t most = largest_size);
/// Accepts one of these words. `one_of({"f32", "bf16"})`
[[nodiscard]] SHARDLIB_INLINE Validator one_of(std::initializer_list<const char*> choices);
/// Accepts names of files of one kind. `ends_in(".svg")`
[[nodiscard]] SHARDLIB_INLINE Validator ends_in(std::string ending);
/// The unit that --help shows after the default: "tokens".
[[nodiscard]] SHARDLIB_INLINE Validator unit(std::string name);
/// The placeholder for the value in --help: "FILE".
[[nodiscard]] SHARDLIB_INLINE Validator value_name(std::string name);
/// The option must be given.
[[nodiscard]] SHARDLIB_INLINE Validator required();
/// The option is not a setting of the run: it is neither read from a file nor stored.
[[nodiscard]] SHARDLIB_INLINE Validator command_line_only();

}  // namespace shardlib::run

#ifndef SHARDLIB_COMPILED
#include "shardlib/run/impl/validator.hpp"
#endif
