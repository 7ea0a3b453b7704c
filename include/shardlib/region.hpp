// Where pools cut their blocks from: ranges of addresses that fit, the lowest first, freed neighbours joined again.
#pragma once

#include <cstddef>
#include <cstdint>
#include <iosfwd>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "shardlib/detail/inline.hpp"

namespace shardlib {

/// Memory to cut blocks from. What is known about blocks stands beside them and not in them, so that a dry run's region
/// can have addresses alone. Thread-safe: any thread may free what another has allocated.
class Region {
 public:
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;
  virtual ~Region() = default;

  /// This process's own memory, of which pages are taken as they are first written.
  static std::shared_ptr<Region> make();
  /// Addresses where no program has memory: an access is a fault. For dry runs.
  static std::shared_ptr<Region> make_phantom();

  /// Uninitialised memory, aligned to 64 bytes; null when there is no more: neither of the addresses that it may have
  /// nor, for a large block, on the machine, whoever uses it.
  std::byte* allocate(std::size_t bytes);
  /// `bytes`: as they were allocated.
  void free(std::byte* data, std::size_t bytes);
  /// Returns the pages that lie in no block to the system.
  void trim();
  /// Bytes that blocks have been cut from so far. Beside the most that were in blocks at once it tells what
  /// fragmentation costs.
  [[nodiscard]] std::size_t reserved() const;
  [[nodiscard]] virtual bool is_phantom() const { return false; }
  /// Where a pool's long blocks begin: at multiples of so many bytes.
  [[nodiscard]] virtual std::size_t alignment() const { return 64; }

 protected:
  using Addresses = std::pair<std::uintptr_t, std::size_t>;  ///< the first and how many

  Region() = default;
  /// More addresses, for a block of `bytes`; 0 of them when there are none.
  virtual Addresses grow(std::size_t bytes) = 0;
  /// Gives whole pages back to the system; where this fails they stay.
  virtual void discard(std::uintptr_t begin, std::size_t bytes) = 0;
  /// To be called before the addresses go: whoever gets them next may use them all.
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
  /// The lowest addresses of which no byte has been in a block, after what is free just before them; none where there
  /// are too few, or the machine has not the memory.
  std::optional<std::uintptr_t> take_untouched(std::size_t bytes);

  mutable std::mutex mutex_;
  Free free_;
  std::vector<Addresses> grown_;
  std::size_t claimed_ = 0;
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
/// How much of it, swap included, programs can have before the system begins to kill. `meminfo` is what Linux has in
/// /proc/meminfo; a very large number where there is no such file.
std::size_t available_bytes(std::istream& meminfo);
std::size_t available_bytes();
/// Whether the machine has that much for a block, beside what this process's regions were granted and have not written
/// yet. Then it is granted. Of a block below a megabyte nothing is asked: that would take longer than writing it.
bool claim(std::size_t bytes);
void disclaim(std::size_t bytes);

}  // namespace detail

}  // namespace shardlib

#ifndef SHARDLIB_COMPILED
#include "shardlib/region_inl.hpp"
#endif
