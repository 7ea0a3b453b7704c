// The kernel of dropout for a device's shard.
#pragma once

#include <cstddef>
#include <string>

#include "shardlib/autodiff/tape.hpp"
#include "shardlib/compute/create.hpp"
#include "shardlib/kernels/elementwise.hpp"
#include "shardlib/ops/dropout.hpp"
#include "shardlib/ops/map.hpp"
#include "shardlib/runtime/value.hpp"
#include "shardlib/support/error.hpp"
#include "shardlib/support/function.hpp"

namespace shardlib::detail {

inline void require_probability(const OpInfo& op, double rate) {
  if (!(rate >= 0 && rate < 1))
    throw UsageError(op.describe() + ": the rate " + std::to_string(rate) +
                     " is not a probability; give a number from 0 to below 1");
}

template <class Scale>
struct DropoutElement {
  float rate;
  Scale scale;
  template <class D>
  SHARDLIB_FUNCTION void operator()(const D& v, const float& u, D& y) const {
    y = static_cast<D>(u < rate ? scalar_of<D>(0) : load(v) * scale);
  }
};

template <class D>
Buffer Dropout<D>::operator()(const Value& in, const Value& out) const {
  note_key(out, key, rate);
  const Exec exec = out.device->exec();
  Buffer result = allocate(out);
  const Buffer draws = exec.pool->allocate(static_cast<std::size_t>(out.count()) * sizeof(float));
  with_global_index(out, [&](auto local, auto strides, auto offsets) {
    kernels::fill_random<kernels::body::Uniform>(exec, draws.as<float>(), local, strides, offsets, key.seed,
                                                 key.stream);
  });
  using Scale = decltype(load(D{}));
  const Scale scale = Scale{1} / (Scale{1} - static_cast<Scale>(rate));
  kernels::apply_flat(exec, out.count(), DropoutElement<Scale>{rate, scale}, in.as<const D>(), draws.as<const float>(),
                      result.as<D>());
  return result;
}

}  // namespace shardlib::detail
