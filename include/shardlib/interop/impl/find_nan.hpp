// Definitions of find_nan.hpp.
#pragma once

#include "shardlib/interop/find_nan.hpp"

#include <cstdint>
#include <string>

#include "shardlib/spec/dtype.hpp"
#include "shardlib/support/error.hpp"

namespace shardlib::detail {

SHARDLIB_INLINE void require_no_nan(const Device& device, const OpReport& ran) {
  std::int64_t first = -1, count = 0, n = 0;
  visit_dtype(ran.dtype, [&]<class D>(D /*zero*/) {
    if constexpr (floating<D>) {
      n = static_cast<std::int64_t>(ran.bytes / sizeof(D));
      device.exec().read(static_cast<const D*>(ran.shard), n, [&](const D* x) {
        for (std::int64_t i = 0; i < n; ++i) {
          const auto number = static_cast<accumulator_t<D>>(x[i]);
          if (number == number) continue;
          if (count++ == 0) first = i;
        }
      });
    }
  });
  if (count == 0) return;
  throw Error(ran.op.describe() + " makes a NaN, the first of this program: element " + std::to_string(first) +
              " of the shard of `" + std::string(to_string(ran.spec).view()) + "`, and " + std::to_string(count) +
              " of its " + std::to_string(n) +
              " elements; look at its operands, of which none had a NaN since FindNan was made (" + device.describe() +
              ")");
}

}  // namespace shardlib::detail
