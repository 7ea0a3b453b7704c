// The memory from which pools allocate blocks: the lowest free range of addresses that fits. Adjacent free ranges are
// merged.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "shardlib/memory/stream.hpp"
#include "shardlib/support/inline.hpp"

namespace shardlib {

namespace detail {
class Faults;
class Flights;
class Gpu;
class SimulatedQueue;
/// The identity of a device's hardware, which is the same for all processes, whatever number each gives it.
using HardwareName = std::array<char, 16>;
/// The model of the hardware behind a device.
struct HardwareModel {
  std::string name = {};  ///< as its maker calls it: "NVIDIA H100 80GB HBM3"
  int sharers = 1;        ///< how many devices of the program share it
};
}  // namespace detail

/// Memory to allocate blocks from. The data about blocks is outside of them, so that meta memory needs only
/// addresses. Thread-safe: any thread may free a block that another thread allocated.
class Region {
 public:
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;
  virtual ~Region() = default;

  /// This process's own memory. The system assigns pages at the first write.
  static std::shared_ptr<Region> make();
  /// Meta memory: addresses that no program can use. An access is a fault.
  static std::shared_ptr<Region> make_meta();
  /// Memory of the simulated device. Kernels and copies may access it, between `open` and `close`; any other access is
  /// a fault. A freed block is overwritten with NaN when the device has run what it began before. SimulatedQueue says
  /// what the seed does.
  static std::shared_ptr<Region> make_simulated(std::uint64_t seed = 0);
  /// Memory of a GPU, for the device `local_rank` of this machine: the devices are dealt out to the GPUs. The
  /// `sharers`, the devices of one GPU, share its memory evenly. Throws UsageError if the build or the machine has no
  /// GPU.
  static std::shared_ptr<Region> make_gpu(int local_rank, int sharers);

  /// Uninitialized memory, aligned to 64 bytes. Null if the region has no addresses left or the machine has no memory
  /// left.
  std::byte* allocate(std::size_t bytes);
  /// `bytes` must be the allocated size.
  void free(std::byte* data, std::size_t bytes);
  /// Frees what lies behind the first `to` bytes of a block of `from` bytes.
  void shrink(std::byte* data, std::size_t from, std::size_t to);
  /// Returns the pages outside of all blocks to the system.
  void trim();
  /// The number of bytes that have been part of a block at any time. The difference to the peak of bytes in blocks is
  /// the cost of fragmentation.
  [[nodiscard]] std::size_t reserved() const;
  /// Whether all these bytes have addresses of this region.
  [[nodiscard]] bool contains(const void* begin, std::size_t bytes) const;
  [[nodiscard]] virtual bool is_meta() const { return false; }  ///< whether this is meta memory
  /// Whether this is a device's own memory: kernels and copies access it, and the program's other code does not.
  [[nodiscard]] virtual bool is_device() const { return false; }
  /// Opens device memory for a kernel or a copy, until `close` has been called as often. Use MemoryAccess.
  virtual void open() {}
  virtual void close() {}
  /// The GPU whose memory this is. Null for all memory that the host's cores can access.
  [[nodiscard]] virtual detail::Gpu* gpu() { return nullptr; }
  /// The stream of the simulated device whose memory this is. Null for all other memory.
  [[nodiscard]] virtual detail::SimulatedQueue* queue() { return nullptr; }
  /// Waits until the device has done all that it has begun. Throws Error if some of it has failed, has found a wrong
  /// operand, or waits for a collective that has failed.
  virtual void synchronize() {}
  /// The faults that kernels of the device find. Null for host memory.
  [[nodiscard]] virtual detail::Faults* faults() { return nullptr; }
  /// The communications that the device's stream waits for. Null for host memory.
  [[nodiscard]] virtual detail::Flights* flights() { return nullptr; }
  /// A second stream of the device. Null for host memory.
  virtual std::unique_ptr<detail::Stream> make_stream() { return nullptr; }
  /// The hardware of device memory.
  [[nodiscard]] virtual detail::HardwareName hardware() const { return {}; }
  /// The model of a GPU. Other memory has none.
  [[nodiscard]] virtual detail::HardwareModel model() const { return {}; }
  /// Copies, or clears (`zero`), bytes of this memory by the device itself, in the order of its stream. The host waits
  /// for a copy to host memory, and for one from there that is longer than `most_uploaded`. Host memory may be changed
  /// as soon as this returns. Returns false if this is host memory.
  virtual bool copy(void* /*to*/, const void* /*from*/, std::size_t /*bytes*/) { return false; }
  virtual bool zero(void* /*to*/, std::size_t /*bytes*/) { return false; }
  /// Describes the memory in a pool's error when it is exhausted. Empty for the memory of this machine.
  [[nodiscard]] virtual std::string describe() const { return {}; }
  /// The alignment of a pool's long blocks, in bytes.
  [[nodiscard]] virtual std::size_t alignment() const { return 64; }

