// Definitions of einsum.hpp.
#pragma once

#include "shardlib/compute/einsum.hpp"

namespace shardlib::detail {

SHARDLIB_INLINE double einsum_flops(const Value& x, const Value& y) {
  double flops = 2.0 * static_cast<double>(x.count());
  for (int i = 0; i < y.spec->rank(); ++i)
    if (!x.spec->has(y.spec->dims[i].name)) flops *= static_cast<double>(y.local[i]);
  return flops;
}

}  // namespace shardlib::detail
