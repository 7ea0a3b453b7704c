// Predicts the time of a step on hypothetical devices: a roofline for what a device computes, and the alpha-beta model
// for what it communicates.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "shardlib/device/device.hpp"
#include "shardlib/device/mesh_axes.hpp"
#include "shardlib/run/accelerators.hpp"
#include "shardlib/run/plan.hpp"
#include "shardlib/run/unit.hpp"
#include "shardlib/support/error.hpp"
#include "shardlib/support/text.hpp"

namespace shardlib::run {

/// A device's connection along a mesh axis.
struct Link {
  double bandwidth = 0;  ///< bytes/s that a device sends while it receives at the same rate
  double latency = 0;    ///< seconds for an empty message
};

/// A device and its links along each axis of the mesh.
struct Machine {
  double flops = 0;            ///< peak FLOP/s, which MFU is measured against
  double efficiency = 1;       ///< share of the peak that products reach
  double memory = 0;           ///< bytes/s, read and written; 0: memory takes no time
  std::vector<AxisSize> mesh;  ///< the mesh of the device
  std::vector<Link> links;     ///< links in the order of the mesh's axes
  double f32_flops = 0;        ///< the peak of a step whose products are all of f32; 0: `flops`
};

/// The seconds of a step, by what takes them.
struct Prediction {
  double products = 0;  ///< local ops with FLOPs: each by its FLOPs or by memory, whichever is longer
  double rest = 0;      ///< other local ops, those of the optimizer too, by memory
  /// Seconds of the collectives over the same axes.
  struct Communication {
    std::string axes;        ///< "d t"
    int devices = 1;         ///< devices in a group
    double latency = 0;      ///< seconds for latency
    double bandwidth = 0;    ///< seconds for bandwidth
    std::int64_t calls = 0;  ///< calls in a step
  };
  std::vector<Communication> communication;  ///< one entry for each set of axes
  double peak_seconds = 0;                   ///< time of the model's own FLOPs at the peak

