// Kernels of flip and roll for a device's shard.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "shardlib/autodiff/tape.hpp"
#include "shardlib/kernels/layout.hpp"
#include "shardlib/kernels/strided.hpp"
#include "shardlib/ops/positions.hpp"
#include "shardlib/runtime/value.hpp"
#include "shardlib/support/error.hpp"
#include "shardlib/support/inline.hpp"

namespace shardlib::detail {

/// Copies `size` positions along a dim, from `from` on to those from `to` on; backwards if `step` is -1.
inline void copy_positions(const Value& in, const Value& out, std::byte* result, int dim, std::int64_t from,
                           std::int64_t to, std::int64_t size, std::int64_t step) {
  auto strides = kernels::row_major(view(in.local));
  const auto out_strides = strides;
  Shape range = in.local;
  range[dim] = size;
  if (product(range) == 0) return;
  const std::size_t element = size_of(in.dtype);
  const auto skip = [&](std::int64_t position) {
    return static_cast<std::size_t>(position * out_strides[dim]) * element;
  };
  strides.at(dim) *= step;
  kernels::copy_strided(out.device->exec(), element, view(range), in.data().data() + skip(from), strides,
                        result + skip(to), out_strides);
}

SHARDLIB_INLINE Buffer Flip::operator()(const Value& in, const Value& out) const {
  Buffer result = allocate(out);
  const std::int64_t n = in.global.logical[dim];  // without padding
  copy_positions(in, out, result.data(), dim, n - 1, 0, n, -1);
  return result;
}
SHARDLIB_INLINE Buffer Roll::operator()(const Value& in, const Value& out) const {
  Buffer result = allocate(out);
  const std::int64_t n = in.global.logical[dim];
  if (n == 0) return result;
  const std::int64_t first = (by % n + n) % n;  // where position 0 goes
  copy_positions(in, out, result.data(), dim, 0, first, n - first, 1);
  copy_positions(in, out, result.data(), dim, n - first, 0, first, 1);
  return result;
}

SHARDLIB_INLINE void require_diagonal(const OpInfo& op, const ValuePtr& x, int kept, int dropped) {
  const std::int64_t length = x->global.logical[kept], other = x->global.logical[dropped];
  if (length <= other) return;
  const std::string stays(x->spec->dims[kept].name), goes(x->spec->dims[dropped].name);
  const bool sharded = !x->spec->dims[kept].axes.empty();  // diagonal<"Y", "X"> leaves a whole X out
  throw Error(op.label() + " of `" + std::string(to_string(*x->spec).view()) + "`" + op.at() + ": dim `" + stays +
              "` is " + std::to_string(length) + ", but `" + goes + "` only " + std::to_string(other) +
              ", so there is no diagonal element for each index of `" + stays + "`; " +
              (sharded ? "gather `" + stays + "` first, and then " : "") + "write `diagonal<\"" + goes + "\", \"" +
              stays + "\">` (" + x->device->describe() + ")");
}

}  // namespace shardlib::detail
