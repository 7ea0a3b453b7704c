// Device memory: aligned Kokkos host memory, or a backend's, from a per-device pool that counts what is alive.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "shardlib/detail/inline.hpp"

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

/// Where a pool gets its blocks from instead of the heap. Called from any thread.
class MemorySource {
 public:
  virtual ~MemorySource() = default;
  /// Uninitialised memory, aligned to 64 bytes; null when there is no more.
  virtual std::byte* allocate(std::size_t bytes) = 0;
  virtual void free(std::byte* data, std::size_t bytes) = 0;
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

  /// Null: from the heap.
  static std::shared_ptr<Pool> make(std::shared_ptr<MemorySource> source = nullptr) {
    return std::shared_ptr<Pool>(new Pool(false, std::move(source)));
  }
  /// A pool that accounts for memory that is not there: nobody may read or write what it hands out. For dry runs.
  static std::shared_ptr<Pool> make_phantom() { return std::shared_ptr<Pool>(new Pool(true, nullptr)); }
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;
  ~Pool() { trim(); }

  /// Uninitialised memory, aligned to 64 bytes. Throws Error when there is not enough.
  Buffer allocate(std::size_t bytes);

  [[nodiscard]] bool is_phantom() const { return phantom_; }
  [[nodiscard]] Stats stats() const;
  void reset_peak();
  /// Returns the free blocks to the system.
  void trim();

 private:
  Pool(bool phantom, std::shared_ptr<MemorySource> source) : phantom_(phantom), source_(std::move(source)) {}
  static std::size_t round(std::size_t bytes) {
    const std::size_t unit = bytes > 65536 ? 4096 : 64;
    return std::max<std::size_t>(unit, (bytes + unit - 1) / unit * unit);
  }
  [[noreturn]] void fail(std::size_t bytes) const;
  std::byte* take(std::size_t bytes);
  std::byte* take_free(std::size_t bytes);
  /// Null when the system has no more.
  std::byte* from_system(std::size_t bytes);
  /// Under the mutex.
  void count(std::size_t bytes);
  void give(std::byte* p, std::size_t bytes);

  mutable std::mutex mutex_;
  std::map<std::size_t, std::vector<std::byte*>> free_;
  Stats stats_;
  bool phantom_;
  std::shared_ptr<MemorySource> source_;
  std::uintptr_t next_phantom_ = std::uintptr_t{1} << 62;  ///< where no program has memory: an access is a fault
};

}  // namespace shardlib

#ifndef SHARDLIB_COMPILED
#include "shardlib/buffer_inl.hpp"
#endif
