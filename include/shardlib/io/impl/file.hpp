// Definitions of file.hpp.
#pragma once

#include "shardlib/io/file.hpp"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <system_error>
#include <utility>

#include "shardlib/io/impl/posix.hpp"
#include "shardlib/io/impl/temporary.hpp"
#include "shardlib/support/error.hpp"
#include "shardlib/support/regular_file.hpp"

namespace shardlib::io {

SHARDLIB_INLINE InputFile::InputFile(std::string path) : path_(std::move(path)) {
  shardlib::detail::require_regular_file(path_);  // opening a device may already do something
  // O_NONBLOCK: if a pipe has taken the path since the check, opening it must not wait for a writer.
  file_ = std::make_shared<const detail::Descriptor>(path_, O_RDONLY | O_CLOEXEC | O_NONBLOCK, "read");
  struct stat status {};
  const int failed = ::fstat(file_->number(), &status) != 0 ? errno : S_ISDIR(status.st_mode) ? EISDIR : 0;
  if (failed != 0) detail::fail_file("read", path_, failed);
  shardlib::detail::require_regular_file(path_, status);
  size_ = static_cast<std::uint64_t>(status.st_size);
}

SHARDLIB_INLINE void InputFile::read(std::uint64_t offset, std::span<std::byte> out) const {
  for (std::size_t done = 0; done < out.size();) {
    const ssize_t n = ::pread(file_->number(), out.data() + done, out.size() - done, static_cast<off_t>(offset + done));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) detail::fail_file("read", path_, errno);
    if (n == 0)
      throw Error("cannot read '" + path_ + "': it ends at byte " + std::to_string(offset + done) + ", but " +
                  std::to_string(out.size() - done) + " more are needed: it was truncated");
    done += static_cast<std::size_t>(n);
  }
}

SHARDLIB_INLINE bool file_exists(const std::string& path) {
  struct stat status {};
  if (::stat(path.c_str(), &status) == 0) return true;
  if (errno != ENOENT && errno != ENOTDIR) detail::fail_file("look for", path, errno);
  return false;
}

SHARDLIB_INLINE bool is_folder(const std::string& path) {
  struct stat status {};
  return ::stat(path.c_str(), &status) == 0 && S_ISDIR(status.st_mode);
}

SHARDLIB_INLINE Bytes read_file(const std::string& path) {
  const InputFile file(path);
  Bytes bytes(file.size());
  file.read(0, bytes);
  return bytes;
}

SHARDLIB_INLINE OutputFile::OutputFile(const std::string& path) : path_(path) {
  struct stat status {};
  // The commit renames the temporary file to this path, and that would replace a device, too.
  if (::stat(path.c_str(), &status) == 0 && !S_ISREG(status.st_mode))
    throw UsageError("cannot write '" + path + "': it is not a regular file; move it away, or choose another path");
  temporary_ = detail::temporary_name(path);
  descriptor_ = detail::create_file(temporary_);
  if (descriptor_ < 0) detail::fail_file("write", path_, errno);
}
SHARDLIB_INLINE OutputFile::~OutputFile() {
  if (descriptor_ >= 0) ::close(descriptor_);
  if (!temporary_.empty()) ::unlink(temporary_.c_str());
}
SHARDLIB_INLINE void OutputFile::write(std::span<const std::byte> bytes) {
  detail::write_all(descriptor_, bytes, path_);
}
SHARDLIB_INLINE void OutputFile::commit(bool durable) {
  if (durable && ::fsync(descriptor_) != 0) detail::fail_file("write", path_, errno);
  if (::close(std::exchange(descriptor_, -1)) != 0) detail::fail_file("write", path_, errno);
  detail::on_own_paths([&] {
    rename_path(temporary_, path_);
    temporary_.clear();
    if (durable) sync_path(std::filesystem::path(path_).parent_path().string());
  });
}

SHARDLIB_INLINE void replace_file(const std::string& path, std::span<const std::byte> bytes, bool durable) {
  OutputFile file(path);
  file.write(bytes);
  file.commit(durable);
}

SHARDLIB_INLINE void make_folders(const std::string& path) {
  namespace fs = std::filesystem;
  std::error_code error;
  fs::create_directories(path, error);
  if (!error) return;
  // The system says "File exists" for a link that leads nowhere, such as a link to a disk that is not mounted.
  std::error_code ignored;
  if (const fs::path link = path; fs::is_symlink(link, ignored) && !fs::exists(link, ignored))
    throw StorageError("cannot make the folder '" + path + "': it is a symbolic link to '" +
                       fs::read_symlink(link, ignored).string() + "', which is not there (is its disk mounted?)");
  detail::fail_file("make the folder", path, error.value());
}

