// Files of a run that someone removes while this process has them open.
#pragma once

#include <fmt/format.h>

#include <sys/stat.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <system_error>

#include "shardlib/support/error.hpp"
#include "shardlib/support/regular_file.hpp"
#include "shardlib/support/warning.hpp"

namespace shardlib::run::detail {

inline std::string whole_file(const std::string& path) {
  shardlib::detail::require_regular_file(path);
  errno = 0;
  std::ifstream file(path, std::ios::binary);
  if (!file || (file.peek(), file.bad()))
    throw UsageError("cannot read the file '" + path + "'" +
                     (errno == 0 ? "" : ": " + std::string(std::strerror(errno))));
  std::error_code gone;
  const auto size = std::filesystem::file_size(path, gone);  // of a file that may grow meanwhile
  std::ostringstream text;
  text << file.rdbuf();
  if (!gone && text.view().size() < size)
    throw Error(fmt::format("cannot read the file '{}' beyond byte {} of {}: does its disk work?", path,
                            text.view().size(), size));
  return text.str();
}

/// The path that a file made at `path` has: symbolic links can lead to where no file is.
inline std::string linked_path(std::filesystem::path path) {
  while (std::filesystem::is_symlink(path)) path = path.parent_path() / std::filesystem::read_symlink(path);
  return path.string();
}

/// The path of a file that this process has open, also of one that was removed.
inline std::string descriptor_path(int file) {
  return "/proc/self/fd/" + std::to_string(file);
}

/// The place of a file that this process has opened at a path: `there`, or it was moved or removed, or the path has
/// another file. If it is `unknown`, errno says why.
enum class FilePlace { there, replaced, moved, removed, unknown };
inline FilePlace place_of(int file, const std::string& path) {
  struct stat ours {};
  struct stat there {};
  if (::fstat(file, &ours) != 0) return FilePlace::there;
  if (::stat(path.c_str(), &there) == 0)
    return there.st_dev == ours.st_dev && there.st_ino == ours.st_ino ? FilePlace::there : FilePlace::replaced;
  if (errno != ENOENT) return FilePlace::unknown;
  if (ours.st_nlink == 0) return FilePlace::removed;
  // On NFS it gets another name in its folder, and loses it when it is closed.
  std::error_code unknown;
  const std::string name = std::filesystem::read_symlink(descriptor_path(file), unknown).filename().string();
  return name.starts_with(".nfs") ? FilePlace::removed : FilePlace::moved;
}

inline void warn_removed(const std::string& path) {
  shardlib::detail::warn(fmt::format("the file '{}' was removed while this run uses it: it is written again", path));
}

}  // namespace shardlib::run::detail
