// Matrix products on a GPU, by cuBLAS.
#pragma once

#if defined(SHARDLIB_LAUNCHER_CUDA)

#include <cstdint>
#include <limits>
#include <string>
#include <type_traits>

#include "shardlib/memory/gpu.hpp"
#include "shardlib/spec/dtype.hpp"
#include "shardlib/support/error.hpp"

namespace shardlib::kernels::detail {

template <class T>
inline constexpr cudaDataType_t cuda_type = std::is_same_v<T, bf16>    ? CUDA_R_16BF
                                            : std::is_same_v<T, float> ? CUDA_R_32F
                                                                       : CUDA_R_64F;

/// As gemm_batch. Products of f32 are of f32 (not TF32), and sums of bf16 are f32.
template <class T, class C>
void gpu_gemm(const shardlib::detail::Gpu& gpu, bool trans_a, bool trans_b, std::int64_t m, std::int64_t n,
              std::int64_t k, const T* a, std::int64_t lda, std::int64_t stride_a, const T* b, std::int64_t ldb,
              std::int64_t stride_b, C* c, std::int64_t ldc, std::int64_t stride_c, std::int64_t count,
              bool accumulate) {
  for (const std::int64_t size : {m, n, k, lda, ldb, ldc, count})
    if (size > std::numeric_limits<int>::max())
      throw Error("product of matrices: the size or stride " + std::to_string(size) +
                  " is more than cuBLAS takes, 2147483647; divide the arrays, or shard them");
  // The kernels for tensor cores take 8 columns and 8 terms of bf16 at a time. For one more, as of a vocabulary of
  // 50257, cuBLAS has others, which take six times as long; so the rest is a product of its own.
  constexpr std::int64_t unit = 8, least = 64 * unit, large = std::int64_t{1} << 28;
  if (std::is_same_v<T, bf16> && count == 1 && m * n * k >= large && lda % unit == 0 && ldb % unit == 0 &&
      ldc % unit == 0) {
    const auto part = [&](std::int64_t columns, std::int64_t terms, const T* from_a, const T* from_b, C* to, bool add) {
      gpu_gemm(gpu, trans_a, trans_b, m, columns, terms, from_a, lda, 0, from_b, ldb, 0, to, ldc, 0, 1, add);
    };
    const std::int64_t columns = n / unit * unit;
    if (columns != n && columns >= least) {
      part(columns, k, a, b, c, accumulate);
      return part(n - columns, k, a, trans_b ? b + columns * ldb : b + columns, c + columns, accumulate);
    }
    // Parts of a sum in bf16 would be rounded, and then their sum.
    if constexpr (!std::is_same_v<C, bf16>) {
      const std::int64_t terms = k / unit * unit;
      if (terms != k && terms >= least) {  // the few terms first: the sum of all is rounded last
        part(n, k - terms, trans_a ? a + terms * lda : a + terms, trans_b ? b + terms : b + terms * ldb, c, accumulate);
        return part(n, terms, a, b, c, true);
      }
    }
  }
  using Number = std::conditional_t<std::is_same_v<C, double>, double, float>;
  const Number one = 1, before = accumulate ? Number(1) : Number(0);
  const auto narrow = [](std::int64_t v) { return static_cast<int>(v); };
  const auto op = [](bool transposed) { return transposed ? CUBLAS_OP_T : CUBLAS_OP_N; };
  gpu.before_enqueue();
  constexpr auto compute = std::is_same_v<C, double> ? CUBLAS_COMPUTE_64F : CUBLAS_COMPUTE_32F;
  // cuBLAS has the columns of a matrix contiguous: it sees C' = op(B)' op(A)'. It divides the sums of one product among
  // multiprocessors, but not those of a batch.
  if (count == 1)
    return shardlib::detail::check_cublas(
        cublasGemmEx(gpu.cublas(), op(trans_b), op(trans_a), narrow(n), narrow(m), narrow(k), &one, b, cuda_type<T>,
                     narrow(ldb), a, cuda_type<T>, narrow(lda), &before, c, cuda_type<C>, narrow(ldc), compute,
                     CUBLAS_GEMM_DEFAULT),
        "a product of matrices");
  shardlib::detail::check_cublas(
      cublasGemmStridedBatchedEx(gpu.cublas(), op(trans_b), op(trans_a), narrow(n), narrow(m), narrow(k), &one, b,
                                 cuda_type<T>, narrow(ldb), stride_b, a, cuda_type<T>, narrow(lda), stride_a, &before,
                                 c, cuda_type<C>, narrow(ldc), stride_c, narrow(count), compute, CUBLAS_GEMM_DEFAULT),
      "a product of matrices");
}

}  // namespace shardlib::kernels::detail

#endif
