// Runs kernels on a GPU: NVIDIA's by CUDA, or by Kokkos where SHARDLIB_KOKKOS_CUDA is defined; AMD's by HIP.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#if defined(SHARDLIB_KOKKOS_CUDA)
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#endif

#include "shardlib/device/team.hpp"
#include "shardlib/memory/gpu.hpp"
#include "shardlib/support/error.hpp"
#include "shardlib/support/kokkos.hpp"

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
    for (std::int64_t i = cuda_lane(); i < count; i += cuda_lanes) f(i);
  }
  template <int Ahead, class Load, class Store>
  __device__ void stream(std::int64_t count, const Load& load, const Store& store) const {
    for (std::int64_t i = cuda_lane(); i < count; i += Ahead * cuda_lanes) {
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
    if (cuda_lane() == 0) f();
  }
  __device__ void barrier() const {
    __syncthreads();
  }
  [[nodiscard]] __device__ int part() const {
    return cuda_lane() / part_lanes;
  }
  [[nodiscard]] __device__ int part_lane() const {
    return cuda_lane() % part_lanes;
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

/// Runs every `blocks`-th item of a kernel, from number `block` on, by one block of threads. `scratch` is that of all
/// blocks.
template <class Kernel>
__device__ __forceinline__ void run_block(const Kernel& kernel, std::int64_t items, std::int64_t block,
                                          std::int64_t blocks, const TeamMemory& all, std::size_t scratch_bytes) {
  const CudaTeam team(
      {all.scratch_bytes + scratch_bytes * static_cast<std::size_t>(block), all.tile_bytes, all.board_bytes});
  for (std::int64_t item = block; item < items; item += blocks) {
    kernel(team, item);
    team.barrier();
  }
}

/// The kernel stays where the launch put it: a copy for each thread, of loops over many dims, would take longer than
/// many kernels.
template <class Kernel>
__global__ void SHARDLIB_LAUNCH_BOUNDS(Kernel)
    run_on_cuda(const SHARDLIB_GRID_CONSTANT Kernel kernel, std::int64_t items, std::byte* scratch,
                std::size_t scratch_bytes) {
  alignas(16) __shared__ std::byte tile[tile_bytes_of<Kernel>];
  alignas(16) __shared__ std::byte board[team_board_bytes];
  run_block(kernel, items, blockIdx.x, gridDim.x, {scratch, tile, board}, scratch_bytes);
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

#if defined(SHARDLIB_KOKKOS_CUDA)

template <class Kernel>
using KokkosTeams =
    Kokkos::TeamPolicy<Kokkos::Cuda,
                       Kokkos::LaunchBounds<cuda_lanes, static_cast<unsigned>(cuda_teams_at_once<Kernel>)>>;

/// The functor that Kokkos calls for each team, which is a block of CUDA threads.
template <class Kernel>
struct KokkosBlock {
  Kernel kernel;
  std::int64_t items;
  std::byte* scratch;
  std::size_t scratch_bytes;

  static constexpr std::size_t shared_bytes = tile_bytes_of<Kernel> + team_board_bytes;
  static_assert(shared_bytes <= std::size_t{46} << 10, "Kokkos takes a part of a block's 48 KB for itself");

  __device__ void operator()(const typename KokkosTeams<Kernel>::member_type& member) const {
    const std::size_t bytes = shared_bytes;  // Kokkos takes a reference to it
    auto* const shared = static_cast<std::byte*>(member.team_scratch(0).get_shmem_aligned(bytes, 16));
    run_block(kernel, items, member.league_rank(), member.league_size(),
              {scratch, shared, shared + tile_bytes_of<Kernel>}, scratch_bytes);
  }
};

/// The execution space instance of a GPU's stream, which starts Kokkos unless the program has. It is made once for each
/// device, because that allocates memory.
inline const Kokkos::Cuda& kokkos_of(const Gpu& gpu) {
  std::shared_ptr<void>& kept = gpu.kept_by_launcher();
  if (kept == nullptr) {
    static std::mutex one_at_a_time;  // devices are threads
    const std::lock_guard lock(one_at_a_time);
    start_kokkos_on(gpu.ordinal());
    kept = std::make_shared<Kokkos::Cuda>(gpu.stream());
  }
  return *static_cast<const Kokkos::Cuda*>(kept.get());
}

/// Starts a kernel by Kokkos, in the stream of a GPU's kernels. Tools of Kokkos see its type as its name.
template <class Kernel>
void launch_by_kokkos(const Gpu& gpu, std::int64_t items, unsigned blocks, std::byte* scratch,
                      std::size_t scratch_bytes, const Kernel& kernel) {
  using Block = KokkosBlock<Kernel>;
  try {
    KokkosTeams<Kernel> teams(kokkos_of(gpu), static_cast<int>(blocks), static_cast<int>(cuda_lanes));
    teams.set_scratch_size(0, Kokkos::PerTeam(static_cast<int>(Block::shared_bytes + 16)));
    // Without the hint, Kokkos copies a functor of more than 512 bytes to constant memory, for which launches take
    // turns.
    Kokkos::parallel_for(Kokkos::Experimental::require(teams, Kokkos::Experimental::WorkItemProperty::HintLightWeight),
                         Block{kernel, items, scratch, scratch_bytes});
  } catch (const std::runtime_error& error) {  // Kokkos' own
    throw Error(std::string("GPU: the start of a kernel by Kokkos failed: ") + error.what());
  }
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

#if defined(__CUDACC__) || defined(__HIPCC__)
template <class Kernel>
void run_by_cuda(const Gpu& gpu, std::int64_t items, unsigned blocks, std::byte* scratch, std::size_t scratch_bytes,
                 const Kernel& kernel) {
  gpu.before_enqueue();
#if defined(SHARDLIB_KOKKOS_CUDA)
  launch_by_kokkos(gpu, items, blocks, scratch, scratch_bytes, kernel);
#else
  check_cuda(launch_on_cuda(gpu.stream(), items, blocks, scratch, scratch_bytes, kernel), "the start of a kernel");
#endif
}
#else
template <class Kernel>
void run_by_cuda(const Gpu& /*gpu*/, std::int64_t /*items*/, unsigned /*blocks*/, std::byte* /*scratch*/,
                 std::size_t /*scratch_bytes*/, const Kernel& /*kernel*/) {
  static_assert(sizeof(Kernel) == 0,
                "SHARDLIB_LAUNCHER=cuda or hip: this source starts kernels, so nvcc or hipcc must compile it; in "
                "CMake, call shardlib_compile_for_gpu(target)");
}
#endif

#endif

}  // namespace shardlib::detail
