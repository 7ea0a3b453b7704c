// Definitions of index.hpp.
#pragma once

#include "shardlib/compute/index.hpp"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <numeric>
#include <string>

#include "shardlib/kernels/strided.hpp"
#include "shardlib/support/error.hpp"

namespace shardlib::detail {

/// The position in `spec` of dim number d of the result. Integer dims have no names to find them by. Only ops whose
/// tensors have their dims in the same places take them.
SHARDLIB_INLINE int place_in(const TensorSpec& spec, const TensorSpec& result, int d) {
  return result.dims[d].is_integer() ? d : spec.find(result.dims[d].name);
}
/// The strides of x along the result's dims.
SHARDLIB_INLINE Shape strides_of(const Value& x, const TensorSpec& result) {
  const auto all = kernels::row_major(view(x.local));
  Shape strides;
  for (int d = 0; d < result.rank(); ++d) {
    const int at = place_in(*x.spec, result, d);
    strides.push_back(at < 0 ? 0 : all[at]);
  }
  return strides;
}
/// The rows that this device has along the dim of an index.
SHARDLIB_INLINE kernels::Lookup rows_along(const Value& table, const IndexAlong& index) {
  kernels::Lookup lookup;
  lookup.index_dtype = index.ids->dtype;
  lookup.row_stride = kernels::row_major(view(table.local))[index.dim];
  lookup.rows = table.local[index.dim];
  lookup.first_row = shard_index(*table.device, table.spec->dims[index.dim].axes) * lookup.rows;
  lookup.global_rows = table.global.logical[index.dim];
  lookup.dim = table.spec->dims[index.dim].name;
  return lookup;
}

SHARDLIB_INLINE LookupLoops::LookupLoops(const Value& table, const Indices& indices, const Shape& shape,
                                         const TensorSpec& result)
    : table_strides(strides_of(table, result)), shape_(shape) {
  // Along a looked-up dim, the index alone chooses the row.
  for (int d = 0; d < result.rank(); ++d)
    for (const IndexAlong& index : indices)
      if (place_in(*table.spec, result, d) == index.dim) table_strides[d] = 0;
  if (indices.size() == 1) {
    lookup = rows_along(table, indices[0]);
    index_strides = strides_of(*indices[0].ids, result);
    ids_ = indices[0].ids->data();
  } else {
    join(table, indices, result);
  }
  lookup.shape = view(shape_);
  lookup.table_strides = view(table_strides);
  lookup.index_strides = view(index_strides);
}

SHARDLIB_INLINE void LookupLoops::join(const Value& table, const Indices& indices, const TensorSpec& result) {
  // The joined ids have the dims that any of the indices has.
  Shape shape = shape_;
  for (int d = 0; d < result.rank(); ++d)
    if (std::none_of(indices.begin(), indices.end(),
                     [&](const IndexAlong& index) { return place_in(*index.ids->spec, result, d) >= 0; }))
      shape[d] = 1;
  const auto strides = kernels::row_major(view(shape));
  for (int d = 0; d < result.rank(); ++d) index_strides.push_back(shape[d] == shape_[d] ? strides[d] : 0);
  const Exec exec = table.device->exec();
  const auto bytes = static_cast<std::size_t>(kernels::product(view(shape))) * sizeof(u32);
  ids_ = exec.pool->allocate(bytes);
  exec.zero(ids_.data(), bytes);
  // The joined ids count units, of which the steps along all looked-up dims are multiples.
  std::int64_t unit = 0;
  for (const IndexAlong& index : indices) unit = std::gcd(unit, rows_along(table, index).row_stride);
  unit = std::max<std::int64_t>(unit, 1);
  lookup.rows = 1;
  for (const IndexAlong& index : indices) index.ids->storage->materialize();  // checks are named when the op ends
  for (int i = 0; i < indices.size(); ++i) {
    kernels::Lookup along = rows_along(table, indices[i]);
    const Shape steps = strides_of(*indices[i].ids, result);
    along.shape = view(shape);
    along.index_strides = view(steps);
    along.row_stride /= unit;
    lookup.rows += (along.rows - 1) * along.row_stride;
    if (lookup.rows > std::int64_t{std::numeric_limits<u32>::max()})
      throw Error(
          "the looked-up dims of the shard of the table span 2^32 steps or more; put them first and next to each other "
          "in the table's spec, or shard it further");
    const std::string name = "index tensor " + std::to_string(i + 1);
    const Buffer& ids = indices[i].ids->data();
    if (along.index_dtype == DType::i32)
      kernels::join_ids(exec, along, ids.as<i32>(), name.c_str(), ids_.as<u32>());
    else
      kernels::join_ids(exec, along, ids.as<u32>(), name.c_str(), ids_.as<u32>());
  }
  lookup.index_dtype = DType::u32;
  lookup.row_stride = unit;
  lookup.joined = true;
}

}  // namespace shardlib::detail
