// Kernels of the collectives for a device's shards.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string_view>
#include <vector>

#include "shardlib/autodiff/overlap.hpp"
#include "shardlib/autodiff/tape.hpp"
#include "shardlib/compute/reductions.hpp"
#include "shardlib/ops/asynchronous.hpp"
#include "shardlib/ops/collectives.hpp"
#include "shardlib/support/inline.hpp"

namespace shardlib {
namespace detail {

/// The axes that a group of devices spans. Its ranks are row-major in this order.
using GroupAxes = std::vector<std::string_view>;

/// The axes in the order of the mesh, which determines the order of a sum over them.
SHARDLIB_INLINE GroupAxes in_mesh_order(const Device& device, const Axes& axes);

/// Starts an operation of a communicator. The device's stopwatch counts the time as communication.
SHARDLIB_INLINE Request begin(const Value& shape, const std::function<Request()>& start);

/// Starts and completes an operation. The wait for other devices counts as communication as well.
SHARDLIB_INLINE void complete(const Value& shape, const std::function<Request()>& start);

SHARDLIB_INLINE void add_traffic(const Value& shape, std::size_t bytes, const GroupAxes& axes);

SHARDLIB_INLINE Buffer reduce(const Value& in, const Value& out, const GroupAxes& axes, Reduction op);

/// The maximum of the shards `local` over the axes of the dims that `out` lacks. Sets their padding to zero first.
SHARDLIB_INLINE Buffer max_of_shards(const Value& in, const Value& out, Buffer local);

template <class D>
Buffer max_over_devices(const Value& in, const Value& out) {
  return max_of_shards(in, out, reduce_kernel<kernels::detail::MaxOp, D>(in, out));
}

SHARDLIB_INLINE int places_on_ring(const ValuePtr& x, std::string_view axis, std::int64_t by);
/// The type-erased part of `record_shift`. It starts the transfer at once, and the first read of the result waits for
/// it. Where a policy keeps the result, it waits at once. In a replay the first read starts the transfer.
[[gnu::cold]] SHARDLIB_INLINE ValuePtr record_shift_erased(const OpInfo& op, const ValuePtr& x, const Shift& shift,
                                                           EdgeSource source);

/// Records a `shift` of x, whose vjp is `vjp`.
template <class Out, class X, class V>
Out record_shift(const OpInfo& op, const X& x, const Shift& shift, const V& vjp) {
  return Out(record_shift_erased(op, x.value(), shift, erased<"shift", Out>(vjp).source()));
}

}  // namespace detail
}  // namespace shardlib

#ifndef SHARDLIB_COMPILED
#include "shardlib/compute/impl/collectives.hpp"
#endif
