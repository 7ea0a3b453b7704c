// Definitions of dropout.hpp.
#pragma once

#include "shardlib/compute/dropout.hpp"

#include <string>

#include "shardlib/support/error.hpp"

namespace shardlib::detail {

SHARDLIB_INLINE void require_probability(const OpInfo& op, double rate) {
  if (!(rate >= 0 && rate < 1))
    throw UsageError(std::string(op.name) + ": the rate " + std::to_string(rate) + " is not a probability below 1");
}

}  // namespace shardlib::detail
