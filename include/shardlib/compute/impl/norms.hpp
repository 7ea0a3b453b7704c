// Definitions of norms.hpp.
#pragma once

#include "shardlib/compute/norms.hpp"

#include <cmath>
#include <cstdint>
#include <numbers>
#include <string>

#include "shardlib/runtime/padding.hpp"
#include "shardlib/support/error.hpp"

namespace shardlib {

SHARDLIB_INLINE double RopeAngles::operator()(std::int64_t position, std::int64_t pair, std::int64_t width) const {
  const double frequency = std::pow(base, -2.0 * static_cast<double>(pair) / static_cast<double>(width));
  // The share of the frequency that stays undivided: by Llama 3.1's reference code, apply_scaling.
  double kept = 0;
  if (context > 0) {
    const double fits = static_cast<double>(context) * frequency / (2 * std::numbers::pi);
    kept = fits < low_freq_factor    ? 0
           : fits > high_freq_factor ? 1
                                     : (fits - low_freq_factor) / (high_freq_factor - low_freq_factor);
  }
  return static_cast<double>(position) * ((1 - kept) * frequency / factor + kept * frequency);
}

namespace detail {

SHARDLIB_INLINE void require_pairs(const OpInfo& op, const ValuePtr& x, int dim) {
  require_unpadded(op, x, dim,
                   "rotary embedding pairs its halves, which padding would move; choose a size that needs none");
  const std::int64_t size = x->global.logical[dim];
  if (size % 2 != 0)
    throw Error(op.describe() + ": dim `" + std::string(x->spec->dims[dim].name) + "` has the odd size " +
                std::to_string(size) + "; rotary embedding rotates pairs (" + x->device->describe() + ")");
}

}  // namespace detail
}  // namespace shardlib
