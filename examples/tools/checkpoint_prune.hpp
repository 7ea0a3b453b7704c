// shardlib-checkpoint prune: removes old checkpoints, by the rules by which a run does.
#pragma once

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <shardlib/io/checkpoint/folder.hpp>
#include <shardlib/io/file.hpp>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <optional>
#include <string>
#include <system_error>
#include <vector>

#include "checkpoint_files.hpp"

/// The arguments of `prune`: the folder, and which of its checkpoints stay.
struct PruneRequest {
  std::string directory;
  std::int64_t keep = 0, every = 0, best = 1;
  bool dry_run = false;
};

/// The bytes of all files in a folder.
inline std::uint64_t bytes_in(const std::string& folder) {
  namespace fs = std::filesystem;
  std::uint64_t bytes = 0;
  std::error_code error;
  for (fs::recursive_directory_iterator it(folder, error), end; !error && it != end; it.increment(error)) {
    std::error_code gone;
    if (it->is_regular_file(gone)) bytes += it->file_size(gone);
  }
  return bytes;
}

/// The step of the first whole checkpoint of `paths`, or nothing. It reads every file of a checkpoint that may be the
/// one. `left` receives the damaged ones, `complete` the steps of those that have all files in the right sizes.
inline std::optional<std::int64_t> find_complete(const std::vector<std::string>& paths,
                                                 std::vector<std::int64_t>& complete, std::vector<std::string>& left) {
  std::optional<std::int64_t> newest;
  for (const std::string& path : paths) {
    try {
      const io::Checkpoint checkpoint = io::Checkpoint::open(path);
      if (const std::string file = wrong_size(checkpoint); !file.empty())
        throw Error(fmt::format("checkpoint '{}' is damaged: '{}' is missing or of a wrong size", path, file));
      const std::optional<std::int64_t> step = io::detail::step_of(base_name(path));
      if (!newest) {
        static_cast<void>(open_verified(path));
        newest = step;
      } else {
        complete.push_back(*step);
      }
    } catch (const Error& e) {
      left.emplace_back(e.what());
    }
  }
  return newest;
}

inline int prune(const PruneRequest& request) {
  const std::string folder = directory_of(request.directory);
  const std::vector<std::string> paths = io::list_checkpoints(folder);
  if (paths.empty())
    throw UsageError("'" + folder + "' has no checkpoints: give the folder of a run or of its checkpoints");
  std::vector<std::int64_t> before;
  std::vector<std::string> damaged;
  const std::optional<std::int64_t> newest = find_complete(paths, before, damaged);
  for (const std::string& what : damaged) fmt::print("stays: {}\n", what);
  if (!newest)
    throw Error(fmt::format("none of the {} checkpoints in '{}' is whole, so none is removed: look at them with verify",
                            paths.size(), folder));
  // Steps after the one that a run resumes from are of a run that was abandoned: a run's own retention keeps them too.
  std::erase_if(before, [&](std::int64_t step) { return step > *newest; });
  std::vector<std::int64_t> old =
      io::detail::not_kept(folder, before, *newest,
                           {static_cast<int>(std::min<std::int64_t>(request.keep, 1'000'000'000)), request.every,
                            static_cast<int>(std::min<std::int64_t>(request.best, 1'000'000'000))});
  std::ranges::sort(old);
  std::uint64_t total = 0;
  const char* const verb = request.dry_run ? "would remove" : "removes";
  const auto announce = [&](const std::string& path, const std::string& what) {
    const std::uint64_t bytes = bytes_in(path);
    total += bytes;
    fmt::print("{} {}{}, {}\n", verb, base_name(path), what, show_bytes(bytes));
    std::fflush(stdout);  // before a failure
  };
  if (!request.dry_run) io::remove_stale_temporaries(folder);
  for (const std::string& path : io::detail::half_removed(folder)) {
    announce(path, " (left by a process that ended)");
    if (!request.dry_run) io::remove_folder(path);
  }
  for (const std::int64_t step : old) {
    const std::string path = folder + "/" + io::checkpoint_name(step);
    announce(path, "");
    if (!request.dry_run) io::detail::remove_checkpoint(path);
  }
  fmt::print("{} {} of {} and {}; a run resumes from {}\n", request.dry_run ? "would remove" : "removed", old.size(),
             counted(paths.size(), "checkpoint"), show_bytes(total), io::checkpoint_name(*newest));
  return 0;
}
