// Definitions of einsum.hpp.
#pragma once

#include "shardlib/compute/einsum.hpp"

#include <array>
#include <limits>
#include <string_view>
#include <tuple>
#include <vector>

#include "shardlib/runtime/bindings.hpp"

namespace shardlib::detail {

SHARDLIB_INLINE double einsum_flops(const Value& x, const Value& y) {
  double flops = 2.0 * static_cast<double>(x.count());
  for (int i = 0; i < y.spec->rank(); ++i)
    if (!x.spec->has(y.spec->dims[i].name)) flops *= static_cast<double>(y.local[i]);
  return flops;
}

SHARDLIB_INLINE EinsumOrder einsum_order(const OpInfo& op, const OpParts& parts, const std::vector<ValuePtr>& x) {
  Bindings names(op, x[0]->device);
  for (const ValuePtr& operand : x) names.bind(*operand);
  const auto size = [&](std::string_view dim) {
    for (const ValuePtr& operand : x)
      if (const int at = operand->spec->find(dim); at >= 0) return static_cast<double>(operand->local[at]);
    return 1.0;
  };
  const unsigned all = (1U << x.size()) - 1;
  EinsumOrder order{};
  std::array<double, std::tuple_size_v<EinsumOrder>> least{};
  for (unsigned set = 1; set <= all; ++set) {
    const unsigned lowest = set & (0U - set);
    if (set == lowest) continue;
    least[set] = std::numeric_limits<double>::infinity();
    for (unsigned first = 1; first < set; ++first) {
      if ((first & ~set) != 0 || (first & lowest) == 0) continue;
      const TensorSpec a = rules::product_of(parts, first), b = rules::product_of(parts, set & ~first);
      double products = 1;
      for (const Dim& dim : a.dims) products *= size(dim.name);
      for (const Dim& dim : b.dims) products *= a.has(dim.name) ? 1.0 : size(dim.name);
      const double cost = least[first] + least[set & ~first] + products;
      if (cost < least[set]) {
        least[set] = cost;
        order[set] = first;
      }
    }
  }
  return order;
}

}  // namespace shardlib::detail
