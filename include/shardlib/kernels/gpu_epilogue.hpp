// A matrix product with an epilogue on NVIDIA's GPUs, by cuBLASLt.
#pragma once

#if defined(SHARDLIB_LAUNCHER_CUDA) && !defined(SHARDLIB_LAUNCHER_HIP)

#include <cublasLt.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <type_traits>

#include "shardlib/kernels/epilogue.hpp"
#include "shardlib/kernels/gpu_gemm.hpp"
#include "shardlib/kernels/impl/einsum_loops.hpp"
#include "shardlib/memory/gpu.hpp"
#include "shardlib/spec/dtype.hpp"

namespace shardlib::kernels::detail {

/// A handle of cuBLAS is one of cuBLASLt, too.
inline cublasLtHandle_t lt_handle(const shardlib::detail::Gpu& gpu) {
  return reinterpret_cast<cublasLtHandle_t>(gpu.cublas());
}

/// Owns a descriptor of cuBLASLt.
template <class T, auto Destroy>
class LtOwned {
  struct End {
    void operator()(T owned) const { static_cast<void>(Destroy(owned)); }
  };
  std::unique_ptr<std::remove_pointer_t<T>, End> owned_;

 public:
  template <class Create, class... Args>
  explicit LtOwned(const Create& create, const Args&... args) {
    T made = nullptr;
    shardlib::detail::check_cublas(create(&made, args...), "a descriptor of cuBLASLt");
    owned_.reset(made);
  }
  [[nodiscard]] T get() const { return owned_.get(); }
};
using LtLayout = LtOwned<cublasLtMatrixLayout_t, &cublasLtMatrixLayoutDestroy>;
using LtPreference = LtOwned<cublasLtMatmulPreference_t, &cublasLtMatmulPreferenceDestroy>;

/// The matrices of a product as cuBLASLt sees them, whose columns are contiguous: D = op(A) op(B), with our B as A.
template <class T>
struct LtProduct {
  LtOwned<cublasLtMatmulDesc_t, &cublasLtMatmulDescDestroy> what{cublasLtMatmulDescCreate, CUBLAS_COMPUTE_32F,
                                                                 CUDA_R_32F};
  LtLayout a, b, d;

  explicit LtProduct(const EinsumMatrices& g)
      : a(layout(g.b, g.depth, g.columns)), b(layout(g.a, g.rows, g.depth)), d(layout(g.c, g.rows, g.columns)) {
    const auto op = [](const MatrixLayout& stored) { return stored.transposed ? CUBLAS_OP_T : CUBLAS_OP_N; };
    set(CUBLASLT_MATMUL_DESC_TRANSA, op(g.b));
    set(CUBLASLT_MATMUL_DESC_TRANSB, op(g.a));
  }
  template <class V>
  void set(cublasLtMatmulDescAttributes_t attribute, const V& value) {
    shardlib::detail::check_cublas(cublasLtMatmulDescSetAttribute(what.get(), attribute, &value, sizeof value),
                                   "cublasLtMatmulDescSetAttribute");
  }

