// Definitions of rope_options.hpp.
#pragma once

#include "shardlib/run/rope_options.hpp"

#include <fmt/format.h>

#include "shardlib/support/error.hpp"

namespace shardlib::run {

SHARDLIB_INLINE void declare(Options& options, RopeAngles& rope) {
  options.add("--rope-base", rope.base, "base of rotary positions", above(1));
  options.add("--rope-factor", rope.factor, "factor by which rotary positions are stretched for longer texts",
              at_least(1));
  options.add("--rope-context", rope.context,
              "length of texts before stretching, as in Llama 3.1 (0: all frequencies alike)", size(0));
  options.add("--rope-low", rope.low_freq_factor,
              "as in Llama 3.1: fully stretched below this number of rotations in --rope-context", above(0));
  options.add("--rope-high", rope.high_freq_factor, "not stretched above this number of rotations", above(0));
  options.flag("--rope-yarn", rope.yarn, "with --rope-context: stretch as YaRN does, in place of Llama 3.1");
  options.add("--rope-beta-fast", rope.beta_fast,
              "for YaRN: not stretched above this number of rotations in --rope-context", above(0));
  options.add("--rope-beta-slow", rope.beta_slow, "for YaRN: fully stretched below this number of rotations", above(0));
  options.flag("--rope-truncate", rope.truncate,
               "for YaRN: round the range of pairs between the two outward to whole pairs");
  options.add("--rope-amplitude", rope.amplitude, "for YaRN: factor of rotated pairs (0: 0.1 log(--rope-factor) + 1)",
              at_least(0));
  // A loaded model gives its --rope-context after the command line is read.
  options.without_effect({"--rope-low", "--rope-high", "--rope-yarn"}, [&rope](const Options& o) {
    return rope.context > 0 || o.given("--load") ? "" : "without --rope-context N: give that too, or leave it out";
  });
  options.without_effect({"--rope-low", "--rope-high"}, [&rope](const Options&) {
    return rope.yarn ? "with --rope-yarn, which has --rope-beta-slow and --rope-beta-fast: leave it out" : "";
  });
  options.without_effect(
      {"--rope-beta-fast", "--rope-beta-slow", "--rope-truncate", "--rope-amplitude"}, [&rope](const Options& o) {
        return rope.yarn || o.given("--load") ? "" : "without --rope-yarn: give that too, or leave it out";
      });
}

SHARDLIB_INLINE void check_rope(const RopeAngles& rope, std::int64_t d_head) {
  if (d_head % 2 != 0)
    throw UsageError(fmt::format("--d-head {}: rotary positions rotate pairs; choose a multiple of 2", d_head));
  if (rope.low_freq_factor >= rope.high_freq_factor)
    throw UsageError(fmt::format("--rope-low {} is not below --rope-high {}: choose a smaller one",
                                 rope.low_freq_factor, rope.high_freq_factor));
  if (rope.beta_slow >= rope.beta_fast)
    throw UsageError(fmt::format("--rope-beta-slow {} is not below --rope-beta-fast {}: choose a smaller one",
                                 rope.beta_slow, rope.beta_fast));
  if (rope.yarn && rope.context == 0)
    throw UsageError("--rope-yarn needs the length of texts before stretching: give --rope-context N too");
  if (rope.context > 0 && rope.factor == 1)
    throw UsageError(
        fmt::format("--rope-context {} chooses what --rope-factor stretches, and with the factor 1 that is "
                    "nothing: give the factor too, or leave --rope-context out",
                    rope.context));
}

}  // namespace shardlib::run
