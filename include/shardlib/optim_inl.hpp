// Definitions of optim.hpp.
#pragma once

#include "shardlib/optim.hpp"

#include <cmath>
#include <memory>
#include <utility>

#include "shardlib/bindings.hpp"
#include "shardlib/kernels/elementwise.hpp"
#include "shardlib/kernels/reduce.hpp"
#include "shardlib/observe.hpp"

namespace shardlib::detail {

SHARDLIB_INLINE ValuePtr sum_of_squares(const Value& x, const TensorSpec& spec) {
  auto out = make_value({"sum_of_squares", {}, {}}, x.device, DType::f32, spec, {});
  out->storage->buffer = observed(*out, [&] {
    Buffer result = allocate(*out);
    const f32 sum = kernels::sum_of_squares(x.device->exec(), x.count(), x.as<const f32>());
    x.device->exec().copy(result.data(), &sum, sizeof sum);
    return result;
  });
  return out;
}

/// A value of the same contents whose block may be written: itself, if nobody else sees it.
inline std::shared_ptr<Value> writable(ValuePtr& x) {
  static_cast<void>(x->data());
  auto value = detached(*x);
  const bool alone = x.use_count() == 1 && x->storage.use_count() == 2 && x->storage->buffer.unique();
  if (!alone) {
    value->storage = std::make_shared<Storage>(Storage{allocate(*value), nullptr});
    x->device->exec().copy(value->storage->buffer.data(), x->storage->buffer.data(), x->bytes());
  }
  x = nullptr;
  return value;
}

SHARDLIB_INLINE void adamw(const AdamWNumbers& numbers, ValuePtr& weight, ValuePtr& mean, ValuePtr& variance,
                           const Value& grad) {
  const OpInfo op{"adamw", {}, {}};
  Bindings sizes(op, grad.device);
  for (const Value* x : {weight.get(), mean.get(), variance.get(), &grad}) sizes.bind(*x);
  const auto p = writable(weight), m = writable(mean), v = writable(variance);
  p->made_by = op;
  static_cast<void>(observed(*p, [&] {
    state(p->device).work.in_place = true;
    kernels::apply_streaming(
        p->device->exec(), p->count(),
        [n = numbers](f32& w, f32& m0, f32& v0, const f32& g) {
          m0 = n.beta1 * m0 + (1 - n.beta1) * n.clip * g;
          v0 = n.beta2 * v0 + (1 - n.beta2) * n.clip * n.clip * g * g;
          w -= n.rate * (m0 * n.correct1 / (std::sqrt(v0 * n.correct2) + n.epsilon) + n.decay * w);
        },
        p->as<f32>(), m->as<f32>(), v->as<f32>(), grad.as<const f32>());
    return p->storage->buffer;
  }));
  weight = p;
  mean = m;
  variance = v;
}

}  // namespace shardlib::detail
