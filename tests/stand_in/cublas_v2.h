// The same for cuBLAS: it starts, and multiplies nothing.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda_runtime.h"

enum cublasStatus_t {
  CUBLAS_STATUS_SUCCESS,
  CUBLAS_STATUS_NOT_INITIALIZED,
  CUBLAS_STATUS_INVALID_VALUE,
  CUBLAS_STATUS_NOT_SUPPORTED
};
enum cublasOperation_t { CUBLAS_OP_N, CUBLAS_OP_T };
enum cublasComputeType_t { CUBLAS_COMPUTE_32F, CUBLAS_COMPUTE_64F };
enum cublasGemmAlgo_t { CUBLAS_GEMM_DEFAULT };
enum cublasMath_t { CUBLAS_DEFAULT_MATH = 0, CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION = 16 };
struct cublasContext {
  cudaStream_t stream = nullptr;
  void* workspace = nullptr;  ///< null: one of the library's pool
};
using cublasHandle_t = cublasContext*;

inline const char* cublasGetStatusString(cublasStatus_t) {
  return "CUBLAS_STATUS_NOT_INITIALIZED";
}
inline cublasStatus_t cublasCreate(cublasHandle_t* handle) {
  return *handle = new cublasContext, CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t cublasDestroy(cublasHandle_t handle) {
  return delete handle, CUBLAS_STATUS_SUCCESS;
}
/// Also takes the workspace back.
inline cublasStatus_t cublasSetStream(cublasHandle_t handle, cudaStream_t stream) {
  return *handle = {stream, nullptr}, CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t cublasSetWorkspace(cublasHandle_t handle, void* workspace, std::size_t) {
  if (reinterpret_cast<std::uintptr_t>(workspace) % 256 != 0) return CUBLAS_STATUS_INVALID_VALUE;
  return handle->workspace = workspace, CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t cublasSetMathMode(cublasHandle_t, cublasMath_t) {
  return CUBLAS_STATUS_SUCCESS;
}
