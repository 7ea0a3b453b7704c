// Whole files and folders through POSIX, with errors that name the file and the reason: UsageError if the path is wrong
// (it does not exist, or is not a file), Error if the system fails.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "shardlib/support/inline.hpp"

namespace shardlib::io {

/// The bytes of a file, in memory.
using Bytes = std::vector<std::byte>;

/// The bytes of a text, without a copy.
inline std::span<const std::byte> as_bytes(std::string_view text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}
/// Bytes as a text, without a copy.
inline std::string_view as_text(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

namespace detail {
class Descriptor;
}

/// A file open for reading, and its `path`; copies share it, and reads are thread-safe.
class InputFile {
 public:
  /// Throws UsageError where the file does not exist, Error where it cannot be read.
  explicit InputFile(std::string path);

  [[nodiscard]] const std::string& path() const { return path_; }
  /// The size when it was opened.
  [[nodiscard]] std::uint64_t size() const { return size_; }
  /// Fills `out` from byte `offset` on. Throws Error where the file ends before.
  void read(std::uint64_t offset, std::span<std::byte> out) const;

 private:
  std::string path_;
  std::shared_ptr<const detail::Descriptor> file_;
  std::uint64_t size_ = 0;
};

/// A file that is written in pieces under a temporary name in the same folder, and gets its name at `commit`. If the
/// process dies before, the temporary file stays: see remove_stale_temporaries.
class OutputFile {
 public:
  /// Throws UsageError if a folder, a device or a pipe has this path.
  explicit OutputFile(const std::string& path);
  OutputFile(const OutputFile&) = delete;
  OutputFile& operator=(const OutputFile&) = delete;
  /// Removes what was not committed.
  ~OutputFile();

  void write(std::span<const std::byte> bytes);  ///< appends the bytes
  /// With `durable` it is on the disk (fsync) when this returns.
  void commit(bool durable);

 private:
  std::string path_, temporary_;
  int descriptor_ = -1;
};

/// Whether a file, a folder or anything else has this path.
[[nodiscard]] bool file_exists(const std::string& path);
/// Whether the path is a folder's. `is_folder("runs/first")`
[[nodiscard]] bool is_folder(const std::string& path);
/// Reads the bytes of a file.
[[nodiscard]] Bytes read_file(const std::string& path);
/// Creates or replaces the file, through an OutputFile: the path has the old one or the new one, never a part, also
/// after a crash of the process, and with `durable` of the machine. `replace_file("LATEST", as_bytes(name))`
void replace_file(const std::string& path, std::span<const std::byte> bytes, bool durable = false);
/// Creates a folder and its parents. An existing folder is not an error.
void make_folders(const std::string& path);
/// Makes one folder. It is an error if the name exists already, even as a symbolic link.
void make_new_folder(const std::string& path);
/// Makes the file's bytes, or the folder's entries, durable (fsync).
void sync_path(const std::string& path);
/// Renames a file or folder, in one step. `rename_path("all.partial", "all")`
void rename_path(const std::string& from, const std::string& to);
/// Renames a folder. An existing folder `to` is replaced and removed. `replace_folder("new", "step-00000100")`
void replace_folder(const std::string& from, const std::string& to);
/// Keeps other processes from writing a folder for as long as the result lives, by a lock on its file `.lock`. Throws
/// UsageError where another one has it. `const auto lock = lock_folder("all.partial")`
[[nodiscard]] std::shared_ptr<const void> lock_folder(const std::string& folder);
/// lock_folder of a folder that an earlier process may have begun, and is made if not. `require_own(begun)` looks at
/// what is there and throws if it is something else, before anything changes. A folder that has been begun is locked
/// first, as another process may be at work. `begin_folder("all.partial", [](bool begun) {})`
[[nodiscard]] std::shared_ptr<const void> begin_folder(const std::string& folder,
                                                       const std::function<void(bool begun)>& require_own);
/// Removes a folder with all that is in it.
void remove_folder(const std::string& path);
/// The files in a folder and in those below it, sorted. Hidden ones are left out. Symbolic links are followed; one that
/// leads nowhere is a UsageError, as it may stand for a file that was not fetched. `files_below("texts")`
[[nodiscard]] std::vector<std::string> files_below(const std::string& folder);
/// Throws UsageError, which begins with the option, unless a file can be written at `path`. An existing file does not
/// change. Call it early for outputs that are written late. `require_writable("out.svg", "--timeline")`
void require_writable(const std::string& path, const std::string& option);
/// Whether a regular file has other bytes than `begin` at its start, so that another program's data would be lost. An
/// empty file has none. `begins_otherwise("runs.csv", "run,step")`
[[nodiscard]] bool begins_otherwise(const std::string& path, std::string_view begin);
/// Removes the temporary files and folders directly in `folder` that dead processes of this machine have left. Those of
/// living processes stay, and those of other machines too, until nothing in them has changed for a day. What cannot be
/// removed stays without an error. `remove_stale_temporaries("runs/first")`
void remove_stale_temporaries(const std::string& folder);

}  // namespace shardlib::io

#ifndef SHARDLIB_COMPILED
#include "shardlib/io/impl/file.hpp"
#endif
