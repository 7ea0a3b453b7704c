// Where local math runs: how many CPU threads, and the pool that scratch memory comes from; or nowhere, in a dry run.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <string_view>
#include <utility>
#include <vector>

#include "shardlib/device/simulated_team.hpp"
#include "shardlib/device/team.hpp"
#include "shardlib/memory/buffer.hpp"
#include "shardlib/memory/simulated_queue.hpp"
#include "shardlib/support/error.hpp"
#include "shardlib/support/kokkos.hpp"
#include "shardlib/types/call_site.hpp"
#if defined(SHARDLIB_LAUNCHER_KOKKOS)
#include "shardlib/device/kokkos_launcher.hpp"
#elif defined(SHARDLIB_LAUNCHER_CUDA)
#include "shardlib/device/cuda_launcher.hpp"
#endif

namespace shardlib {

/// The launcher of this program's kernels: "host", "CUDA", "HIP" or "Kokkos::Cuda" (a GPU, else the host), or one of
/// Kokkos' spaces of the host: "Kokkos::Serial".
inline std::string_view launcher_name() {
#if defined(SHARDLIB_LAUNCHER_KOKKOS)
  return detail::kokkos_space_name;
#elif defined(SHARDLIB_KOKKOS_CUDA)
  return "Kokkos::Cuda";
#elif defined(SHARDLIB_LAUNCHER_HIP)
  return "HIP";
#elif defined(SHARDLIB_LAUNCHER_CUDA)
  return "CUDA";
#else
  return "host";
#endif
}

namespace detail {
/// The error of an op whose loop would run on the host, in memory that host code cannot access.
[[noreturn]] inline void refuse_host_loop() {
  throw Error(
      "this op has no kernel for a device with memory of its own, which host code cannot access; use --device cpu, or "
      "read tensors with span, item or fetch");
}
}  // namespace detail

/// The execution instance that every local kernel takes.
struct Exec {
  Pool* pool = nullptr;
  int threads = 1;  ///< CPU threads that a kernel may use: this device's share of the cores
  /// A dry run: memory is not there. Kernels check their arguments and take their scratch, for the pool to count, and
  /// touch nothing. They need not ask, because all that touches memory goes through the functions below.
  bool dry = false;

