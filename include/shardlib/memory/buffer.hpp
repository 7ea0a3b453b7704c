// Device memory: shared handles to blocks, from a per-device pool that counts allocated bytes.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <utility>

#include "shardlib/memory/region.hpp"
#include "shardlib/support/handle.hpp"
#include "shardlib/support/inline.hpp"
#include "shardlib/types/call_site.hpp"

namespace shardlib {

/// A shared handle to a block of memory. Copies share the block, and the last copy returns it to its pool. `data`
/// points to the first byte, `bytes` is the size, and `as` is the same pointer with another type. A block that
/// `is_read_only` must not be written.
class Buffer {
 public:
  Buffer() = default;
  /// A handle to memory from elsewhere. `owner` keeps it alive; if it is null, the caller guarantees that. A
  /// `read_only` block is never unique. `device` is the region of a block of device memory.
  Buffer(void* data, std::size_t bytes, std::shared_ptr<void> owner, bool read_only = false, Region* device = nullptr)
      : block_(detail::Handle<Block>::make(static_cast<std::byte*>(data), bytes, std::move(owner), read_only, device)) {
  }

  [[nodiscard]] std::byte* data() const { return block_ ? block_->data : nullptr; }
  [[nodiscard]] std::size_t bytes() const { return block_ ? block_->bytes : 0; }
  template <class T>
  [[nodiscard]] T* as() const {
    return reinterpret_cast<T*>(data());
  }
  explicit operator bool() const { return block_ != nullptr; }
  [[nodiscard]] bool is_read_only() const { return block_ && block_->read_only; }
  /// The region of a block that only kernels and copies may access; null for host memory.
  [[nodiscard]] Region* device_memory() const { return block_ ? block_->device : nullptr; }
  /// Whether the handles keep the memory alive. If not, it is a caller's, who may free it at any time.
  [[nodiscard]] bool is_owned() const { return !block_ || block_->owned; }
  /// True if no other handle shares this block, so that an op may overwrite it.
  [[nodiscard]] bool unique() const { return block_.use_count() == 1 && !block_->read_only && !block_->slice; }
  /// A handle to a part of this block, which it keeps alive. A slice is never unique.
  [[nodiscard]] Buffer slice(std::size_t begin, std::size_t bytes) const {
    Buffer part(data() + begin, bytes, std::make_shared<Buffer>(*this), is_read_only(), device_memory());
    part.block_->slice = true;
    part.block_->owned = is_owned();
    return part;
  }

 private:
  friend class Pool;
  struct Block : detail::Counted {
    std::byte* data;
    std::size_t bytes;
    std::shared_ptr<void> owner;
    bool read_only;
    bool slice = false;
    bool owned = owner != nullptr;
    Region* device;
    Block(std::byte* d, std::size_t b, std::shared_ptr<void> o, bool r, Region* m)
        : data(d), bytes(b), owner(std::move(o)), read_only(r), device(m) {}
  };
  detail::Handle<Block> block_;
};

/// Copies the bytes of `from` to `to`, of the same size: host memory, or one device's. `copy(host, shard)`
SHARDLIB_INLINE void copy(const Buffer& to, const Buffer& from);

/// A device's memory: allocates blocks of a region and counts their bytes. Later requests of any size reuse freed
/// blocks, so a training step in steady state requests no memory from the system. Thread-safe: a peer's pending
/// communication may drop the last handle.
class Pool : public std::enable_shared_from_this<Pool> {
 public:
  /// The pool's memory use.
  struct Stats {
    std::size_t live = 0;      ///< bytes allocated now
    std::size_t peak = 0;      ///< maximum of `live` since `reset_peak`
    std::size_t reserved = 0;  ///< bytes of the region that have been in blocks, including those of other pools
  };

  /// A pool with its own region, or with a region shared with other pools.
  static std::shared_ptr<Pool> make(std::shared_ptr<Region> region = Region::make()) {
    return std::shared_ptr<Pool>(new Pool(std::move(region)));
  }
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;
  ~Pool() { trim(); }

  /// Blocks of at least this size have the region's alignment. Smaller ones have 64 bytes.
  static constexpr std::size_t long_block = std::size_t{1} << 18;
  /// Uninitialized memory, for the current op or for `op`. Throws Error if there is not enough memory. It names the ops
  /// that have most of it.
  Buffer allocate(std::size_t bytes);
  Buffer allocate(std::size_t bytes, const detail::OpInfo& op);
  /// Frees what lies behind the first `bytes` of a block of this pool that no other handle shares. Other memory stays.
  void shrink(const Buffer& block, std::size_t bytes);

  /// True for meta memory: nothing may read or write these blocks.
  [[nodiscard]] bool is_meta() const { return region_->is_meta(); }
  /// The region, if it is device memory: kernels open it. Null for host memory.
  [[nodiscard]] Region* device_memory() const { return device_; }
  [[nodiscard]] Stats stats() const;  ///< the current numbers
  void reset_peak();                  ///< resets the peak to the bytes that are live now
  /// The peak of a step's plan, which errors about too little memory name. 0: there is no plan.
  void set_planned_peak(std::size_t bytes) { planned_peak_ = bytes; }
  /// Returns the pages outside of all blocks to the system.
  void trim() { region_->trim(); }

 private:
  explicit Pool(std::shared_ptr<Region> region)
      : region_(std::move(region)), device_(region_->is_device() ? region_.get() : nullptr) {}
  static std::size_t round(std::size_t bytes) {
    const std::size_t unit = bytes > 65536 ? 4096 : 64;
    return std::max<std::size_t>(unit, (bytes + unit - 1) / unit * unit);
  }
  /// The blocks that one line of the program has made, as errors name it.
  struct Made {
    std::string by;
    std::size_t bytes = 0;
  };
  /// The line, its file, the op and its op spec.
  using Maker = std::tuple<std::uint_least32_t, const char*, std::string, std::string>;
  /// Gives a block back when its last handle has gone.
  struct Lease {
    std::shared_ptr<Pool> pool;
    std::size_t bytes, taken;  ///< as counted, and in the region
    Made* made;                ///< null for a short block
    void operator()(void* p) const {
      pool->uncount(bytes, made);
      pool->region_->free(static_cast<std::byte*>(p), taken);
    }
  };
  /// Shorter blocks do not fill a memory, and a look-up for each would take a part of their ops' time.
  static constexpr std::size_t counted_block = std::size_t{1} << 16;
  Made* count(std::size_t bytes, const detail::OpInfo& op);
  void uncount(std::size_t bytes, Made* made);
  /// What has most bytes, in words.
  [[nodiscard]] std::string largest() const;
  [[noreturn]] void fail(std::size_t bytes) const;

  mutable std::mutex mutex_;
  Stats stats_;
  std::map<Maker, Made, std::less<>> live_;
  std::shared_ptr<Region> region_;
  Region* device_;
  std::atomic<std::size_t> planned_peak_ = 0;
};

}  // namespace shardlib

#ifndef SHARDLIB_COMPILED
#include "shardlib/memory/impl/buffer.hpp"
// This cannot stand at the end of region.hpp: Gpu is a Region, so gpu.hpp reads region.hpp first.
#include "shardlib/memory/impl/gpu.hpp"
#endif
