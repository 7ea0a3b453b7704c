// The report of a run while it goes on.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <string>
#include <utility>

#include "shardlib/run/report.hpp"
#include "shardlib/run/run_directory.hpp"
#include "shardlib/support/error.hpp"

namespace shardlib::run::detail {

/// Writes a run's report again and again, each `interval` seconds and in at most a hundredth of the run's time. A
/// report that cannot be written costs a message, not the run.
class LiveReport {
 public:
  LiveReport(const RunDirectory& directory, std::function<void(const std::string&)> message,
             double interval = report_interval)
      : directory_(directory), message_(std::move(message)), interval_(interval), next_(now() + interval) {}

  /// After a step, on the device that writes.
  void step() {
    const double begin = now();
    if (!directory_.exists() || begin < next_) return;
    try {
      write_report({directory_.path()}, directory_.report(), std::max(interval_, 1e-3));
    } catch (const Error& error) {
      if (!std::exchange(failed_, true)) message_(fmt::format("the report could not be written: {}", error.what()));
    }
    const double end = now();
    interval_ = std::max(interval_, 100 * (end - begin));
    next_ = end + interval_;
  }

 private:
  static double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
  }

  const RunDirectory& directory_;
  std::function<void(const std::string&)> message_;
  double interval_, next_;
  bool failed_ = false;
};

}  // namespace shardlib::run::detail
