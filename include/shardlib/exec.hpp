// Where local math runs: how many CPU threads, and the pool that scratch memory comes from.
#pragma once

#include <Kokkos_Core.hpp>

#include <cstddef>
#include <cstdint>
#include <utility>

#include "shardlib/buffer.hpp"

namespace shardlib {

/// The execution instance that every local kernel takes.
struct Exec {
  Pool* pool = nullptr;
  int threads = 1;  ///< CPU threads that a kernel may use; 1 when devices are threads of one process

  /// Runs f(i) for i in [0, n), in parallel where the space and `threads` allow. Iterations must be independent.
  template <class F>
  void for_each(std::int64_t n, F&& f) const {
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
};

}  // namespace shardlib
