// Definitions of dry_run.hpp.
#pragma once

#include "shardlib/run/dry_run.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "shardlib/run/graph.hpp"
#include "shardlib/run/plan.hpp"
#include "shardlib/run/prediction.hpp"
#include "shardlib/support/error.hpp"

namespace shardlib::run {

namespace detail {

/// The accelerator of --plan-device; null if it is not given.
inline const Accelerator* planned_device(const Training& t) {
  if (t.plan_device == "none") return nullptr;
  if (!t.plan) throw UsageError("--plan-device describes the device of a planned step: give --plan too");
  return std::ranges::find(accelerators, t.plan_device, &Accelerator::name);
}

/// Whether the plan fits the accelerator's memory, as a line.
inline std::string fits(const Plan& plan, const Accelerator& device) {
  const auto most = static_cast<double>(plan.peak);
  return fmt::format("{} of the {} of one {}: {}\n", short_bytes(plan.peak),
                     short_bytes(static_cast<std::int64_t>(device.bytes)), device.name,
                     most <= 0.9 * device.bytes ? "fits" : "does not fit; shard over more devices, or see --recompute");
}

/// The machine of --plan-device, --plan-flops and the related options; empty if they are not given. A device alone has
/// no prediction where links to others are missing.
inline std::optional<Machine> planned_machine(const Training& t, const std::vector<AxisSize>& mesh) {
  const Accelerator* const device = planned_device(t);
  if (device != nullptr && t.plan_flops == 0 && t.plan_bandwidth.empty() && device_count(mesh) > 1) return std::nullopt;
  const double flops = t.plan_flops > 0 || device == nullptr ? t.plan_flops : device->flops;
  const double memory = t.plan_memory > 0 || device == nullptr ? t.plan_memory : device->memory;
  if (flops == 0) {
    if (t.plan_efficiency != 1 || t.plan_memory > 0 || !t.plan_bandwidth.empty() || !t.plan_latency.empty())
      throw UsageError(
          "--plan-efficiency, --plan-memory, --plan-bandwidth and --plan-latency describe a device whose peak "
          "is missing: give --plan-flops or --plan-device too");
    return std::nullopt;
  }
  if (!t.plan) throw UsageError("--plan-flops predicts the time of a planned step: give --plan too");
  if (t.plan_bandwidth.empty() && device_count(mesh) > 1)
    throw UsageError(fmt::format(
        "--plan-flops: a prediction for {} devices needs the B/s that each sends, as in --plan-bandwidth {}",
        device_count(mesh), example(plan_bandwidth, mesh)));
  Machine machine{flops, t.plan_efficiency, memory, mesh, std::vector<Link>(mesh.size())};
  const auto values = [&](const AxisOption& option, const std::string& text) {
    return text.empty() ? std::vector<double>(mesh.size()) : for_each_axis(option, text, mesh);
  };
  const auto bandwidths = values(plan_bandwidth, t.plan_bandwidth);
  const auto latencies = values(plan_latency, t.plan_latency);
  for (std::size_t i = 0; i < mesh.size(); ++i) machine.links[i] = {bandwidths[i], latencies[i]};
  return machine;
}

/// The memory of a device under each policy, a line each. `planned` is the plan under the chosen one.
inline std::string policies_text(const std::vector<AxisSize>& mesh, const DeviceBody& body, RecomputePolicy& policy,
                                 const Plan& planned) {
  const std::string chosen = policy.name;
  std::vector<std::string> names{"none", "dots", "seqax", "attention", "everything"};
  if (std::ranges::find(names, chosen) == names.end()) names.push_back(chosen);
  std::string text =
      fmt::format("\nmemory of a device by --recompute\n  {:<38}{:>12}{:>14}\n", "", "saved", "most at once");
  for (const std::string& name : names) {
    policy.name = name;
    try {
      const Plan one = name == chosen ? planned : plan(mesh, body);
      text += fmt::format("  {:<38}{:>12}{:>14}{}\n", name, short_bytes(one.activations), short_bytes(one.peak),
                          name == chosen ? "   this plan" : "");
    } catch (const Error&) {
      text += fmt::format("  {:<38}{:>12}{:>14}\n", name, "-", "not this model");
    }
  }
  policy.name = chosen;
  return text;
}

}  // namespace detail

SHARDLIB_INLINE void declare(Options& options, RecomputePolicy& policy) {
  options.add(
      "--recompute", policy.name,
      "what the backward pass computes again: none, all but matrix products (dots), all but what the model marks "
      "(seqax), all but attention (attention), everything, or all but the results of these ops: OP,OP",
      value_name("POLICY"));
}

SHARDLIB_INLINE bool dry_run(const Training& training, const std::vector<AxisSize>& mesh, const DeviceBody& body,
                             const DeviceBody& layer, std::string_view stage_axis, RecomputePolicy* policy) {
  // Under mpirun one rank does this, because nothing is sent.
  const bool speaks = world_rank() == 0;
  const std::optional<Machine> machine = detail::planned_machine(training, mesh);
  if (machine && !stage_axis.empty() && std::ranges::find(mesh, stage_axis, &AxisSize::name)->size > 1)
    throw UsageError(
        fmt::format("--plan-flops predicts a step of one stage: a pipeline's waits are the simulator's (give "
                    "--show-schedule), or a mesh of {}=1",
                    stage_axis));
  if (training.plan && speaks) {
    const std::vector<Plan> plans =
        stage_axis.empty() ? std::vector{plan(mesh, body)} : plan_along(stage_axis, mesh, body);
    fmt::print("{}", to_string(stage_axis, plans));
    if (policy != nullptr) fmt::print("{}", detail::policies_text(mesh, body, *policy, plans[0]));
    if (const Accelerator* const device = detail::planned_device(training))
      fmt::print("\n{}", detail::fits(plans[0], *device));
    if (machine) fmt::print("{}", to_string(predict(plans[0], *machine)));
  }
  if (!training.graph.empty() && speaks) {
    write_svg(dot(mesh, layer, {.fold = true}), training.graph);
    fmt::print("graph: {}\n", training.graph);
  }
  return training.plan || !training.graph.empty();
}

}  // namespace shardlib::run
