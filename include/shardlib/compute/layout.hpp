// Kernels of layout ops for a device's shards.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "shardlib/autodiff/tape.hpp"
#include "shardlib/ops/layout.hpp"
#include "shardlib/runtime/value.hpp"
#include "shardlib/support/inline.hpp"

namespace shardlib::detail {

/// Records a stack of the parts along a dim of that size. `sources` holds one VJP for each part.
SHARDLIB_INLINE ValuePtr record_stack_erased(const OpInfo& op, const std::vector<ValuePtr>& parts, DimSize size,
                                             const TensorSpec& spec, std::vector<EdgeSource>& sources);
/// Records the same bytes as a value on another view of the device, under another spec and other sizes.
SHARDLIB_INLINE ValuePtr record_on(const OpInfo& op, const ValuePtr& x, const DevicePtr& device, const TensorSpec& spec,
                                   const GlobalSizes& global, std::span<EdgeSource> sources);

template <class Out, class X>
Out record_stack(const OpInfo& op, const std::vector<X>& parts, DimSize size) {
  std::vector<EdgeSource> sources;
  std::vector<ValuePtr> values;
  for (const X& part : parts) {
    const auto number = static_cast<std::int64_t>(sources.size());
    sources.push_back(erased<"stack", Out>(vjp(part, StackVjp<Dual<X, axes_of<Out::spec>()>>{number})).source());
    values.push_back(part.value());
  }
  return Out(record_stack_erased(op, values, size, parsed<Out::spec>, sources));
}

}  // namespace shardlib::detail

#ifndef SHARDLIB_COMPILED
#include "shardlib/compute/impl/layout.hpp"
#endif
