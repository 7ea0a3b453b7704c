// The report of a run that is in progress.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <exception>
#include <functional>
#include <string>
#include <utility>

#include "shardlib/run/report.hpp"
#include "shardlib/run/run_directory.hpp"
#include "shardlib/support/stopwatch.hpp"

namespace shardlib::run::detail {

/// Writes a run's report again and again, each `interval` seconds and in at most a hundredth of the run's time, and at
/// its end. A report that cannot be written costs a message, not the run.
class LiveReport {
 public:
  LiveReport(const RunDirectory& directory, std::function<void(const std::string&)> message,
             double interval = report_interval)
      : directory_(directory),
        message_(std::move(message)),
        interval_(interval),
        next_(shardlib::detail::steady_seconds() + interval) {}

  /// After a step, on the device that writes.
  void step() {
    const double begin = shardlib::detail::steady_seconds();
    if (!directory_.exists() || begin < next_) return;
    static_cast<void>(write(std::max(until_next(), 1e-3)));
    last_ = shardlib::detail::steady_seconds() - begin;
    next_ = begin + last_ + until_next();
  }
  /// Writes the page of a run that has ended. False if it could not.
  [[nodiscard]] bool finish() { return write(0); }

 private:
  [[nodiscard]] double until_next() const { return std::max(interval_, 100 * last_); }
  bool write(double every) {
    try {
      write_report({directory_.path()}, directory_.report(), every);
      failed_ = false;
    } catch (const std::exception& error) {  // also those of std::filesystem
      if (!std::exchange(failed_, true))
        message_(fmt::format("the report could not be written: {}; `shardlib-report {}` writes it later", error.what(),
                             directory_.path()));
      return false;
    }
    return true;
  }

  const RunDirectory& directory_;
  std::function<void(const std::string&)> message_;
  double interval_, next_, last_ = 0;  ///< `last_`: how long the last page took
  bool failed_ = false;
};

}  // namespace shardlib::run::detail
