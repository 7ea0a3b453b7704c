// A run checks before its first step that its ranks agree and that its outputs can be written, and finds its plan or
// its peak.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include "shardlib/device/device.hpp"
#include "shardlib/device/launch.hpp"
#include "shardlib/io/agree.hpp"
#include "shardlib/io/data/token_batch.hpp"
#include "shardlib/io/file.hpp"
#include "shardlib/memory/region.hpp"
#include "shardlib/run/accelerators.hpp"
#include "shardlib/run/impl/batches.hpp"
#include "shardlib/run/impl/run_identity.hpp"
#include "shardlib/run/metrics.hpp"
#include "shardlib/run/peak.hpp"
#include "shardlib/run/plan.hpp"
#include "shardlib/run/run_directory.hpp"
#include "shardlib/run/training.hpp"
#include "shardlib/support/error.hpp"
#include "shardlib/support/version.hpp"

namespace shardlib::run::detail {

/// The first line of a resolved configuration in which two devices differ, or nothing.
inline std::optional<std::array<std::string, 2>> difference(const std::string& a, const std::string& b) {
  std::istringstream mine(a), theirs(b);
  for (std::string x, y; !mine.eof() || !theirs.eof();) {
    if (!std::getline(mine, x)) x.clear();
    if (!std::getline(theirs, y)) y.clear();
    if (x != y) return std::array{x, y};
  }
  return std::nullopt;
}

/// Throws UsageError, the same on all devices, unless they run the same program on the same data. Ranks with other
/// settings would otherwise train silently, each its own model.
inline void require_one_run(const DevicePtr& device, const Training& training, const std::string& configuration,
                            const Data& data) {
  if (device->size() == 1) return;
  const std::string mine = fmt::format(
      "shardlib {}\n--run {}\n--resume {}\n--allow-change {}\n--sample-only {}\n--chat {}\n"
      "--evaluate: {} questions\ninitial weights: {}\n{}\ndata = {}\nvalidation data = {}\n",
      SHARDLIB_VERSION, training.directory, training.resume, training.allow_change, training.sample_only, training.chat,
      data.questions.size(), training.initial_weights, configuration, loader_hash(data.train.get(), "none"),
      loader_hash(data.validation.get(), "none"));
  const std::vector<std::string> all = io::gather_texts(*device, mine);
  std::string others;
  std::optional<std::array<std::string, 2>> first;
  for (std::size_t i = 1; i < all.size(); ++i) {
    const auto differs = difference(all[0], all[i]);
    if (!differs || (first && *differs != *first)) continue;
    first = differs;
    others += (others.empty() ? "" : ", ") + std::to_string(i);
  }
  if (!first) return;
  const auto shown = [](const std::string& line) { return line.empty() ? "nothing" : "`" + line + "`"; };
  throw UsageError(
      fmt::format("the ranks run different programs: rank 0 has {}, but rank {} has {}; start all ranks with "
                  "the same settings, data and program",
                  shown((*first)[0]), others, shown((*first)[1])));
}

/// Throws UsageError, the same on all devices, if --metrics names a file that a run writes itself. It is called before
/// the run's folder is made.
inline void check_metrics(const DevicePtr& device, const Training& training) {
  io::together(*device, "", [&] {
    if (device->rank() == 0 && !training.metrics.empty())
      require_no_run_file(training.metrics, "--metrics", training.directory);
  });
}

/// Throws UsageError if the file of --metrics cannot be written, is a run's that begins at this moment, or holds
/// anything else than records, which would be lost.
inline void require_metrics(const std::string& path) {
  JsonLines tried(path, JsonLines::Mode::append, "check --metrics");
  if (!tried.lock())
    throw UsageError("--metrics '" + path + "': another run is writing to this file; choose another path");
  if (!std::filesystem::is_regular_file(path)) return;  // a pipe or a device
  const io::InputFile file(path);
  io::Bytes head(static_cast<std::size_t>(std::min<std::uint64_t>(file.size(), 256)));
  file.read(0, head);
  if (!begins_as_record(io::as_text(head)))
    throw UsageError("--metrics '" + path + "': the file holds something else than records of a run, and would be " +
                     "emptied; choose another path, or move it away");
}

/// Throws UsageError before the first step if an output that an option names cannot be written.
inline void require_outputs(const Training& training, const RunDirectory& directory) {
  if (!training.metrics.empty()) require_metrics(training.metrics);
  if (!directory.exists()) return;
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

inline Plan plan_step(const DevicePtr& device, const Training& t, const Program& program) {
  const std::int64_t rows = t.batch / t.microbatches / BatchPlace(*device, t).parts;
  const std::vector parts(static_cast<std::size_t>(t.microbatches), io::detail::empty_rows(rows, t.seq));
  Plan plan = count_step(device, [&] {
    program.step({0, lr_schedule(t)(0), parts, [](const StepResult&) { return true; }});
  });
  plan.parameters = program.parameters;
  plan.weights = program.weight_bytes;
  plan.copies = program.copy_bytes;
  plan.gradients = program.gradient_bytes.value_or(program.weight_bytes);
  plan.optimizer = program.optimizer_bytes;
  plan.model_flops = program.flops_per_token * static_cast<double>(t.batch * t.seq);
  return plan;
}

/// The peak of all devices together, or 0 if it is not known. All devices call it.
inline double peak_of_run(const DevicePtr& device, const Training& training, std::string_view dtype) {
  // Devices that are threads of this process share its cores. Ranks of one machine measure their cores together.
  const double peak = device->exec().gpu() != nullptr
                          ? gpu_peak(device->pool()->device_memory()->model(), dtype, training.plan_flops)
                      : under_mpi()         ? measured_peak_flops(device->exec().threads)
                      : device->rank() == 0 ? measured_peak_flops()
                                            : 0.0;
  const double sum = reduce(device, peak, Reduction::sum);
  return sum > 0 ? sum : 0;
}

}  // namespace shardlib::run::detail
