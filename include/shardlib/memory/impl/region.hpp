// Definitions of region.hpp.
#pragma once

#include "shardlib/memory/region.hpp"

#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <iterator>

#include "shardlib/memory/impl/heap.hpp"
#include "shardlib/memory/system.hpp"

namespace shardlib {

namespace detail {

SHARDLIB_INLINE Mapping::Mapping(int file, std::size_t bytes) {
  const int kind = file == -1 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED;
  void* const at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, kind | MAP_NORESERVE, file, 0);
  if (at == MAP_FAILED) return;
  data_ = static_cast<std::byte*>(at);
  bytes_ = bytes;
#ifdef MADV_HUGEPAGE
  // A matrix product that walks along columns touches one page per element, so huge pages help. In a small pool, a
  // huge page would be mostly unused, so the first 16 MiB keep normal pages.
  constexpr std::size_t small = std::size_t{16} << 20;
  if (file == -1 && bytes > small) madvise(data_ + small, bytes - small, MADV_HUGEPAGE);
#endif
}

SHARDLIB_INLINE Mapping::~Mapping() {
  if (data_ != nullptr) munmap(data_, bytes_);
}

/// The region that make_meta returns.
class Meta final : public Region {
 public:
  [[nodiscard]] bool is_meta() const override { return true; }

 private:
  /// Meta memory is free, but what the program notes down of each tensor is not. It takes the process' own memory.
  bool grant(std::size_t) override {
    constexpr std::size_t looks = 4096, least = std::size_t{512} << 20;
    return ++grants_ % looks != 0 || left_bytes() > least;
  }
  Addresses grow(std::size_t) override { return {std::uintptr_t{1} << 62, std::exchange(left_, 0)}; }
  void discard(std::uintptr_t, std::size_t) override {}

  std::size_t left_ = std::size_t{1} << 62, grants_ = 0;
};

}  // namespace detail

SHARDLIB_INLINE std::byte* Region::allocate(std::size_t bytes) {
  const std::size_t size = block_bytes(bytes);
  const std::lock_guard lock(mutex_);
  auto begin = free_.take(size);
  if (!begin) {
    std::uintptr_t before = untouched_;
    begin = take_untouched(size);
    if (!begin) {
      const Addresses more = grow(size);
      if (more.second == 0) return nullptr;
      // Free ranges need no grant, so the rest of the last range is granted now, or not used.
      if (end_ != untouched_ && grant(end_ - untouched_)) free_.give(untouched_, end_ - untouched_);
      grown_.push_back(more);
      before = untouched_ = more.first;
      end_ = more.first + more.second;
      begin = take_untouched(size);
      if (!begin) return nullptr;
    }
    if (!grant(untouched_ - before)) {
      if (*begin < before) free_.give(*begin, before - *begin);
      untouched_ = before;
      return nullptr;
    }
  }
  begin_block(*begin, size);
  return reinterpret_cast<std::byte*>(*begin);
}

SHARDLIB_INLINE void Region::begin_block(std::uintptr_t begin, std::size_t size) {
  if (is_meta()) return;
  detail::unpoison(begin, size);
  detail::poison(begin + size - detail::guard_bytes, detail::guard_bytes);
}

SHARDLIB_INLINE void Region::end_block(std::uintptr_t begin, std::size_t bytes) {
  if (!is_meta()) detail::poison(begin, block_bytes(bytes));
}

SHARDLIB_INLINE std::size_t Region::block_bytes(std::size_t bytes) const {
  return (std::max<std::size_t>(bytes, 1) + 63) / 64 * 64 + (is_meta() ? 0 : detail::guard_bytes);
}

SHARDLIB_INLINE std::optional<std::uintptr_t> Region::take_untouched(std::size_t bytes) {
  const std::size_t before = free_.take_before(untouched_);
  const std::uintptr_t begin = untouched_ - before;
  if (end_ - begin < bytes) {
    if (before > 0) free_.give(begin, before);
    return std::nullopt;
  }
  untouched_ = begin + bytes;
  return begin;
}

