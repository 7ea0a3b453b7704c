// Definitions of tensor.hpp.
#pragma once

#include "shardlib/runtime/tensor.hpp"

#include <string>

#include "shardlib/device/mesh_axes.hpp"
#include "shardlib/support/error.hpp"

namespace shardlib::detail {

SHARDLIB_INLINE int dim_of(const TensorSpec& spec, std::string_view text, const OpInfo& call, std::string_view dim) {
  const int at = spec.find(dim);
  if (at < 0) throw Error(call.describe() + ": `" + std::string(text) + "` has no dim `" + std::string(dim) + "`");
  return at;
}

SHARDLIB_INLINE void match_axes(const DevicePtr& device, std::string_view axes) {
  if (!device)
    throw Error("a mesh `" + std::string(axes) + "` needs a device; take the one that `launch` gives to its function");
  auto next = device->axes().begin();
  Small<std::string_view, max_axes> absent;
  for (const std::string_view name : rules::mesh_axes(axes)) {
    if (next != device->axes().end() && next->name == name)
      ++next;
    else
      absent.push_back(name);
  }
  if (next == device->axes().end())
    for (const std::string_view name : absent) device->know_absent(name);
  else
    throw UsageError("the program is written for a mesh with the axes `" + std::string(axes) +
                     "`, in this order, but was given `" + to_string(device->axes()) +
                     "`; give `launch` the axes of the program");
}

SHARDLIB_INLINE void fail_without_device(std::string_view axes) {
  throw Error("a mesh `" + std::string(axes) +
              "` was never given its device; make it of the one that `launch` gives to its function");
}

}  // namespace shardlib::detail
