// The same for cuBLASLt: it checks what its documentation demands of a call, and computes the product and its epilogue
// in double.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "cublas_v2.h"

using cublasLtHandle_t = cublasContext*;
enum cublasLtEpilogue_t {
  CUBLASLT_EPILOGUE_DEFAULT = 1,
  CUBLASLT_EPILOGUE_BIAS = 4,
  CUBLASLT_EPILOGUE_GELU_AUX_BIAS = 164,
  CUBLASLT_EPILOGUE_DGELU = 192
};
enum cublasLtReductionScheme_t { CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE = 2 };
enum cublasLtMatmulDescAttributes_t {
  CUBLASLT_MATMUL_DESC_TRANSA = 3,
  CUBLASLT_MATMUL_DESC_TRANSB = 4,
  CUBLASLT_MATMUL_DESC_EPILOGUE = 7,
  CUBLASLT_MATMUL_DESC_BIAS_POINTER = 8,
  CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER = 11,
  CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD = 12
};
enum cublasLtMatmulPreferenceAttributes_t {
  CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES = 1,
  CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK = 3,
  CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES = 5,
  CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
  CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
  CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES
};

struct StandInLtMatmul {
  cublasComputeType_t compute;
  cudaDataType_t scale;
  cublasOperation_t op_a = CUBLAS_OP_N, op_b = CUBLAS_OP_N;
  cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_DEFAULT;
  void *bias = nullptr, *aux = nullptr;
  std::int64_t aux_ld = 0;
};
struct StandInLtLayout {
  cudaDataType_t type;
  std::uint64_t rows, columns;
  std::int64_t ld;
};
struct StandInLtPreference {
  std::size_t workspace = 0;
  std::uint32_t reductions = 7, alignment[4] = {256, 256, 256, 256};
};
using cublasLtMatmulDesc_t = StandInLtMatmul*;
using cublasLtMatrixLayout_t = StandInLtLayout*;
using cublasLtMatmulPreference_t = StandInLtPreference*;
/// What an algorithm was found for. Others may not be valid, or may read past what is aligned.
struct cublasLtMatmulAlgo_t {
  StandInLtMatmul call;
  StandInLtLayout a, b, c, d;
  std::uint32_t alignment[4];
  std::size_t workspace;
};
struct cublasLtMatmulHeuristicResult_t {
  cublasLtMatmulAlgo_t algo;
  std::size_t workspaceSize;
  cublasStatus_t state;
};

/// The answers that a test asks for, and the calls that were made.
struct StandInLt {
  bool has_algorithms = true;
  int heuristics = 0, products = 0;
  cublasLtEpilogue_t last = CUBLASLT_EPILOGUE_DEFAULT;
};
inline StandInLt stand_in_lt;

inline cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* desc, cublasComputeType_t compute,
                                               cudaDataType_t scale) {
  return *desc = new StandInLtMatmul{compute, scale}, CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t desc) {
  return delete desc, CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* layout, cudaDataType_t type,
                                                 std::uint64_t rows, std::uint64_t columns, std::int64_t ld) {
  return *layout = new StandInLtLayout{type, rows, columns, ld}, CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t layout) {
  return delete layout, CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* preference) {
  return *preference = new StandInLtPreference, CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t preference) {
  return delete preference, CUBLAS_STATUS_SUCCESS;
}
template <class T>
cublasStatus_t stand_in_set(T& to, const void* from, std::size_t bytes) {
  if (bytes != sizeof(T)) return CUBLAS_STATUS_INVALID_VALUE;
  return std::memcpy(&to, from, bytes), CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t desc, cublasLtMatmulDescAttributes_t which,
                                                     const void* value, std::size_t bytes) {
  switch (which) {
    case CUBLASLT_MATMUL_DESC_TRANSA:
      return stand_in_set(desc->op_a, value, bytes);
    case CUBLASLT_MATMUL_DESC_TRANSB:
      return stand_in_set(desc->op_b, value, bytes);
    case CUBLASLT_MATMUL_DESC_EPILOGUE:
      return stand_in_set(desc->epilogue, value, bytes);
    case CUBLASLT_MATMUL_DESC_BIAS_POINTER:
      return stand_in_set(desc->bias, value, bytes);
    case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER:
      return stand_in_set(desc->aux, value, bytes);
    case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD:
      return stand_in_set(desc->aux_ld, value, bytes);
  }
  return CUBLAS_STATUS_INVALID_VALUE;
}
inline cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t preference,
                                                           cublasLtMatmulPreferenceAttributes_t which,
                                                           const void* value, std::size_t bytes) {
  if (which == CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES) return stand_in_set(preference->workspace, value, bytes);
  if (which == CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK) return stand_in_set(preference->reductions, value, bytes);
  return stand_in_set(preference->alignment[which - CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES], value, bytes);
}

