// Definitions of dry_run.hpp.
#pragma once

#include "shardlib/run/dry_run.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <ranges>
#include <utility>

#include "shardlib/device/impl/local_place.hpp"
#include "shardlib/io/file.hpp"
#include "shardlib/memory/control_groups.hpp"
#include "shardlib/memory/system.hpp"
#include "shardlib/run/console.hpp"
#include "shardlib/run/graph.hpp"
#include "shardlib/run/plan.hpp"
#include "shardlib/run/prediction.hpp"
#include "shardlib/run/run_directory.hpp"
#include "shardlib/support/error.hpp"

#if defined(SHARDLIB_WITH_MPI)
#include "shardlib/comm/mpi/process.hpp"
#endif

namespace shardlib::run {

namespace detail {

/// The accelerator of --plan-device; null if it is not given.
inline const Accelerator* planned_device(const Training& t) {
  if (t.plan_device == "none") return nullptr;
  if (!t.plan) throw UsageError("--plan-device describes the device of a planned step: give --plan too");
  return std::ranges::find(accelerators, t.plan_device, &Accelerator::name);
}

/// The memory of a planned device, by --plan-capacity or --plan-device; nothing if neither is given.
inline std::optional<double> planned_bytes(const Training& t) {
  const Accelerator* const device = planned_device(t);
  if (t.plan_capacity > 0 && !t.plan)
    throw UsageError("--plan-capacity is the memory of a planned step's device: give --plan too");
  if (t.plan_capacity > 0) return t.plan_capacity;
  return device != nullptr ? std::optional(device->bytes) : std::nullopt;
}

/// Whether the devices are GPUs: those of the run, or those that it is planned for.
inline bool on_gpus(const Training& t) {
  return t.device == "gpu" || t.plan_device != "none";
}
/// The figure of a plan that is the peak there.
inline auto peak_of(const Training& t) {
  return on_gpus(t) ? &Plan::peak_gpus : &Plan::peak;
}

/// The highest peak of all stages.
inline std::int64_t highest(const std::vector<Plan>& plans, std::int64_t Plan::*peak) {
  return std::ranges::max(plans | std::views::transform(peak));
}

/// A line that says whether the plans of all stages fit devices of `bytes` bytes.
inline std::string fits(const std::vector<Plan>& plans, const Training& t, double bytes) {
  const std::int64_t most = highest(plans, peak_of(t));
  return fmt::format(
      "{} of the {} of one {}: {}\n", short_bytes(most), short_bytes(static_cast<std::int64_t>(bytes)),
      t.plan_device == "none" ? "device" : t.plan_device,
      static_cast<double>(most) <= 0.9 * bytes ? "fits" : "does not fit; shard over more devices, or see --recompute");
}

/// The machine of --plan-device, --plan-flops and the related options; empty if they are not given. A device alone has
/// no prediction where links to others are missing.
inline std::optional<Machine> planned_machine(const Training& t, const std::vector<AxisSize>& mesh) {
  const Accelerator* const device = planned_device(t);
  if (device != nullptr && t.plan_flops == 0 && t.plan_bandwidth.empty() && device_count(mesh) > 1) {
    if (t.plan_efficiency != 1 || t.plan_memory > 0 || !t.plan_latency.empty())
      throw UsageError(
          fmt::format("--plan-efficiency, --plan-memory and --plan-latency are of a prediction, which needs the B/s "
                      "that each of {} devices sends too, as in --plan-bandwidth {}",
                      device_count(mesh), example(plan_bandwidth, mesh)));
    return std::nullopt;
  }
  const bool has_links = !t.plan_bandwidth.empty() || !t.plan_latency.empty();
  if (!t.plan && t.device == "gpu" && t.plan_efficiency == 1 && t.plan_memory == 0 && !has_links)
    return std::nullopt;  // the peak is for MFU
  const bool own = t.plan_flops > 0 || device == nullptr;
  const double flops = own ? t.plan_flops : device->flops;
  const double memory = t.plan_memory > 0 || device == nullptr ? t.plan_memory : device->memory;
  if (flops == 0) {
    if (t.plan_efficiency != 1 || t.plan_memory > 0 || has_links)
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
  if (!own) machine.f32_flops = device->f32_flops;
  const auto values = [&](const AxisOption& option, const std::string& text) {
    return text.empty() ? std::vector<double>(mesh.size()) : for_each_axis(option, text, mesh);
  };
  const auto bandwidths = values(plan_bandwidth, t.plan_bandwidth);
  const auto latencies = values(plan_latency, t.plan_latency);
  for (std::size_t i = 0; i < mesh.size(); ++i) machine.links[i] = {bandwidths[i], latencies[i]};
  return machine;
}

/// Whether the policy names ops, which a program may not run.
inline bool names_ops(const RecomputePolicy& policy) {
  const std::vector<std::string> always{"none", "dots", "marked", "everything"};
  return std::ranges::find(always, policy.name) == always.end();
}

/// The memory of a device under each policy, a line each. `planned` is the plan under the chosen one.
inline std::string policies_text(const std::vector<AxisSize>& mesh, const DeviceBody& body, RecomputePolicy& policy,
                                 const Plan& planned, std::int64_t Plan::*peak) {
  const std::string chosen = policy.name;
  std::vector<std::string> names{"none", "dots", "marked", "attention", "everything"};
  if (std::ranges::find(names, chosen) == names.end()) names.push_back(chosen);
  std::string text =
      fmt::format("\nmemory of a device by --recompute\n  {:<38}{:>12}{:>14}\n", "", "saved", "most at once");
  for (const std::string& name : names) {
    policy.name = name;
    try {
      const Plan one = name == chosen ? planned : plan(mesh, body);
      text += fmt::format("  {:<38}{:>12}{:>14}{}\n", name, short_bytes(one.residuals), short_bytes(one.*peak),
                          name == chosen ? "   this plan" : "");
    } catch (const Error&) {
      text += fmt::format("  {:<38}{:>12}{:>14}\n", name, "-", "not this model");
    }
  }
  policy.name = chosen;
  return text;
}

/// The plans of all stages, or the one plan without stages.
inline std::vector<Plan> plans_of(const std::vector<AxisSize>& mesh, const DeviceBody& body,
                                  std::string_view stage_axis) {
  return stage_axis.empty() ? std::vector{plan(mesh, body)} : plan_along(stage_axis, mesh, body);
}

/// As plans_of. Throws UsageError if the policy names ops that the program does not run, which a dry run finds.
inline std::vector<Plan> checked_plans(RecomputePolicy* policy, const std::vector<AxisSize>& mesh,
                                       const DeviceBody& body, std::string_view stage_axis) {
  const bool names = policy != nullptr && names_ops(*policy);
  if (names &&
      (("," + policy->name + ",").find(",,") != std::string::npos || policy->name.find(' ') != std::string::npos))
    throw UsageError("--recompute '" + policy->name +
                     "': one of its ops has no name: write none, dots, marked, "
                     "attention, everything, or ops with commas and no spaces, as in einsum_unreduced,all_gather");
  try {
    return plans_of(mesh, body, stage_axis);
  } catch (const UsageError&) {
    throw;
  } catch (const Error& error) {
    if (!names) throw;
    const std::string chosen = std::exchange(policy->name, "everything");
    static_cast<void>(plans_of(mesh, body, stage_axis));  // throws if the mistake is not the policy's
    throw UsageError("--recompute '" + chosen + "': " + error.what());
  }
}

/// The memory of a device of the run, the same on all ranks; nothing if it is not known.
inline std::optional<double> device_bytes(const Training& t, const std::vector<AxisSize>& mesh) {
  if (const std::optional<double> planned = planned_bytes(t)) return planned;
  if (t.plan || t.device == "simulated") return std::nullopt;
  const bool on_gpu = t.device == "gpu";
  int sharers = device_count(mesh);  // of the host's memory
#if defined(SHARDLIB_WITH_MPI)
  namespace mpi = shardlib::detail::mpi;
  if (under_mpi()) sharers = mpi::process.local_size;
#endif
  double bytes = on_gpu ? shardlib::detail::least_gpu_bytes(device_count(mesh))
                        : static_cast<double>(shardlib::detail::least_group_limit("/proc/self/cgroup", "/sys/fs/cgroup",
                                                                                  shardlib::detail::machine_bytes())) /
                              sharers;
#if defined(SHARDLIB_WITH_MPI)
  if (under_mpi())
    mpi::check(MPI_Allreduce(MPI_IN_PLACE, &bytes, 1, MPI_DOUBLE, MPI_MIN, mpi::process.control), "choosing --gather",
               sizeof bytes);
#endif
  return bytes > 0 ? std::optional(bytes) : std::nullopt;
}

/// The most memory that a device of any stage takes, whatever connects the devices, or `on_gpus` NCCL.
inline std::int64_t most_bytes(const std::vector<Plan>& plans, bool on_gpus) {
  std::int64_t most = 0;
  for (const Plan& p : plans)
    most = std::max(most, on_gpus ? p.peak_gpus : std::max({p.peak, p.peak_node, p.peak_mpi}));
  return most;
}

/// One line for each choice: the bytes that a device sends and its peak memory, the most of all stages. `planned` are
/// the plans of the current choice.
inline std::string gathers_text(const std::vector<AxisSize>& mesh, const DeviceBody& body, std::string_view stage_axis,
                                GatherPolicy& gather, const std::vector<Plan>& planned, std::int64_t Plan::*peak) {
  const bool chosen = gather.per_step;
  std::string text = fmt::format("\na device by --gather\n  {:<38}{:>12}{:>14}\n", "", "sent", "most at once");
  for (const bool per_step : {false, true}) {
    gather.per_step = per_step;
    const auto plans = per_step == chosen ? planned : plans_of(mesh, body, stage_axis);
    const std::int64_t sent = std::ranges::max(plans | std::views::transform(&Plan::sent));
    text += fmt::format("  {:<38}{:>12}{:>14}{}\n", per_step ? "per-step" : "per-microbatch", short_bytes(sent),
                        short_bytes(highest(plans, peak)), per_step == chosen ? "   this plan" : "");
  }
  gather.per_step = chosen;
  return text;
}

}  // namespace detail

SHARDLIB_INLINE void declare(Options& options, GatherPolicy& gather) {
  options.group("training")
      .add("--gather", gather.name,
           "when weights are gathered and gradients scattered: per-microbatch, per-step, which takes more memory, or "
           "auto: per-step if there are several microbatches and the plan fits into the devices' memory",
           one_of({"auto", "per-step", "per-microbatch"}));
}

SHARDLIB_INLINE void choose_gather(GatherPolicy& gather, const Training& training, const std::vector<AxisSize>& mesh,
                                   const DeviceBody& body, std::string_view stage_axis) {
  gather.per_step = gather.name == "per-step";
  const bool trains = training.steps > 0 && !training.sample_only && (training.graph.empty() || training.plan);
  if (gather.name != "auto" || training.microbatches == 1 || !trains) return;
  const std::optional<double> bytes = detail::device_bytes(training, mesh);
  if (!bytes) return;
  gather.per_step = true;
  std::int64_t peak = 0;
  try {
    peak = detail::most_bytes(detail::plans_of(mesh, body, stage_axis), detail::on_gpus(training));
  } catch (const Error&) {
    gather.per_step = false;  // `dry_run` or the run reports the mistake
    return;
  }
  gather.per_step = static_cast<double>(peak) <= 0.9 * *bytes;
  if (!training.plan && world_rank() == 0)
    print_console(fmt::format("--gather auto is {}: per-step takes {} of the {} of a device\n",
                              gather.per_step ? "per-step" : "per-microbatch", detail::short_bytes(peak),
                              detail::short_bytes(static_cast<std::int64_t>(*bytes))));
}

SHARDLIB_INLINE void declare(Options& options, RecomputePolicy& policy) {
  options.add("--recompute", policy.name,
              "values that the backward pass computes again: none, all but matrix products (dots), all but what the "
              "model marks (marked), all but attention (attention), everything, or all but the results of these ops: "
              "OP,OP",
              value_name("POLICY"));
}

SHARDLIB_INLINE bool dry_run(Training& training, const std::vector<AxisSize>& mesh, const DeviceBody& body,
                             const DeviceBody& layer, std::string_view stage_axis, RecomputePolicy* policy,
                             GatherPolicy* gather) {
  // Under mpirun one rank does this, because nothing is sent.
  const bool speaks = world_rank() == 0;
  if (!training.graph.empty() && speaks) {
    require_no_run_file(training.graph, "--graph", training.directory);
    io::require_writable(training.graph, "--graph");
  }
  const bool prints = training.plan && speaks;
  const std::optional<Machine> machine = detail::planned_machine(training, mesh);
  const std::optional<double> bytes = detail::planned_bytes(training);
  if (machine && !stage_axis.empty() && std::ranges::find(mesh, stage_axis, &AxisSize::name)->size > 1)
    throw UsageError(
        fmt::format("--plan-flops predicts a step of one stage: a pipeline's waits are the simulator's (give "
                    "--show-schedule), or a mesh of {}=1",
                    stage_axis));
  std::vector<Plan> plans;
  if (prints)
    plans = detail::checked_plans(policy, mesh, body, stage_axis);
  else if (policy != nullptr && detail::names_ops(*policy) && !training.sample_only)
    static_cast<void>(detail::checked_plans(policy, mesh, body, ""));
  if (prints) {
    fmt::print("{}", to_string(stage_axis, plans));
    if (policy != nullptr)
      fmt::print("{}", detail::policies_text(mesh, body, *policy, plans[0], detail::peak_of(training)));
    if (gather != nullptr && training.microbatches > 1)
      fmt::print("{}", detail::gathers_text(mesh, body, stage_axis, *gather, plans, detail::peak_of(training)));
    if (bytes) fmt::print("\n{}", detail::fits(plans, training, *bytes));
    if (machine) fmt::print("{}", to_string(predict(plans[0], *machine)));
  }
  if (!training.graph.empty() && speaks) {
    write_svg(dot(mesh, layer, {.fold = true}), training.graph);
    fmt::print("graph: {}\n", training.graph);
  }
  const bool stops = training.plan || !training.graph.empty();
  if (training.draw_step && !training.sample_only && !stops && speaks) {
    const std::string graph = dot(mesh, body, {.fold = true, .whole_step = true});
    print_console(
        fmt::format("drawing {}/step.svg from {} lines of DOT; `dot` takes seconds for 1000, minutes for 2000\n",
                    training.directory, std::ranges::count(graph, '\n')));
    training.step_svg = svg(graph);
  }
  // Not for a CPU: the plan counts one thread, so its peak is not the one of this run.
  if (training.device != "cpu" && !training.sample_only && !stops) {
    try {
      const auto planned = detail::plans_of(mesh, body, stage_axis);
      training.planned_peak = detail::highest(planned, training.device == "gpu" ? &Plan::peak_gpus : &Plan::peak);
    } catch (const Error&) {  // the run reports the mistake
    }
  }
  return stops;
}

}  // namespace shardlib::run
