// Definitions of arrays.hpp.
#pragma once

#include "shardlib/io/checkpoint/arrays.hpp"

#include <list>

#include "shardlib/device/mesh_axes.hpp"
#include "shardlib/io/checkpoint/writer.hpp"
#include "shardlib/runtime/value.hpp"
#include "shardlib/support/error.hpp"

namespace shardlib::io {

SHARDLIB_INLINE void save_arrays(const std::string& directory, const CheckpointMeta& meta,
                                 const std::vector<ArrayToSave>& arrays) {
  namespace core = shardlib::detail;
  // A mesh of one device, on which each array is one shard.
  const auto device = DevicePtr::make(std::vector<AxisSize>{}, 0);
  std::list<TensorSpec> specs;  // values point to their specs
  detail::NamedValues leaves;
  for (const auto& [about, fill] : arrays) {
    if (about.shape.size() > static_cast<std::size_t>(max_dims))
      throw UsageError("'" + about.name + "' has " + std::to_string(about.shape.size()) +
                       " dims, but a tensor has at most " + std::to_string(max_dims) +
                       ": merge some, or leave the array out");
    TensorSpec& spec = specs.emplace_back();
    core::GlobalSizes sizes;
    for (std::size_t i = 0; i < about.shape.size(); ++i) {
      Dim dim;
      dim.name = about.dims.at(i);
      spec.dims.push_back(dim);
      sizes.push_back(about.shape[i]);
    }
    const auto value = core::make_value({"save_arrays", {}, {}}, device, about.dtype, spec, sizes);
    value->storage->buffer = core::allocate(*value);
    fill({value->storage->buffer.data(), value->storage->buffer.bytes()});
    leaves.emplace_back(about.name, value);
  }
  detail::CheckpointWriter writer(device, directory, {});
  writer.start(meta, leaves, false);
  writer.finish();
}

}  // namespace shardlib::io
