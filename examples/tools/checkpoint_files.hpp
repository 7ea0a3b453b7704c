// Functions that the commands of shardlib-checkpoint share.
#pragma once

#include <fmt/format.h>
#include <shardlib/io/checkpoint/folder.hpp>
#include <shardlib/io/file.hpp>
#include <shardlib/support/error.hpp>
#include <shardlib/support/text.hpp>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <iterator>
#include <string>
#include <system_error>
#include <vector>

using namespace shardlib;
using shardlib::detail::counted;

inline std::string show_bytes(std::uint64_t bytes) {
  constexpr const char* units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  auto value = static_cast<double>(bytes);
  std::size_t unit = 0;
  for (; value >= 1024 && unit + 1 < std::size(units); ++unit) value /= 1024;
  return unit == 0 ? fmt::format("{} B", bytes) : fmt::format("{:.1f} {}", value, units[unit]);
}

/// The last part of a path; "step-00000100" of "a/step-00000100/".
inline std::string base_name(std::string path) {
  while (path.size() > 1 && path.ends_with('/')) path.pop_back();
  return path.substr(path.rfind('/') + 1);
}

/// The folder of checkpoints in a run's folder, or the path itself. Throws UsageError if it is no folder.
inline std::string directory_of(const std::string& path) {
  const std::string give = ": give the folder of a run or of its checkpoints";
  if (!io::file_exists(path)) throw UsageError("there is no folder '" + path + "'" + give);
  if (!std::filesystem::is_directory(path)) throw UsageError("'" + path + "' is a file" + give);
  const std::string below = path + "/checkpoints";
  return io::file_exists(below) ? below : path;
}

/// The first file whose size is not the manifest's, or "".
inline std::string wrong_size(const io::Checkpoint& checkpoint) {
  for (const io::ManifestFile& file : checkpoint.files()) {
    std::error_code missing;
    const auto bytes = std::filesystem::file_size(checkpoint.path() + "/" + file.path, missing);
    if (missing || bytes != file.bytes) return file.path;
  }
  return "";
}

/// Opens a checkpoint and compares every file with the manifest. Throws Error if it is damaged.
inline io::Checkpoint open_verified(const std::string& path) {
  io::Checkpoint checkpoint = io::Checkpoint::open(path);
  if (const auto damages = checkpoint.damages(); !damages.empty())
    throw Error(io::detail::damage_message(path, damages));
  return checkpoint;
}

/// "1 leaf", "2 leaves", and with `kind` "2 other leaves".
inline std::string counted_leaves(std::integral auto count, const std::string& kind = "") {
  return fmt::format("{} {}{}", count, kind, count == 1 ? "leaf" : "leaves");
}

/// The name of a leaf without the prefix, for a safetensors file. Throws UsageError if that is all of the name.
inline std::string without_prefix(const std::string& leaf, const std::string& prefix) {
  if (leaf == prefix)
    throw UsageError("--prefix '" + prefix + "' is the whole name of a leaf, which would have none in the file: give " +
                     "the part up to a dot, as in weights.");
  return leaf.substr(prefix.size());
}

/// Throws UsageError if the folder in which a command would make a checkpoint is something else.
inline void require_place(const std::string& directory) {
  const std::string give = ": give the folder of a run's checkpoints, or a new one";
  if (io::file_exists(directory) && !std::filesystem::is_directory(directory))
    throw UsageError("'" + directory + "' is a file" + give);
  if (io::file_exists(directory + "/manifest.json")) throw UsageError("'" + directory + "' is a checkpoint" + give);
  if (io::file_exists(directory + "/config.toml"))
    throw UsageError("'" + directory + "' is the folder of a run: give '" + directory + "/checkpoints'");
  if (io::detail::step_of(base_name(directory)))  // a run would take it for a damaged checkpoint
    throw UsageError("'" + directory + "' has the name of a checkpoint, which is made in the folder that you give" +
                     give);
}

/// Throws UsageError if there is something at the path that a command would make.
inline void require_new(const std::string& made) {
  if (io::file_exists(made)) throw UsageError("'" + made + "' already exists: choose another --step or folder");
}

/// Throws UsageError if a checkpoint of this step would make a run in the folder resume from an earlier step.
inline void require_latest(const std::string& directory, std::int64_t step) {
  const std::vector<std::string> there =
      io::file_exists(directory) ? io::list_checkpoints(directory) : std::vector<std::string>();
  for (const std::string& path : there)
    if (const std::string name = base_name(path); io::detail::step_of(name) > step)
      throw UsageError("'" + directory + "' has " + name + ", and a run there would resume from the earlier " +
                       io::checkpoint_name(step) + ": choose another folder, or a later --step where there is one");
}
