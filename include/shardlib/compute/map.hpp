// Broadcast loops over the shards of a device.
#pragma once

#include <cstddef>
#include <vector>

#include "shardlib/autodiff/tape.hpp"
#include "shardlib/kernels/elementwise.hpp"
#include "shardlib/kernels/strided.hpp"
#include "shardlib/ops/map.hpp"
#include "shardlib/runtime/value.hpp"
#include "shardlib/support/inline.hpp"

namespace shardlib::detail {

/// Strides of an operand as a loop over the dims of the result sees it: 0 along the dims that it lacks.
[[gnu::cold]] SHARDLIB_INLINE Shape broadcast_strides(const Value& x, const TensorSpec& result);
template <class D>
kernels::Operand<D> broadcast_operand(const Value& x, const TensorSpec& result) {
  return {x.as<D>(), view(broadcast_strides(x, result))};
}

/// The result of a loop, contiguous.
template <class D>
kernels::Operand<D> whole_operand(D* data, const Value& like) {
  return {data, kernels::row_major(view(like.local)).span()};
}

/// The result of a map, of which `out` has the shape.
[[nodiscard]] SHARDLIB_INLINE Buffer map_forward(const MapFunction& function, const std::vector<ValuePtr>& x,
                                                 const Value& out);
/// The cotangent of operand i alone, of the result's shape.
[[nodiscard]] SHARDLIB_INLINE ValuePtr map_pull(const MapFunction& function, std::size_t i, const Value& ct,
                                                const std::vector<ValuePtr>& x);
/// All cotangents in one loop.
[[nodiscard]] SHARDLIB_INLINE std::vector<ValuePtr> map_pull_all(const MapFunction& function, const Value& ct,
                                                                 const std::vector<ValuePtr>& x);

}  // namespace shardlib::detail

#ifndef SHARDLIB_COMPILED
#include "shardlib/compute/impl/map.hpp"
#endif
