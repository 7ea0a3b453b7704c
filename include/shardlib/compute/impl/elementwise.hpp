// Definitions of elementwise.hpp.
#pragma once

#include "shardlib/compute/elementwise.hpp"

#include <cstddef>
#include <cstdint>
#include <string>

#include "shardlib/kernels/body/check.hpp"
#include "shardlib/kernels/check.hpp"
#include "shardlib/kernels/strided.hpp"
#include "shardlib/spec/dtype.hpp"
#include "shardlib/support/error.hpp"

namespace shardlib::detail {

/// The kernel of a cast between two different floating dtypes.
inline Buffer (*floating_cast(DType to, DType from))(const Value&, const Value&) {
  if (to == DType::f32) return from == DType::bf16 ? cast_kernel<f32, bf16> : cast_kernel<f32, f64>;
  if (to == DType::bf16) return from == DType::f32 ? cast_kernel<bf16, f32> : cast_kernel<bf16, f64>;
  return from == DType::f32 ? cast_kernel<f64, f32> : cast_kernel<f64, bf16>;
}
SHARDLIB_INLINE ValuePtr cast_floating(const OpInfo& op, const ValuePtr& x, DType to) {
  const DType from = x->dtype;
  note_operand(*x);
  EdgeSource source{&x, {}, [from](const ValuePtr& ct, const Residuals& /*saved*/) {
                      return cast_floating(Calling("cast", {}, {}), ct, from);
                    }};
  const auto kernel = floating_cast(to, from);
  return evaluate(make_recorded(op, x->device, to, *x->spec, x->global, {&source, 1}),
                  OfOperand<decltype(kernel)>{x, kernel});
}

SHARDLIB_INLINE void check_divisor(const Value& divisor) {
  const Shape shape = true_shape(divisor);
  const auto strides = kernels::row_major(view(divisor.local));
  kernels::Nest<1> nest;
  for (int i = 0; i < shape.size(); ++i) nest.push(shape[i], {strides[i]});
  const auto check = [&]<class U>(U /*of the size of an element*/) {
    kernels::check(divisor.device->exec(), nest, kernels::body::ZeroInteger<U>{divisor.as<const U>()},
                   [&](const std::string& /*zero*/) {
                     return "the divisor `" + std::string(to_string(*divisor.spec).view()) +
                            "` has a zero in this shard, by which integers cannot be divided; replace it, e.g. with "
                            "`where`";
                   });
  };
  size_of(divisor.dtype) == 1 ? check(std::uint8_t{}) : check(std::uint32_t{});
}

}  // namespace shardlib::detail
