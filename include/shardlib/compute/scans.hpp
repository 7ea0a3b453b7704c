// Kernels of scans for a device's shards.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

#include "shardlib/autodiff/tape.hpp"
#include "shardlib/compute/reductions.hpp"
#include "shardlib/kernels/scans.hpp"
#include "shardlib/ops/scans.hpp"
#include "shardlib/runtime/value.hpp"
#include "shardlib/spec/dtype.hpp"
#include "shardlib/support/inline.hpp"

namespace shardlib::detail {

template <class Op, class D>
Buffer Cumulate<Op, D>::operator()(const Value& in, const Value& out) const {
  const Along a = along(in, dim);
  Buffer result = allocate(out);
  kernels::cumulate<Op>(out.device->exec(), dtype_c<D>, in.data().data(), result.data(), a, reverse);
  return result;
}
template <class D>
Buffer CumprodBackward<D>::operator()(const Value& out) const {
  const Along a = along(out, dim);
  Buffer shard = allocate(out);
  kernels::cumprod_backward(out.device->exec(), dtype_c<D>, x->data().data(), result->data().data(), ct->data().data(),
                            shard.data(), a);
  return shard;
}
template <class D>
Buffer CummaxBackward<D>::operator()(const Value& out) const {
  const Along a = along(out, dim);
  Buffer shard = allocate(out);
  kernels::cummax_backward(out.device->exec(), dtype_c<D>, x->data().data(), ct->data().data(), shard.data(), a);
  return shard;
}
/// Gathers `rows` rows of numbers of `bytes` bytes from each shard along dim number `dim`; `fill` writes this shard's.
/// Nothing, if there is one shard.
class GatheredEnds {
 public:
  SHARDLIB_INLINE GatheredEnds(const Value& out, int dim, std::int64_t rows, std::size_t bytes,
                               const std::function<void(void*)>& fill);
  [[nodiscard]] const kernels::ScanEnds& ends() const { return ends_; }

 private:
  Buffer all_;
  kernels::ScanEnds ends_;
};

template <class D>
Buffer LinearScan<D>::operator()(const Value& out) const {
  const Along d = along(out, dim);
  const Exec exec = out.device->exec();
  const void *const from_a = a->data().data(), *const from_b = b->data().data();
  const GatheredEnds gathered(out, dim, 2, sizeof(accumulator_t<D>), [&](void* ends) {
    kernels::linear_scan_ends(exec, dtype_c<D>, from_a, from_b, ends, d, reverse);
  });
  Buffer h = allocate(out);
  kernels::linear_scan(exec, dtype_c<D>, from_a, from_b, h.data(), d, reverse, gathered.ends());
  return h;
}
template <class D>
Buffer LinearScanBackward<D>::operator()(const Value& out) const {
  const Along d = along(out, dim);
  const Exec exec = out.device->exec();
  const void *const from_a = a->data().data(), *const from_ct = ct->data().data();
  const void* const h = result ? result->data().data() : nullptr;
  const GatheredEnds gathered(out, dim, result ? 3 : 2, sizeof(accumulator_t<D>), [&](void* ends) {
    kernels::linear_scan_backward_ends(exec, dtype_c<D>, from_a, h, from_ct, ends, d, reverse);
  });
  Buffer shard = allocate(out);
  kernels::linear_scan_backward(exec, dtype_c<D>, from_a, h, from_ct, shard.data(), d, reverse, gathered.ends());
  return shard;
}

}  // namespace shardlib::detail

#ifndef SHARDLIB_COMPILED
#include "shardlib/compute/impl/scans.hpp"
#endif
