// Ops on leaves without their types, for optimizers that communicate. They have no derivatives.
#pragma once

#include "shardlib/runtime/value.hpp"
#include "shardlib/support/inline.hpp"
#include "shardlib/types/tensor.hpp"

namespace shardlib::detail {

/// all_gather and shard. `to` is a lasting spec. Where nothing is sharded, they return x.
[[nodiscard]] SHARDLIB_INLINE ValuePtr gathered_leaf(const ValuePtr& x, const TensorSpec& to);
[[nodiscard]] SHARDLIB_INLINE ValuePtr leaf_shard(const ValuePtr& x, const TensorSpec& to);

/// The sum in f32 over the dims that `to`, a lasting spec, lacks, of all devices: "A/d B/t" to "A/d".
[[nodiscard]] SHARDLIB_INLINE ValuePtr leaf_sum(const ValuePtr& x, const TensorSpec& to);
/// The sum of all elements' squares, of all devices.
[[nodiscard]] SHARDLIB_INLINE ValuePtr leaf_sum_of_squares(const ValuePtr& x);

}  // namespace shardlib::detail

#ifndef SHARDLIB_COMPILED
#include "shardlib/optim/impl/leaf_ops.hpp"
#endif
