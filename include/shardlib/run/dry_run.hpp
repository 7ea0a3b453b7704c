// The options --plan and --graph, which show what a training program would do, without training. Also --gather, whose
// default depends on a dry run.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "shardlib/device/launch.hpp"
#include "shardlib/device/mesh_axes.hpp"
#include "shardlib/ops/value_and_grad.hpp"
#include "shardlib/run/options.hpp"
#include "shardlib/run/training.hpp"
#include "shardlib/support/inline.hpp"

namespace shardlib::run {

/// When a step gathers the weights and scatters the gradients: once, or in each microbatch (--gather).
struct GatherPolicy {
  std::string name = "auto";  ///< auto, per-step or per-microbatch
  bool per_step = false;      ///< the choice, which choose_gather makes
};

/// Declares the option --gather, in the group "training". `declare(options, gather)`
SHARDLIB_INLINE void declare(Options& options, GatherPolicy& gather);

/// Makes the choice that `body` reads. `auto` is per-step if the step has several microbatches and its planned peak is
/// at most 0.9 of a device's memory: that of --plan-capacity or --plan-device, for --device gpu what a device takes of
/// its GPU, or for --device cpu the memory of the machine, or of its container, divided by the devices on it. Where the
/// memory is not known, and in one microbatch, it is per-microbatch. All ranks make the same choice. The first one
/// prints a choice that it made by memory. `choose_gather(gather, training, mesh, body)`
SHARDLIB_INLINE void choose_gather(GatherPolicy& gather, const Training& training, const std::vector<AxisSize>& mesh,
                                   const DeviceBody& body, std::string_view stage_axis = "");

/// Does what --plan and --graph ask for and returns true, or returns false if neither is given. Prints the plan of
/// `body`, with the memory of each rank along `stage_axis` if given. Draws the graph of `layer`, such as the program
/// with one layer. With the `policy` that `body` reads, it prints the memory under the other policies too, and with
/// `gather` memory and bytes of both choices, if there are several microbatches. Throws UsageError if the `policy`
/// names ops that the program does not run. For --step-graph it leaves the picture of `body` in `training.step_svg`,
/// and for a device other than the CPU the plan's peak in `training.planned_peak`. `if (dry_run(training, mesh, body,
/// layer)) return 0;`
SHARDLIB_INLINE bool dry_run(Training& training, const std::vector<AxisSize>& mesh, const DeviceBody& body,
                             const DeviceBody& layer, std::string_view stage_axis = "",
                             RecomputePolicy* policy = nullptr, GatherPolicy* gather = nullptr);

/// Declares the option --recompute of a policy. `declare(options, config.recompute)`
SHARDLIB_INLINE void declare(Options& options, RecomputePolicy& policy);

}  // namespace shardlib::run

#ifndef SHARDLIB_COMPILED
#include "shardlib/run/impl/dry_run.hpp"
#endif
