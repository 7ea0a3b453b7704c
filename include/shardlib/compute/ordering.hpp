// Kernels of ops that order elements, for a device's shard.
#pragma once

#include <string>

#include "shardlib/autodiff/tape.hpp"
#include "shardlib/compute/index.hpp"
#include "shardlib/compute/reductions.hpp"
#include "shardlib/kernels/ordering.hpp"
#include "shardlib/ops/ordering.hpp"
#include "shardlib/runtime/bindings.hpp"
#include "shardlib/runtime/value.hpp"

namespace shardlib::detail {

inline GlobalSizes top_k_sizes(const OpInfo& op, const TensorSpec& out, const ValuePtr& x, int dim, DimSize k) {
  Bindings names(op, x->device);
  names.bind(*x);
  names.bind(out.dims[dim].name, k);
  if (k.size < 1 || k.size > x->global[dim].size)
    names.fail("k is " + std::to_string(k.size) + ", but dim `" + std::string(x->spec->dims[dim].name) + "` has " +
               std::to_string(x->global[dim].size) + " elements; take 1 to all of them");
  return names.sizes(out);
}

template <class D>
Buffer Argsort<D>::operator()(const Value& in, const Value& out) const {
  const Along a = along(in, dim);
  Buffer result = allocate(out);
  kernels::argsort(out.device->exec(), dtype_c<D>, in.data().data(), a, descending, out.global.logical[dim],
                   result.as<i32>(), out.local[dim]);
  return result;
}

}  // namespace shardlib::detail
