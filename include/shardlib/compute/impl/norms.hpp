// Definitions of norms.hpp.
#pragma once

#include "shardlib/compute/norms.hpp"

#include <string>

#include "shardlib/runtime/padding.hpp"
#include "shardlib/support/error.hpp"

namespace shardlib::detail {

SHARDLIB_INLINE void require_pairs(const OpInfo& op, const ValuePtr& x, int dim) {
  require_unpadded(op, x, dim,
                   "rotary embedding pairs its halves, which padding would move; choose a size that needs none");
  const std::int64_t size = x->global.logical[dim];
  if (size % 2 != 0)
    throw Error(op.describe() + ": dim `" + std::string(x->spec->dims[dim].name) + "` has the odd size " +
                std::to_string(size) + "; rotary embedding turns pairs (" + x->device->describe() + ")");
}

}  // namespace shardlib::detail
