// The names of temporary files and folders. They name their process, so that leftovers of dead processes are known.
#pragma once

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>

#include "shardlib/io/file.hpp"
#include "shardlib/support/crc32c.hpp"
#include "shardlib/support/environment.hpp"
#include "shardlib/support/error.hpp"

namespace shardlib::io::detail {

inline constexpr std::string_view temporary_mark = ".tmp-";

/// A process among all machines that may see a folder.
struct Owner {
  std::string machine;  ///< eight hexadecimal digits of the host's name and of the container's processes
  std::int64_t process = 0;
  std::int64_t start = 0;  ///< when it began, in the system's ticks: numbers of processes are used again
  friend bool operator==(const Owner&, const Owner&) = default;
};

/// When a process began; nothing where it has ended, 0 where the system does not say.
inline std::optional<std::int64_t> start_of(std::int64_t process) {
  if (::kill(static_cast<pid_t>(process), 0) != 0 && errno == ESRCH) return std::nullopt;
  std::ifstream file("/proc/" + std::to_string(process) + "/stat");
  const std::string text(std::istreambuf_iterator<char>(file), {});
  // The second field is a name in brackets, which may hold anything. Behind it stand the state and, 19 further, the
  // start.
  std::size_t at = text.rfind(')');
  if (at == std::string::npos || at + 2 >= text.size()) return 0;
  if (text[at + 2] == 'Z' || text[at + 2] == 'X') return std::nullopt;  // killed, and nobody has asked for its status
  for (int field = 0; field < 20 && at != std::string::npos; ++field) at = text.find(' ', at + 1);
  std::int64_t start = 0;
  if (at != std::string::npos) std::from_chars(text.data() + at + 1, text.data() + text.size(), start);
  return start;
}

/// This process.
inline Owner this_process() {
  std::error_code ignored;
  const std::string name =
      shardlib::detail::host_name() + std::filesystem::read_symlink("/proc/self/ns/pid", ignored).string();
  return {hex(crc32c(as_bytes(name))), ::getpid(), start_of(::getpid()).value_or(0)};
}

/// A name in the folder of `path` that no other process uses: "LATEST.tmp-1a2b3c4d-4242-987654-0".
inline std::string temporary_name(const std::string& path) {
  static std::atomic<unsigned> names = 0;
  const Owner owner = this_process();
  return path + std::string(temporary_mark) + owner.machine + "-" + std::to_string(owner.process) + "-" +
         std::to_string(owner.start) + "-" + std::to_string(names++);
}

/// Removes a folder at its end, if it is still there, unless it was kept. If that fails, the next writer tries again.
class TemporaryFolder {
 public:
  explicit TemporaryFolder(const std::string& path) : path_(path) {}
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  ~TemporaryFolder() {
    std::error_code ignored;
    if (!kept_ && !path_.empty()) std::filesystem::remove_all(path_, ignored);
  }
  void keep() { kept_ = true; }

 private:
  const std::string& path_;
  bool kept_ = false;
};

/// replace_folder where the file system cannot swap two folders: for a moment there is none. If the new one cannot be
/// renamed, the old one stays.
inline void replace_by_renames(const std::string& from, const std::string& to) {
  const std::string aside = temporary_name(to + ".old");
  rename_path(to, aside);
  try {
    rename_path(from, to);
  } catch (const Error&) {
    rename_path(aside, to);
    throw;
  }
  remove_folder(aside);
}

/// Whose temporary it is, if `temporary_name` made the name.
inline std::optional<Owner> owner_of(std::string_view name) {
  const std::size_t mark = name.rfind(temporary_mark);
  if (mark == std::string_view::npos) return std::nullopt;
  std::string_view rest = name.substr(mark + temporary_mark.size());
  Owner owner;
  std::int64_t number = 0;
  if (rest.size() < 9 || rest.substr(0, 8).find_first_not_of("0123456789abcdef") != std::string_view::npos)
    return std::nullopt;
  owner.machine = rest.substr(0, 8);
  rest.remove_prefix(8);
  for (std::int64_t* const value : {&owner.process, &owner.start, &number}) {
    if (!rest.starts_with('-')) return std::nullopt;
    const auto [end, error] = std::from_chars(rest.data() + 1, rest.data() + rest.size(), *value);
    if (error != std::errc() || *value < 0) return std::nullopt;
    rest.remove_prefix(static_cast<std::size_t>(end - rest.data()));
  }
  return rest.empty() && owner.process > 0 ? std::optional(owner) : std::nullopt;
}

/// Whether a process of this machine still runs.
inline bool is_alive(const Owner& owner) {
  const std::optional<std::int64_t> start = start_of(owner.process);
  return start && (*start == 0 || owner.start == 0 || *start == owner.start);
}

/// When a file, or anything in a folder, has changed last.
inline std::filesystem::file_time_type last_change(const std::filesystem::path& path) {
  namespace fs = std::filesystem;
  std::error_code ignored;
  auto last = fs::last_write_time(path, ignored);
  for (fs::recursive_directory_iterator it(path, ignored), end; !ignored && it != end; it.increment(ignored)) {
    std::error_code gone;
    last = std::max(last, it->last_write_time(gone));
  }
  return last;
}

/// Whether no process writes this temporary file any more. For a process of another machine this is unknown; then a day
/// without a change decides.
inline bool is_stale_temporary(const std::string& path) {
  const std::optional<Owner> owner = owner_of(path.substr(path.rfind('/') + 1));
  if (!owner) return false;
  if (owner->machine == this_process().machine) return !is_alive(*owner);
  return last_change(path) + std::chrono::hours(24) < std::filesystem::file_time_type::clock::now();
}

}  // namespace shardlib::io::detail
