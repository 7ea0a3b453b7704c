// Matrix product on the host: oneDNN for f32 where the build has it, Eigen otherwise.
#pragma once

#ifndef EIGEN_DONT_PARALLELIZE
#define EIGEN_DONT_PARALLELIZE  // threads are the caller's affair
#endif
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // g++ 12's own AVX-512 header, inlined into Eigen
#endif
#include <Eigen/Core>
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic pop
#endif

#include <algorithm>
#include <cstdint>
#include <string>
#include <type_traits>
#if defined(SHARDLIB_WITH_DNNL)
#include <dnnl.h>
#endif

#include "shardlib/error.hpp"
#include "shardlib/exec.hpp"

namespace shardlib::kernels {

namespace detail {

template <class T>
void eigen_gemm(bool trans_a, bool trans_b, std::int64_t m, std::int64_t n, std::int64_t k, const T* a,
                std::int64_t lda, const T* b, std::int64_t ldb, T* c, std::int64_t ldc, bool accumulate) {
  using Matrix = Eigen::Matrix<T, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
  using Input = Eigen::Map<const Matrix, 0, Eigen::OuterStride<>>;
  const Input left(a, trans_a ? k : m, trans_a ? m : k, Eigen::OuterStride<>(lda));
  const Input right(b, trans_b ? n : k, trans_b ? k : n, Eigen::OuterStride<>(ldb));
  Eigen::Map<Matrix, 0, Eigen::OuterStride<>> result(c, m, n, Eigen::OuterStride<>(ldc));
  if (!accumulate) result.setZero();
  if (trans_a && trans_b) {
    result.noalias() += left.transpose() * right.transpose();
  } else if (trans_a) {
    result.noalias() += left.transpose() * right;
  } else if (trans_b) {
    result.noalias() += left * right.transpose();
  } else {
    result.noalias() += left * right;
  }
}

}  // namespace detail

/// C = op(A) op(B), plus C where `accumulate`; row-major, op transposes where its flag says so. op(A) is m x k.
template <class T>
void gemm(const Exec& /*exec*/, bool trans_a, bool trans_b, std::int64_t m, std::int64_t n, std::int64_t k, const T* a,
          std::int64_t lda, const T* b, std::int64_t ldb, T* c, std::int64_t ldc, bool accumulate) {
  static_assert(std::is_same_v<T, float> || std::is_same_v<T, double>);
  if (m == 0 || n == 0) return;
  if (k == 0) {
    if (accumulate) return;
    for (std::int64_t i = 0; i < m; ++i) std::fill_n(c + i * ldc, n, T(0));
    return;
  }
#if defined(SHARDLIB_WITH_DNNL)
  if constexpr (std::is_same_v<T, float>) {
    const auto status = dnnl_sgemm(trans_a ? 'T' : 'N', trans_b ? 'T' : 'N', m, n, k, 1.0F, a, lda, b, ldb,
                                   accumulate ? 1.0F : 0.0F, c, ldc);
    if (status != dnnl_success) {
      const auto text = [](std::int64_t v) { return std::to_string(v); };
      throw Error("gemm: dnnl_sgemm failed with status " + text(status) + " on m=" + text(m) + " n=" + text(n) +
                  " k=" + text(k) + " lda=" + text(lda) + " ldb=" + text(ldb) + " ldc=" + text(ldc) +
                  "; check the leading dims, or build without SHARDLIB_WITH_DNNL");
    }
  } else
#endif
  {
    detail::eigen_gemm(trans_a, trans_b, m, n, k, a, lda, b, ldb, c, ldc, accumulate);
  }
}

}  // namespace shardlib::kernels
