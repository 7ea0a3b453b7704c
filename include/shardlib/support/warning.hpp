// Warnings: sentences on the standard error about what a program goes on without.
#pragma once

#include <atomic>
#include <cstdio>
#include <string>
#include <string_view>

namespace shardlib::detail {

/// Gets each warning as a line. A run's log sets it; null: nobody.
inline std::atomic<void (*)(std::string_view line)> warning_log = nullptr;

/// Prints "warning: " and the text to the standard error, and to the log.
inline void warn(const std::string& text) {
  const std::string line = "warning: " + text + "\n";
  std::fputs(line.c_str(), stderr);
  if (const auto log = warning_log.load(); log != nullptr) log(line);
}

}  // namespace shardlib::detail
