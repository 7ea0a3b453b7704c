// Definitions of dry_run.hpp.
#pragma once

#include "shardlib/run/dry_run.hpp"

#include <fmt/format.h>

#include "shardlib/run/graph.hpp"
#include "shardlib/run/plan.hpp"

namespace shardlib::run {

SHARDLIB_INLINE bool dry_run(const Training& training, const std::vector<AxisSize>& mesh, const DeviceBody& body,
                             const DeviceBody& layer) {
  // Under mpirun one rank is enough: nothing is sent.
  const bool speaks = world_rank() == 0;
  if (training.plan && speaks) fmt::print("{}", to_string(plan(mesh, body)));
  if (!training.graph.empty() && speaks) {
    write_svg(dot(mesh, layer), training.graph);
    fmt::print("graph: {}\n", training.graph);
  }
  return training.plan || !training.graph.empty();
}

}  // namespace shardlib::run
