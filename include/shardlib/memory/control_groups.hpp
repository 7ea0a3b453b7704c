// The control groups of this process, by which Linux limits the memory of a container or a job.
#pragma once

#include <algorithm>
#include <cstddef>
#include <fstream>
#include <optional>
#include <string>

namespace shardlib::detail {

/// A number in a file by itself; nothing for anything else, as "max".
inline std::optional<std::size_t> lone_number(const std::string& path) {
  std::ifstream file(path);
  std::size_t number = 0;
  return file >> number ? std::optional(number) : std::nullopt;
}

/// Calls f(folder, whether it is of version 2) for the memory group of a process and for each one around it. `groups`
/// is like /proc/self/cgroup, `root` like /sys/fs/cgroup, version 1 or 2.
template <class F>
void each_memory_group(const std::string& groups, const std::string& root, const F& f) {
  std::ifstream lines(groups);
  for (std::string line; std::getline(lines, line);) {
    // "0::/job" is of version 2, "4:cpu,memory:/job" of version 1, which has a folder for each controller.
    const std::size_t first = line.find(':'), second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
    const bool v2 = controllers == ",,";
    if (!v2 && controllers.find(",memory,") == std::string::npos) continue;
    const std::string base = root + (v2 ? "" : "/memory");
    // In a container the path may be that of the host. Then its folders do not exist, and the root is the group.
    for (std::string path = line.substr(second + 1);; path.erase(path.rfind('/'))) {
      f(base + (path == "/" ? "" : path), v2);
      if (path.rfind('/') == std::string::npos) break;
    }
  }
}

/// The most memory that the processes of a group may take; nothing if it has no limit.
inline std::optional<std::size_t> group_limit(const std::string& folder, bool v2) {
  return lone_number(folder + (v2 ? "/memory.max" : "/memory.limit_in_bytes"));
}

/// The least limit of a process's groups, or `otherwise` if that is less.
inline std::size_t least_group_limit(const std::string& groups, const std::string& root, std::size_t otherwise) {
  each_memory_group(groups, root, [&](const std::string& folder, bool v2) {
    otherwise = std::min(otherwise, group_limit(folder, v2).value_or(otherwise));
  });
  return otherwise;
}

}  // namespace shardlib::detail
