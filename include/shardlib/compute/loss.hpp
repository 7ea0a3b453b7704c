// Kernels of the losses for a device's shards.
#pragma once

#include <array>
#include <cstdint>
#include <utility>

#include "shardlib/autodiff/tape.hpp"
#include "shardlib/compute/collectives.hpp"
#include "shardlib/compute/elementwise.hpp"
#include "shardlib/compute/index.hpp"
#include "shardlib/compute/reductions.hpp"
#include "shardlib/kernels/rows.hpp"
#include "shardlib/ops/loss.hpp"
#include "shardlib/runtime/program_state.hpp"
#include "shardlib/runtime/value.hpp"
#include "shardlib/support/inline.hpp"

namespace shardlib::detail {

/// The number of ids without padding in this device's shard of the vocabulary, the last dim.
inline std::int64_t true_vocabulary(const Value& logits) {
  return true_shape(logits)[logits.local.size() - 1];
}

template <class D>
Buffer SumExp<D>::operator()(const Value& out) const {
  Buffer result = allocate(out);
  kernels::sum_exp(out.device->exec(), x->template as<const D>(), shift->template as<const D>(), result.as<D>(),
                   out.count(), x->local[x->local.size() - 1], true_vocabulary(*x));
  return result;
}

template <class D, class I>
Buffer CrossEntropyBackward<D, I>::operator()(const Value& out) const {
  const D* const from = x->template as<const D>();
  // The logits are the largest shard of a step. If no other value shares the memory, the cotangent reuses it.
  const bool last_use = !x->slot && x->storage.use_count() == 1 && x->storage->buffer.unique();
  program_state(out.device).work.in_place = last_use;
  Buffer result = last_use ? std::move(x->storage->buffer) : allocate(out);
  const int last = x->local.size() - 1;
  const std::int64_t n = x->local[last];
  kernels::cross_entropy_backward(out.device->exec(), from, shift->template as<const D>(), sum->template as<const D>(),
                                  ids->template as<const I>(), ct->template as<const D>(), result.as<D>(), ct->count(),
                                  n, shard_index(*out.device, x->spec->dims[last].axes) * n);
  return result;
}

/// The cotangent of the logits, `spec`, from that of the loss, which can be differentiated. `rows` are the targets, the
/// largest logits, and the sums of exp(logits - largest).
SHARDLIB_INLINE ValuePtr record_cross_entropy_vjp(const ValuePtr& ct, const ValuePtr& logits,
                                                  const std::array<ValuePtr, 3>& rows, const TensorSpec& spec,
                                                  Kernel&& kernel);
template <class D, class I>
ValuePtr record_cross_entropy_vjp(const CrossEntropyBackward<D, I>& k, const TensorSpec& spec) {
  return record_cross_entropy_vjp(k.ct, k.x, {k.ids, k.shift, k.sum}, spec, Kernel(k));
}

}  // namespace shardlib::detail

#ifndef SHARDLIB_COMPILED
#include "shardlib/compute/impl/cross_entropy.hpp"
#include "shardlib/compute/impl/loss.hpp"
#endif
