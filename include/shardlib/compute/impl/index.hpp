// Definitions of index.hpp.
#pragma once

#include "shardlib/compute/index.hpp"

#include "shardlib/kernels/strided.hpp"

namespace shardlib::detail {

SHARDLIB_INLINE LookupLoops::LookupLoops(const Value& table, int row_dim, const Value& indices, const Shape& shape,
                                         const TensorSpec& result)
    : shape_(shape) {
  const auto table_all = kernels::row_major(view(table.local)), index_all = kernels::row_major(view(indices.local));
  for (int d = 0; d < result.rank(); ++d) {
    // Integer dims have no names to find them by. Only ops whose tensors have their dims in the same places take them.
    const auto place = [&, &dim = result.dims[d]](const TensorSpec& spec) {
      return dim.is_integer() ? d : spec.find(dim.name);
    };
    const int t = place(*table.spec), i = place(*indices.spec);
    // Along the looked-up dim, the index alone chooses the row.
    table_strides.push_back(t < 0 || t == row_dim ? 0 : table_all[t]);
    index_strides.push_back(i < 0 ? 0 : index_all[i]);
  }
  lookup.shape = view(shape_);
  lookup.table_strides = view(table_strides);
  lookup.index_strides = view(index_strides);
  lookup.index_dtype = indices.dtype;
  lookup.row_stride = table_all[row_dim];
  lookup.rows = table.local[row_dim];
  lookup.first_row = shard_index(*table.device, table.spec->dims[row_dim].axes) * lookup.rows;
  lookup.global_rows = table.global.logical[row_dim];
}

}  // namespace shardlib::detail