SHARDLIB_INLINE void make_new_folder(const std::string& path) {
  if (::mkdir(path.c_str(), 0777) != 0) detail::fail_file("make the folder", path, errno);
}

SHARDLIB_INLINE void sync_path(const std::string& path) {
  const detail::Descriptor file(path.empty() ? "." : path, O_RDONLY | O_CLOEXEC, "sync");
  // Some file systems (FUSE, SMB) have no fsync for folders and say so with EINVAL: then there is nothing to wait for.
  if (::fsync(file.number()) != 0 && errno != EINVAL) detail::fail_file("sync", path, errno);
}

SHARDLIB_INLINE void replace_folder(const std::string& from, const std::string& to) {
  if (::rename(from.c_str(), to.c_str()) == 0) return;
  if (errno != EEXIST && errno != ENOTEMPTY) detail::fail_file("rename '" + from + "' to", to, errno);
  // If the file system can swap the two folders, there is always one of them.
  if (::renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), RENAME_EXCHANGE) != 0)
    return detail::replace_by_renames(from, to);
  remove_folder(from);
}

SHARDLIB_INLINE std::shared_ptr<const void> lock_folder(const std::string& folder) {
  constexpr int flags = O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC;
  const auto file = std::make_shared<const detail::Descriptor>(folder + "/.lock", flags, "write");
  // Some file systems have no locks. There two processes cannot be told apart, and the writer continues.
  if (::flock(file->number(), LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK)
    throw UsageError("another process is writing '" + folder + "': wait for it, or write elsewhere");
  return file;
}

SHARDLIB_INLINE std::shared_ptr<const void> begin_folder(const std::string& folder,
                                                         const std::function<void(bool begun)>& require_own) {
  const bool begun = file_exists(folder + "/.lock");
  const auto lock = begun ? lock_folder(folder) : nullptr;
  require_own(begun);
  make_folders(folder);
  return begun ? lock : lock_folder(folder);
}

SHARDLIB_INLINE void remove_folder(const std::string& path) {
  std::error_code error;
  std::filesystem::remove_all(path, error);
  if (error) detail::fail_file("remove the folder", path, error.value());
}

SHARDLIB_INLINE std::vector<std::string> files_below(const std::string& folder) {
  namespace fs = std::filesystem;
  std::vector<std::string> paths;
  std::error_code error;
  fs::recursive_directory_iterator it(folder, fs::directory_options::follow_directory_symlink, error), end;
  for (; !error && it != end; it.increment(error)) {
    const bool hidden = it->path().filename().string().starts_with('.');
    std::error_code gone;
    if (hidden && it->is_directory(gone)) it.disable_recursion_pending();
    if (hidden) continue;
    if (it->is_regular_file(gone)) paths.push_back(it->path().string());
    if (it->is_symlink(gone) && !it->exists(gone)) {
      if (error = gone; error.value() == ELOOP) break;
      throw UsageError("'" + it->path().string() + "' is a symbolic link to nothing: fetch its file, or remove it");
    }
  }
  if (error)
    throw UsageError("cannot list the folder '" + folder + "': " +
                     (error.value() == ELOOP ? "a symbolic link in it leads to a folder above it; remove the link"
                                             : error.message()));
  std::sort(paths.begin(), paths.end());  // the order of a folder's entries differs from machine to machine
  return paths;
}

SHARDLIB_INLINE void require_writable(const std::string& path, const std::string& option) {
  try {
    const OutputFile tried(path);
  } catch (const Error& error) {
    throw UsageError(option + ": " + error.what() + "; nothing has been computed yet: check " + option);
  }
}

SHARDLIB_INLINE bool begins_otherwise(const std::string& path, std::string_view begin) {
  if (!std::filesystem::is_regular_file(path)) return false;
  const InputFile file(path);
  Bytes bytes(static_cast<std::size_t>(std::min<std::uint64_t>(file.size(), begin.size())));
  file.read(0, bytes);
  return !begin.starts_with(as_text(bytes));
}

SHARDLIB_INLINE void remove_stale_temporaries(const std::string& folder) {
  namespace fs = std::filesystem;
  std::vector<fs::path> stale;
  std::error_code ignored;  // the next start or save tries again
  for (fs::directory_iterator it(folder.empty() ? "." : folder, ignored), end; !ignored && it != end;
       it.increment(ignored))
    if (detail::is_stale_temporary(it->path().string())) stale.push_back(it->path());
  for (const fs::path& path : stale) fs::remove_all(path, ignored);
}

SHARDLIB_INLINE void rename_path(const std::string& from, const std::string& to) {
  if (::rename(from.c_str(), to.c_str()) != 0) detail::fail_file("rename '" + from + "' to", to, errno);
}

}  // namespace shardlib::io
