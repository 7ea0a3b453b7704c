// Kernels of index_unreduced and scatter_add for a device's shards.
#pragma once

#include <cstddef>

#include "shardlib/autodiff/tape.hpp"
#include "shardlib/kernels/index.hpp"
#include "shardlib/ops/index.hpp"
#include "shardlib/runtime/value.hpp"
#include "shardlib/spec/dtype.hpp"
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
  table->storage->materialize();  // a wait behind the check of ids would report it without the op's name
  const LookupLoops loops(*table, indices, out.local, *out.spec);
  Buffer result = allocate(out);
  kernels::gather(out.device->exec(), dtype_c<D>, loops.lookup, table->data().data(), loops.ids(), result.data());
  return result;
}
template <class D>
Buffer ScatterAdd<D>::operator()(const Value& out) const {
  ct->storage->materialize();  // before there is memory for the result
  Buffer result = allocate(out);
  out.device->exec().zero(result.data(), out.bytes());
  ScatterAddTo<D>{*this}(out, result.data());
  return result;
}
template <class D>
void ScatterAddTo<D>::operator()(const Value& out, std::byte* sum) const {
  this->ct->storage->materialize();
  const LookupLoops loops(out, this->indices, this->ct->local, *this->ct_spec);
  kernels::scatter_add(out.device->exec(), dtype_c<D>, loops.lookup, this->ct->data().data(), loops.ids(), sum);
}

template <class D>
ValuePtr record_scatter(const OpInfo& op, const ScatterAdd<D>& add, const TensorSpec& spec, const GlobalSizes& global,
                        bool addend) {
  const DevicePtr& device = add.ct->device;
  if (addend && !add.ct->slot)
    return record_addend_erased(op, device, dtype_v<D>, spec, global, add, ScatterAddTo<D>{add});
  EdgeSource source{&add.ct};
  if (add.ct->slot)
    source.vjp = [indices = add.indices, due = &lasting_dual(*add.ct_spec, {&spec})](const ValuePtr& ct,
                                                                                     const Residuals& saved) {
      return record_lookup<D>(Calling("index_unreduced", {}, {}), {ct, indices}, *due, saved.sizes);
    };
  return evaluate(make_recorded(op, device, dtype_v<D>, spec, global, {&source, 1}), add);
}
template <class D>
ValuePtr record_lookup(const OpInfo& op, const Lookup<D>& rows, const TensorSpec& spec, const GlobalSizes& global) {
  EdgeSource source{&rows.table};
  if (rows.table->slot)
    source.vjp = [indices = rows.indices, of = &spec, due = &lasting_dual(*rows.table->spec, {&spec})](
                     const ValuePtr& ct, const Residuals& saved) {
      return record_scatter<D>(Calling("scatter_add", {}, {}), {ct, indices, of}, *due, saved.sizes, false);
    };
  return evaluate(make_recorded(op, rows.table->device, dtype_v<D>, spec, global, {&source, 1}), rows);
}

}  // namespace shardlib::detail

#ifndef SHARDLIB_COMPILED
#include "shardlib/compute/impl/index.hpp"
#endif
