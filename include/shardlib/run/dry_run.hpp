// The options --plan and --graph: what a training program would do, without training.
#pragma once

#include <string_view>
#include <vector>

#include "shardlib/device/launch.hpp"
#include "shardlib/ops/value_and_grad.hpp"
#include "shardlib/run/options.hpp"
#include "shardlib/run/training.hpp"
#include "shardlib/support/inline.hpp"

namespace shardlib::run {

/// Does what --plan and --graph ask for and returns true, or returns false if neither is given. Prints the plan of
/// `body`, with the memory of each rank along `stage_axis` if given. Draws the graph of `layer`, such as the program
/// with one layer. With the `policy` that `body` reads, it prints the memory under the other policies too.
/// `if (dry_run(training, mesh, body, layer)) return 0;`
SHARDLIB_INLINE bool dry_run(const Training& training, const std::vector<AxisSize>& mesh, const DeviceBody& body,
                             const DeviceBody& layer, std::string_view stage_axis = "",
                             RecomputePolicy* policy = nullptr);

/// Declares the option --recompute of a policy. `declare(options, config.recompute)`
SHARDLIB_INLINE void declare(Options& options, RecomputePolicy& policy);

}  // namespace shardlib::run

#ifndef SHARDLIB_COMPILED
#include "shardlib/run/impl/dry_run.hpp"
#endif
