// Kernels of reductions for a device's shard.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "shardlib/autodiff/tape.hpp"
#include "shardlib/compute/create.hpp"
#include "shardlib/kernels/reduce.hpp"
#include "shardlib/kernels/strided.hpp"
#include "shardlib/ops/reductions.hpp"
#include "shardlib/runtime/value.hpp"
#include "shardlib/support/inline.hpp"

namespace shardlib::detail {

/// Which dims of `in` the result lacks.
SHARDLIB_INLINE Small<bool, max_dims> removed_dims(const TensorSpec& in, const TensorSpec& out);

using kernels::Along;
/// A shard along an unsharded dim.
inline Along along(const Value& x, int dim) {
  Along a;
  a.padding = x.global.padded[dim] - x.global.logical[dim];
  for (int i = 0; i < x.local.size(); ++i) (i < dim ? a.outer : i == dim ? a.n : a.inner) *= x.local[i];
  return a;
}

template <class Op, class D>
Buffer reduce_kernel(const Value& in, const Value& out) {
  Buffer result = allocate(out);
  // A sum takes the padding too, which holds zeros, so that its order depends on the padded sizes.
  const Shape part = std::is_same_v<Op, kernels::detail::SumOp> ? Shape() : true_shape(in);
  kernels::reduce<Op>(out.device->exec(), dtype_c<D>, in.data().data(), view(in.local),
                      removed_dims(*in.spec, *out.spec), result.data(), view(part));
  return result;
}

template <class D>
Buffer ExtremumBackward<D>::operator()(const Value& out) const {
  Buffer shard = allocate(out), given = ct == nullptr ? allocate(*extrema) : ct->data();
  if (ct == nullptr) fill_constant(given, *extrema, 1);
  kernels::extremum_backward(out.device->exec(), dtype_c<D>, x->data().data(), view(x->local),
                             removed_dims(*x->spec, *extrema->spec), extrema->data().data(), given.data(), shard.data(),
                             view(true_shape(*x)));
  return shard;
}

template <class D>
Buffer ProdBackward<D>::operator()(const Value& out) const {
  Buffer shard = allocate(out);
  kernels::prod_backward(out.device->exec(), dtype_c<D>, x->data().data(), view(x->local),
                         removed_dims(*x->spec, *ct->spec), ct->data().data(), shard.data(), view(true_shape(*x)));
  return shard;
}

template <class D>
Buffer argmax_kernel(const Value& in, const Value& out) {
  const auto removed = removed_dims(*in.spec, *out.spec);  // the rule allows exactly one
  const auto dim = std::ranges::find(removed, true) - removed.begin();
  const Along a = along(in, static_cast<int>(dim));
  Buffer result = allocate(out);
  kernels::argmax(out.device->exec(), dtype_c<D>, in.data().data(), a, result.as<i32>());
  return result;
}

}  // namespace shardlib::detail

#ifndef SHARDLIB_COMPILED
#include "shardlib/compute/impl/reductions.hpp"
#endif
