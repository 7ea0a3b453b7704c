// Definitions of buffer.hpp.
#pragma once

#include "shardlib/buffer.hpp"

#include <Kokkos_Core.hpp>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <limits>
#include <string>

#include "shardlib/error.hpp"

namespace shardlib {

SHARDLIB_INLINE Buffer Pool::allocate(std::size_t bytes) {
  if (bytes > std::numeric_limits<std::size_t>::max() / 2) fail(bytes);  // no room to round up, nor in any machine
  const std::size_t rounded = round(bytes);
  std::byte* data = take(rounded);
  auto lease = std::shared_ptr<void>(
      data, [pool = shared_from_this(), rounded](void* p) { pool->give(static_cast<std::byte*>(p), rounded); });
  return Buffer(data, bytes, std::move(lease));
}

SHARDLIB_INLINE Pool::Stats Pool::stats() const {
  const std::lock_guard lock(mutex_);
  return stats_;
}

SHARDLIB_INLINE void Pool::reset_peak() {
  const std::lock_guard lock(mutex_);
  stats_.peak = stats_.live;
}

SHARDLIB_INLINE void Pool::trim() {
  const std::lock_guard lock(mutex_);
  for (auto& [bytes, blocks] : free_) {
    for (std::byte* p : blocks) {
      if (source_) {
        source_->free(p, bytes);
      } else if (!phantom_) {
        Kokkos::kokkos_free<Kokkos::HostSpace>(p);
      }
      stats_.reserved -= bytes;
    }
  }
  free_.clear();
}

SHARDLIB_INLINE void Pool::fail(std::size_t bytes) const {
  throw Error("out of memory: " + std::to_string(bytes) + " bytes wanted, " + std::to_string(stats().live) +
              " in use by this device's pool: use smaller sizes, or more devices");
}

SHARDLIB_INLINE std::byte* Pool::take(std::size_t bytes) {
  std::byte* p = take_free(bytes);
  if (p == nullptr) p = from_system(bytes);
  if (p == nullptr) {
    trim();  // free blocks of other sizes may be what is lacking
    p = from_system(bytes);
  }
  if (p == nullptr) fail(bytes);
  return p;
}

SHARDLIB_INLINE std::byte* Pool::take_free(std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  const auto it = free_.find(bytes);
  if (it == free_.end() || it->second.empty()) return nullptr;
  std::byte* p = it->second.back();
  it->second.pop_back();
  count(bytes);
  return p;
}

namespace detail {

/// Asks for large pages within a block, before it is touched: a matrix product walks along columns, a page each. Only a
/// hint, so that a refusal is no error.
inline void use_large_pages([[maybe_unused]] std::byte* data, [[maybe_unused]] std::size_t bytes) {
#if defined(__linux__)
  constexpr std::size_t page = std::size_t{2} << 20;
  const auto begin = (reinterpret_cast<std::uintptr_t>(data) + page - 1) / page * page;
  const auto end = (reinterpret_cast<std::uintptr_t>(data) + bytes) / page * page;
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}

}  // namespace detail

SHARDLIB_INLINE std::byte* Pool::from_system(std::size_t bytes) {
  std::byte* p = nullptr;
  if (phantom_) {
    const std::lock_guard lock(mutex_);
    p = reinterpret_cast<std::byte*>(next_phantom_);
    next_phantom_ += bytes;
    stats_.reserved += bytes;
    count(bytes);
    return p;
  }
  try {
    p = source_ ? source_->allocate(bytes)
                : static_cast<std::byte*>(Kokkos::kokkos_malloc<Kokkos::HostSpace>("shardlib", bytes));
  } catch (const std::exception&) {  // of a type that differs between versions of Kokkos
    return nullptr;
  }
  if (p == nullptr) return nullptr;
  if (source_ == nullptr) detail::use_large_pages(p, bytes);
  const std::lock_guard lock(mutex_);
  stats_.reserved += bytes;
  count(bytes);
  return p;
}

SHARDLIB_INLINE void Pool::count(std::size_t bytes) {
  stats_.live += bytes;
  stats_.peak = std::max(stats_.peak, stats_.live);
}

SHARDLIB_INLINE void Pool::give(std::byte* p, std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  stats_.live -= bytes;
  free_[bytes].push_back(p);
}

}  // namespace shardlib
