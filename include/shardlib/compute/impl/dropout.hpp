// Definitions of dropout.hpp.
#pragma once

#include "shardlib/compute/dropout.hpp"

#include <string>

#include "shardlib/support/error.hpp"

namespace shardlib::detail {

SHARDLIB_INLINE void require_probability(const OpInfo& op, double rate) {
  if (!(rate >= 0 && rate < 1))
    throw UsageError(op.describe() + ": the rate " + std::to_string(rate) +
                     " is not a probability; give a number from 0 to below 1");
}

}  // namespace shardlib::detail
