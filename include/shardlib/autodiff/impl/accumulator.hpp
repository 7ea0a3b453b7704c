// Definitions of accumulator.hpp.
#pragma once

#include "shardlib/autodiff/accumulator.hpp"

#include "shardlib/device/exec.hpp"
#include "shardlib/kernels/elementwise.hpp"

namespace shardlib::detail {

SHARDLIB_INLINE void convert(const Value& from, const Value& to) {
  const Exec exec = from.device->exec();
  if (from.dtype == to.dtype)
    exec.copy(to.storage->buffer.data(), from.data().data(), from.bytes());
  else if (from.dtype == DType::bf16)
    kernels::apply_flat(exec, from.count(), kernels::body::ConvertElement{}, from.as<const bf16>(),
                        to.storage->buffer.as<f32>());
  else
    kernels::apply_flat(exec, from.count(), kernels::body::ConvertElement{}, from.as<const f32>(),
                        to.storage->buffer.as<bf16>());
}

SHARDLIB_INLINE void add_elements(const Value& ct, const Buffer& sum) {
  visit_dtype(ct.dtype, [&]<class T>(T /*zero*/) {
    if constexpr (floating<T>)
      kernels::apply_flat(ct.device->exec(), ct.count(), kernels::body::AddElement{}, ct.as<const T>(),
                          sum.as<accumulator_t<T>>());
  });
}

}  // namespace shardlib::detail
