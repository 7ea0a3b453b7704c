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
  const auto text = [&] {
    return "the divisor `" + std::string(to_string(*divisor.spec).view()) +
           "` has a zero in this shard, by which integers cannot be divided; replace it, e.g. with `where`";
  };
  const Exec exec = divisor.device->exec();
  const std::size_t element = size_of(divisor.dtype);
  if (exec.on_device()) {
    const auto check = [&]<class U>(U) {
      kernels::check_late(exec, nest.count(), kernels::body::ZeroInteger<U>{nest, divisor.as<const U>()}, text());
    };
    return element == 1 ? check(std::uint8_t{}) : check(std::uint32_t{});
  }
  kernels::Walk<1> walk(nest, 0);
  const auto bytes = static_cast<std::int64_t>(divisor.bytes());
  exec.read(divisor.as<const std::byte>(), bytes, [&](const std::byte* data) {
    for (std::int64_t i = 0; i < nest.count(); ++i, walk.next()) {
      bool zero = true;
      for (std::size_t k = 0; k < element; ++k)
        zero = zero && data[static_cast<std::size_t>(walk.offsets[0]) * element + k] == std::byte{0};
      if (zero) throw Error(text());
    }
  });
}

}  // namespace shardlib::detail
