// Definitions of parameter_groups.hpp.
#pragma once

#include "shardlib/run/parameter_groups.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "shardlib/run/impl/option_values.hpp"
#include "shardlib/support/error.hpp"

namespace shardlib::run {

namespace detail {

/// "layers/0/*=0.1" as pattern and factor; the factor is negative if the text has none.
struct GroupText {
  explicit GroupText(std::string_view text) : pattern(text.substr(0, text.rfind('='))) {
    if (double value = 0; pattern.size() < text.size() &&
                          parse_number(std::string(text.substr(pattern.size() + 1)), value) && std::isfinite(value))
      factor = value;
  }
  std::string_view pattern;
  double factor = -1;
};

}  // namespace detail

SHARDLIB_INLINE LeafFactors ParameterGroups::operator()(std::string_view leaf, bool decays) const {
  LeafFactors factors{.rate = 1, .decay = decays ? 1.0 : 0.0};
  const auto apply = [&](const std::vector<std::string>& texts, double& factor) {
    for (const std::string& text : texts)
      if (const detail::GroupText group(text); leaf_matches(group.pattern, leaf)) factor = group.factor;
  };
  apply(lr_mult, factors.rate);
  apply(decay_mult, factors.decay);
  if (std::ranges::any_of(freeze, [&](const std::string& pattern) { return leaf_matches(pattern, leaf); }))
    factors.rate = 0;
  return factors;
}

SHARDLIB_INLINE void declare(Options& options, ParameterGroups& groups) {
  options.add("--lr-mult", groups.lr_mult,
              "factor of the learning rate for leaves of this pattern, as in 'layers/0/*=0.1'; may be given several "
              "times, and the last that fits a leaf counts",
              value_name("PATTERN=FACTOR"));
  options.add("--decay-mult", groups.decay_mult, "the same for --weight-decay, where 0 is none",
              value_name("PATTERN=FACTOR"));
  options.add(
      "--freeze", groups.freeze,
      "do not train leaves of this pattern, as 'layers/0/*': they and their moments stay as they are, and their "
      "gradients do not count in --clip; may be given several times",
      value_name("PATTERN"));
}

SHARDLIB_INLINE void check_groups(const ParameterGroups& groups, const std::vector<std::string>& leaves) {
  const auto check = [&](const char* option, const std::vector<std::string>& texts) {
    for (const std::string& text : texts) {
      const detail::GroupText group(text);
      if (group.factor < 0)
        throw UsageError(fmt::format("{} '{}' has no factor of at least 0 behind its pattern; write it as in '{}=0.1'",
                                     option, text, group.pattern));
      shardlib::detail::require_match(option, group.pattern, leaves);
    }
  };
  check("--lr-mult", groups.lr_mult);
  check("--decay-mult", groups.decay_mult);
  for (const std::string& pattern : groups.freeze) shardlib::detail::require_match("--freeze", pattern, leaves);
  if (std::ranges::all_of(leaves, [&](const std::string& leaf) { return groups(leaf).rate == 0; }))
    throw UsageError("--freeze and --lr-mult leave nothing to train: all leaves have the rate 0");
}

}  // namespace shardlib::run
