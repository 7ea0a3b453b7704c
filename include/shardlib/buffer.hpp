// Device memory: aligned Kokkos host memory from a per-device pool that counts what is alive.
#pragma once

#include <Kokkos_Core.hpp>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace shardlib {

/// A shared handle to a block of bytes; copies share the block, the last one returns it to its pool.
class Buffer {
 public:
  Buffer() = default;
  /// Memory that somebody else owns; `owner` keeps it alive (null: the caller promises to).
  Buffer(void* data, std::size_t bytes, std::shared_ptr<void> owner)
      : block_(std::make_shared<Block>(static_cast<std::byte*>(data), bytes, std::move(owner))) {}

  [[nodiscard]] std::byte* data() const { return block_ ? block_->data : nullptr; }
  [[nodiscard]] std::size_t bytes() const { return block_ ? block_->bytes : 0; }
  template <class T>
  [[nodiscard]] T* as() const {
    return reinterpret_cast<T*>(data());
  }
  explicit operator bool() const { return block_ != nullptr; }
  /// True when no other handle sees this block, so that an op may overwrite it.
  [[nodiscard]] bool unique() const {
    if (block_.use_count() != 1) return false;
    // use_count is a relaxed read: what another thread did with its handle before dropping it must be seen.
    std::atomic_thread_fence(std::memory_order_acquire);
    return true;
  }

 private:
  struct Block {
    std::byte* data;
    std::size_t bytes;
    std::shared_ptr<void> owner;
    Block(std::byte* d, std::size_t b, std::shared_ptr<void> o) : data(d), bytes(b), owner(std::move(o)) {}
  };
  std::shared_ptr<Block> block_;
};

/// Keeps freed blocks for the next request of the same rounded size, so that a steady training step allocates nothing.
/// Thread-safe: a peer's pending communication may drop the last handle.
class Pool : public std::enable_shared_from_this<Pool> {
 public:
  struct Stats {
    std::size_t live = 0;      ///< bytes handed out now
    std::size_t peak = 0;      ///< most bytes handed out at once since `reset_peak`
    std::size_t reserved = 0;  ///< bytes taken from the system
  };

  static std::shared_ptr<Pool> make() { return std::shared_ptr<Pool>(new Pool); }
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;
  ~Pool() { trim(); }

  /// Uninitialised memory, aligned to 64 bytes.
  Buffer allocate(std::size_t bytes) {
    const std::size_t rounded = round(bytes);
    std::byte* data = take(rounded);
    auto lease = std::shared_ptr<void>(
        data, [pool = shared_from_this(), rounded](void* p) { pool->give(static_cast<std::byte*>(p), rounded); });
    return Buffer(data, bytes, std::move(lease));
  }

  [[nodiscard]] Stats stats() const {
    const std::lock_guard lock(mutex_);
    return stats_;
  }
  void reset_peak() {
    const std::lock_guard lock(mutex_);
    stats_.peak = stats_.live;
  }
  /// Returns the free blocks to the system.
  void trim() {
    const std::lock_guard lock(mutex_);
    for (auto& [bytes, blocks] : free_) {
      for (std::byte* p : blocks) {
        Kokkos::kokkos_free<Kokkos::HostSpace>(p);
        stats_.reserved -= bytes;
      }
    }
    free_.clear();
  }

 private:
  Pool() = default;
  static std::size_t round(std::size_t bytes) {
    const std::size_t unit = bytes > 65536 ? 4096 : 64;
    return std::max<std::size_t>(unit, (bytes + unit - 1) / unit * unit);
  }
  std::byte* take(std::size_t bytes) {
    const std::lock_guard lock(mutex_);
    stats_.live += bytes;
    stats_.peak = std::max(stats_.peak, stats_.live);
    if (auto it = free_.find(bytes); it != free_.end() && !it->second.empty()) {
      std::byte* p = it->second.back();
      it->second.pop_back();
      return p;
    }
    stats_.reserved += bytes;
    return static_cast<std::byte*>(Kokkos::kokkos_malloc<Kokkos::HostSpace>("shardlib", bytes));
  }
  void give(std::byte* p, std::size_t bytes) {
    const std::lock_guard lock(mutex_);
    stats_.live -= bytes;
    free_[bytes].push_back(p);
  }

  mutable std::mutex mutex_;
  std::map<std::size_t, std::vector<std::byte*>> free_;
  Stats stats_;
};

}  // namespace shardlib