 private:
  /// The layout of a row-major matrix of these sizes, or of its transpose.
  static LtLayout layout(const MatrixLayout& stored, std::int64_t rows, std::int64_t columns) {
    const auto size = [](std::int64_t n) { return static_cast<std::uint64_t>(n); };
    return LtLayout(cublasLtMatrixLayoutCreate, cuda_type<T>, size(stored.transposed ? rows : columns),
                    size(stored.transposed ? columns : rows), stored.stride);
  }
};

/// The alignment of an address that cuBLASLt asks for, up to 256 bytes.
inline std::uint32_t lt_alignment(const void* address) {
  const auto at = reinterpret_cast<std::uintptr_t>(address);
  return static_cast<std::uint32_t>(std::min<std::uintptr_t>(256, at & (~at + 1)));
}

/// The numbers that the choice of an algorithm depends on.
using LtKey = std::array<std::int64_t, 16>;

/// The algorithm that cuBLASLt's heuristic names first, or none. Parts of a sum stay f32, in the workspace, until they
/// are added.
template <class T>
std::optional<cublasLtMatmulAlgo_t> lt_algorithm(const shardlib::detail::Gpu& gpu, const LtProduct<T>& product,
                                                 const void* a, const void* b, const void* d) {
  const LtPreference wanted(cublasLtMatmulPreferenceCreate);
  const auto set = [&wanted](cublasLtMatmulPreferenceAttributes_t attribute, const auto& value) {
    shardlib::detail::check_cublas(cublasLtMatmulPreferenceSetAttribute(wanted.get(), attribute, &value, sizeof value),
                                   "cublasLtMatmulPreferenceSetAttribute");
  };
  set(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, gpu.workspace_bytes);
  set(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, std::uint32_t{CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE});
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, lt_alignment(a));
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, lt_alignment(b));
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, lt_alignment(d));
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, lt_alignment(d));
  cublasLtMatmulHeuristicResult_t first{};
  int found = 0;
  const cublasStatus_t status =
      cublasLtMatmulAlgoGetHeuristic(lt_handle(gpu), product.what.get(), product.a.get(), product.b.get(),
                                     product.d.get(), product.d.get(), wanted.get(), 1, &first, &found);
  if (status == CUBLAS_STATUS_NOT_SUPPORTED || (status == CUBLAS_STATUS_SUCCESS && found == 0)) return {};
  shardlib::detail::check_cublas(status, "cublasLtMatmulAlgoGetHeuristic");
  if (first.state != CUBLAS_STATUS_SUCCESS) return {};
  return first.algo;
}

/// C = op(A) op(B) and the epilogue, for f32 (not TF32) and bf16 with sums in f32. False where cuBLASLt has no kernel
/// for it, or a slow one.
template <class T>
bool gpu_gemm_with(shardlib::detail::Gpu& gpu, const EinsumMatrices& g, const T* a, const T* b, T* c,
                   const Epilogue& epilogue) {
  // Arrays of the result's shape need rows at distances of whole units, as do the kernels for tensor cores.
  constexpr std::int64_t unit = 8;
  for (const std::int64_t size : {g.c.stride, g.columns, g.depth, g.a.stride, g.b.stride})
    if (size % unit != 0) return false;
  gpu.before_enqueue();
  LtProduct<T> product(g);
  void* d = c;
  cublasLtEpilogue_t kind = CUBLASLT_EPILOGUE_BIAS;
  const void* aux = nullptr;
  if (epilogue.gelu != nullptr) {
    kind = CUBLASLT_EPILOGUE_GELU_AUX_BIAS;
    d = epilogue.gelu;
    aux = c;
  } else if (epilogue.slope_at != nullptr) {
    kind = CUBLASLT_EPILOGUE_DGELU;
    aux = epilogue.slope_at;
  }
  product.set(CUBLASLT_MATMUL_DESC_EPILOGUE, kind);
  if (epilogue.bias != nullptr) product.set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, epilogue.bias);
  if (aux != nullptr) {
    product.set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, aux);
    product.set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, g.c.stride);
  }
  // The heuristic takes tens of microseconds. Its first answer stays that of the size, so that bits do not change.
  using Algorithms = std::map<LtKey, std::optional<cublasLtMatmulAlgo_t>>;
  if (!gpu.remembered()) gpu.remembered() = std::make_shared<Algorithms>();
  Algorithms& algorithms = *static_cast<Algorithms*>(gpu.remembered().get());
  const LtKey key{cuda_type<T>,
                  kind,
                  g.rows,
                  g.columns,
                  g.depth,
                  g.a.transposed,
                  g.a.stride,
                  g.b.transposed,
                  g.b.stride,
                  g.c.stride,
                  lt_alignment(a),
                  lt_alignment(b),
                  lt_alignment(c),
                  lt_alignment(d),
                  lt_alignment(epilogue.bias),
                  lt_alignment(aux)};
  auto found = algorithms.find(key);
  if (found == algorithms.end()) found = algorithms.emplace(key, lt_algorithm(gpu, product, b, a, d)).first;
  if (!found->second) return false;
  const float one = 1, zero = 0;
  shardlib::detail::check_cublas(cublasLtMatmul(lt_handle(gpu), product.what.get(), &one, b, product.a.get(), a,
                                                product.b.get(), &zero, d, product.d.get(), d, product.d.get(),
                                                &*found->second, gpu.workspace(), gpu.workspace_bytes, gpu.stream()),
                                 "a product of matrices with an epilogue");
  return true;
}

}  // namespace shardlib::kernels::detail

#endif