  /// The GPU that runs the kernels; null where the host's cores do.
  [[nodiscard]] detail::Gpu* gpu() const { return on_device() ? pool->device_memory()->gpu() : nullptr; }
  /// Whether the kernels run in memory that host code cannot access.
  [[nodiscard]] bool on_device() const { return pool != nullptr && pool->device_memory() != nullptr; }
  /// Waits for the device's stream. Throws the error of a kernel in it. Host memory has none.
  void synchronize() const {
    if (on_device()) pool->device_memory()->synchronize();
  }
  /// Puts work(), which holds by value all that it needs, into the simulated device's stream. Host memory has none: the
  /// work is done at once.
  template <class F>
  void launch(const F& work) const {
    if (dry) return;
    if (on_device()) return pool->device_memory()->queue()->launch(work);
    work();
  }
  /// Calls f(), which reads or writes shards on the calling thread, unless for_each would throw. `exec.run([&] {
  /// product.run(); })`
  template <class F>
  void run(const F& f) const {
    if (dry) return;
    if (on_device()) detail::refuse_host_loop();
    f();
  }
  /// Calls f(elements) with n elements as host code can read them: themselves, or a copy of device memory.
  /// `exec.read(ids, n, [&](const i32* on_host) { ... })`
  template <class T, class F>
  void read(const T* elements, std::int64_t n, const F& f) const {
    if (dry) return;
    if (!on_device()) return f(elements);
    std::vector<T> there(static_cast<std::size_t>(n));
    copy(there.data(), elements, there.size() * sizeof(T));
    f(there.data());
  }
  /// Runs f(i) for i in [0, n), on `threads` threads where the build has OpenMP. Iterations must be independent: the
  /// result does not depend on their order. Rethrows what one of them throws. Throws Error on a device with memory of
  /// its own, whose loops are kernels.
  template <class F>
  void for_each(std::int64_t n, F&& f) const {
    if (dry) return;
    if (on_device()) detail::refuse_host_loop();
#if defined(SHARDLIB_WITH_OPENMP)
    if (threads > 1 && n > 1) return for_each_in_parallel(n, f);
#endif
#if defined(KOKKOS_ENABLE_SERIAL) && !defined(SHARDLIB_KOKKOS_CUDA)
    using Range = Kokkos::RangePolicy<Kokkos::Serial, Kokkos::IndexType<std::int64_t>>;
    Kokkos::parallel_for("shardlib", Range(0, n), std::forward<F>(f));
#else  // no Kokkos, one without the serial space (Debian sid's), or one that starts with a GPU
    for (std::int64_t i = 0; i < n; ++i) f(i);
#endif
  }
  /// Runs a kernel: kernel(team, item) for each item in [0, items), which are independent. The kernel is a struct that
  /// holds all it needs by value, and its call is a template of the team (HostTeam says what a team has). It allocates
  /// nothing and throws nothing. `scratch_bytes` is what one item needs of scratch memory. On a device the kernel runs
  /// later, in the order of the device's stream.
  template <class Kernel>
  void for_items(std::int64_t items, std::size_t scratch_bytes, const Kernel& kernel) const {
    if (items == 0) return;
    if (on_device()) return for_items_on_device(items, scratch_bytes, kernel);
#if defined(SHARDLIB_LAUNCHER_KOKKOS)
    const std::int64_t teams = detail::kokkos_teams(items, threads);
    const Buffer block = scratch(scratch_bytes * static_cast<std::size_t>(teams));
    if (!dry) detail::run_by_kokkos(items, teams, block.data(), scratch_bytes, kernel);
#else
    if (dry && scratch_bytes > 0) count_scratch(items, scratch_bytes);
    for_each(items, [&](std::int64_t item) {
      const Buffer block = scratch(scratch_bytes);
      alignas(64) std::byte tile[detail::tile_bytes_of<Kernel>];
      alignas(64) std::byte board[detail::team_board_bytes];
      kernel(HostTeam{{block.data(), tile, board}}, item);
    });
#endif
  }
  /// The same where `on_device`. The host's team needs no code for such a kernel.
  template <class Kernel>
  void for_items_on_device(std::int64_t items, std::size_t scratch_bytes, const Kernel& kernel) const {
    if (items == 0) return;
#if defined(SHARDLIB_LAUNCHER_CUDA)
    if (gpu() != nullptr) return for_items_on_gpu(items, scratch_bytes, kernel);
#endif
    const Buffer block = scratch(scratch_bytes);
    launch([items, at = block.data(), kernel] { detail::run_simulated(items, at, kernel); });
  }
#if defined(SHARDLIB_LAUNCHER_CUDA)
  /// The same on a GPU, which the pool's memory must be of. Other teams need no code for such a kernel.
  template <class Kernel>
  void for_items_on_gpu(std::int64_t items, std::size_t scratch_bytes, const Kernel& kernel) const {
    if (items == 0) return;
    const unsigned blocks = detail::cuda_blocks(*gpu(), items, scratch_bytes);
    const Buffer block = scratch(scratch_bytes * blocks);
    detail::run_by_cuda(*gpu(), items, blocks, block.data(), scratch_bytes, kernel);
  }
#endif
  /// The number of threads of a `for_each` here. Inside of another it has one, because loops do not nest.
  [[nodiscard]] int available_threads() const {
#if defined(SHARDLIB_WITH_OPENMP)
    return in_loop_ ? 1 : threads;
#else
    return 1;
#endif
  }
  /// Takes, in a dry run, the scratch that each iteration of a `for_each` over n takes, for the pool to count.
  void count_scratch(std::int64_t n, std::size_t bytes) const {
    std::vector<Buffer> blocks;
    for (std::int64_t i = 0; dry && i < std::min<std::int64_t>(n, threads); ++i)
      blocks.push_back(pool->allocate(bytes));
  }
  /// Clears the bytes. `copy` copies bytes that do not overlap, within the device's memory, or between it and the
  /// host's.
  // Pieces are never empty, because the pointer of 0 bytes may be null, which memset and memcpy do not accept.
  void zero(void* to, std::size_t bytes) const {
    if (!dry && on_device() && pool->device_memory()->zero(to, bytes)) return;
    for_pieces(bytes, [to](std::size_t at, std::size_t n) { std::memset(static_cast<std::byte*>(to) + at, 0, n); });
  }
  void copy(void* to, const void* from, std::size_t bytes) const {
    if (!dry && on_device() && pool->device_memory()->copy(to, from, bytes)) return;
    for_pieces(bytes, [to, from](std::size_t at, std::size_t n) {
      std::memcpy(static_cast<std::byte*>(to) + at, static_cast<const std::byte*>(from) + at, n);
    });
  }

 private:
  /// Scratch memory of kernels.
  [[nodiscard]] Buffer scratch(std::size_t bytes) const {
    return bytes == 0 ? Buffer() : pool->allocate(bytes);
  }
  template <class F>
  void for_pieces(std::size_t bytes, const F& f) const {
    constexpr std::size_t piece = 1 << 20;
    for_each(static_cast<std::int64_t>((bytes + piece - 1) / piece), [&](std::int64_t i) {
      const std::size_t at = static_cast<std::size_t>(i) * piece;
      f(at, std::min(piece, bytes - at));
    });
  }
#if defined(SHARDLIB_WITH_OPENMP)
  // This is not Kokkos' OpenMP space: Debian 12's Kokkos lacks it, and it serves one thread of a process, whereas
  // devices are threads here. oneDNN has the same OpenMP threads, and runs on one of them within the loop.
  template <class F>
  void for_each_in_parallel(std::int64_t n, F& f) const {
    std::exception_ptr error;
    const detail::Calling* const op = detail::Calling::innermost;
#pragma omp parallel num_threads(threads)
    {
      const bool before = std::exchange(in_loop_, true);
      const detail::Calling* const op_before = std::exchange(detail::Calling::innermost, op);  // scratch is the op's
#pragma omp for schedule(dynamic)
      for (std::int64_t i = 0; i < n; ++i) {
        try {
          f(i);
        } catch (...) {
#pragma omp critical(shardlib_for_each)
          error = std::current_exception();
        }
      }
      detail::Calling::innermost = op_before;
      in_loop_ = before;
    }
    if (error) std::rethrow_exception(error);
  }
  /// Whether this thread runs iterations. omp_in_parallel() needs OpenMP's header, which clang may not have.
  static inline thread_local bool in_loop_ = false;
#endif
};

}  // namespace shardlib
