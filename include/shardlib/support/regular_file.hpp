// The check that a path may be opened for reading.
#pragma once

#include <sys/stat.h>

#include <string>

#include "shardlib/support/error.hpp"

namespace shardlib::detail {

/// Throws UsageError for a pipe, a socket or a device: reading one may block forever. `status` describes `path`.
inline void require_regular_file(const std::string& path, const struct stat& status) {
  const char* const kind = S_ISFIFO(status.st_mode)                             ? "a pipe"
                           : S_ISSOCK(status.st_mode)                           ? "a socket"
                           : S_ISCHR(status.st_mode) || S_ISBLK(status.st_mode) ? "a device"
                                                                                : nullptr;
  if (kind != nullptr)
    throw UsageError("cannot read '" + path + "': it is " + kind +
                     ", and reading that could wait forever; give the path of a regular file");
}
/// As above, with the path's current status. A path that does not exist passes, because opening it fails.
inline void require_regular_file(const std::string& path) {
  struct stat status {};
  if (::stat(path.c_str(), &status) == 0) require_regular_file(path, status);
}

/// Throws UsageError if the path is a folder. `remedy` says what to give in its place.
inline void refuse_folder(const std::string& path, const std::string& remedy) {
  struct stat status = {};
  if (::stat(path.c_str(), &status) == 0 && S_ISDIR(status.st_mode))
    throw UsageError("'" + path + "' is a folder: " + remedy);
}

}  // namespace shardlib::detail
