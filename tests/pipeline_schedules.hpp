// Pipeline schedules of random sizes, and lists of tasks in brief, for the tests of schedules and of the simulator.
#pragma once

#include <algorithm>
#include <cctype>
#include <random>
#include <sstream>
#include <string>
#include <utility>

#include "shardlib/pipeline/schedule.hpp"

namespace shardlib::test {

/// Any schedule with a number of microbatches that it has lists for: up to 8 ranks, 4 stages each, 40 microbatches.
inline std::pair<pipeline::Schedule, int> any_schedule(std::mt19937& random) {
  const auto pick = [&](int low, int high) { return std::uniform_int_distribution(low, high)(random); };
  const int p = pick(1, 8), v = pick(1, 4), m = pick(1, 40);
  const int rounds = std::max(1, m / p), in_rounds = m / rounds * rounds;
  switch (pick(0, 7)) {
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
    case 5:
      return {pipeline::InterleavedGPipe({.num_stages = v * p, .mpmd_dim = p}), in_rounds};
    case 6:
      return {pipeline::KimiK2({.num_stages = v * p, .mpmd_dim = p, .fuse_steady_state = pick(0, 1) == 1}), in_rounds};
    default:
      return {pipeline::Interleaved1F1B({.num_stages = v * p, .mpmd_dim = p, .fuse_steady_state = pick(0, 1) == 1}),
              in_rounds};
  }
}

/// "fwd 0 1, bwd 0" of stage 2 is fwd_2__0 fwd_2__1 bwd_2__0.
inline pipeline::TaskList brief(int stage, const std::string& text) {
  pipeline::TaskList list;
  std::istringstream words(text);
  std::string kind = "fwd";
  for (std::string word; words >> word;) {
    if (std::isdigit(static_cast<unsigned char>(word[0])) != 0)
      list.push_back(pipeline::parse_task(kind + "_" + std::to_string(stage) + "__" + word));
    else
      kind = word;
  }
  return list;
}

}  // namespace shardlib::test
