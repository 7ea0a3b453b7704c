// Many matrix products of one size, whose operands and results are at constant distances in memory.
#pragma once

#include <cstdint>

#include "shardlib/device/exec.hpp"
#include "shardlib/kernels/gemm.hpp"

namespace shardlib::kernels {

/// gemm for each i in [0, count): of the matrices at a + i stride_a and b + i stride_b, into c + i stride_c. A stride
/// of an operand may be 0; results do not overlap. T is f32 or f64, and C is T; or T is bf16, on every CPU, and C is
/// f32, or bf16 without `accumulate`.
template <class T, class C>
void gemm_batch(const Exec& exec, bool trans_a, bool trans_b, std::int64_t m, std::int64_t n, std::int64_t k,
                const T* a, std::int64_t lda, std::int64_t stride_a, const T* b, std::int64_t ldb,
                std::int64_t stride_b, C* c, std::int64_t ldc, std::int64_t stride_c, std::int64_t count,
                bool accumulate) {
#if defined(SHARDLIB_LAUNCHER_CUDA)
  if (exec.gpu() != nullptr && m > 0 && n > 0 && k > 0)
    return detail::gpu_gemm(*exec.gpu(), trans_a, trans_b, m, n, k, a, lda, stride_a, b, ldb, stride_b, c, ldc,
                            stride_c, count, accumulate);
#endif
  for (std::int64_t i = 0; i < count; ++i)
    gemm<T, C>(exec, trans_a, trans_b, m, n, k, a + i * stride_a, lda, b + i * stride_b, ldb, c + i * stride_c, ldc,
               accumulate);
}

}  // namespace shardlib::kernels
