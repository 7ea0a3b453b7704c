// Definitions of console.hpp.
#pragma once

#include "shardlib/run/console.hpp"
#include "shardlib/run/impl/removed_file.hpp"
#include "shardlib/support/error.hpp"
#include "shardlib/support/warning.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <utility>

namespace shardlib::run {

namespace detail {

/// The log of this process, or what waits for one.
struct Console {
  std::mutex mutex;
  std::string path, waiting;
  int file = -1;
  const ConsoleLog* owner = nullptr;

  Console() { shardlib::detail::warning_log = &log_console; }
  void log(std::string_view text) {
    constexpr std::size_t most_waiting = 64 * 1024;
    if (file < 0) {
      waiting += text;
      if (waiting.size() > most_waiting) waiting.erase(0, waiting.size() - most_waiting);
      return;
    }
    while (!text.empty()) {
      const ssize_t count = ::write(file, text.data(), text.size());
      if (count < 0 && errno == EINTR) continue;
      if (count < 0) return give_up();
      text.remove_prefix(static_cast<std::size_t>(count));
    }
  }
  void open(const std::string& name) {
    close();
    path = name;
    file = ::open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
    if (file < 0) give_up();
  }
  void close() {
    if (file >= 0) ::close(std::exchange(file, -1));
  }
  void give_up() {
    fmt::print(stderr, "warning: cannot write '{}': {}; the run continues without it\n", path, std::strerror(errno));
    close();
  }
};

inline Console& console() {
  static Console of_process;
  return of_process;
}

}  // namespace detail

SHARDLIB_INLINE void print_console(std::string_view text) {
  detail::Console& console = detail::console();
  const std::lock_guard lock(console.mutex);
  console.log(text);  // first, because the reader of the standard output may have left
  fmt::print("{}", text);
  std::fflush(stdout);
}

SHARDLIB_INLINE void log_console(std::string_view text) {
  detail::Console& console = detail::console();
  const std::lock_guard lock(console.mutex);
  console.log(text);
}

SHARDLIB_INLINE ConsoleLog::ConsoleLog(const std::string& path, std::string_view mark) {
  detail::Console& console = detail::console();
  const std::lock_guard lock(console.mutex);
  console.open(path);
  console.owner = this;
  const std::string before = std::exchange(console.waiting, {});
  if (console.file >= 0) console.log(std::string(mark) + before);
}

SHARDLIB_INLINE ConsoleLog::~ConsoleLog() {
  detail::Console& console = detail::console();
  const std::lock_guard lock(console.mutex);
  if (console.owner != this) return;
  console.close();
  console.waiting.clear();
}

SHARDLIB_INLINE void ConsoleLog::keep_place() {
  detail::Console& console = detail::console();
  std::string path;
  {
    const std::lock_guard lock(console.mutex);
    if (console.owner != this || console.file < 0) return;
    path = console.path;
    if (detail::place_of(console.file, path) != detail::FilePlace::removed) return;
    std::string text;
    try {
      text = detail::whole_file(detail::descriptor_path(console.file));
    } catch (const Error&) {  // the run does not need it
    }
    console.open(path);
    if (console.file < 0) return;
    console.log(text);
  }
  detail::warn_removed(path);  // which takes the lock
}

}  // namespace shardlib::run
