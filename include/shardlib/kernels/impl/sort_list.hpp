// Sorting of a list by kernels, and whether a device needs it.
#pragma once

#include <cstdint>
#include <utility>

#include "shardlib/device/exec.hpp"
#include "shardlib/kernels/body/sort.hpp"

namespace shardlib::kernels::detail {

/// Whether teams have one lane, which can add or sort in order by itself.
inline bool single_lane([[maybe_unused]] const Exec& exec) {
#if defined(SHARDLIB_LAUNCHER_KOKKOS)
  return false;
#else
  return !exec.on_device();
#endif
}

/// Sorts n distinct elements of `list`, with `other` as scratch memory. Returns the one of the two that holds the
/// result.
template <class E>
E* sort_list(const Exec& exec, E* list, E* other, std::int64_t n) {
  constexpr std::int64_t run = body::SortRuns<E>::length, piece = body::MergeRuns<E>::piece;
  exec.for_items((n + run - 1) / run, 0, body::SortRuns<E>{list, other, n});
  for (std::int64_t length = run; length < n; length *= 2) {
    std::swap(list, other);
    exec.for_items((n + piece - 1) / piece, 0, body::MergeRuns<E>{list, other, n, length});
  }
  return other;
}

}  // namespace shardlib::kernels::detail
