// Finds the op that makes the first NaN of a program.
#pragma once

#include "shardlib/runtime/observe.hpp"
#include "shardlib/runtime/op_report.hpp"
#include "shardlib/support/inline.hpp"
#include "shardlib/types/tensor.hpp"

namespace shardlib {

namespace detail {
/// Throws Error if the op's result has a NaN.
SHARDLIB_INLINE void require_no_nan(const Device& device, const OpReport& ran);
}  // namespace detail

/// While it lives, every op of this device reads its result, in the forward and the backward pass. The first result
/// with a NaN throws Error, which names the op, its line and the element. Make it before the first op: a NaN that an
/// earlier op made is reported as that of the op that reads it. A dry run has no numbers to look at.
/// `const FindNan guard(mesh);`
class FindNan {
 public:
  template <Spec A>
  explicit FindNan(const Mesh<A>& mesh) : FindNan(mesh.device()) {}
  explicit FindNan(const DevicePtr& device)
      : observing_(device,
                   [device = device.get()](const detail::OpReport& ran) { detail::require_no_nan(*device, ran); }) {}

 private:
  detail::Observing observing_;
};

}  // namespace shardlib

#ifndef SHARDLIB_COMPILED
#include "shardlib/interop/impl/find_nan.hpp"
#endif
