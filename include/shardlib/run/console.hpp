// The output of a run: the standard output of its first rank, and console.log in its folder.
#pragma once

#include <string>
#include <string_view>

#include "shardlib/support/inline.hpp"

namespace shardlib::run {

/// Prints to the standard output, at once, and to the open ConsoleLog. Call it on the first rank.
/// `print_console("note: ...\n")`
SHARDLIB_INLINE void print_console(std::string_view text);
/// Writes to the open ConsoleLog alone: errors, and what a terminal shows in another way. `log_console("error: ...\n")`
SHARDLIB_INLINE void log_console(std::string_view text);

/// The log of this process's console and of its warnings, while this object lives. It begins with `mark`, and with up
/// to 64 KiB of what the process has printed before. There is one at a time: a second one closes the first.
class ConsoleLog {
 public:
  /// Appends to the file. If it cannot be written, now or later, there is a warning, and the program continues.
  ConsoleLog(const std::string& path, std::string_view mark);
  ConsoleLog(const ConsoleLog&) = delete;
  ConsoleLog& operator=(const ConsoleLog&) = delete;
  ~ConsoleLog();
  /// Writes the file again, with a warning, if it was removed.
  void keep_place();
};

}  // namespace shardlib::run

#ifndef SHARDLIB_COMPILED
#include "shardlib/run/impl/console.hpp"
#endif
