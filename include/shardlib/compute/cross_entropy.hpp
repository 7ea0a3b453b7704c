// The backward pass of cross_entropy, as a function that can be differentiated.
#pragma once

#include <array>

#include "shardlib/autodiff/tape.hpp"
#include "shardlib/ops/loss.hpp"
#include "shardlib/runtime/value.hpp"
#include "shardlib/support/inline.hpp"

namespace shardlib::detail {

/// The cotangent of the logits, `spec`, from that of the loss. `rows` are the targets, the largest logits, and the sums
/// of exp(logits - largest).
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
#endif
