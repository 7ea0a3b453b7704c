// Definitions of rope_options.hpp.
#pragma once

#include "shardlib/run/rope_options.hpp"

#include <fmt/format.h>

#include "shardlib/support/error.hpp"

namespace shardlib::run {

SHARDLIB_INLINE void declare(Options& options, RopeAngles& rope) {
  options.add("--rope-base", rope.base, "base of rotary positions", above(1));
  options.add("--rope-factor", rope.factor, "how many times longer texts rotary positions are stretched to",
              at_least(1));
  options.add("--rope-context", rope.context,
              "length of texts before that, to stretch as Llama 3.1 does (0: all frequencies alike)", size(0));
  options.add("--rope-low", rope.low_freq_factor,
              "as Llama 3.1 does: below so many turns in --rope-context, stretched in full", above(0));
  options.add("--rope-high", rope.high_freq_factor, "above so many turns, not stretched", above(0));
}

SHARDLIB_INLINE void check_rope(const RopeAngles& rope, std::int64_t d_head) {
  if (d_head % 2 != 0)
    throw UsageError(fmt::format("--d-head {}: rotary positions turn pairs; choose a multiple of 2", d_head));
  if (rope.low_freq_factor >= rope.high_freq_factor)
    throw UsageError(fmt::format("--rope-low {} is not below --rope-high {}: choose a smaller one",
                                 rope.low_freq_factor, rope.high_freq_factor));
}

}  // namespace shardlib::run
