// Kernels of causal_attention for a device's shards.
#pragma once

#include <array>
#include <optional>
#include <span>
#include <utility>

#include "shardlib/autodiff/tape.hpp"
#include "shardlib/kernels/attention.hpp"
#include "shardlib/ops/attention.hpp"
#include "shardlib/runtime/value.hpp"
#include "shardlib/support/inline.hpp"

namespace shardlib::detail {

/// The arguments of an attention, with the kernels for the operands' dtype.
struct AttentionKernels : Attention {
  double scale = 1;
  Buffer (*forward)(const AttentionKernels& a, const Value& out, const Handle<Value>& sums) = nullptr;
  void (*backward)(const AttentionKernels& a, const Value& out, const Value& sums, const Value& ct,
                   std::span<const ValuePtr> grads) = nullptr;
};

/// The loops over the operands' shards. The log-sum-exps have the layout of the queries without the width dim.
[[nodiscard]] SHARDLIB_INLINE kernels::AttentionLoops attention_loops(const AttentionKernels& a);

[[nodiscard]] SHARDLIB_INLINE ValuePtr record_attention_erased(AttentionKernels a, std::optional<double> scale,
                                                               const TensorSpec& sums,
                                                               const std::array<const TensorSpec*, 3>& due);

template <class D>
struct AttentionOf {
  using A = accumulator_t<D>;
  static const i32* segments_of(const Attention& a) {
    return a.segments == nullptr ? nullptr : reinterpret_cast<const i32*>(a.segments->data().data());
  }
  static Buffer forward(const AttentionKernels& a, const Value& out, const Handle<Value>& sums) {
    Buffer result = allocate(out);
    if (sums != nullptr) sums->storage->buffer = allocate(*sums);
    kernels::causal_attention(out.device->exec(), attention_loops(a), a.q->as<const D>(), a.k->as<const D>(),
                              a.v->as<const D>(), segments_of(a), result.as<D>(),
                              sums != nullptr ? sums->storage->buffer.template as<A>() : nullptr);
    return result;
  }
  static void backward(const AttentionKernels& a, const Value& out, const Value& sums, const Value& ct,
                       std::span<const ValuePtr> grads) {
    const auto shard = [](const ValuePtr& x) { return x == nullptr ? nullptr : x->storage->buffer.template as<D>(); };
    const D* const result = out.as<const D>();  // first, because in a replay this also computes the sums
    kernels::causal_attention_backward(out.device->exec(), attention_loops(a), a.q->as<const D>(), a.k->as<const D>(),
                                       a.v->as<const D>(), segments_of(a), result, sums.as<const A>(), ct.as<const D>(),
                                       shard(grads[0]), shard(grads[1]), shard(grads[2]));
  }
};

template <class D>
ValuePtr record_attention(Attention a, std::optional<double> scale, const TensorSpec& sums,
                          const std::array<const TensorSpec*, 3>& due) {
  AttentionKernels with{std::move(a)};
  with.forward = &AttentionOf<D>::forward;
  with.backward = &AttentionOf<D>::backward;
  return record_attention_erased(std::move(with), scale, sums, due);
}

}  // namespace shardlib::detail

#ifndef SHARDLIB_COMPILED
#include "shardlib/compute/impl/attention.hpp"
#endif
