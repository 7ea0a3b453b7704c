// Kernels of ops that order elements, for a device's shard.
#pragma once

#include "shardlib/autodiff/tape.hpp"
#include "shardlib/compute/index.hpp"
#include "shardlib/compute/reductions.hpp"
#include "shardlib/kernels/ordering.hpp"
#include "shardlib/ops/ordering.hpp"
#include "shardlib/runtime/value.hpp"
#include "shardlib/support/inline.hpp"

namespace shardlib::detail {

template <class D>
Buffer Argsort<D>::operator()(const Value& in, const Value& out) const {
  const Along a = along(in, dim);
  Buffer result = allocate(out);
  kernels::argsort(out.device->exec(), dtype_c<D>, in.data().data(), a.outer, a.n, a.inner, a.padding, descending,
                   out.global.logical[dim], result.as<i32>(), out.local[dim]);
  return result;
}

}  // namespace shardlib::detail

#ifndef SHARDLIB_COMPILED
#include "shardlib/compute/impl/ordering.hpp"
#endif
