// The options of rotary positions.
#pragma once

#include <cstdint>

#include "shardlib/ops/norms.hpp"
#include "shardlib/run/options.hpp"
#include "shardlib/support/inline.hpp"

namespace shardlib::run {

/// Declares --rope-base, --rope-factor, --rope-context, --rope-low and --rope-high, and for YaRN --rope-yarn,
/// --rope-beta-fast, --rope-beta-slow, --rope-truncate and --rope-amplitude. `declare(options, config.rope)`
SHARDLIB_INLINE void declare(Options& options, RopeAngles& rope);

/// Throws UsageError if the head width is odd (--d-head), unless --rope-low is below --rope-high and --rope-beta-slow
/// below --rope-beta-fast, or for a --rope-context or --rope-yarn that stretches nothing. `check_rope(config.rope, 64)`
SHARDLIB_INLINE void check_rope(const RopeAngles& rope, std::int64_t d_head);

}  // namespace shardlib::run

#ifndef SHARDLIB_COMPILED
#include "shardlib/run/impl/rope_options.hpp"
#endif
