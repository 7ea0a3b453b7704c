// Products with an epilogue, in one call of a GPU's library.
#pragma once

#include <cstdint>
#include <span>

#include "shardlib/device/exec.hpp"
#include "shardlib/kernels/einsum_plan.hpp"
#include "shardlib/kernels/epilogue.hpp"
#include "shardlib/spec/dtype.hpp"
#include "shardlib/support/inline.hpp"

namespace shardlib::kernels {

/// Whether the products of this device can have epilogues.
inline bool has_epilogues([[maybe_unused]] const Exec& exec) {
#if defined(SHARDLIB_LAUNCHER_CUDA) && !defined(SHARDLIB_LAUNCHER_HIP)
  return exec.gpu() != nullptr;
#else
  return false;
#endif
}

/// As einsum of operands and result of one dtype, and then the epilogue, in one call of the GPU's library. Where that
/// has none for the dtype and the layouts, it does nothing and returns false.
[[nodiscard]] SHARDLIB_INLINE bool einsum_with_epilogue(const Exec& exec, const EinsumPlan& plan, DType dtype,
                                                        const void* lhs, std::span<const std::int64_t> lhs_shape,
                                                        const void* rhs, std::span<const std::int64_t> rhs_shape,
                                                        void* result, const Epilogue& epilogue);

}  // namespace shardlib::kernels

#ifndef SHARDLIB_COMPILED
#include "shardlib/kernels/impl/einsum_epilogue.hpp"
#endif
