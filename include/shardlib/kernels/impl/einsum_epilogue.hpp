// Definitions of einsum_epilogue.hpp.
#pragma once

#include "shardlib/kernels/einsum_epilogue.hpp"

#include <array>
#include <cstddef>
#include <utility>

#include "shardlib/kernels/gpu_epilogue.hpp"
#include "shardlib/kernels/impl/einsum_loops.hpp"

namespace shardlib::kernels {

SHARDLIB_INLINE bool einsum_with_epilogue([[maybe_unused]] const Exec& exec, [[maybe_unused]] const EinsumPlan& plan,
                                          [[maybe_unused]] DType dtype, [[maybe_unused]] const void* lhs,
                                          [[maybe_unused]] std::span<const std::int64_t> lhs_shape,
                                          [[maybe_unused]] const void* rhs,
                                          [[maybe_unused]] std::span<const std::int64_t> rhs_shape,
                                          [[maybe_unused]] void* result, [[maybe_unused]] const Epilogue& epilogue) {
#if defined(SHARDLIB_LAUNCHER_CUDA) && !defined(SHARDLIB_LAUNCHER_HIP)
  if (!has_epilogues(exec)) return false;
  std::array<std::int64_t, std::size_t{2} * max_rank> sizes{};
  for (int i = 0; i < plan.count; ++i) {
    const EinsumPlan::Index& index = plan.at(i);
    if (index.role == detail::Role::lhs_only || index.role == detail::Role::rhs_only) return false;
    const std::int64_t size = index.lhs >= 0 ? lhs_shape[static_cast<std::size_t>(index.lhs)]
                                             : rhs_shape[static_cast<std::size_t>(index.rhs)];
    if (size == 0) return false;
    sizes[static_cast<std::size_t>(i)] = size;
  }
  const EinsumLoops s = choose_einsum_loops(plan, {sizes.data(), static_cast<std::size_t>(plan.count)}, true);
  if (s.inner != EinsumLoops::Inner::gemm || s.kept.count() != 1 || s.summed.count() != 1 || s.permutes()) return false;
  const detail::EinsumMatrices g(s);
  if (epilogue.bias != nullptr && epilogue.bias_size != g.columns) return false;
  if (g.swapped) std::swap(lhs, rhs);
  if (dtype == DType::bf16)
    return detail::gpu_gemm_with(*exec.gpu(), g, static_cast<const bf16*>(lhs), static_cast<const bf16*>(rhs),
                                 static_cast<bf16*>(result), epilogue);
  if (dtype == DType::f32)
    return detail::gpu_gemm_with(*exec.gpu(), g, static_cast<const f32*>(lhs), static_cast<const f32*>(rhs),
                                 static_cast<f32*>(result), epilogue);
#endif
  return false;
}

}  // namespace shardlib::kernels
