// Warnings on the standard error, which a run's log gets too.
#pragma once

#include <atomic>
#include <cstdio>
#include <string>
#include <string_view>

namespace shardlib::detail {

/// The function that gets each warning as a line, or null. A run's log sets it.
inline std::atomic<void (*)(std::string_view line)> warning_log = nullptr;

/// Writes "warning: " and the text to the log, and prints them to the standard error.
inline void warn(const std::string& text) {
  const std::string line = "warning: " + text + "\n";
  if (const auto log = warning_log.load(); log != nullptr) log(line);  // first, as print_console does
  std::fputs(line.c_str(), stderr);
}

}  // namespace shardlib::detail
