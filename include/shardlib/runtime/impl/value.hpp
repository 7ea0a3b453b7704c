// Definitions of value.hpp.
#pragma once

#include "shardlib/runtime/value.hpp"

#include <algorithm>
#include <limits>
#include <map>
#include <mutex>
#include <string_view>

#include "shardlib/support/error.hpp"
#include "shardlib/types/leaves.hpp"

namespace shardlib::detail {

SHARDLIB_INLINE void check_inside(const Value& value) {
  for (const Differentiated* weight = value.storage->weight; weight != nullptr; weight = weight->around)
    if (!value.slot || value.slot == weight->outside)
      throw Error(
          weight->title +
          " comes from outside of the function that value_and_grad differentiates, so its gradient would miss "
          "this use; use the function's parameter, or `stop_gradient` of the weight if no gradient is meant, as of a "
          "copy of the weights, which shares their tensors" +
          (value.slot ? ", or `w * 1.0` from before the call if only the gradient of the function around the "
                        "call is meant"
                      : ""));
}

SHARDLIB_INLINE std::int64_t element_count(const Value& value) {
  return product(value.global.logical);
}

SHARDLIB_INLINE std::int64_t shard_count(const Device& device, const Axes& axes) {
  std::int64_t n = 1;
  for (auto axis : axes) n *= device.size(axis);
  return n;
}

SHARDLIB_INLINE std::int64_t shard_index(const Device& device, const Axes& axes) {
  std::int64_t index = 0;
  for (auto axis : axes) index = index * device.size(axis) + device.axis_index(axis);
  return index;
}

SHARDLIB_INLINE void require_running(const OpInfo& op, const Device& device) {
  if (!device.has_ended()) return;
  throw Error(op.describe() +
              ": its operands, or its mesh, are of a `launch` that has returned; compute in the function that `launch` "
              "runs, and keep what `fetch` or `item` returns (" +
              device.describe() + ")");
}

SHARDLIB_INLINE const TensorSpec& lasting(TensorSpec spec) {
  static std::mutex mutex;
  static std::map<std::string, TensorSpec, std::less<>> all;
  const auto text = to_string(spec);
  const std::lock_guard lock(mutex);
  if (const auto found = all.find(text.view()); found != all.end()) return found->second;
  const auto made = all.emplace(text.view(), TensorSpec()).first;
  return made->second = TensorSpec(made->first);  // its names are views into the key, as the caller's text may not last
}

SHARDLIB_INLINE Handle<Value> make_value(const OpInfo& op, const DevicePtr& device, DType dtype, const TensorSpec& spec,
                                         const GlobalSizes& global) {
  auto value = Handle<Value>::make();
  value->device = device;
  value->dtype = dtype;
  value->spec = &spec;
  value->global = global;
  value->made_by = Calling::placed(op);
  value->storage = Handle<Storage>::make();
  const auto fail = [&](const std::string& why) {
    throw Error(op.describe() + ": " + why + " (" + device->describe() + ")");
  };
  require_running(op, *device);
  // The product of all sizes must fit the index types, even if some dim is empty.
  std::int64_t room = std::numeric_limits<std::int64_t>::max() / 2 / static_cast<std::int64_t>(size_of(dtype));
  for (const std::int64_t extent : global.padded) {
    if (extent < 0 || extent > room) {
      std::string sizes;
      for (int i = 0; i < spec.rank(); ++i)
        sizes += (i == 0 ? "`" : ", `") + std::string(spec.dims[i].name) + "` = " + to_string(global[i]);
      fail("the sizes " + sizes + " of `" + std::string(to_string(spec).view()) +
           "` multiply to more bytes than can be counted; choose smaller ones");
    }
    room /= std::max<std::int64_t>(extent, 1);
  }
  try {
    for (auto axis : spec.partial)
      if (axis != rules::unnamed_axes) static_cast<void>(device->size(axis));
    for (int i = 0; i < spec.rank(); ++i) {
      const Dim& dim = spec.dims[i];
      const std::int64_t parts = shard_count(*device, dim.axes);
      if (dim.is_integer() && global[i] != DimSize(dim.integer))
        fail("the integer dim `" + std::string(dim.name) + "` has size " + to_string(global[i]));
      if (global[i].padded % parts != 0)
        fail("dim `" + std::string(to_string(dim).view()) + "` of size " + to_string(global[i]) +
             " does not divide evenly into " + std::to_string(parts) + " shards; choose a multiple of " +
             std::to_string(parts) + ", or pad it: {\"" + std::string(dim.name) + "\", " +
             std::to_string(global[i].size) + ", " + std::to_string(round_up(global[i].padded, parts)) + "}");
      value->local.push_back(global[i].padded / parts);
    }
  } catch (const Error& error) {
    if (std::string_view(error.what()).starts_with("unknown axis"))
      throw Error(op.describe() + ": `" + std::string(to_string(spec).view()) + "`: " + error.what() + " (" +
                  device->describe() + ")");
    throw;
  }
  note_made(*value);
  return value;
}

SHARDLIB_INLINE Shape true_shape(const Value& x) {
  Shape shape;
  for (int i = 0; i < x.local.size(); ++i) {
    const std::int64_t first = shard_index(*x.device, x.spec->dims[i].axes) * x.local[i];
    shape.push_back(std::clamp<std::int64_t>(x.global.logical[i] - first, 0, x.local[i]));
  }
  return shape;
}

SHARDLIB_INLINE Buffer allocate(const Value& value) {
  return value.device->pool()->allocate(value.bytes(), value.made_by);
}

SHARDLIB_INLINE const std::byte* host_data(const Value& value) {
  const Buffer& shard = value.data();
  if (shard.device_memory() == nullptr) return shard.data();
  Buffer& mirror = value.storage->mirror;
  if (mirror.bytes() == shard.bytes() && mirror)
    copy(mirror, shard);  // earlier results of this function stay valid
  else
    mirror = value.device->to_host(shard);
  return mirror.data();
}

SHARDLIB_INLINE Handle<Value> detached(const Value& value) {
  auto copy = Handle<Value>::make(value);
  copy->stopped = value.stopped || value.slot;
  copy->slot = {};
  return copy;
}

SHARDLIB_INLINE Handle<Value> stopped(const Value& value) {
  auto copy = detached(value);
  copy->stopped = true;
  return copy;
}

}  // namespace shardlib::detail