/// Whether shapes, dtypes and epilogue of a call are as the documentation demands.
inline bool stand_in_fits(const StandInLtMatmul& call, const StandInLtLayout& a, const StandInLtLayout& b,
                          const StandInLtLayout& c, const StandInLtLayout& d) {
  const auto turned = [](cublasOperation_t op, const StandInLtLayout& x) {
    return op == CUBLAS_OP_T ? StandInLtLayout{x.type, x.columns, x.rows, x.ld} : x;
  };
  const StandInLtLayout left = turned(call.op_a, a), right = turned(call.op_b, b);
  bool fits = left.rows == d.rows && right.columns == d.columns && left.columns == right.rows && c.rows == d.rows &&
              c.columns == d.columns && c.ld == d.ld;
  for (const StandInLtLayout* x : {&a, &b, &c, &d})
    fits = fits && x->type == d.type && x->ld >= static_cast<std::int64_t>(x->rows);
  fits = fits && call.compute == CUBLAS_COMPUTE_32F && call.scale == CUDA_R_32F && d.type != CUDA_R_64F;
  const bool has_bias = call.epilogue == CUBLASLT_EPILOGUE_BIAS || call.epilogue == CUBLASLT_EPILOGUE_GELU_AUX_BIAS;
  const bool has_aux = call.epilogue == CUBLASLT_EPILOGUE_DGELU || call.epilogue == CUBLASLT_EPILOGUE_GELU_AUX_BIAS;
  return fits && has_bias == (call.bias != nullptr) && has_aux == (call.aux != nullptr) &&
         (!has_aux || (call.aux_ld % 8 == 0 && call.aux_ld >= static_cast<std::int64_t>(d.rows)));
}
inline cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t, cublasLtMatmulDesc_t desc,
                                                     cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                                     cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                                     cublasLtMatmulPreference_t preference, int wanted,
                                                     cublasLtMatmulHeuristicResult_t* results, int* found) {
  ++stand_in_lt.heuristics;
  *found = 0;
  // Other reductions would round parts of a sum to the result's dtype.
  if (wanted != 1 || preference->reductions != CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE ||
      !stand_in_fits(*desc, *a, *b, *c, *d))
    return CUBLAS_STATUS_INVALID_VALUE;
  if (!stand_in_lt.has_algorithms) return CUBLAS_STATUS_NOT_SUPPORTED;
  cublasLtMatmulAlgo_t found_for{*desc, *a, *b, *c, *d, {}, preference->workspace};
  std::copy_n(preference->alignment, 4, found_for.alignment);
  *results = {found_for, preference->workspace, CUBLAS_STATUS_SUCCESS};
  return *found = 1, CUBLAS_STATUS_SUCCESS;
}

/// The alignment that an address has, up to 256 bytes; of a null pointer 256.
inline std::uint32_t stand_in_alignment(const void* address) {
  const auto at = reinterpret_cast<std::uintptr_t>(address) % 256;
  return at == 0 ? 256 : static_cast<std::uint32_t>(at & (~at + 1));
}
/// Whether an algorithm was found for such a call with arrays that are aligned no better than these.
inline bool stand_in_fits(const cublasLtMatmulAlgo_t& algorithm, const StandInLtMatmul& call, const StandInLtLayout& a,
                          const StandInLtLayout& b, const StandInLtLayout& c, const StandInLtLayout& d,
                          const void* const (&arrays)[4]) {
  const StandInLtMatmul& known = algorithm.call;
  bool fits = known.compute == call.compute && known.scale == call.scale && known.op_a == call.op_a &&
              known.op_b == call.op_b && known.epilogue == call.epilogue && known.aux_ld == call.aux_ld &&
              stand_in_alignment(call.bias) >= stand_in_alignment(known.bias) &&
              stand_in_alignment(call.aux) >= stand_in_alignment(known.aux);
  const StandInLtLayout* const pairs[][2] = {
      {&algorithm.a, &a}, {&algorithm.b, &b}, {&algorithm.c, &c}, {&algorithm.d, &d}};
  for (const auto& [x, y] : pairs)
    fits = fits && x->type == y->type && x->rows == y->rows && x->columns == y->columns && x->ld == y->ld;
  for (int i = 0; i < 4; ++i) fits = fits && stand_in_alignment(arrays[i]) >= algorithm.alignment[i];
  return fits;
}

