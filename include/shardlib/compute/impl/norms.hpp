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
void rotary_tables(const Exec& exec, const RopeAngles& angles, std::int64_t first, std::int64_t positions,
                   std::int64_t n, double sign, T* tables) {
  const std::int64_t half = n / 2;
  exec.for_items(
      positions, 0,
      kernels::body::RotaryTable<T, RopeAngles>{angles, first, half, n, sign, tables, tables + positions * half});
}
SHARDLIB_INLINE void fill_rotary_tables(const Exec& exec, const RopeAngles& angles, std::int64_t first,
                                        std::int64_t positions, std::int64_t n, double sign, f32* tables) {
  rotary_tables(exec, angles, first, positions, n, sign, tables);
}
SHARDLIB_INLINE void fill_rotary_tables(const Exec& exec, const RopeAngles& angles, std::int64_t first,
                                        std::int64_t positions, std::int64_t n, double sign, f64* tables) {
  rotary_tables(exec, angles, first, positions, n, sign, tables);
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
