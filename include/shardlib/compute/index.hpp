// Kernels of index_unreduced for a device's shards.
#pragma once

#include <cstddef>

#include "shardlib/autodiff/tape.hpp"
#include "shardlib/kernels/index.hpp"
#include "shardlib/ops/index.hpp"
#include "shardlib/runtime/value.hpp"
#include "shardlib/support/inline.hpp"

namespace shardlib::detail {

/// Strides of a lookup: one for each dim of the result, and 0 where the table or the indices lack the dim.
struct LookupLoops {
  Shape table_strides, index_strides;
  kernels::Lookup lookup;

  LookupLoops(const Value& table, int row_dim, const Value& indices, const Shape& shape, const TensorSpec& result);
  LookupLoops(const LookupLoops&) = delete;
  LookupLoops& operator=(const LookupLoops&) = delete;

 private:
  Shape shape_;
};

template <class D>
Buffer Lookup<D>::operator()(const Value& out) const {
  const LookupLoops loops(*table, row, *indices, out.local, *out.spec);
  Buffer result = allocate(out);
  kernels::gather(out.device->exec(), dtype_c<D>, loops.lookup, table->data().data(), indices->data().data(),
                  result.data());
  return result;
}
template <class D>
Buffer ScatterAdd<D>::operator()(const Value& out) const {
  const LookupLoops loops(out, row, *indices, ct->local, *ct_spec);
  Buffer result = allocate(out);
  kernels::scatter_add(out.device->exec(), dtype_c<D>, loops.lookup, ct->data().data(), indices->data().data(),
                       result.data(), out.count());
  return result;
}
template <class D>
void ScatterAddTo<D>::operator()(const Value& out, std::byte* sum) const {
  const LookupLoops loops(out, this->row, *this->indices, this->ct->local, *this->ct_spec);
  kernels::scatter_add_to(out.device->exec(), dtype_c<D>, loops.lookup, this->ct->data().data(),
                          this->indices->data().data(), sum);
}

}  // namespace shardlib::detail

#ifndef SHARDLIB_COMPILED
#include "shardlib/compute/impl/index.hpp"
#endif