SHARDLIB_INLINE void Region::free(std::byte* data, std::size_t bytes) {
  const auto begin = reinterpret_cast<std::uintptr_t>(data);
  end_block(begin, bytes);
  const std::lock_guard lock(mutex_);
  free_.give(begin, block_bytes(bytes));
}

SHARDLIB_INLINE void Region::shrink(std::byte* data, std::size_t from, std::size_t to) {
  const auto begin = reinterpret_cast<std::uintptr_t>(data);
  const std::size_t kept = block_bytes(to), freed = block_bytes(from) - kept;
  if (freed == 0) return;
  if (freed > detail::guard_bytes) end_block(begin + kept, freed - detail::guard_bytes);
  begin_block(begin, kept);
  const std::lock_guard lock(mutex_);
  free_.give(begin + kept, freed);
}

SHARDLIB_INLINE void Region::trim() {
  const std::lock_guard lock(mutex_);
  const std::size_t page = detail::page_bytes();
  for (const auto& [begin, bytes] : free_.ranges()) {
    const std::uintptr_t first = (begin + page - 1) / page * page;
    const std::uintptr_t last = (begin + bytes) / page * page;
    if (first < last) discard(first, last - first);
  }
}

SHARDLIB_INLINE std::size_t Region::reserved() const {
  const std::lock_guard lock(mutex_);
  std::size_t bytes = 0;
  for (const Addresses& a : grown_) bytes += a.second;
  return bytes - (end_ - untouched_);
}

SHARDLIB_INLINE bool Region::contains(const void* begin, std::size_t bytes) const {
  const auto first = reinterpret_cast<std::uintptr_t>(begin);
  const std::lock_guard lock(mutex_);
  return std::ranges::any_of(grown_, [&](const Addresses& range) {
    return first >= range.first && first + bytes <= range.first + range.second;
  });
}

SHARDLIB_INLINE void Region::leave() {
  for (const auto& [begin, bytes] : grown_) {
    detail::unpoison(begin, begin + bytes == end_ ? untouched_ - begin : bytes);
  }
}

SHARDLIB_INLINE std::optional<std::uintptr_t> Region::Free::take(std::size_t bytes) {
  auto fit = by_size_.lower_bound({bytes, 0});
  if (fit == by_size_.end()) return std::nullopt;
  for (auto other = fit; other != by_size_.end() && other->first / 4 <= bytes; ++other) {
    if (other->second < fit->second) fit = other;
  }
  const auto [length, begin] = *fit;
  // Reuses the range's tree nodes for its remainder, which saves allocations.
  auto size = by_size_.extract(fit);
  auto range = ranges_.extract(begin);
  if (length > bytes) {
    size.value() = {length - bytes, begin + bytes};
    by_size_.insert(std::move(size));
    range.key() = begin + bytes;
    range.mapped() = length - bytes;
    ranges_.insert(std::move(range));
  }
  return begin;
}

SHARDLIB_INLINE void Region::Free::give(std::uintptr_t begin, std::size_t bytes) {
  const auto after = ranges_.lower_bound(begin);
  if (after != ranges_.end() && after->first == begin + bytes) {
    bytes += after->second;
    remove(after);
  }
  const std::size_t before = take_before(begin);
  begin -= before;
  bytes += before;
  ranges_.emplace(begin, bytes);
  by_size_.emplace(bytes, begin);
}

SHARDLIB_INLINE std::size_t Region::Free::take_before(std::uintptr_t end) {
  const auto next = ranges_.lower_bound(end);
  if (next == ranges_.begin()) return 0;
  const auto [begin, bytes] = *std::prev(next);
  if (begin + bytes != end) return 0;
  remove(std::prev(next));
  return bytes;
}

SHARDLIB_INLINE void Region::Free::remove(Range range) {
  by_size_.erase({range->second, range->first});
  ranges_.erase(range);
}

SHARDLIB_INLINE std::shared_ptr<Region> Region::make() {
  return std::make_shared<detail::Heap>();
}
SHARDLIB_INLINE std::shared_ptr<Region> Region::make_meta() {
  return std::make_shared<detail::Meta>();
}

}  // namespace shardlib
