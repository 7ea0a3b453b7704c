// POSIX file descriptors and their errors, for impl/ headers.
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <span>
#include <string>
#include <system_error>

#include "shardlib/support/error.hpp"

namespace shardlib::io {
namespace detail {

inline std::string reason(int error) {
  return std::system_category().message(error);
}
[[noreturn]] inline void fail_file(const std::string& what, const std::string& path, int error) {
  const std::string message = "cannot " + what + " '" + path + "': " + reason(error);
  // No later try can open such a path. (EACCES may be a lost ticket of a network file system.)
  const bool wrong_path =
      error == ENOENT || error == ENOTDIR || error == EISDIR || error == ELOOP || error == ENAMETOOLONG;
  if (wrong_path) throw UsageError(message);
  throw StorageError(message);
}

/// f() on paths that this program has made itself. If one is gone, someone has removed it, and a later try makes it
/// again. So the UsageErrors of fail_file become StorageErrors.
template <class F>
auto on_own_paths(const F& f) {
  try {
    return f();
  } catch (const UsageError& error) {
    throw StorageError(error.what());
  }
}

/// Creates a temporary file and returns its descriptor, or -1 with errno. A file that a dead process has left under
/// this name is removed first; a symbolic link is never followed, so nothing outside of the folder is overwritten.
inline int create_file(const std::string& path) {
  constexpr int flags = O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC;
  const int file = ::open(path.c_str(), flags, 0666);
  if (file >= 0 || errno != EEXIST || ::unlink(path.c_str()) != 0) return file;
  return ::open(path.c_str(), flags, 0666);
}

/// Closes the descriptor on every way out.
class Descriptor {
 public:
  explicit Descriptor(int number) : number_(number) {}
  Descriptor(const std::string& path, int flags, const char* what) : number_(::open(path.c_str(), flags, 0666)) {
    if (number_ < 0) fail_file(what, path, errno);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  ~Descriptor() { ::close(number_); }
  [[nodiscard]] int number() const { return number_; }

 private:
  int number_;
};

inline void write_all(int descriptor, std::span<const std::byte> bytes, const std::string& path) {
  while (!bytes.empty()) {
    const ssize_t n = ::write(descriptor, bytes.data(), bytes.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) fail_file("write", path, errno);
    bytes = bytes.subspan(static_cast<std::size_t>(n));
  }
}

}  // namespace detail

}  // namespace shardlib::io