  [[nodiscard]] double computing() const { return products + rest; }  ///< products and the rest
  /// Latency and bandwidth of all axes.
  [[nodiscard]] double communicating() const {
    double sum = 0;
    for (const Communication& c : communication) sum = sum + c.latency + c.bandwidth;
    return sum;
  }
  [[nodiscard]] double serial() const { return computing() + communicating(); }  ///< if nothing overlaps
  /// If all communication overlaps with computing.
  [[nodiscard]] double overlapped() const { return std::max(computing(), communicating()); }
};

/// An option that takes a number for each axis of the mesh, with the words of its messages. `name` is the option,
/// `least` the smallest number.
struct AxisOption {
  std::string_view name;
  std::string_view number;  ///< describes a number: finite, and at least `least`
  double least = 0;
  std::string_view slow, fast;  ///< example values for the outermost axis and for the others
};
/// The bandwidth of links, option --plan-bandwidth.
inline constexpr AxisOption plan_bandwidth{"--plan-bandwidth", "number of at least 1, in B/s", 1, "25e9", "300e9"};
/// The latency of links, option --plan-latency.
inline constexpr AxisOption plan_latency{"--plan-latency", "number of at least 0, in seconds", 0, "20e-6", "5e-6"};

/// The number of messages in sequence in a collective of n devices, by its best algorithms (Thakur, Rabenseifner and
/// Gropp 2005): ceil(log2 n) for gathers, scatters and scans, twice that for all_reduce, n - 1 for all_to_all and for
/// ops that send their shards one by one (attention, einsums; in attention's backward pass three times as many),
/// else 1. `messages_in_sequence("all_reduce", 8)` is 6.
[[nodiscard]] inline int messages_in_sequence(std::string_view op, int devices) {
  const auto rounds = static_cast<int>(std::bit_width(static_cast<unsigned>(devices - 1)));  // ceil(log2 devices)
  // A scan over an axis gathers the last states. `wait` runs the gather or the scatter of a recomputed function.
  if (op == "all_gather" || op == "reduce_scatter" || op == "wait" || op.starts_with("linear_scan")) return rounds;
  if (op.starts_with("all_reduce")) return 2 * rounds;
  // Keys arrive, their cotangents return, and the receiver answers that it has read them.
  if (op.starts_with("causal_attention_backward")) return 3 * (devices - 1);
  const bool in_turn = op.starts_with("causal_attention") || op.starts_with("einsum");  // shards, one after the other
  return in_turn || op.ends_with("all_to_all") ? devices - 1 : 1;
}

/// Predicts the seconds of a planned step. A collective over several axes runs at the speed of the slowest.
/// `predict(plan, machine)`
[[nodiscard]] inline Prediction predict(const Plan& plan, const Machine& machine) {
  Prediction p;
  const double peak = machine.f32_flops > 0 && !plan.has_bf16 ? machine.f32_flops : machine.flops;
  const auto by_memory = [&](std::int64_t bytes) {
    return machine.memory > 0 ? static_cast<double>(bytes) / machine.memory : 0;
  };
  for (const Plan::Local& op : plan.local) {
    const double memory = by_memory(op.bytes), arithmetic = op.flops / (peak * machine.efficiency);
    (op.flops > 0 ? p.products : p.rest) += std::max(memory, arithmetic);
  }
  std::map<std::string, Prediction::Communication> sums;
  for (const Plan::Collective& c : plan.collectives) {
    auto& sum = sums.try_emplace(c.axes, Prediction::Communication{.axes = c.axes}).first->second;
    Link slowest;
    sum.devices = 1;
    for (std::size_t i = 0; i < machine.mesh.size(); ++i) {
      const std::string& name = machine.mesh[i].name;
      if ((" " + c.axes + " ").find(" " + name + " ") == std::string::npos) continue;
      sum.devices *= machine.mesh[i].size;
      if (machine.mesh[i].size == 1) continue;
      const Link& link = machine.links[i];
      slowest.bandwidth = slowest.bandwidth > 0 ? std::min(slowest.bandwidth, link.bandwidth) : link.bandwidth;
      slowest.latency = std::max(slowest.latency, link.latency);
    }
    sum.calls += c.calls;
    sum.latency += static_cast<double>(c.calls) * messages_in_sequence(c.op, sum.devices) * slowest.latency;
    sum.bandwidth += static_cast<double>(c.bytes) / slowest.bandwidth;
  }
  for (auto& [axes, sum] : sums) p.communication.push_back(std::move(sum));
  p.peak_seconds = plan.model_flops / device_count(plan.mesh) / peak;
  return p;
}

/// An example of the option's value, "d=25e9,t=300e9", for the axes over which something is sent. Empty if there are
/// none. `example(plan_bandwidth, mesh)`
[[nodiscard]] inline std::string example(const AxisOption& option, const std::vector<AxisSize>& mesh) {
  std::string text;
  for (const AxisSize& axis : mesh)
    if (axis.size > 1)
      text +=
          fmt::format("{}={}", text.empty() ? axis.name : "," + axis.name, text.empty() ? option.slow : option.fast);
  return text;
}

/// Reads "300e9" for all axes of the mesh, or "d=25e9,t=300e9", one number for each axis. An axis of size 1 may be left
/// out; its number is 0. Throws UsageError. `for_each_axis(plan_bandwidth, "d=25e9,t=300e9", mesh)`
[[nodiscard]] inline std::vector<double> for_each_axis(const AxisOption& option, const std::string& text,
                                                       const std::vector<AxisSize>& mesh) {
  const auto fail = [&](const std::string& reason) {
    const std::string axes = example(option, mesh);
    throw UsageError(fmt::format("{} {}: {}; give one number for all axes, as in {}{}", option.name, text, reason,
                                 option.fast,
                                 axes.empty() ? ""
                                              : fmt::format(", or one for each axis of mesh {} that has several "
                                                            "devices, as in {}",
                                                            to_string(mesh), axes)));
  };
  const auto number = [&](const std::string& digits) {
    double value = 0;
    if (!shardlib::detail::parse_number(digits, value) || !std::isfinite(value) || value < option.least)
      fail(fmt::format("'{}' is not a {}", digits, option.number));
    return value;
  };
  if (text.find('=') == std::string::npos) return std::vector<double>(mesh.size(), number(text));
  std::vector<std::optional<double>> given(mesh.size());
  for (std::size_t begin = 0; begin <= text.size();) {
    const std::size_t end = std::min(text.find(',', begin), text.size());
    const std::string entry = text.substr(begin, end - begin);
    const std::size_t equals = std::min(entry.find('='), entry.size());
    const std::string name = entry.substr(0, equals);
    const auto axis = std::ranges::find(mesh, name, &AxisSize::name);
    if (axis == mesh.end()) fail("'" + name + "' is not an axis");
    std::optional<double>& value = given[static_cast<std::size_t>(axis - mesh.begin())];
    if (value) fail("axis " + name + " is given twice");
    value = number(entry.substr(std::min(equals + 1, entry.size())));
    begin = end + 1;
  }
  std::vector<double> values;
  for (std::size_t i = 0; i < mesh.size(); ++i) {
    if (!given[i] && mesh[i].size > 1) fail("axis " + mesh[i].name + " is missing");
    values.push_back(given[i].value_or(0));
  }
  return values;
}

/// The prediction as a table to print.
[[nodiscard]] inline std::string to_string(const Prediction& p) {
  std::string text = "\npredicted time of a step\n";
  const auto line = [&](const std::string& what, double seconds, const std::string& note = "") {
    text +=
        fmt::format("  {:<34}{:>12}{}\n", what, unit_text(Unit::seconds, seconds), note.empty() ? "" : "   " + note);
  };
  line("products", p.products);
  line("other ops and the optimizer", p.rest);
  for (const Prediction::Communication& c : p.communication)
    line(fmt::format("communication over {}", c.axes), c.latency + c.bandwidth,
         fmt::format("{} devices, {}, {} of it latency", c.devices, shardlib::detail::counted(c.calls, "call"),
                     unit_text(Unit::seconds, c.latency)));
  const auto step = [&](const char* what, double seconds) {
    line(what, seconds, fmt::format("MFU {}", unit_text(Unit::percent, p.peak_seconds / seconds)));
  };
  step("a step, nothing overlapping", p.serial());
  step("a step, all overlapping", p.overlapped());
  return text;
}

}  // namespace shardlib::run
