// Runs kernels on a GPU, without Kokkos: NVIDIA's by CUDA, AMD's by HIP.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "shardlib/device/team.hpp"
#include "shardlib/memory/gpu.hpp"

namespace shardlib::detail {

#if defined(__CUDACC__) || defined(__HIPCC__)

inline constexpr unsigned cuda_lanes = 128;

/// A block of CUDA threads, which are the lanes. Its parts are warps, or with HIP halves of wavefronts.
struct CudaTeam : TeamMemory {
  static constexpr bool single = false;
  static constexpr int part_lanes = 32, parts = cuda_lanes / part_lanes;

  explicit __device__ CudaTeam(const TeamMemory& memory) : TeamMemory(memory) {}
  template <class F>
  __device__ void lanes(std::int64_t count, const F& f) const {
#pragma unroll 4
    for (std::int64_t i = threadIdx.x; i < count; i += blockDim.x) f(i);
  }
  template <int Ahead, class Load, class Store>
  __device__ void stream(std::int64_t count, const Load& load, const Store& store) const {
    for (std::int64_t i = threadIdx.x; i < count; i += Ahead * cuda_lanes) {
      decltype(load(i)) loaded[Ahead];
#pragma unroll
      for (int k = 0; k < Ahead; ++k)
        if (i + k * cuda_lanes < count) loaded[k] = load(i + k * cuda_lanes);
#pragma unroll
      for (int k = 0; k < Ahead; ++k)
        if (i + k * cuda_lanes < count) store(i + k * cuda_lanes, loaded[k]);
    }
  }
  template <class F>
  __device__ void one(const F& f) const {
    if (threadIdx.x == 0) f();
  }
  __device__ void barrier() const {
    __syncthreads();
  }
  [[nodiscard]] __device__ int part() const {
    return static_cast<int>(threadIdx.x) / part_lanes;
  }
  [[nodiscard]] __device__ int part_lane() const {
    return static_cast<int>(threadIdx.x) % part_lanes;
  }
  template <class A>
  [[nodiscard]] __device__ A exchange(A value, int distance) const {
#if defined(__HIPCC__)
    return __shfl_xor(value, distance, part_lanes);
#else
    return __shfl_xor_sync(~0U, value, distance);
#endif
  }
};

/// How many teams of a kernel a multiprocessor should hold at least, which bounds the registers of a lane. A kernel
/// with `static constexpr int teams_at_once` says itself.
template <class Kernel>
inline constexpr int cuda_teams_at_once = 0;
template <class Kernel>
requires requires {
  Kernel::teams_at_once;
}
inline constexpr int cuda_teams_at_once<Kernel> = Kernel::teams_at_once;

#if defined(__HIPCC__)  // bounds count other things there, and arguments have a place of their own
#define SHARDLIB_LAUNCH_BOUNDS(Kernel) __launch_bounds__(cuda_lanes)
#define SHARDLIB_GRID_CONSTANT
#else
#define SHARDLIB_LAUNCH_BOUNDS(Kernel) __launch_bounds__(cuda_lanes, cuda_teams_at_once<Kernel>)
#define SHARDLIB_GRID_CONSTANT __grid_constant__
#endif

/// A block runs every gridDim-th item. The kernel stays where the launch put it: a copy for each thread, of loops over
/// many dims, would take longer than many kernels.
template <class Kernel>
__global__ void SHARDLIB_LAUNCH_BOUNDS(Kernel)
    run_on_cuda(const SHARDLIB_GRID_CONSTANT Kernel kernel, std::int64_t items, std::byte* scratch,
                std::size_t scratch_bytes) {
  alignas(16) __shared__ std::byte tile[tile_bytes_of<Kernel>];
  alignas(16) __shared__ std::byte board[team_board_bytes];
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
  run_on_cuda<<<blocks, cuda_lanes, 0, stream>>>(kernel, items, scratch, scratch_bytes);
  return cudaGetLastError();
}

#if defined(SHARDLIB_LAUNCHER_CUDA)
/// Loads a kernel on the current GPU, if it is not there yet. Unless a program asks for it, CUDA loads a kernel when it
/// is first started.
template <class Kernel>
void load_on_cuda() {
  cudaFuncAttributes attributes{};
  check_cuda(cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(&run_on_cuda<Kernel>)),
             "cudaFuncGetAttributes");
}
#endif

#endif

#if defined(SHARDLIB_LAUNCHER_CUDA)

/// How many blocks run a kernel of `items` items. Without scratch memory each item has a block, which a multiprocessor
/// takes when it is free.
inline unsigned cuda_blocks(const Gpu& gpu, std::int64_t items, std::size_t scratch_bytes) {
  constexpr std::int64_t blocks_per_multiprocessor = 16;  // of 128 threads: all that a multiprocessor can hold
  constexpr std::int64_t most = std::int64_t{1} << 30;    // that CUDA starts at once
  return static_cast<unsigned>(
      std::min(items, scratch_bytes == 0 ? most : gpu.multiprocessors() * blocks_per_multiprocessor));
}

template <class Kernel>
void run_by_cuda(const Gpu& gpu, std::int64_t items, unsigned blocks, std::byte* scratch, std::size_t scratch_bytes,
                 const Kernel& kernel) {
#if defined(__CUDACC__) || defined(__HIPCC__)
  gpu.before_enqueue();
  check_cuda(launch_on_cuda(gpu.stream(), items, blocks, scratch, scratch_bytes, kernel), "the start of a kernel");
#else
  static_assert(sizeof(Kernel) == 0,
                "SHARDLIB_LAUNCHER=cuda or hip: this source starts kernels, so nvcc or hipcc must compile it; in "
                "CMake, call shardlib_compile_for_gpu(target)");
#endif
}

#endif

}  // namespace shardlib::detail
