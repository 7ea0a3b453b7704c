// Definitions of map.hpp.
#pragma once

#include "shardlib/ops/map.hpp"

#include <cstdint>

namespace shardlib::detail {

SHARDLIB_INLINE Extents broadcast_strides(const Value& x, const TensorSpec& result) {
  Extents strides;
  for (int i = 0; i < result.rank(); ++i) {
    // Operands with integer dims are never broadcast; they match by position.
    const int at = x.spec->dims == result.dims ? i : x.spec->find(result.dims[i].name);
    std::int64_t stride = at < 0 ? 0 : 1;
    for (int k = at + 1; at >= 0 && k < x.local.size(); ++k) stride *= x.local[k];
    strides.push_back(stride);
  }
  return strides;
}

SHARDLIB_INLINE Handle<Value> value_like(const Value& like, DType dtype) {
  auto value = detached(like);
  value->made_by = {"map_backward", {}, {}};
  value->dtype = dtype;
  value->storage = std::make_shared<Storage>(Storage{allocate(*value), nullptr});
  return value;
}

}  // namespace shardlib::detail
