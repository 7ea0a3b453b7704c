// A region of this process's own memory.
#pragma once

#include <sys/mman.h>
#include <sys/resource.h>

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <utility>
#include <vector>

#include "shardlib/memory/region.hpp"
#include "shardlib/memory/system.hpp"

#if defined(__SANITIZE_ADDRESS__)
#define SHARDLIB_ASAN
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define SHARDLIB_ASAN
#endif
#endif
#ifdef SHARDLIB_ASAN
#include <sanitizer/asan_interface.h>
#endif

namespace shardlib::detail {

// AddressSanitizer reports accesses outside of blocks and to the guard bytes after each block.
#ifdef SHARDLIB_ASAN
inline constexpr std::size_t guard_bytes = 64;
inline void poison(std::uintptr_t begin, std::size_t bytes) {
  ASAN_POISON_MEMORY_REGION(reinterpret_cast<void*>(begin), bytes);
}
inline void unpoison(std::uintptr_t begin, std::size_t bytes) {
  ASAN_UNPOISON_MEMORY_REGION(reinterpret_cast<void*>(begin), bytes);
}
#undef SHARDLIB_ASAN
#else
inline constexpr std::size_t guard_bytes = 0;
inline void poison(std::uintptr_t, std::size_t) {}
inline void unpoison(std::uintptr_t, std::size_t) {}
#endif

/// This process's own memory.
class Heap : public Region {
 public:
  ~Heap() override {
    leave();
    const std::lock_guard lock(grants.mutex);
    grants.bytes -= granted_;
  }

 protected:
  bool grant(std::size_t bytes) override {
    const std::lock_guard lock(grants.mutex);
    if (bytes > small_grant && bytes > grants.left()) return false;
    granted_ += bytes;
    grants.bytes += bytes;
    return true;
  }
  Addresses grow(std::size_t bytes) override {
    // Reserves addresses for all memory of the machine, so that the blocks are adjacent. Where addresses count as
    // memory (ulimit -v, vm.overcommit_memory=2), it reserves smaller ranges.
    rlimit limit{};
    const bool is_limited = getrlimit(RLIMIT_AS, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY;
    const std::size_t pages = (bytes + page_bytes() - 1) / page_bytes() * page_bytes();
    // Linux always grants addresses alone. This limit makes the allocation fail with an error, where the program
    // would otherwise be killed.
    std::size_t left = machine_bytes();
    for (const Mapping& mapping : mappings_) left -= mapping.bytes();
    for (const std::size_t wanted : {is_limited ? 0 : left, std::size_t{64} << 20, pages}) {
      if (wanted < bytes || wanted > left) continue;
      Mapping mapping(-1, wanted);
      if (mapping.data() == nullptr) continue;
      mappings_.push_back(std::move(mapping));
      return {reinterpret_cast<std::uintptr_t>(mappings_.back().data()), wanted};
    }
    return {};
  }
  void discard(std::uintptr_t begin, std::size_t bytes) override {
    madvise(reinterpret_cast<void*>(begin), bytes, MADV_DONTNEED);
  }

 private:
  std::vector<Mapping> mappings_;
  std::size_t granted_ = 0;
};

}  // namespace shardlib::detail
