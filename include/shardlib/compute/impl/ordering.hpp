// Definitions of ordering.hpp.
#pragma once

#include "shardlib/compute/ordering.hpp"

#include <string>

#include "shardlib/runtime/bindings.hpp"

namespace shardlib::detail {

SHARDLIB_INLINE GlobalSizes top_k_sizes(const OpInfo& op, const TensorSpec& out, const ValuePtr& x, int dim,
                                        DimSize k) {
  Bindings names(op, x->device);
  names.bind(*x);
  names.bind(out.dims[dim].name, k);
  if (k.size < 1 || k.size > x->global[dim].size)
    names.fail("k is " + std::to_string(k.size) + ", but dim `" + std::string(x->spec->dims[dim].name) + "` has " +
               std::to_string(x->global[dim].size) + " elements; take 1 to all of them");
  return names.sizes(out);
}

}  // namespace shardlib::detail
