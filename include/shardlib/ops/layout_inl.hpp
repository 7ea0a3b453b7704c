// Definitions of layout.hpp.
#pragma once

#include "shardlib/ops/layout.hpp"

namespace shardlib::detail {

SHARDLIB_INLINE void check_same_sizes(const OpInfo& op, const Value& a, const Value& b, int at) {
  for (int i = 0; i < a.global.size(); ++i)
    if (i != at && b.global[i] != a.global[i])
      throw Error(op.describe() + ": dim `" + std::string(a.spec->dims[i].name) + "` is " + to_string(a.global[i]) +
                  " in one operand, but " + to_string(b.global[i]) + " in another (" + a.device->describe() + ")");
}

}  // namespace shardlib::detail
