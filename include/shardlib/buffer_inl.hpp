// Definitions of buffer.hpp.
#pragma once

#include "shardlib/buffer.hpp"

#include <algorithm>
#include <limits>
#include <string>

#include "shardlib/error.hpp"

namespace shardlib {

SHARDLIB_INLINE Buffer Pool::allocate(std::size_t bytes) {
  if (bytes > std::numeric_limits<std::size_t>::max() / 2) fail(bytes);  // no room to round up, nor in any machine
  const std::size_t rounded = round(bytes);
  std::byte* const data = region_->allocate(rounded);
  if (data == nullptr) fail(bytes);
  {
    const std::lock_guard lock(mutex_);
    stats_.live += rounded;
    stats_.peak = std::max(stats_.peak, stats_.live);
  }
  auto lease = std::shared_ptr<void>(
      data, [pool = shared_from_this(), rounded](void* p) { pool->give(static_cast<std::byte*>(p), rounded); });
  return Buffer(data, bytes, std::move(lease));
}

SHARDLIB_INLINE Pool::Stats Pool::stats() const {
  const std::lock_guard lock(mutex_);
  Stats result = stats_;
  result.reserved = region_->reserved();
  return result;
}

SHARDLIB_INLINE void Pool::reset_peak() {
  const std::lock_guard lock(mutex_);
  stats_.peak = stats_.live;
}

SHARDLIB_INLINE void Pool::fail(std::size_t bytes) const {
  throw Error("out of memory: " + std::to_string(bytes) + " bytes wanted, " + std::to_string(stats().live) +
              " in use by this device's pool: use smaller sizes, or more devices");
}

SHARDLIB_INLINE void Pool::give(std::byte* p, std::size_t bytes) {
  {
    const std::lock_guard lock(mutex_);
    stats_.live -= bytes;  // first: whom the block serves next counts it again
  }
  region_->free(p, bytes);
}

}  // namespace shardlib
