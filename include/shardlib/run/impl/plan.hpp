// Definitions of plan.hpp.
#pragma once

#include "shardlib/run/plan.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <memory>
#include <span>
#include <tuple>
#include <utility>

#include "shardlib/comm/dry.hpp"
#include "shardlib/runtime/observe.hpp"
#include "shardlib/runtime/op_report.hpp"
#include "shardlib/runtime/program_state.hpp"
#include "shardlib/spec/dtype.hpp"
#include "shardlib/support/error.hpp"
#include "shardlib/support/text.hpp"

namespace shardlib::run {

namespace detail {

/// 1234567 -> "1.235 M"; 1000 to a step.
inline std::string short_number(double value) {
  constexpr const char* prefixes[] = {"", "k", "M", "G", "T", "P", "E"};
  std::size_t at = 0;
  for (; value >= 999.95 && at + 1 < std::size(prefixes); ++at) value /= 1000;
  return at == 0 ? fmt::format("{:.0f} ", value) : fmt::format("{:#.4g} {}", value, prefixes[at]);
}
SHARDLIB_INLINE std::string short_bytes(std::int64_t bytes) {
  return short_number(static_cast<double>(bytes)) + "B";
}

}  // namespace detail

SHARDLIB_INLINE std::string to_string(const Plan& p) {
  const int devices = device_count(p.mesh);
  std::string text =
      fmt::format("plan for {}{}{}: one step, counted in a dry run\n\n", shardlib::detail::counted(devices, "device"),
                  p.mesh.empty() ? "" : ", mesh ", to_string(p.mesh));
  const auto line = [&](const char* what, const std::string& value, const std::string& note = "") {
    text += fmt::format("  {:<38}{:>12}{}\n", what, value, note.empty() ? "" : "   " + note);
  };
  line("parameters", fmt::format("{}", p.parameters));
  text += "\nmemory of a device\n";
  line("weights", detail::short_bytes(p.weights));
  if (p.copies > 0) line("their copies for computation", detail::short_bytes(p.copies));
  line("gradients", detail::short_bytes(p.gradients));
  line("optimizer", detail::short_bytes(p.optimizer));
  line("saved residuals", detail::short_bytes(p.residuals));
  line("most at once, with buffers", detail::short_bytes(p.peak), fmt::format("{} bytes", p.peak));
  line("  the same under MPI, no shared memory", detail::short_bytes(p.peak_mpi), fmt::format("{} bytes", p.peak_mpi));
  line("  the same under MPI, in one node", detail::short_bytes(p.peak_node), fmt::format("{} bytes", p.peak_node));
  line("  the same on GPUs, by NCCL", detail::short_bytes(p.peak_gpus), fmt::format("{} bytes", p.peak_gpus));
  text += "\narithmetic of a step\n";
  line("a device", detail::short_number(p.flops) + "FLOP");
  line("all devices", detail::short_number(p.all_flops) + "FLOP");
  if (p.model_flops > 0) line("the model's, nothing twice", detail::short_number(p.model_flops) + "FLOP");

  std::size_t op = 10, spec = 4, axes = 4;
  for (const auto& c : p.collectives) {
    op = std::max(op, c.op.size());
    spec = std::max(spec, c.spec.size());
    axes = std::max(axes, c.axes.size());
  }
  const auto row = [&](std::string_view a, std::string_view b, std::string_view c, const std::string& calls,
                       const std::string& bytes) {
    text += fmt::format("  {:<{}}  {:<{}}  {:<{}}{:>8}{:>12}\n", a, op, b, spec, c, axes, calls, bytes);
  };
  text += "\ncommunication of a device in a step\n";
  row("collective", "spec", "axes", "calls", "sent");
  std::int64_t calls = 0;
  std::vector<Plan::Collective> by_axes;  // they choose the links: between nodes, or inside one
  for (const auto& c : p.collectives) {
    row(c.op, c.spec, c.axes, std::to_string(c.calls), detail::short_bytes(c.bytes));
    calls += c.calls;
    auto sum = std::ranges::find(by_axes, c.axes, &Plan::Collective::axes);
    if (sum == by_axes.end()) sum = by_axes.insert(sum, {"all", "", c.axes});
    sum->calls += c.calls;
    sum->bytes += c.bytes;
  }
  std::ranges::sort(by_axes, [](const Plan::Collective& a, const Plan::Collective& b) {
    return a.bytes != b.bytes ? a.bytes > b.bytes : a.axes < b.axes;
  });
  if (by_axes.size() > 1)
    for (const auto& sum : by_axes)
      row(sum.op, sum.spec, sum.axes, std::to_string(sum.calls), detail::short_bytes(sum.bytes));
  row("all", "", "", std::to_string(calls), detail::short_bytes(p.sent()));
  return text;
}

SHARDLIB_INLINE Plan count_step(const DevicePtr& device, const std::function<void()>& step) {
  Plan plan;
  plan.mesh = device->axes();
  std::map<std::tuple<std::string, std::string, std::string>, Plan::Collective> collectives;
  std::map<std::pair<std::string, std::string>, Plan::Local> locals;
  auto& state = shardlib::detail::program_state(device);
  {
    const shardlib::detail::NoteReads noting(state);
    const shardlib::detail::Observing observing(device, [&](const shardlib::detail::OpReport& ran) {
      plan.flops += ran.work.flops;
      plan.has_bf16 = plan.has_bf16 || (ran.work.flops > 0 && ran.dtype == DType::bf16);
      if (ran.work.bytes == 0 || ran.work.flops > 0) {
        Plan::Local l{ran.op.name, std::string(ran.op.spec)};
        auto& sum = locals.try_emplace({l.op, l.spec}, l).first->second;
        sum.flops += ran.work.flops;
        sum.bytes += shardlib::detail::touched(ran);
      }
      if (ran.work.bytes == 0) return;
      Plan::Collective c{ran.op.name, std::string(ran.op.spec), fmt::format("{}", fmt::join(ran.work.axes, " "))};
      auto& sum = collectives.try_emplace({c.op, c.spec, c.axes}, c).first->second;
      ++sum.calls;
      sum.bytes += ran.work.bytes;
    });
    state.counting = true;
    step();
    state.counting = false;
  }
  for (auto& [key, local] : locals) plan.local.push_back(std::move(local));
  for (auto& [key, collective] : collectives) plan.collectives.push_back(std::move(collective));
  std::ranges::sort(plan.collectives, [](const auto& a, const auto& b) {
    return std::tie(b.bytes, a.op, a.spec, a.axes) < std::tie(a.bytes, b.op, b.spec, b.axes);
  });
  plan.residuals = static_cast<std::int64_t>(state.residual_bytes);
  plan.peak = static_cast<std::int64_t>(device->pool()->stats().peak);
  return plan;
}

namespace detail {

inline Plan plan_of(int device_index, const std::vector<AxisSize>& mesh,
                    const std::function<void(const DevicePtr&)>& body) {
  const auto run = [&](Peers peers) {
    const auto device = DevicePtr::make(mesh, device_index, std::make_shared<DryWorld>(peers));
    body(device);
    Plan result = device->local<Plan>();
    device->clear_local();
    if (result.peak == 0) throw Error("plan: the program has not called run::train");
    return result;
  };
  Plan result = run(Peers::threads);
  result.peak_node = run(Peers::node).peak;
  result.peak_mpi = run(Peers::mpi).peak;
  result.peak_gpus = run(Peers::gpus).peak;
  return result;
}

}  // namespace detail

SHARDLIB_INLINE Plan plan(const std::vector<AxisSize>& mesh, const std::function<void(const DevicePtr&)>& body) {
  Plan result = detail::plan_of(0, mesh, body);
  result.all_flops = result.flops * device_count(mesh);
  return result;
}

SHARDLIB_INLINE std::vector<Plan> plan_along(std::string_view axis, const std::vector<AxisSize>& mesh,
                                             const std::function<void(const DevicePtr&)>& body) {
  const auto at = std::ranges::find(mesh, axis, &AxisSize::name);
  if (at == mesh.end()) throw Error("plan_along: the mesh " + to_string(mesh) + " has no axis " + std::string(axis));
  const int behind = device_count(std::span(std::next(at), mesh.end()));  // devices with one place along it, in a row
  std::vector<Plan> plans;
  double flops = 0;
  for (int place = 0; place < at->size; ++place) {
    plans.push_back(detail::plan_of(place * behind, mesh, body));
    flops += plans.back().flops * device_count(mesh) / at->size;
  }
  for (Plan& plan : plans) plan.all_flops = flops;
  return plans;
}

SHARDLIB_INLINE std::string to_string(std::string_view axis, const std::vector<Plan>& plans) {
  std::string text = to_string(plans.at(0));
  if (plans.size() == 1) return text;
  const std::string name(axis);
  text += fmt::format("\nabove: a device of {} = 0; memory and arithmetic of a device of each {}\n", name, name);
  const auto row = [&](const auto&... cells) { ((text += fmt::format("{:>12}", cells)), ...), text += '\n'; };
  row(name, "weights", "gradients", "optimizer", "residuals", "most", "most (MPI)", "(one node)", "(NCCL)", "step");
  for (std::size_t place = 0; place < plans.size(); ++place) {
    const Plan& p = plans[place];
    row(place, detail::short_bytes(p.weights), detail::short_bytes(p.gradients), detail::short_bytes(p.optimizer),
        detail::short_bytes(p.residuals), detail::short_bytes(p.peak), detail::short_bytes(p.peak_mpi),
        detail::short_bytes(p.peak_node), detail::short_bytes(p.peak_gpus), detail::short_number(p.flops) + "FLOP");
  }
  return text;
}

}  // namespace shardlib::run
