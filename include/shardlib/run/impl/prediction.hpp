// Definitions of prediction.hpp.
#pragma once

#include "shardlib/run/prediction.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <map>
#include <optional>

#include "shardlib/run/unit.hpp"
#include "shardlib/support/error.hpp"
#include "shardlib/support/text.hpp"

namespace shardlib::run {

SHARDLIB_INLINE int messages_in_sequence(std::string_view op, int devices) {
  const auto rounds = static_cast<int>(std::bit_width(static_cast<unsigned>(devices - 1)));  // ceil(log2 devices)
  // A scan over an axis gathers the last states. `wait` runs the gather or the scatter of a recomputed function.
  if (op == "all_gather" || op == "reduce_scatter" || op == "wait" || op.starts_with("linear_scan")) return rounds;
  if (op.starts_with("all_reduce")) return 2 * rounds;
  // Keys arrive, their cotangents return, and the receiver answers that it has read them.
  if (op.starts_with("causal_attention_backward")) return 3 * (devices - 1);
  const bool in_turn = op.starts_with("causal_attention") || op.starts_with("einsum");  // shards, one after the other
  return in_turn || op.ends_with("all_to_all") ? devices - 1 : 1;
}

SHARDLIB_INLINE Prediction predict(const Plan& plan, const Machine& machine) {
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

SHARDLIB_INLINE std::string example(const AxisOption& option, const std::vector<AxisSize>& mesh) {
  std::string text;
  for (const AxisSize& axis : mesh)
    if (axis.size > 1)
      text +=
          fmt::format("{}={}", text.empty() ? axis.name : "," + axis.name, text.empty() ? option.slow : option.fast);
  return text;
}

SHARDLIB_INLINE std::vector<double> for_each_axis(const AxisOption& option, const std::string& text,
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

SHARDLIB_INLINE std::string to_string(const Prediction& p) {
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
