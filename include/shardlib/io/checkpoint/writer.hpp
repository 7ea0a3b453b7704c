// Saving checkpoints, erased of types: every device writes its own shards, all agree, one renames.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "shardlib/device/device.hpp"
#include "shardlib/io/checkpoint/folder.hpp"
#include "shardlib/runtime/value.hpp"
#include "shardlib/support/inline.hpp"

namespace shardlib::io::detail {

/// Leaves of a tree by the names under which they are stored.
using NamedValues = std::vector<std::pair<std::string, shardlib::detail::ValuePtr>>;

/// Writes one checkpoint at a time into a directory. All members are collective over the mesh and throw the same error
/// on all devices.
class CheckpointWriter {
 public:
  CheckpointWriter(DevicePtr device, std::string directory, const Retention& keep, bool finite = false);
  CheckpointWriter(const CheckpointWriter&) = delete;
  CheckpointWriter& operator=(const CheckpointWriter&) = delete;
  /// Waits for the files, but commits nothing: without `finish` the checkpoint is given up, with a warning.
  ~CheckpointWriter();

  /// Finishes the checkpoint under way, if any, and begins one. Holds on to the values' memory, which no op overwrites
  /// then, until their files are written: by a thread of its own (background), or before this returns.
  void start(const CheckpointMeta& meta, const NamedValues& leaves, bool background);
  /// Commits the checkpoint under way if all devices have written their files.
  void poll();
  /// Waits for the checkpoint under way and commits it.
  void finish();
  [[nodiscard]] bool in_flight() const { return job_ != nullptr; }

 private:
  struct Job;
  /// Calls Tuning::checkpoint_phase.
  void pass(std::string_view phase) const;
  void plan(Job& job, const NamedValues& leaves) const;
  void merge(Job& job, const std::map<std::string, shardlib::detail::ValuePtr>& mine) const;
  void write_metadata_files(Job& job) const;
  void commit(Job& job) const;

  DevicePtr device_;
  std::string directory_;
  Retention keep_;
  bool finite_;
  std::unique_ptr<Job> job_;
};

}  // namespace shardlib::io::detail

#ifndef SHARDLIB_COMPILED
#include "shardlib/io/checkpoint/impl/writer.hpp"
#endif