/// A column-major matrix in the memory of the current GPU.
class StandInMatrix {
 public:
  StandInMatrix(const void* data, cudaDataType_t type, std::uint64_t rows, std::uint64_t columns, std::int64_t ld)
      : data_(static_cast<std::byte*>(const_cast<void*>(data))), bytes_(type == CUDA_R_16BF ? 2 : 4), ld_(ld) {
    const std::size_t end = (static_cast<std::size_t>(ld) * (columns - 1) + rows) * bytes_;
    const std::lock_guard lock(stand_in_mutex);
    for (const auto& [memory, block] : stand_in_blocks) {
      auto* const begin = static_cast<std::byte*>(memory);
      there_ = there_ || (block.first == stand_in_gpu && data_ >= begin && data_ + end <= begin + block.second);
    }
  }
  StandInMatrix(const void* data, const StandInLtLayout& layout)
      : StandInMatrix(data, layout.type, layout.rows, layout.columns, layout.ld) {}
  [[nodiscard]] bool there() const { return there_ && reinterpret_cast<std::uintptr_t>(data_) % 16 == 0; }
  [[nodiscard]] double get(std::uint64_t row, std::uint64_t column) const {
    float value = 0;
    std::memcpy(reinterpret_cast<std::byte*>(&value) + 4 - bytes_, at(row, column), bytes_);
    return static_cast<double>(value);
  }
  void set(std::uint64_t row, std::uint64_t column, double number) const {
    const float value = static_cast<float>(number);
    std::uint32_t bits = 0;
    std::memcpy(&bits, &value, 4);
    if (bytes_ == 2) bits += 0x7fff + (bits >> 16 & 1);  // to the nearest, of two the even one
    std::memcpy(at(row, column), reinterpret_cast<std::byte*>(&bits) + 4 - bytes_, bytes_);
  }

 private:
  [[nodiscard]] std::byte* at(std::uint64_t row, std::uint64_t column) const {
    return data_ + (row + column * static_cast<std::uint64_t>(ld_)) * bytes_;
  }
  std::byte* data_;
  std::size_t bytes_;
  std::int64_t ld_;
  bool there_ = false;
};

inline cublasStatus_t cublasLtMatmul(cublasLtHandle_t, cublasLtMatmulDesc_t call, const void* alpha, const void* a,
                                     cublasLtMatrixLayout_t layout_a, const void* b, cublasLtMatrixLayout_t layout_b,
                                     const void* beta, const void* c, cublasLtMatrixLayout_t layout_c, void* d,
                                     cublasLtMatrixLayout_t layout_d, const cublasLtMatmulAlgo_t* algorithm,
                                     void* workspace, std::size_t workspace_bytes, cudaStream_t stream) {
  const StandInMatrix left(a, *layout_a), right(b, *layout_b), result(d, *layout_d);
  const bool has_bias = call->bias != nullptr, has_aux = call->aux != nullptr;
  const StandInMatrix bias(has_bias ? call->bias : d, layout_d->type, layout_d->rows, 1, layout_d->ld);
  const StandInMatrix aux(has_aux ? call->aux : d, layout_d->type, layout_d->rows, layout_d->columns,
                          has_aux ? call->aux_ld : layout_d->ld);
  const StandInMatrix scratch(workspace, CUDA_R_32F, workspace_bytes / 4, 1, 0);
  const bool there = left.there() && right.there() && result.there() && bias.there() && aux.there() && scratch.there();
  if (!there || !stand_in_fits(*call, *layout_a, *layout_b, *layout_c, *layout_d) || c != d ||
      !stand_in_fits(*algorithm, *call, *layout_a, *layout_b, *layout_c, *layout_d, {a, b, c, d}) ||
      algorithm->workspace > workspace_bytes || stand_in_alignment(workspace) < 256 ||
      *static_cast<const float*>(alpha) != 1 || *static_cast<const float*>(beta) != 0)
    return CUBLAS_STATUS_INVALID_VALUE;
  if (stand_in_put(stream) != cudaSuccess) return CUBLAS_STATUS_INVALID_VALUE;
  const std::uint64_t depth = call->op_a == CUBLAS_OP_T ? layout_a->rows : layout_a->columns;
  for (std::uint64_t column = 0; column < layout_d->columns; ++column)
    for (std::uint64_t row = 0; row < layout_d->rows; ++row) {
      double sum = 0;
      for (std::uint64_t k = 0; k < depth; ++k)
        sum += (call->op_a == CUBLAS_OP_T ? left.get(k, row) : left.get(row, k)) *
               (call->op_b == CUBLAS_OP_T ? right.get(column, k) : right.get(k, column));
      if (has_bias) sum += bias.get(row, 0);
      const double x = call->epilogue == CUBLASLT_EPILOGUE_DGELU ? aux.get(row, column) : sum;
      const double k = std::sqrt(2 / std::acos(-1.0)), t = std::tanh(k * (x + 0.044715 * x * x * x));
      if (call->epilogue == CUBLASLT_EPILOGUE_GELU_AUX_BIAS) {
        aux.set(row, column, sum);
        sum = 0.5 * x * (1 + t);
      }
      if (call->epilogue == CUBLASLT_EPILOGUE_DGELU)
        sum *= 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * k * (1 + 3 * 0.044715 * x * x);
      result.set(row, column, sum);
    }
  stand_in_lt.last = call->epilogue;
  return ++stand_in_lt.products, CUBLAS_STATUS_SUCCESS;
}
