// Runs kernels on a CUDA device, without Kokkos. scripts/test-cuda.sh compiles it; no backend of a device uses it yet.
#pragma once

#if defined(__CUDACC__)

#include <cstddef>
#include <cstdint>

#include "shardlib/device/team.hpp"

namespace shardlib::detail {

/// A block of CUDA threads, which are the lanes.
struct CudaTeam : TeamMemory {
  static constexpr bool single = false;

  explicit __device__ CudaTeam(const TeamMemory& memory) : TeamMemory(memory) {}
  template <class F>
  __device__ void lanes(std::int64_t count, const F& f) const {
    for (std::int64_t i = threadIdx.x; i < count; i += blockDim.x) f(i);
  }
  template <class F>
  __device__ void one(const F& f) const {
    if (threadIdx.x == 0) f();
  }
  __device__ void barrier() const { __syncthreads(); }
};

/// A block runs every gridDim-th item.
template <class Kernel>
__global__ void run_on_cuda(const Kernel kernel, std::int64_t items, std::byte* scratch, std::size_t scratch_bytes) {
  __shared__ alignas(16) std::byte tile[team_tile_bytes];
  __shared__ alignas(16) std::byte board[team_board_bytes];
  const CudaTeam team({scratch + scratch_bytes * blockIdx.x, tile, board});
  for (std::int64_t item = blockIdx.x; item < items; item += gridDim.x) {
    kernel(team, item);
    team.barrier();
  }
}

/// Starts a kernel on a stream. `scratch` has `scratch_bytes` for each of the `blocks`.
template <class Kernel>
cudaError_t launch_on_cuda(cudaStream_t stream, std::int64_t items, unsigned blocks, std::byte* scratch,
                           std::size_t scratch_bytes, const Kernel& kernel) {
  constexpr unsigned lanes = 128;
  run_on_cuda<<<blocks, lanes, 0, stream>>>(kernel, items, scratch, scratch_bytes);
  return cudaGetLastError();
}

}  // namespace shardlib::detail

#endif
