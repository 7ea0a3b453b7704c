// Definitions of optimizers.hpp.
#pragma once

#include "shardlib/optim/optimizers.hpp"

#include <cmath>
#include <memory>
#include <utility>

#include "shardlib/kernels/elementwise.hpp"
#include "shardlib/kernels/reduce.hpp"
#include "shardlib/runtime/bindings.hpp"
#include "shardlib/runtime/observe.hpp"
#include "shardlib/support/use_count.hpp"

namespace shardlib::detail {

SHARDLIB_INLINE ValuePtr sum_of_squares(const Value& x, const TensorSpec& spec, bool counts) {
  auto out = make_value({"sum_of_squares", {}, {}}, x.device, DType::f32, spec, {});
  out->storage->buffer = observed(*out, [&] {
    Buffer result = allocate(*out);
    const auto of = [&]<class D>(D) { return kernels::sum_of_squares(x.device->exec(), x.count(), x.as<const D>()); };
    const f32 sum = !counts ? 0 : x.dtype == DType::bf16 ? of(bf16()) : of(f32());
    x.device->exec().copy(result.data(), &sum, sizeof sum);
    return result;
  });
  return out;
}

enum class Contents { kept, overwritten };

/// A value whose shard may be written: x itself if it has no other owner, else a new value, with the same contents if
/// `contents` asks for them.
inline Handle<Value> writable(ValuePtr& x, Contents contents) {
  static_cast<void>(x->data());
  auto value = detached(*x);
  const bool alone = x.use_count() == 1 && use_count(x->storage) == 2 && x->storage->buffer.unique();
  if (!alone) {
    value->storage = std::make_shared<Storage>(Storage{allocate(*value), nullptr});
    if (contents == Contents::kept)
      x->device->exec().copy(value->storage->buffer.data(), x->storage->buffer.data(), x->bytes());
  }
  x = nullptr;
  return value;
}

SHARDLIB_INLINE void adamw(const AdamWNumbers& numbers, ValuePtr& weight, ValuePtr& mu, ValuePtr& nu, const Value& grad,
                           ValuePtr* copy) {
  const OpInfo op{"adamw", {}, {}};
  Bindings sizes(op, grad.device);
  for (const Value* x : {weight.get(), mu.get(), nu.get(), &grad}) sizes.bind(*x);
  Handle<Value> c;
  if (copy != nullptr) {
    sizes.bind(**copy);
    if ((*copy)->dtype == DType::bf16) {
      c = writable(*copy, Contents::overwritten);
      c->made_by = op;
    }
    *copy = nullptr;  // in f32 it is the weight, which must have no other owner
  }
  const auto p = writable(weight, Contents::kept), m = writable(mu, Contents::kept);
  const auto v = writable(nu, Contents::kept);
  p->made_by = op;
  static_cast<void>(observed(*p, [&] {
    program_state(p->device).work.in_place = true;
    const auto one = [n = numbers](f32& w, f32& m0, f32& v0, const auto& grad_of, auto&... copies) {
      const f32 g = static_cast<f32>(grad_of);
      m0 = n.beta1 * m0 + (1 - n.beta1) * n.clip * g;
      v0 = n.beta2 * v0 + (1 - n.beta2) * n.clip * n.clip * g * g;
      w -= n.rate * (m0 * n.correct1 / (std::sqrt(v0 * n.correct2) + n.epsilon) + n.decay * w);
      ((copies = bf16(w)), ...);
    };
    const auto all = [&](auto... rest) {
      kernels::apply_nontemporal(p->device->exec(), p->count(), one, p->as<f32>(), m->as<f32>(), v->as<f32>(), rest...);
    };
    const bool from_bf16 = grad.dtype == DType::bf16;
    if (from_bf16 && c) all(grad.as<const bf16>(), c->as<bf16>());
    if (from_bf16 && !c) all(grad.as<const bf16>());
    if (!from_bf16 && c) all(grad.as<const f32>(), c->as<bf16>());
    if (!from_bf16 && !c) all(grad.as<const f32>());
    return p->storage->buffer;
  }));
  weight = p;
  mu = m;
  nu = v;
  if (copy != nullptr) *copy = c ? c : p;
}

}  // namespace shardlib::detail
