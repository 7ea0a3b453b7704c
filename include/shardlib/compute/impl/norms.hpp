// Definitions of norms.hpp.
#pragma once

#include "shardlib/compute/norms.hpp"

#include <cstdint>
#include <string>

#include "shardlib/kernels/body/positions.hpp"
#include "shardlib/runtime/padding.hpp"
#include "shardlib/support/error.hpp"

namespace shardlib::detail {

template <class T>
void rotary_tables(const Exec& exec, const RopeAngles& angles, PositionRun positions, std::int64_t n, double sign,
                   T* cosine, T* sine) {
  exec.for_items(positions.size, 0,
                 kernels::body::RotaryTable<T, RopeAngles>{angles, positions.first, n / 2, n, sign, cosine, sine});
}
SHARDLIB_INLINE void fill_rotary_tables(const Exec& exec, const RopeAngles& angles, PositionRun positions,
                                        std::int64_t n, double sign, f32* cosine, f32* sine) {
  rotary_tables(exec, angles, positions, n, sign, cosine, sine);
}
SHARDLIB_INLINE void fill_rotary_tables(const Exec& exec, const RopeAngles& angles, PositionRun positions,
                                        std::int64_t n, double sign, f64* cosine, f64* sine) {
  rotary_tables(exec, angles, positions, n, sign, cosine, sine);
}

SHARDLIB_INLINE void require_pairs(const OpInfo& op, const ValuePtr& x, int dim) {
  require_unpadded(op, x, dim,
                   "rotary embedding pairs its halves, which padding would move; choose a size that needs none");
  const std::int64_t size = x->global.logical[dim];
  if (size % 2 != 0)
    throw Error(op.describe() + ": dim `" + std::string(x->spec->dims[dim].name) + "` has the odd size " +
                std::to_string(size) + "; rotary embedding rotates pairs (" + x->device->describe() + ")");
}

}  // namespace shardlib::detail
