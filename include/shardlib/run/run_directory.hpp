// The folder of a training run: config.toml, tokenizer/, run.json, metrics.jsonl, samples.jsonl, console.log,
// checkpoints/, trace.json, report.html.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "shardlib/device/mesh_axes.hpp"
#include "shardlib/io/tokenizer/tokenizer.hpp"
#include "shardlib/run/console.hpp"
#include "shardlib/run/metrics.hpp"
#include "shardlib/support/inline.hpp"

namespace shardlib::run {

/// The treatment of an existing run: `automatic` resumes it, `never` makes it an error.
enum class Resume { automatic, never };

/// The folder of one run. One process of the job, the writer, accesses the files. For the others every call does
/// nothing, so all ranks can run the same code. It never mixes two runs: UsageErrors are a folder with other files, a
/// run of another process and, unless it may be resumed, an existing run.
class RunDirectory {
 public:
  RunDirectory() = default;  ///< no folder: records go nowhere
  /// Creates the folder of a run with this `config` (Options::to_toml), or opens an existing run. A folder of imported
  /// checkpoints alone is a run to resume.
  RunDirectory(std::string path, std::string config, Resume resume, bool writer);

  [[nodiscard]] const std::string& path() const { return path_; }  ///< the path of the folder
  [[nodiscard]] bool exists() const { return !path_.empty(); }     ///< whether there is a folder

  /// Call it once, before the first record, with the first step: 0, or the one after the loaded checkpoint. A folder is
  /// a run from here on: config.toml is there. It removes
  /// the records of that step and later, because the run writes them again. If an old run has no checkpoint and starts
  /// again, its records are kept in metrics.N.jsonl instead. If the configuration has changed, it is stored, and the
  /// former one is kept in config.N.toml; not if `trains` is false, as the run then has no step left. From here on,
  /// console.log takes what `print_console` prints. Returns a sentence to print for each action.
  std::vector<std::string> begin(std::int64_t step, bool trains = true);

  /// Records in run.json that the run starts or resumes at `step` on a mesh with these `axes`, computing in `dtype`:
  /// when, where, with which command, version and commit of the library. Returns sentences to print.
  std::vector<std::string> note_start(std::int64_t step, const std::vector<AxisSize>& axes, const std::string& dtype);

  /// Keeps a copy of the tokenizer that `name` stands for in the folder `tokenizer`, so that samples need the run's
  /// folder alone. A whole copy that encodes the same ids stays as it is; "bytes" needs none.
  void keep_tokenizer(const io::Tokenizer& used, const std::string& name);
  /// Keeps the picture of a step as step.svg; nothing if it is empty.
  void keep_step_graph(const std::string& svg);
  /// The tokenizer that `name`, the value of --tokenizer, stands for in samples of this run: the copy, if there is one
  /// and config.toml has the same name, and otherwise `name`.
  [[nodiscard]] std::string tokenizer_of(const std::string& name) const;

  /// For a run that goes back to a checkpoint: removes the records of `step` and later, and returns their events.
  std::vector<std::string> go_back(std::int64_t step);

  /// Appends a record to `metrics`, or a sample to `samples`.
  void write(const Record& record) { metrics_.write(record); }
  void write(const Sample& sample) { samples_.write(sample); }
  /// Flushes the records to disk. Call it before a checkpoint is saved, so that no checkpoint is newer than the
  /// records. Writes config.toml, run.json, the records, console.log, the tokenizer and step.svg again, with a
  /// warning, if they were removed: the run can then resume.
  void sync();

  /// The paths in the folder: `checkpoints`, `metrics`, `samples`, `console`, `config`, `starts`, `tokenizer`, `trace`,
  /// `step_graph`, `report`, `tensorboard`.
  [[nodiscard]] std::string checkpoints() const { return file("checkpoints"); }
  [[nodiscard]] std::string metrics() const { return file("metrics.jsonl"); }
  [[nodiscard]] std::string samples() const { return file("samples.jsonl"); }
  [[nodiscard]] std::string console() const { return file("console.log"); }
  [[nodiscard]] std::string config() const { return file("config.toml"); }
  [[nodiscard]] std::string starts() const { return file("run.json"); }
  [[nodiscard]] std::string tokenizer() const { return file("tokenizer"); }
  [[nodiscard]] std::string trace() const { return file("trace.json"); }
  [[nodiscard]] std::string step_graph() const { return file("step.svg"); }
  [[nodiscard]] std::string report() const { return file("report.html"); }
  [[nodiscard]] std::string tensorboard() const { return file("tensorboard"); }

 private:
  [[nodiscard]] std::string file(const std::string& name) const { return path_ + "/" + name; }
  void keep_files();

  std::string path_, config_text_;
  bool writer_ = false, resumed_ = false;
  std::vector<std::string> changes_;  ///< of the stored configuration: "model.d_model: 256 -> 512"
  /// The texts of config.toml, run.json, the tokenizer and step.svg, by the paths of the files.
  std::map<std::string, std::string> kept_;
  JsonLines metrics_, samples_;
  std::unique_ptr<ConsoleLog> console_;
};

/// Throws UsageError, which begins with the option, if `path` is a file or folder that a run writes itself:
/// config.toml, a file below checkpoints/ and so on, in the folder of an existing run or in `run`, the folder of --run,
/// which need not exist yet. Call it for each output that an option names, before anything is written.
/// `require_no_run_file("runs/first/config.toml", "--metrics", "runs/second")`
SHARDLIB_INLINE void require_no_run_file(const std::string& path, const std::string& option,
                                         const std::string& run = "");

}  // namespace shardlib::run

#ifndef SHARDLIB_COMPILED
#include "shardlib/run/impl/run_directory.hpp"
#endif
