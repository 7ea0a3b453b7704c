// Dropout whose mask is a pure function of a key and the global index, so that it need not be kept.
#pragma once

#include "shardlib/kernels/elementwise.hpp"
#include "shardlib/ops/create.hpp"

namespace shardlib {

template <dtype D, Spec S>
auto dropout(const Tensor<D, S>& x, double rate, RandomKey key, Site site)
    -> Tensor<detail::after_t<detail::is_float<"dropout", D>, D>, detail::result_of<rules::cast, true, true, S>> {
  const detail::Calling op{"dropout", {}, site};
  if (!(rate >= 0 && rate < 1))
    throw UsageError("dropout: the rate " + std::to_string(rate) + " is no probability below 1");
  const auto kernel = [rate = static_cast<float>(rate), key](const detail::Value& in, const detail::Value& out) {
    const Exec exec = out.device->exec();
    Buffer result = detail::allocate(out);
    const Buffer draws = exec.pool->allocate(static_cast<std::size_t>(out.count()) * sizeof(float));
    detail::with_global_index(out, [&](auto local, auto strides, auto offsets) {
      kernels::fill_uniform(exec, draws.as<float>(), local, strides, offsets, key.seed, key.stream);
    });
    kernels::apply_flat(
        exec, out.count(),
        [rate, scale = 1.0F / (1.0F - rate)](const D& v, const float& u, D& y) {
          y = static_cast<D>(u < rate ? detail::scalar_of<D>(0) : detail::load(v) * scale);
        },
        in.as<const D>(), draws.as<const float>(), result.as<D>());
    return result;
  };
  return detail::record_unary<"dropout", Tensor<D, S>>(
      op, x, x.value()->global, kernel,
      detail::vjp(x, detail::save(), [rate, key](const auto& ct) { return dropout(ct, rate, key); }));
}

}  // namespace shardlib
