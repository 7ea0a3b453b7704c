// Where local math runs: how many CPU threads, and the pool that scratch memory comes from; or nowhere, in a dry run.
#pragma once

#include <Kokkos_Core.hpp>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

#include "shardlib/buffer.hpp"

namespace shardlib {

/// The execution instance that every local kernel takes.
struct Exec {
  Pool* pool = nullptr;
  int threads = 1;  ///< CPU threads that a kernel may use; 1 when devices are threads of one process
  /// A dry run: memory is not there. Kernels check their arguments and take their scratch, for the pool to count, and
  /// touch nothing. All their loops go through the functions below or ask this first.
  bool dry = false;

  /// Runs f(i) for i in [0, n), in parallel where the space and `threads` allow. Iterations must be independent.
  template <class F>
  void for_each(std::int64_t n, F&& f) const {
    if (dry) return;
    using Index = Kokkos::IndexType<std::int64_t>;
#if defined(KOKKOS_ENABLE_OPENMP)
    if (threads > 1) {
      Kokkos::parallel_for("shardlib", Kokkos::RangePolicy<Kokkos::OpenMP, Index>(0, n), std::forward<F>(f));
      return;
    }
#endif
#if defined(KOKKOS_ENABLE_SERIAL)
    Kokkos::parallel_for("shardlib", Kokkos::RangePolicy<Kokkos::Serial, Index>(0, n), std::forward<F>(f));
#else  // a Kokkos without the serial space (Debian sid's); its OpenMP space is not for several threads at once
    for (std::int64_t i = 0; i < n; ++i) f(i);
#endif
  }
  // Nothing may lie at a null pointer, which these functions of C must not be given.
  void zero(void* to, std::size_t bytes) const {
    if (!dry && bytes != 0) std::memset(to, 0, bytes);
  }
  void copy(void* to, const void* from, std::size_t bytes) const {
    if (!dry && bytes != 0) std::memcpy(to, from, bytes);
  }
};

}  // namespace shardlib
