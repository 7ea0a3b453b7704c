// Definitions of arrays.hpp.
#pragma once

#include "shardlib/interop/arrays.hpp"

#include <array>
#include <string>

#include "shardlib/compute/create.hpp"
#include "shardlib/kernels/strided.hpp"
#include "shardlib/runtime/padding.hpp"
#include "shardlib/support/error.hpp"

namespace shardlib::detail {

SHARDLIB_INLINE ValuePtr value_over_memory(const OpInfo& op, const DevicePtr& device, DType dtype,
                                           const TensorSpec& spec, const Sizes& sizes, std::span<const std::byte> shard,
                                           std::shared_ptr<void> owner, FunctionRef<bool(std::int64_t)> is_zero) {
  auto value = make_value(op, device, dtype, spec, given_sizes(op, device, spec, sizes));
  if (value->bytes() != shard.size())
    throw Error(op.describe() + ": the shard of this device has " + std::to_string(value->count()) +
                " elements, the memory " + std::to_string(shard.size() / size_of(dtype)) + " (" + device->describe() +
                ")");
  for_each_padding(*value, [&](auto shape, std::int64_t offset, auto strides) {
    kernels::Nest<1> nest;
    // The array by name, as nvcc 13 drops bare braces here.
    for (std::size_t i = 0; i < shape.size(); ++i) nest.push(shape[i], std::array<std::int64_t, 1>{strides[i]});
    kernels::Walk<1> walk(nest, 0);
    for (std::int64_t i = 0; i < nest.count(); ++i, walk.next())
      if (const auto at = offset + walk.offsets[0]; !is_zero(at))
        throw Error(op.describe() + ": element " + std::to_string(at) +
                    " of the memory is padding, but not zero; clear the padding first (" + device->describe() + ")");
  });
  note_data(op, *value, shard);
  // A slice, because the memory is the caller's: no op may write a slice in place.
  const Buffer memory(const_cast<std::byte*>(shard.data()), shard.size(), std::move(owner));
  value->storage->buffer = device->to_device(memory.slice(0, shard.size()));
  return value;
}

}  // namespace shardlib::detail
