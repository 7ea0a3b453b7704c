// The run-time part of reinterpret: which devices have which indices along the axes of two meshes.
#pragma once

#include "shardlib/autodiff/tape.hpp"
#include "shardlib/ops/reinterpret.hpp"
#include "shardlib/support/inline.hpp"

namespace shardlib::detail {

/// Throws Error unless the axes `to` on `there` number the same devices as `from` on `here`, in the same order.
SHARDLIB_INLINE void check_same_devices(const OpInfo& op, const Device& here, const Axes& from, const Device& there,
                                        const Axes& to);

}  // namespace shardlib::detail

#ifndef SHARDLIB_COMPILED
#include "shardlib/compute/impl/reinterpret.hpp"
#endif
