// A team of lanes, the execution context of a kernel. The host's team has one lane.
#pragma once

#include <cstddef>
#include <cstdint>

#include "shardlib/support/function.hpp"
#include "shardlib/support/loop.hpp"
#if defined(__HIPCC__)
#include <hip/hip_runtime.h>
#endif

namespace shardlib {

namespace detail {
#if defined(__CUDACC__) || defined(__HIPCC__)
/// This thread's number in its block.
__device__ __forceinline__ int cuda_lane() {
#if defined(SHARDLIB_KOKKOS_CUDA)
  return static_cast<int>(threadIdx.x + threadIdx.y);  // Kokkos counts the threads of a team along y, and we along x
#else
  return static_cast<int>(threadIdx.x);
#endif
}
#endif

/// The memory that a team shares in addition to its scratch: a tile for the kernel, and a board of 64 numbers for
/// reductions.
inline constexpr std::size_t team_tile_bytes = 4096, team_board_bytes = 64 * 8;

/// The size of a kernel's tile. A kernel with `static constexpr std::size_t tile_bytes` says itself, up to 48 KB with
/// the board: few of its teams then run at a time, so on a GPU each of its items has a team of its own, and the longest
/// should come first.
template <class Kernel>
inline constexpr std::size_t tile_bytes_of = team_tile_bytes;
template <class Kernel>
requires requires {
  Kernel::tile_bytes;
}
inline constexpr std::size_t tile_bytes_of<Kernel> = Kernel::tile_bytes;

/// The memory of a team of any kind. All lanes of a team run a kernel, each with its own local variables.
struct TeamMemory {
  std::byte* scratch_bytes = nullptr;
  std::byte* tile_bytes = nullptr;
  std::byte* board_bytes = nullptr;

  /// The memory that the kernel asked for at its launch, for the item at hand.
  template <class T>
  [[nodiscard]] SHARDLIB_FUNCTION T* scratch() const {
    return reinterpret_cast<T*>(scratch_bytes);
  }
  /// A short array of N elements in fast memory.
  template <class T, std::int64_t N>
  [[nodiscard]] SHARDLIB_FUNCTION T* tile() const {
    static_assert(static_cast<std::size_t>(N) * sizeof(T) <= team_tile_bytes);
    return reinterpret_cast<T*>(tile_bytes);
  }
  /// The tile of a kernel that says its size.
  template <class T>
  [[nodiscard]] SHARDLIB_FUNCTION T* whole_tile() const {
    return reinterpret_cast<T*>(tile_bytes);
  }
  /// The memory for the sums of lanes in reductions.
  template <class T>
  [[nodiscard]] SHARDLIB_FUNCTION T* board() const {
    static_assert(64 * sizeof(T) <= team_board_bytes);
    return reinterpret_cast<T*>(board_bytes);
  }
};
}  // namespace detail

/// The host's team: one lane, whose loops the compiler vectorizes. The teams of devices also have `parts`: lanes that
/// exchange numbers among themselves (SimulatedTeam).
struct HostTeam : detail::TeamMemory {
  static constexpr bool single = true;  ///< whether the team has one lane only, so that a kernel may take a short cut
  /// Calls f(i) for i in [0, count), divided among the lanes. Lanes do not wait for each other after it.
  SHARDLIB_HOST_ONLY template <class F>
  SHARDLIB_FUNCTION void lanes(std::int64_t count, const F& f) const {
    kernels::independent(count, f);
  }
  /// Calls store(i, load(i)) as `lanes` does. A lane may load for up to Ahead elements before it stores the first.
  SHARDLIB_HOST_ONLY template <int Ahead, class Load, class Store>
  SHARDLIB_FUNCTION void stream(std::int64_t count, const Load& load, const Store& store) const {
    kernels::independent(count, [&](std::int64_t i) { store(i, load(i)); });
  }
  /// Calls f() on one lane.
  SHARDLIB_HOST_ONLY template <class F>
  SHARDLIB_FUNCTION void one(const F& f) const {
    f();
  }
  /// All lanes see what each of them wrote before. Each lane must come here.
  SHARDLIB_FUNCTION void barrier() const {}
};

}  // namespace shardlib
