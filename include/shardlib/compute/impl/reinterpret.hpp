// The run-time part of reinterpret: which devices have which indices along the axes of two meshes.
#pragma once

#include <algorithm>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "shardlib/autodiff/tape.hpp"
#include "shardlib/compute/layout.hpp"
#include "shardlib/device/mesh_axes.hpp"
#include "shardlib/ops/reinterpret.hpp"
#include "shardlib/support/error.hpp"
#include "shardlib/support/inline.hpp"

namespace shardlib::detail {

/// The devices along some axes: how many, and the difference of rank of two that follow each other. `regular` is false
/// where that is not one number.
struct RankRun {
  int devices = 1;
  int stride = 1;
  bool regular = true;
};
inline RankRun ranks_along(const Device& device, const Axes& axes) {
  RankRun run;
  for (int i = axes.size(); i-- > 0;) {
    const int size = device.size(axes[i]);
    if (size == 1) continue;
    const int stride = device.stride(axes[i]);
    if (run.devices == 1) run.stride = stride;
    run.regular = run.regular && stride == run.stride * run.devices;
    run.devices *= size;
  }
  return run;
}

/// Throws Error unless the axes `to` on `there` number the same devices as `from` on `here`, in the same order.
inline void check_same_devices(const OpInfo& op, const Device& here, const Axes& from, const Device& there,
                               const Axes& to) {
  const RankRun before = ranks_along(here, from), after = ranks_along(there, to);
  const auto text = [](const Device& device, const Axes& axes) {
    return "`" + std::string(rules::joined(axes, " ").view()) + "` of mesh " + to_string(device.axes());
  };
  std::string why;
  if (before.devices != after.devices)
    why = text(here, from) + " are " + std::to_string(before.devices) + " devices, but " + text(there, to) + " are " +
          std::to_string(after.devices) + "; choose sizes with equal products";
  else if (!before.regular || !after.regular || (before.devices > 1 && before.stride != after.stride))
    why = text(there, to) + " are other devices than " + text(here, from) +
          ", or have another order, so shards would change places; name the axes that they replace";
  if (!why.empty()) throw Error(op.describe() + ": " + why + " (" + here.describe() + ")");
}

SHARDLIB_INLINE DevicePtr reinterpreted(const OpInfo& op, const DevicePtr& device, const TensorSpec& axes,
                                        const Sizes& given) {
  const auto fail = [&](const std::string& why) {
    throw Error(op.describe() + ": " + why + " (" + device->describe() + ")");
  };
  const rules::AxisMap map = rules::parse_axis_map(op.spec);
  std::vector<AxisSize> sizes;
  const auto find = [&](std::string_view name) { return std::ranges::find(given, name, &NamedSize::name); };
  for (const Dim& axis : axes.dims) {
    const auto* group = std::ranges::find_if(map.groups, [&](const auto& g) { return g.to.contains(axis.name); });
    const auto size = find(axis.name);
    // A mesh may lack axes of its type, and lacks them afterwards too.
    if (group == map.groups.end() &&
        std::ranges::find(device->axes(), axis.name, &AxisSize::name) == device->axes().end())
      continue;
    AxisSize& made = sizes.emplace_back(AxisSize{std::string(axis.name)});
    if (group == map.groups.end())
      made.size = device->size(axis.name);
    else if (size != given.end())
      made.size = static_cast<int>(size->size);
    else if (group->to.size() == 1)
      for (const std::string_view old : group->from) made.size *= device->size(old);
    else
      fail("the size of the new axis `" + made.name + "` is missing; give it: {\"" + made.name + "\", ...}");
    if (made.size < 1) fail("the new axis `" + made.name + "` has the size " + std::to_string(made.size));
  }
  for (const NamedSize& size : given)
    if (std::ranges::none_of(map.groups, [&](const auto& g) { return g.to.contains(size.name); }))
      fail("`" + size.name + "` is none of the new axes, so its size cannot be given");
  for (const auto& group : map.groups) {
    int before = 1, after = 1;
    for (const std::string_view axis : group.from) before *= device->size(axis);
    for (const AxisSize& axis : sizes)
      if (group.to.contains(axis.name)) after *= axis.size;
    if (before != after)
      fail("`" + std::string(rules::joined(group.from, " ").view()) + "` are " + std::to_string(before) +
           " devices, but the new axes " + to_string(sizes) + " have " + std::to_string(after) + " in their place");
  }
  return Device::reinterpreted(device, std::move(sizes));
}

/// The value on another view of its device. `dual` is the spec of its cotangent.
inline ValuePtr record_reinterpreted(const OpInfo& op, const ValuePtr& x, const DevicePtr& device,
                                     const TensorSpec& out, const TensorSpec& dual) {
  EdgeSource source{&x};
  if (is_floating(x->dtype))
    source.vjp = [op, here = x->device, due = &dual](const ValuePtr& ct, const Residuals&) {
      return record_reinterpreted(op, ct, here, *due, lasting_dual(*ct->spec, {}));
    };
  return record_on(op, x, device, out, x->global, {&source, 1});
}

SHARDLIB_INLINE ValuePtr reinterpreted(const OpInfo& op, const ValuePtr& x, const DevicePtr& device,
                                       const TensorSpec& out, const TensorSpec& dual) {
  const DevicePtr& here = x->device;
  if (&here->original() != &device->original())
    throw Error(op.describe() + ": the tensor is on " + here->describe_view() + ", and the mesh is one of " +
                device->describe_view() + "; make the mesh of the tensor's own, by `reinterpret` of that mesh");
  const rules::AxisMap map = rules::parse_axis_map(op.spec);
  for (const auto& group : map.groups) check_same_devices(op, *here, group.from, *device, group.to);
  Axes stay;
  rules::collect_axes(*x->spec, stay);
  for (const std::string_view axis : stay) {
    const Axes one{{axis}, 1};
    if (std::ranges::none_of(map.groups, [&](const auto& g) { return g.from.contains(axis); }))
      check_same_devices(op, *here, one, *device, one);
  }
  return record_reinterpreted(op, x, device, out, dual);
}

}  // namespace shardlib::detail
