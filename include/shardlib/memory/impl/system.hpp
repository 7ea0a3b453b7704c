// Definitions of system.hpp.
#pragma once

#include "shardlib/memory/system.hpp"

#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <limits>
#include <sstream>

#include "shardlib/memory/control_groups.hpp"

namespace shardlib::detail {

SHARDLIB_INLINE std::size_t page_bytes() {
  return static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
}

SHARDLIB_INLINE std::size_t machine_bytes() {
  return static_cast<std::size_t>(sysconf(_SC_PHYS_PAGES)) * page_bytes();
}

SHARDLIB_INLINE std::optional<std::size_t> sum_of_lines(const std::string& path, std::string_view first,
                                                        std::string_view second) {
  std::ifstream file(path);
  std::size_t sum = 0;
  bool known = false;
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    std::string name;
    std::size_t kilobytes = 0;
    words >> name >> kilobytes;
    if (name != first && name != second) continue;
    known = known || name == first;
    sum += kilobytes * 1024;
  }
  return known ? std::optional(sum) : std::nullopt;
}

/// The number behind a name in a file like memory.stat.
inline std::size_t named_number(const std::string& path, std::string_view name) {
  std::ifstream file(path);
  std::string word;
  for (std::size_t number = 0; file >> word >> number;)
    if (word == name) return number;
  return 0;
}

SHARDLIB_INLINE std::optional<std::size_t> control_group_left(const std::string& groups, const std::string& root) {
  std::optional<std::size_t> least;
  each_memory_group(groups, root, [&](const std::string& folder, bool v2) {
    const auto limit = group_limit(folder, v2);
    const auto used = lone_number(folder + (v2 ? "/memory.current" : "/memory.usage_in_bytes"));
    if (!limit || !used) return;
    const std::size_t files = named_number(folder + "/memory.stat", v2 ? "inactive_file" : "total_inactive_file");
    const std::size_t taken = *used - std::min(*used, files);
    const std::size_t left = *limit - std::min(*limit, taken);
    least = std::min(left, least.value_or(left));
  });
  return least;
}

SHARDLIB_INLINE std::size_t Grants::left() const {
  constexpr std::size_t unknown = std::numeric_limits<std::size_t>::max();
  const auto available = sum_of_lines("/proc/meminfo", "MemAvailable:", "SwapFree:");
  const auto written = sum_of_lines("/proc/self/status", "RssAnon:", "VmSwap:");
  if (!written) return unknown;
  const std::size_t in_groups = control_group_left("/proc/self/cgroup", "/sys/fs/cgroup").value_or(unknown);
  const std::size_t least = std::min(available.value_or(unknown), in_groups);
  return least == unknown ? unknown : left_of(least, bytes, *written);
}

SHARDLIB_INLINE std::size_t left_bytes() {
  const std::lock_guard lock(grants.mutex);
  return grants.left();
}

}  // namespace shardlib::detail
