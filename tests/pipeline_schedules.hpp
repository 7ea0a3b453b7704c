// Pipeline schedules of random sizes, for the tests of schedules and of the simulator.
#pragma once

#include <algorithm>
#include <random>
#include <utility>

#include "shardlib/pipeline/schedule.hpp"

namespace shardlib::test {

/// Any schedule with a number of microbatches that it has lists for: up to 8 ranks, 4 stages each, 40 microbatches.
inline std::pair<pipeline::Schedule, int> any_schedule(std::mt19937& random) {
  const auto pick = [&](int low, int high) { return std::uniform_int_distribution(low, high)(random); };
  const int p = pick(1, 8), v = pick(1, 4), m = pick(1, 40);
  switch (pick(0, 5)) {
    case 0:
      return {pipeline::GPipe(p), m};
    case 1:
      return {pipeline::Std1F1B(p), m};
    case 2:
      return {pipeline::Eager1F1B(p), m};
    case 3:
      return {pipeline::ZeroBubble(p), std::max(p, m)};
    case 4:
      return {pipeline::DualPipeV({.num_stages = 2 * p, .mpmd_dim = p}), std::max(2 * p, m)};
    default: {
      const int rounds = std::max(1, m / p);
      return {pipeline::Interleaved1F1B({.num_stages = v * p, .mpmd_dim = p, .fuse_steady_state = pick(0, 1) == 1}),
              m / rounds * rounds};
    }
  }
}

}  // namespace shardlib::test
