// Broadcast loops over a device's shards.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

#include "shardlib/autodiff/tape.hpp"
#include "shardlib/device/exec.hpp"
#include "shardlib/kernels/body/elementwise.hpp"
#include "shardlib/kernels/elementwise.hpp"
#include "shardlib/kernels/strided.hpp"
#include "shardlib/memory/buffer.hpp"
#include "shardlib/ops/map.hpp"
#include "shardlib/runtime/tensor.hpp"
#include "shardlib/runtime/value.hpp"
#include "shardlib/support/handle.hpp"
#include "shardlib/support/inline.hpp"

namespace shardlib::detail {

/// Strides of an operand in a loop over the result's dims: 0 along the dims that it lacks.
[[gnu::cold]] SHARDLIB_INLINE Shape broadcast_strides(const Value& x, const TensorSpec& result);
template <class D>
kernels::Operand<D> broadcast_operand(const Value& x, const TensorSpec& result) {
  return {x.as<D>(), view(broadcast_strides(x, result))};
}

/// A contiguous operand of the loop's shape.
template <class D>
kernels::Operand<D> whole_operand(D* data, const Value& like) {
  return {data, kernels::row_major(view(like.local)).span()};
}

#if defined(SHARDLIB_TYPED_KERNELS)
template <class F, class... T>
void launch_elements(const void* f, const Exec& exec, const kernels::body::ElementwiseLoops& loops,
                     std::byte* const* data) {
  using Row = kernels::body::ElementRow<F, T...>;
  Row row{*static_cast<const F*>(f), {}};
  std::copy_n(data, sizeof...(T), row.data.begin());
  kernels::run_typed(exec, loops.items(), kernels::body::Elementwise<Row>{loops, row});
}
#endif

/// The result of a map of one operand, which the operand's kernel makes together with the operand.
struct MadeWithOperand : Counted {
  bool wanted = true;  ///< by whoever reads the operand
  Buffer result;       ///< until the map has it
};
/// Keeps memory for the map's result, which the kernel of `operand` writes too.
SHARDLIB_INLINE void keep_result(MadeWithOperand& made, Buffer result, const Value& operand);

/// Computes the result of a map, which has the shape of `out`.
[[nodiscard]] SHARDLIB_INLINE Buffer map_forward(const MapFunction& function, const std::vector<ValuePtr>& x,
                                                 const Value& out);
/// The cotangent of operand i only, in the result's shape, and if `over` in the memory of `ct`.
[[nodiscard]] SHARDLIB_INLINE ValuePtr map_vjp(const MapFunction& function, std::size_t i, const Value& ct,
                                               const std::vector<ValuePtr>& x, bool over);
/// All cotangents, in one loop, and if `over` the last one in the memory of `ct`.
[[nodiscard]] SHARDLIB_INLINE std::vector<ValuePtr> map_vjp_all(const MapFunction& function, const Value& ct,
                                                                const std::vector<ValuePtr>& x, bool over);

}  // namespace shardlib::detail

#ifndef SHARDLIB_COMPILED
#include "shardlib/compute/impl/hyper_dual.hpp"
#include "shardlib/compute/impl/map.hpp"
#endif
