// Kernels of scans for a device's shards.
#pragma once

#include "shardlib/autodiff/tape.hpp"
#include "shardlib/compute/reductions.hpp"
#include "shardlib/kernels/scans.hpp"
#include "shardlib/ops/scans.hpp"
#include "shardlib/runtime/value.hpp"

namespace shardlib::detail {

template <class D>
Buffer Cumsum<D>::operator()(const Value& in, const Value& out) const {
  const Along a = along(in, dim);
  Buffer result = allocate(out);
  kernels::cumsum(out.device->exec(), dtype_c<D>, in.data().data(), result.data(), a.outer, a.n, a.inner, reverse);
  return result;
}
template <class D>
Buffer Cumprod<D>::operator()(const Value& in, const Value& out) const {
  const Along a = along(in, dim);
  Buffer result = allocate(out);
  kernels::cumprod(out.device->exec(), dtype_c<D>, in.data().data(), result.data(), a.outer, a.n, a.inner);
  return result;
}
template <class D>
Buffer CumprodBackward<D>::operator()(const Value& out) const {
  const Along a = along(out, dim);
  Buffer shard = allocate(out);
  kernels::cumprod_backward(out.device->exec(), dtype_c<D>, x->data().data(), result->data().data(), ct->data().data(),
                            shard.data(), a.outer, a.n, a.inner);
  return shard;
}
template <class D>
Buffer Cummax<D>::operator()(const Value& in, const Value& out) const {
  const Along a = along(in, dim);
  Buffer result = allocate(out);
  kernels::cummax(out.device->exec(), dtype_c<D>, in.data().data(), result.data(), a.outer, a.n, a.inner);
  return result;
}
template <class D>
Buffer CummaxBackward<D>::operator()(const Value& out) const {
  const Along a = along(out, dim);
  Buffer shard = allocate(out);
  kernels::cummax_backward(out.device->exec(), dtype_c<D>, x->data().data(), ct->data().data(), shard.data(), a.outer,
                           a.n, a.inner);
  return shard;
}
template <class D>
Buffer LinearScan<D>::operator()(const Value& out) const {
  const Along d = along(out, dim);
  Buffer h = allocate(out);
  kernels::linear_scan(out.device->exec(), dtype_c<D>, a->data().data(), b->data().data(), h.data(), d.outer, d.n,
                       d.inner);
  return h;
}
template <class D>
Buffer LinearScanBackward<D>::operator()(const Value& out) const {
  const Along d = along(out, dim);
  Buffer shard = allocate(out);
  kernels::linear_scan_backward(out.device->exec(), dtype_c<D>, a->data().data(),
                                result ? result->data().data() : nullptr, ct->data().data(), shard.data(), d.outer, d.n,
                                d.inner);
  return shard;
}

}  // namespace shardlib::detail
