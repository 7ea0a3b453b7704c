// Definitions of einsum_bias.hpp.
#pragma once

#include "shardlib/compute/einsum_bias.hpp"

#include "shardlib/runtime/program_state.hpp"
#include "shardlib/support/handle.hpp"

namespace shardlib::detail {

SHARDLIB_INLINE Handle<MadeWithOperand> make_with_operand(const DevicePtr& device) {
  auto made = Handle<MadeWithOperand>::make();
  made->wanted = program_state(device).computes();
  return made;
}

SHARDLIB_INLINE bool are_last_dims(const TensorSpec& some, const TensorSpec& result) {
  const int before = result.rank() - some.rank();
  for (int i = 0; i < some.rank(); ++i)
    if (before < 0 || some.dims[i].name != result.dims[before + i].name) return false;
  return some.rank() > 0;
}

}  // namespace shardlib::detail
