// Typing rules of ops outside the library: their kernels and VJPs.
#pragma once

#include <string_view>

#include "shardlib/rules/common.hpp"

namespace shardlib::rules {

/// The kernel or a VJP of an op outside the library: a copy of it runs after the call.
constexpr Verdict own_function(std::string_view op, bool is_kernel, bool is_owned) {
  if (is_owned) return {};
  return {{},
          Text(op) + (is_kernel ? ": its kernel" : ": its VJP") +
              " captures by reference, or holds a pointer or a union, and it runs after the call, when what it refers "
              "to may be "
              "gone; capture numbers by value: `[k]`, and pass tensors to " +
              (is_kernel ? "`custom::operands`" : "`custom::save`")};
}
/// A VJP outside the library takes the cotangent and what `custom::save` names.
constexpr Verdict own_vjp(const TensorSpec& cotangent, int saved, bool is_taken, bool returns_tensor) {
  if (is_taken && !returns_tensor)
    return {{}, "custom::vjp: the function returns no tensor; return the cotangent of the operand"};
  if (is_taken) return {};
  return {{},
          "custom::vjp: the function does not take the cotangent " + quoted(cotangent) + " and " + number(saved) +
              (saved == 1 ? " saved tensor" : " saved tensors") +
              ", as f(ct, saved...); name what it needs besides the cotangent in `custom::save`"};
}

}  // namespace shardlib::rules
