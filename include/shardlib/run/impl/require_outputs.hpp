// Tries the outputs that options name, before the first step.
#pragma once

#include <fmt/format.h>

#include <filesystem>
#include <string>
#include <system_error>

#include "shardlib/io/file.hpp"
#include "shardlib/run/metrics.hpp"
#include "shardlib/run/run_directory.hpp"
#include "shardlib/run/training.hpp"
#include "shardlib/support/error.hpp"

namespace shardlib::run::detail {

/// Throws UsageError before the first step if an output that an option names cannot be written.
inline void require_outputs(const Training& training, const RunDirectory& directory) {
  if (!training.metrics.empty()) const JsonLines tried(training.metrics, JsonLines::Mode::append, "check --metrics");
  if (!directory.exists()) return;
  std::error_code none;
  if (!training.metrics.empty() && std::filesystem::equivalent(training.metrics, directory.metrics(), none))
    throw UsageError("--metrics '" + training.metrics + "': the run writes this file itself; leave the option out");
  try {
    io::make_folders(directory.checkpoints());
    if (training.tensorboard) io::make_folders(directory.tensorboard());
  } catch (const Error& error) {
    throw UsageError(fmt::format("--run: {}; move the existing file away, or choose another folder", error.what()));
  }
  for (const std::string& path :
       {directory.checkpoints() + "/LATEST", directory.samples(), directory.console(), directory.report()})
    io::require_writable(path, "--run");
  if (training.trace) io::require_writable(directory.trace(), "--trace");
  if (training.tensorboard) io::require_writable(directory.tensorboard() + "/events", "--tensorboard");
}

}  // namespace shardlib::run::detail
