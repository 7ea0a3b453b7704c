// Definitions of custom.hpp.
#pragma once

#include "shardlib/compute/custom.hpp"

#include <algorithm>

namespace shardlib::detail {

SHARDLIB_INLINE void require_mesh_of(const DevicePtr& mesh, const ValuePtr& x) {
  if (x->device != mesh)
    throw Error("custom::vjp: the operand `" + std::string(to_string(*x->spec).view()) + "` is on " +
                x->device->describe_view() + ", but the VJP is for mesh " + to_string(mesh->axes()) +
                "; name the mesh of the operand");
}

SHARDLIB_INLINE void require_vjps(const OpInfo& op, std::span<const ValuePtr> operands,
                                  std::span<const ValuePtr* const> differentiated) {
  for (std::size_t i = 0; i < operands.size(); ++i) {
    const Value& x = *operands[i];
    if (!x.slot || !is_floating(x.dtype)) continue;
    // One tensor may be several operands, of which each has a VJP.
    const auto same = [&](const ValuePtr& other) { return other->slot == x.slot; };
    const auto operand = std::ranges::count_if(operands.first(i + 1), same);
    const auto vjps = std::ranges::count_if(differentiated, [&](const ValuePtr* of) { return same(*of); });
    if (operand > vjps)
      throw Error(
          op.describe() + ": operand " + std::to_string(i + 1) + ", `" + std::string(to_string(*x.spec).view()) +
          "`, is differentiated, but the op has no VJP for it, so its gradient would miss this use; give the op "
          "a `custom::vjp` of this operand, or take `stop_gradient` of it before (" +
          x.device->describe() + ")");
  }
  for (const ValuePtr* of : differentiated) {
    const Value& x = **of;
    if (!x.slot) continue;
    const auto same = [&](const ValuePtr& other) { return other->slot == x.slot; };
    const auto uses = std::ranges::count_if(operands, same);
    if (std::ranges::count_if(differentiated, [&](const ValuePtr* other) { return same(*other); }) > uses)
      throw Error(op.describe() + ": the op has more VJPs of `" + std::string(to_string(*x.spec).view()) +
                  "` than operands that are this tensor, " + std::to_string(uses) +
                  ", so its gradient would count a use twice; give each operand one `custom::vjp` (" +
                  x.device->describe() + ")");
  }
}

}  // namespace shardlib::detail