 protected:
  using Addresses = std::pair<std::uintptr_t, std::size_t>;  ///< the first address and the number of addresses

  Region() = default;
  /// Whether the process may write `bytes` more bytes.
  virtual bool grant(std::size_t bytes) = 0;
  /// Reserves more addresses, for a block of `bytes`. Returns 0 addresses if there are none.
  virtual Addresses grow(std::size_t bytes) = 0;
  /// Returns whole pages to the system. If that fails, the pages stay.
  virtual void discard(std::uintptr_t begin, std::size_t bytes) = 0;
  /// Called when addresses become a block of `size` bytes, and before a block becomes free that was asked for with
  /// `bytes`. They make AddressSanitizer's marks.
  virtual void begin_block(std::uintptr_t begin, std::size_t size);
  virtual void end_block(std::uintptr_t begin, std::size_t bytes);
  /// Call it before the addresses are released: it removes the AddressSanitizer marks, because the next owner may use
  /// all of them.
  void leave();

 private:
  /// Free ranges. No two of them are adjacent.
  class Free {
   public:
    /// Takes `bytes` and returns their first address. Candidates are the ranges of `bytes` up to four times `bytes`,
    /// and the lowest of them is used, so that blocks are close together. If there is none, it uses the smallest
    /// larger range, and the lowest of equal ones, which preserves large ranges for large blocks.
    std::optional<std::uintptr_t> take(std::size_t bytes);
    void give(std::uintptr_t begin, std::size_t bytes);
    /// Takes the range that ends at `end` and returns its size in bytes.
    std::size_t take_before(std::uintptr_t end);
    [[nodiscard]] const std::map<std::uintptr_t, std::size_t>& ranges() const { return ranges_; }

   private:
    using Range = std::map<std::uintptr_t, std::size_t>::iterator;
    void remove(Range range);

    std::map<std::uintptr_t, std::size_t> ranges_;              ///< by first address, with their sizes
    std::set<std::pair<std::size_t, std::uintptr_t>> by_size_;  ///< the same ranges, by size
  };

  /// The bytes that a block for `bytes` occupies.
  [[nodiscard]] std::size_t block_bytes(std::size_t bytes) const;
  /// Takes `bytes` at the lowest address that was never part of a block. A free range directly before that address is
  /// used first.
  std::optional<std::uintptr_t> take_untouched(std::size_t bytes);

  mutable std::mutex mutex_;
  Free free_;
  std::vector<Addresses> grown_;
  /// No block has used the addresses from here to the end of the last range in `grown_`.
  std::uintptr_t untouched_ = 0;
  std::uintptr_t end_ = 0;
};

/// Keeps a device's memory open while it lives. Host memory, given as null, is always open.
class MemoryAccess {
 public:
  explicit MemoryAccess(Region* device) : device_(device) {
    if (device_ != nullptr) device_->open();
  }
  MemoryAccess(const MemoryAccess&) = delete;
  MemoryAccess& operator=(const MemoryAccess&) = delete;
  ~MemoryAccess() {
    if (device_ != nullptr) device_->close();
  }

 private:
  Region* device_;
};

namespace detail {

/// Mapped pages, private to this process or of a file. `data` is null if the system refuses the mapping.
class Mapping {
 public:
  Mapping() = default;
  /// A `file` of -1 means private memory.
  Mapping(int file, std::size_t bytes);
  Mapping(Mapping&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
  Mapping& operator=(Mapping&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~Mapping();
  [[nodiscard]] std::byte* data() const { return data_; }
  [[nodiscard]] std::size_t bytes() const { return bytes_; }

 private:
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
};

/// Up to this size, copies from host memory to a device do not make the host wait: another copy is taken meanwhile.
inline constexpr std::size_t most_uploaded = std::size_t{1} << 23;

/// Up to this size, a region grants memory without reading /proc: the check would take longer than the writes.
inline constexpr std::size_t small_grant = std::size_t{1} << 20;

}  // namespace detail

}  // namespace shardlib

#ifndef SHARDLIB_COMPILED
#include "shardlib/memory/impl/region.hpp"
#include "shardlib/memory/impl/simulated.hpp"
#endif
