// The memory of this machine, and how much of it is left for this process.
#pragma once

#include <cstddef>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>

#include "shardlib/support/inline.hpp"

namespace shardlib::detail {

[[nodiscard]] std::size_t page_bytes();
/// The physical memory of this machine.
[[nodiscard]] std::size_t machine_bytes();
/// The sum of the two named lines in a file like /proc/meminfo, in bytes. Returns nothing if the file lacks the first
/// line.
[[nodiscard]] std::optional<std::size_t> sum_of_lines(const std::string& path, std::string_view first,
                                                      std::string_view second);
/// The memory that a process may still take of its control groups, which bound a container or a job: the least that one
/// of them, or of those around it, has left. `groups` is like /proc/self/cgroup, `root` like /sys/fs/cgroup, version 1
/// or 2. Pages of files that can be dropped count as left. Returns nothing if no group has a limit.
[[nodiscard]] std::optional<std::size_t> control_group_left(const std::string& groups, const std::string& root);
/// The part of `available` bytes that is left for a process. Its heaps were granted `granted` bytes, and it will write
/// all of them. It has written `written` bytes so far, some of them perhaps to other memory.
constexpr std::size_t left_of(std::size_t available, std::size_t granted, std::size_t written) {
  // the second term is for page tables
  const std::size_t kept = (granted > written ? granted - written : 0) + granted / 64;
  return available > kept ? available - kept : 0;
}
/// The bytes granted to all heaps of this process. Linux assigns pages at the first write and kills the process if
/// there are none left, so a heap asks before. The total is per process, because devices that are threads share the
/// memory.
struct Grants {
  std::mutex mutex;
  std::size_t bytes = 0;
  /// With the mutex held: as left_bytes.
  [[nodiscard]] std::size_t left() const;
};
inline Grants grants;

/// The memory that is left for this process on this machine, swap included, and in its control groups. A very large
/// number if Linux does not report it.
[[nodiscard]] std::size_t left_bytes();

}  // namespace shardlib::detail

#ifndef SHARDLIB_COMPILED
#include "shardlib/memory/impl/system.hpp"
#endif
