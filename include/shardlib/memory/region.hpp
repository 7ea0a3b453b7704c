// Where pools cut their blocks from: ranges of addresses that fit, the lowest first, freed neighbours joined again.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "shardlib/support/inline.hpp"

namespace shardlib {

/// Memory to cut blocks from. Its records lie outside of the blocks, so a dry run's region needs addresses alone.
/// Thread-safe: any thread may free what another has allocated.
class Region {
 public:
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;
  virtual ~Region() = default;

  /// This process's own memory, of which pages are taken as they are first written.
  static std::shared_ptr<Region> make();
  /// Addresses where no program has memory: an access is a fault. For dry runs.
  static std::shared_ptr<Region> make_meta();

  /// Uninitialised memory, aligned to 64 bytes; null when the region has no more addresses or the machine has not the
  /// memory.
  std::byte* allocate(std::size_t bytes);
  /// `bytes`: as they were allocated.
  void free(std::byte* data, std::size_t bytes);
  /// Returns the pages that lie in no block to the system.
  void trim();
  /// Bytes that blocks have been cut from so far. Beside the most that were in blocks at once it tells what
  /// fragmentation costs.
  [[nodiscard]] std::size_t reserved() const;
  [[nodiscard]] virtual bool is_meta() const { return false; }  ///< whether its memory is not there
  /// Where a pool's long blocks begin: at multiples of so many bytes.
  [[nodiscard]] virtual std::size_t alignment() const { return 64; }

 protected:
  using Addresses = std::pair<std::uintptr_t, std::size_t>;  ///< the first and how many

  Region() = default;
  /// Whether so many bytes more may be written.
  virtual bool grant(std::size_t bytes) = 0;
  /// More addresses, for a block of `bytes`; 0 of them when there are none.
  virtual Addresses grow(std::size_t bytes) = 0;
  /// Gives whole pages back to the system; where this fails they stay.
  virtual void discard(std::uintptr_t begin, std::size_t bytes) = 0;
  /// Call it before the addresses are unmapped: their next user may use all of them.
  void leave();

 private:
  /// Free ranges, no two of which touch.
  class Free {
   public:
    /// The first address of `bytes` that are free no more. They come from the lowest of the ranges that have up to four
    /// times as many, so that blocks lie close together; else from the smallest range, the lowest of equal ones, so
    /// that large ranges remain for large blocks.
    std::optional<std::uintptr_t> take(std::size_t bytes);
    void give(std::uintptr_t begin, std::size_t bytes);
    /// Takes the range that ends at `end`; returns its bytes.
    std::size_t take_before(std::uintptr_t end);
    [[nodiscard]] const std::map<std::uintptr_t, std::size_t>& ranges() const { return ranges_; }

   private:
    using Range = std::map<std::uintptr_t, std::size_t>::iterator;
    void remove(Range range);

    std::map<std::uintptr_t, std::size_t> ranges_;              ///< where they begin, and their bytes
    std::set<std::pair<std::size_t, std::uintptr_t>> by_size_;  ///< the same, bytes first
  };

  /// What a block of `bytes` takes.
  [[nodiscard]] std::size_t block_bytes(std::size_t bytes) const;
  /// The lowest addresses of which no byte has been in a block, after what is free just before them.
  std::optional<std::uintptr_t> take_untouched(std::size_t bytes);

  mutable std::mutex mutex_;
  Free free_;
  std::vector<Addresses> grown_;
  std::uintptr_t untouched_ = 0;  ///< from here to the end of the last of `grown_` no block has been yet
  std::uintptr_t end_ = 0;
};

namespace detail {

/// Pages of memory, this process's own or a file's. `data` is null where the system refuses them.
class Mapping {
 public:
  Mapping() = default;
  /// `file`: -1 for memory of this process alone.
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

std::size_t page_bytes();
/// The memory that this machine has.
std::size_t machine_bytes();
/// The sum of such lines of a file as /proc/meminfo, in bytes; nothing where the first of them is not there.
std::optional<std::size_t> sum_of_lines(const std::string& path, std::string_view first, std::string_view second);
/// What is left of `available` bytes of memory for a process whose heaps were granted `granted` bytes and that has
/// written `written`, which may be other memory in part: what is granted will be written.
constexpr std::size_t left_of(std::size_t available, std::size_t granted, std::size_t written) {
  const std::size_t kept = (granted > written ? granted - written : 0) + granted / 64;  // and for page tables
  return available > kept ? available - kept : 0;
}
/// The memory that the machine has left for this process, swap included; a very large number where Linux does not say.
std::size_t left_bytes();
/// Smaller grants are not checked: the check would take longer than writing the memory.
inline constexpr std::size_t small_grant = std::size_t{1} << 20;

}  // namespace detail

}  // namespace shardlib

#ifndef SHARDLIB_COMPILED
#include "shardlib/memory/impl/region.hpp"
#endif
