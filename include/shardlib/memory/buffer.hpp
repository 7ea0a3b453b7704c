// Device memory: shared handles to blocks, from a per-device pool that counts what is alive.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <memory>
#include <mutex>
#include <utility>

#include "shardlib/memory/region.hpp"
#include "shardlib/support/inline.hpp"
#include "shardlib/support/use_count.hpp"

namespace shardlib {

/// A shared handle to a block of bytes; copies share the block, the last one returns it to its pool. `data` is its
/// first byte, `bytes` its size, `as` the same as a pointer to another type; nobody may write to one that
/// `is_read_only`.
class Buffer {
 public:
  Buffer() = default;
  /// Memory that somebody else owns; `owner` keeps it alive (null: the caller promises to). What is `read_only` is
  /// never unique.
  Buffer(void* data, std::size_t bytes, std::shared_ptr<void> owner, bool read_only = false)
      : block_(std::make_shared<Block>(static_cast<std::byte*>(data), bytes, std::move(owner), read_only)) {}

  [[nodiscard]] std::byte* data() const { return block_ ? block_->data : nullptr; }
  [[nodiscard]] std::size_t bytes() const { return block_ ? block_->bytes : 0; }
  template <class T>
  [[nodiscard]] T* as() const {
    return reinterpret_cast<T*>(data());
  }
  explicit operator bool() const { return block_ != nullptr; }
  [[nodiscard]] bool is_read_only() const { return block_ && block_->read_only; }
  /// True when no other handle sees this block, so that an op may overwrite it.
  [[nodiscard]] bool unique() const { return detail::use_count(block_) == 1 && !block_->read_only; }

 private:
  struct Block {
    std::byte* data;
    std::size_t bytes;
    std::shared_ptr<void> owner;
    bool read_only;
    Block(std::byte* d, std::size_t b, std::shared_ptr<void> o, bool r)
        : data(d), bytes(b), owner(std::move(o)), read_only(r) {}
  };
  std::shared_ptr<Block> block_;
};

/// A device's memory: blocks of a region, and how many bytes they are. Freed ones serve the next requests, of whatever
/// size, so that a steady training step takes nothing from the system. Thread-safe: a peer's pending communication may
/// drop the last handle.
class Pool : public std::enable_shared_from_this<Pool> {
 public:
  /// What the pool has handed out.
  struct Stats {
    std::size_t live = 0;      ///< bytes handed out now
    std::size_t peak = 0;      ///< most bytes handed out at once since `reset_peak`
    std::size_t reserved = 0;  ///< bytes of the region that have been in blocks, its other pools' too
  };

  /// A pool of its own region, or of one shared with other pools.
  static std::shared_ptr<Pool> make(std::shared_ptr<Region> region = Region::make()) {
    return std::shared_ptr<Pool>(new Pool(std::move(region)));
  }
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;
  ~Pool() { trim(); }

  /// From so many bytes on a block has the region's alignment; all have 64 bytes.
  static constexpr std::size_t long_block = std::size_t{1} << 18;
  /// Uninitialised memory. Throws Error when there is not enough.
  Buffer allocate(std::size_t bytes);

  /// True for a pool of addresses without memory, for dry runs: its blocks must not be read or written.
  [[nodiscard]] bool is_meta() const { return region_->is_meta(); }
  [[nodiscard]] Stats stats() const;  ///< the numbers of this moment
  void reset_peak();                  ///< lets the peak begin at what is live now
  /// Returns the pages that lie in no block to the system.
  void trim() { region_->trim(); }

 private:
  explicit Pool(std::shared_ptr<Region> region) : region_(std::move(region)) {}
  static std::size_t round(std::size_t bytes) {
    const std::size_t unit = bytes > 65536 ? 4096 : 64;
    return std::max<std::size_t>(unit, (bytes + unit - 1) / unit * unit);
  }
  [[noreturn]] void fail(std::size_t bytes) const;
  /// `taken`: of the region, for a block that counts `bytes`.
  void give(std::byte* p, std::size_t bytes, std::size_t taken);

  mutable std::mutex mutex_;
  Stats stats_;
  std::shared_ptr<Region> region_;
};

}  // namespace shardlib

#ifndef SHARDLIB_COMPILED
#include "shardlib/memory/impl/buffer.hpp"
#endif
