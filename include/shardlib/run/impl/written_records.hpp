// Readers of the records that earlier steps have left in the folder of a run.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <iterator>
#include <string>
#include <vector>

#include "shardlib/device/device.hpp"
#include "shardlib/io/agree.hpp"
#include "shardlib/run/impl/judge.hpp"
#include "shardlib/run/metrics.hpp"
#include "shardlib/run/run_directory.hpp"
#include "shardlib/run/training.hpp"
#include "shardlib/support/stopwatch.hpp"

namespace shardlib::run::detail {

/// The last records of the run, on all devices: as many as the window that finds spikes takes.
inline std::vector<Judge::AcceptedStep> shared_records(Device& device, const RunDirectory& directory,
                                                       std::int64_t window) {
  std::vector<Judge::AcceptedStep> steps;
  io::together(device, "", [&] {
    if (device.rank() != 0) return;
    for (const Record& record : read_records(directory.metrics()))
      if (!record.skipped) steps.push_back({record.step, record.loss, record.grad_norm});
    steps.erase(steps.begin(), steps.end() - std::min(std::ssize(steps), window));
  });
  std::string bytes(steps.size() * sizeof(Judge::AcceptedStep), '\0');
  std::memcpy(bytes.data(), steps.data(), bytes.size());
  bytes = io::gather_texts(device, bytes)[0];
  steps.resize(bytes.size() / sizeof(Judge::AcceptedStep));
  std::memcpy(steps.data(), bytes.data(), bytes.size());
  return steps;
}

/// How many samples of this step and prompt the run has, the same on all devices.
inline std::int64_t samples_of(Device& device, const RunDirectory& directory, std::int64_t step,
                               const std::string& prompt) {
  std::string drawn;  // as long as their number
  io::together(device, "", [&] {
    if (device.rank() != 0 || !directory.exists() || !std::filesystem::exists(directory.samples())) return;
    const auto number = std::ranges::count_if(read_samples(directory.samples()),
                                              [&](const Sample& s) { return s.step == step && s.prompt == prompt; });
    drawn.assign(static_cast<std::size_t>(number), '.');
  });
  return std::ssize(io::gather_texts(device, drawn)[0]);
}

/// Notes the seconds of a step's parts and their sum; `data` seconds were spent on its batches.
inline void note_seconds(Record& record, double data, const shardlib::detail::Stopwatch& watch) {
  using shardlib::detail::Stopwatch;
  record.seconds = {{"data", data},
                    {"forward", watch.seconds(Stopwatch::forward)},
                    {"backward", watch.seconds(Stopwatch::backward)},
                    {"optimizer", watch.seconds(Stopwatch::rest)},
                    {"communication", watch.seconds(Stopwatch::communication)}};
  for (const auto& [part, seconds] : record.seconds) record.step_seconds += seconds;
}

/// Removes the records of `step` and later from the file of --metrics. A pipe or a device keeps them.
inline void cut_metrics(JsonLines& metrics, const std::string& path, std::int64_t step) {
  if (metrics.is_open() && std::filesystem::is_regular_file(path)) metrics.cut(step);
}

}  // namespace shardlib::run::detail
