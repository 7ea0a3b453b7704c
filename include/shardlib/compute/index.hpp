// Kernels of index_unreduced and scatter_add for a device's shards.
#pragma once

#include <cstddef>

#include "shardlib/autodiff/tape.hpp"
#include "shardlib/kernels/index.hpp"
#include "shardlib/ops/index.hpp"
#include "shardlib/runtime/value.hpp"
#include "shardlib/support/inline.hpp"

namespace shardlib::detail {

/// Strides of a lookup: one for each dim of the result, and 0 where the table or the indices lack the dim. Several
/// indices are joined into one.
struct LookupLoops {
  Shape table_strides, index_strides;
  kernels::Lookup lookup;

  LookupLoops(const Value& table, const Indices& indices, const Shape& shape, const TensorSpec& result);
  LookupLoops(const LookupLoops&) = delete;
  LookupLoops& operator=(const LookupLoops&) = delete;

  const void* ids() const { return ids_.data(); }

 private:
  void join(const Value& table, const Indices& indices, const TensorSpec& result);

  Shape shape_;
  Buffer ids_;
};

template <class D>
Buffer Lookup<D>::operator()(const Value& out) const {
  const LookupLoops loops(*table, indices, out.local, *out.spec);
  Buffer result = allocate(out);
  kernels::gather(out.device->exec(), dtype_c<D>, loops.lookup, table->data().data(), loops.ids(), result.data());
  return result;
}
template <class D>
Buffer ScatterAdd<D>::operator()(const Value& out) const {
  const LookupLoops loops(out, indices, ct->local, *ct_spec);
  Buffer result = allocate(out);
  kernels::scatter_add(out.device->exec(), dtype_c<D>, loops.lookup, ct->data().data(), loops.ids(), result.data(),
                       out.count());
  return result;
}
template <class D>
void ScatterAddTo<D>::operator()(const Value& out, std::byte* sum) const {
  const LookupLoops loops(out, this->indices, this->ct->local, *this->ct_spec);
  kernels::scatter_add_to(out.device->exec(), dtype_c<D>, loops.lookup, this->ct->data().data(), loops.ids(), sum);
}

}  // namespace shardlib::detail

#ifndef SHARDLIB_COMPILED
#include "shardlib/compute/impl/index.hpp"
#endif
