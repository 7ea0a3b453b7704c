// Definitions of padding.hpp.
#pragma once

#include "shardlib/runtime/padding.hpp"

#include <cstddef>
#include <string>

#include "shardlib/kernels/layout.hpp"
#include "shardlib/kernels/strided.hpp"
#include "shardlib/ops/sequences.hpp"
#include "shardlib/support/error.hpp"

namespace shardlib::detail {

SHARDLIB_INLINE void fail_padded(const OpInfo& op, const Device& device, std::string_view dim, DimSize size,
                                 const char* why) {
  throw Error(op.describe() + ": dim `" + std::string(dim) + "` is " + to_string(size) + ", and " + why + " (" +
              device.describe() + ")");
}

SHARDLIB_INLINE void for_each_padding(
    const Value& shape,
    const std::function<void(std::span<const std::int64_t>, std::int64_t, std::span<const std::int64_t>)>& f) {
  if (!shape.global.is_padded()) return;
  const Shape kept = true_shape(shape);
  const kernels::DimVector strides = kernels::row_major(view(shape.local));
  // One box for each dim: the full size of the later dims, and of the earlier dims only the part without padding.
  Shape box = shape.local;
  for (int i = 0; i < box.size(); ++i) {
    box[i] = shape.local[i] - kept[i];
    if (product(box) > 0) f(view(box), kept[i] * strides[i], strides.span());
    box[i] = kept[i];
  }
}

SHARDLIB_INLINE void zero_padding(const Value& shape, const Buffer& shard) {
  const std::size_t element = size_of(shape.dtype);
  for_each_padding(shape, [&](auto box, std::int64_t offset, auto strides) {
    kernels::zero_strided(shape.device->exec(), element, box, shard.data() + static_cast<std::size_t>(offset) * element,
                          strides);
  });
}

SHARDLIB_INLINE void require_unpadded(const OpInfo& op, const ValuePtr& x, int at, const char* why) {
  if (x->global[at].is_padded()) fail_padded(op, *x->device, x->spec->dims[at].name, x->global[at], why);
}

SHARDLIB_INLINE void require_order(const OpInfo& op, const ValuePtr& x, int dim, SequenceOrder order) {
  const std::int64_t devices = shard_count(*x->device, x->spec->dims[dim].axes);
  if (order == SequenceOrder::contiguous || devices == 1) return;
  require_unpadded(op, x, dim, "in zigzag order padding would be between positions; choose a size that needs none");
  if (x->local[dim] % 2 != 0)
    throw Error(op.describe() + ": dim `" + std::string(x->spec->dims[dim].name) + "` of size " +
                to_string(x->global[dim]) + " over " + std::to_string(devices) +
                " devices has no zigzag order, in which each holds two parts of " + std::to_string(2 * devices) +
                "; choose a multiple of " + std::to_string(2 * devices) + ", or SequenceOrder::contiguous (" +
                x->device->describe() + ")");
}

}  // namespace shardlib::detail
