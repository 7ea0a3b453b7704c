// Definitions of optimizers.hpp.
#pragma once

#include "shardlib/optim/optimizers.hpp"

#include <array>
#include <cstddef>
#include <utility>

#include "shardlib/kernels/elementwise.hpp"
#include "shardlib/kernels/reduce.hpp"
#include "shardlib/runtime/bindings.hpp"
#include "shardlib/runtime/observe.hpp"
#include "shardlib/runtime/program_state.hpp"
#include "shardlib/spec/dtype.hpp"
#include "shardlib/support/handle.hpp"

namespace shardlib::detail {

SHARDLIB_INLINE ValuePtr sum_of_squares(const Value& x, const TensorSpec& spec, bool counts) {
  auto out = make_value({"sum_of_squares", {}, {}}, x.device, DType::f32, spec, {});
  out->storage->buffer = observed(*out, [&] {
    Buffer result = allocate(*out);
    const Exec exec = x.device->exec();
    const auto of = [&]<class D>(D) { kernels::sum_of_squares(exec, x.count(), x.as<const D>(), result.as<f32>()); };
    if (!counts)
      exec.zero(result.data(), sizeof(f32));
    else
      x.dtype == DType::bf16 ? of(bf16()) : of(f32());
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
  const bool alone = x.use_count() == 1 && x->storage.use_count() == 2 && x->storage->buffer.unique();
  if (!alone) {
    value->storage = Handle<Storage>::make(allocate(*value));
    if (contents == Contents::kept)
      x->device->exec().copy(value->storage->buffer.data(), x->storage->buffer.data(), x->bytes());
  }
  x = nullptr;
  return value;
}

/// Updates a leaf in one pass by one(weight, moments..., gradient, copies...), as update_in_place says.
template <std::size_t N, class One>
void update_by(const char* name, const One& one, ValuePtr& weight, std::array<ValuePtr, N>& moments, const Value& grad,
               ValuePtr* copy) {
  const OpInfo op{name, {}, {}};
  Bindings sizes(op, grad.device);
  sizes.bind(*weight);
  for (const ValuePtr& moment : moments) sizes.bind(*moment);
  sizes.bind(grad);
  Handle<Value> c;
  if (copy != nullptr) {
    sizes.bind(**copy);
    if ((*copy)->dtype == DType::bf16) {
      c = writable(*copy, Contents::overwritten);
      c->made_by = op;
    }
    *copy = nullptr;  // in f32 it is the weight, which must have no other owner
  }
  const auto p = writable(weight, Contents::kept);
  std::array<Handle<Value>, N> m;
  for (std::size_t i = 0; i < N; ++i) m[i] = writable(moments[i], Contents::kept);
  p->made_by = op;
  static_cast<void>(observed(*p, [&] {
    program_state(p->device).work.in_place = true;
    const auto all = [&](auto... rest) {
      [&]<std::size_t... I>(std::index_sequence<I...>) {
        kernels::apply_nontemporal(p->device->exec(), p->count(), one, p->template as<f32>(),
                                   m[I]->template as<f32>()..., rest...);
      }
      (std::make_index_sequence<N>{});
    };
    const bool from_bf16 = grad.dtype == DType::bf16;
    if (from_bf16 && c) all(grad.as<const bf16>(), c->template as<bf16>());
    if (from_bf16 && !c) all(grad.as<const bf16>());
    if (!from_bf16 && c) all(grad.as<const f32>(), c->template as<bf16>());
    if (!from_bf16 && !c) all(grad.as<const f32>());
    return p->storage->buffer;
  }));
  weight = p;
  for (std::size_t i = 0; i < N; ++i) moments[i] = m[i];
  if (copy != nullptr) *copy = c ? c : p;
}

SHARDLIB_INLINE void update_in_place(const AdamWNumbers& numbers, ValuePtr& weight, std::array<ValuePtr, 2>& moments,
                                     const Value& grad, ValuePtr* copy) {
  update_by("adamw", numbers, weight, moments, grad, copy);
}

SHARDLIB_INLINE void update_in_place(const SgdNumbers& numbers, ValuePtr& weight, std::array<ValuePtr, 1>& moments,
                                     const Value& grad, ValuePtr* copy) {
  update_by("sgd", numbers, weight, moments, grad, copy);
}

SHARDLIB_INLINE void update_in_place(const LionNumbers& numbers, ValuePtr& weight, std::array<ValuePtr, 1>& moments,
                                     const Value& grad, ValuePtr* copy) {
  update_by("lion", numbers, weight, moments, grad, copy);
}

}  // namespace shardlib::detail
