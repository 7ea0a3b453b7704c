// The options --lr-mult, --decay-mult and --freeze: what an optimizer does to some leaves, by patterns of their names.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "shardlib/optim/leaf_rules.hpp"
#include "shardlib/run/options.hpp"
#include "shardlib/support/inline.hpp"

namespace shardlib::run {

/// Factors of the learning rate and of the weight decay of leaves, and the leaves that are frozen. Patterns are those
/// of `leaf_matches`. If several patterns of an option match a leaf, the last one counts.
struct ParameterGroups {
  std::vector<std::string> lr_mult, decay_mult;  ///< "layers/0/*=0.1"
  std::vector<std::string> freeze;               ///< "layers/0/*"

  /// The factors that an optimizer and `global_norm` use for a leaf. `decays` says whether a leaf decays that no
  /// pattern of `decay_mult` matches.
  [[nodiscard]] SHARDLIB_INLINE LeafFactors operator()(std::string_view leaf, bool decays = true) const;
};

/// Declares the options --lr-mult, --decay-mult and --freeze. `declare(options, groups)`
SHARDLIB_INLINE void declare(Options& options, ParameterGroups& groups);

/// Throws UsageError for a text without a factor, a pattern that none of the leaves has, and if no leaf is left to
/// train. `check_groups(groups, leaf_names(weights))`
SHARDLIB_INLINE void check_groups(const ParameterGroups& groups, const std::vector<std::string>& leaves);

}  // namespace shardlib::run

#ifndef SHARDLIB_COMPILED
#include "shardlib/run/impl/parameter_groups.hpp"
#endif
