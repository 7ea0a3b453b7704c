// Definitions of accumulator.hpp.
#pragma once

#include "shardlib/autodiff/accumulator.hpp"

#include <array>

#include "shardlib/autodiff/tape.hpp"
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

SHARDLIB_INLINE ValuePtr tracked_sum(const ValuePtr& a, const ValuePtr& b) {
  const VjpFunction same = [](const ValuePtr& ct, const Residuals& /*none*/) { return ct; };
  std::array<EdgeSource, 2> sources{EdgeSource{&a, {}, false, same}, EdgeSource{&b, {}, false, same}};
  const Kernel add = [a, b](const Value& /*out*/) {
    Accumulator sum;
    for (const ValuePtr& ct : {a, b}) {
      static_cast<void>(ct->data());  // counts as a read of the operand
      sum.add(detached(*ct));
    }
    return sum.take()->data();
  };
  return record_erased({"accumulate", {}, {}}, a->device, a->dtype, *a->spec, a->global, Kernel(add), sources);
}

}  // namespace shardlib::detail
