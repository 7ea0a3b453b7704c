// The folder of a training run: config.toml, run.json, metrics.jsonl, samples.jsonl, checkpoints/, trace.json,
// report.html.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "shardlib/device/mesh_axes.hpp"
#include "shardlib/run/metrics.hpp"
#include "shardlib/support/inline.hpp"

namespace shardlib::run {

/// What to do where a run exists already: `automatic` goes on with it, `never` makes it an error.
enum class Resume { automatic, never };

/// One run's folder. One process of the job, the writer, touches the files; for the others every call does nothing, so
/// that all ranks can run the same code. Never mixes two runs: a folder with other files, a run of another process and,
/// unless it may be resumed, an existing run are UsageErrors.
class RunDirectory {
 public:
  RunDirectory() = default;  ///< no folder: records go nowhere
  /// Creates the folder with `config` (Options::to_toml) in it, or opens the run that is there.
  RunDirectory(std::string path, std::string config, Resume resume, bool writer);

  [[nodiscard]] const std::string& path() const { return path_; }  ///< of the folder
  [[nodiscard]] bool exists() const { return !path_.empty(); }     ///< whether there is a folder
  /// The folder held a run already (known to the writer).
  [[nodiscard]] bool resumed() const { return resumed_; }
  /// What the present configuration changes in the stored one: "model.d_model: 256 -> 512".
  [[nodiscard]] const std::vector<std::string>& changes() const { return changes_; }

  /// Call it once, before the first record, with the step to do first: 0, or the one after the loaded checkpoint.
  /// Records of that step and later are removed, as they will be written again; where an old run has no checkpoint and
  /// starts again, its records are kept in metrics.N.jsonl instead. A changed configuration is stored and the former
  /// one kept in config.N.toml. Returns a sentence to print for each thing done.
  std::vector<std::string> begin(std::int64_t step);

  /// Adds to run.json that the run starts, or goes on, from `step` on devices of the mesh `axes`: when, where, by which
  /// command and which version of the library. Returns sentences to print.
  std::vector<std::string> note_start(std::int64_t step, const std::vector<AxisSize>& axes);

  /// A run that goes back to a checkpoint, in its middle: removes the records of `step` and later.
  void go_back(std::int64_t step);

  /// Appends a record to `metrics`, or a sample to `samples`.
  void write(const Record& record) { metrics_.write(record); }
  void write(const Sample& sample) { samples_.write(sample); }
  /// Call it before a checkpoint is saved: records up to it then survive what the checkpoint survives.
  void sync();

  /// The paths of what the folder holds: `checkpoints`, `metrics`, `samples`, `config`, `starts`, `trace`, `report`,
  /// `tensorboard`.
  [[nodiscard]] std::string checkpoints() const { return file("checkpoints"); }
  [[nodiscard]] std::string metrics() const { return file("metrics.jsonl"); }
  [[nodiscard]] std::string samples() const { return file("samples.jsonl"); }
  [[nodiscard]] std::string config() const { return file("config.toml"); }
  [[nodiscard]] std::string starts() const { return file("run.json"); }
  [[nodiscard]] std::string trace() const { return file("trace.json"); }
  [[nodiscard]] std::string report() const { return file("report.html"); }
  [[nodiscard]] std::string tensorboard() const { return file("tensorboard"); }

 private:
  [[nodiscard]] std::string file(const std::string& name) const { return path_ + "/" + name; }

  std::string path_, config_text_;
  bool writer_ = false, resumed_ = false;
  std::vector<std::string> changes_;
  JsonLines metrics_, samples_;
};

}  // namespace shardlib::run

#ifndef SHARDLIB_COMPILED
#include "shardlib/run/impl/run_directory.hpp"
#endif
