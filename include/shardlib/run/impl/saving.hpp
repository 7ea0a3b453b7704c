// When a run saves checkpoints, and what it does if the storage refuses them.
#pragma once

#include <fmt/format.h>

#include <chrono>
#include <functional>
#include <string>
#include <thread>
#include <utility>

#include "shardlib/io/agree.hpp"
#include "shardlib/run/run_directory.hpp"
#include "shardlib/run/training.hpp"
#include "shardlib/support/error.hpp"

namespace shardlib::run::detail {

/// Saves the checkpoints of one run. All calls are collective. If the storage refuses a checkpoint, that is a warning,
/// and the next save tries again. Several failures in a row are an error, and so is a failure of the last save.
class Saving {
 public:
  static constexpr int most_failures = 3;

  Saving(const DevicePtr& device, const Checkpoints& checkpoints, RunDirectory& directory,
         std::function<void(const std::string&)> say)
      : device_(device), checkpoints_(checkpoints), directory_(directory), say_(std::move(say)) {}

  /// Starts a checkpoint. If `complete`, waits until it is complete.
  void save(const Checkpoints::Saved& saved, bool complete) {
    flush();
    for (int attempt = 1;; ++attempt) {
      try {
        // Flush the records first, so that no checkpoint is newer than the records.
        io::together(*device_, "", [this] { directory_.sync(); });
        checkpoints_.save(saved);
        if (complete) checkpoints_.flush();
        return;
      } catch (const StorageError& error) {
        if (!complete) return note(error);
        if (attempt == most_failures) throw;
        say_(fmt::format("warning: {}; this is the run's last checkpoint, so it is tried again in {} s", error.what(),
                         attempt));
        std::this_thread::sleep_for(std::chrono::seconds(attempt));
      }
    }
  }
  /// Completes a checkpoint that all devices have written. Call it once a step.
  void poll() {
    tolerate([this] { return checkpoints_.poll(); });
  }
  /// Waits for the checkpoint under way and completes it.
  void flush() {
    if (checkpoints_.flush) tolerate([this] { return checkpoints_.flush(); });
  }

 private:
  void tolerate(const std::function<bool()>& completes) {
    try {
      if (completes()) failures_ = 0;
    } catch (const StorageError& error) {
      note(error);
    }
  }
  void note(const StorageError& error) {
    if (++failures_ == most_failures)
      throw Error(
          fmt::format("{} checkpoints in a row could not be saved; the last error: {}; make room, and give the "
                      "same command, which resumes from the last complete checkpoint, or starts again if there is none",
                      failures_, error.what()));
    say_(fmt::format("warning: {}; the next save tries again ({} of {} failures in a row that end the run)",
                     error.what(), failures_, most_failures));
  }

  DevicePtr device_;
  const Checkpoints& checkpoints_;
  RunDirectory& directory_;
  std::function<void(const std::string&)> say_;
  int failures_ = 0;
};

}  // namespace shardlib::run::detail
