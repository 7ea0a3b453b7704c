// What a run records: a JSON object a step in metrics.jsonl, and sampled texts in samples.jsonl.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "shardlib/support/inline.hpp"

namespace shardlib::run {

/// One training step: its loss, learning_rate and grad_norm; tokens_per_second and step_seconds.
struct Record {
  std::int64_t step = 0;  ///< from 0
  double time = 0;        ///< of the step's end, in seconds since 1970; 0: not known
  double loss = 0, learning_rate = 0, grad_norm = 0, tokens_per_second = 0, step_seconds = 0;
  std::optional<double> mfu = {};                 ///< model FLOPs utilisation, 1 is the machine's measured peak
  std::optional<std::int64_t> memory_bytes = {};  ///< of the fullest device
  std::optional<double> validation_loss = {};     ///< after this step
  bool skipped = false;                           ///< the step has made no update
  std::vector<std::string> events = {};           ///< what the run has done out of turn, before or in this step
  std::vector<std::pair<std::string, double>> numbers = {};  ///< of the program, StepResult::numbers
  /// Where the first device's time went: {"forward", 0.2}, ... In a training run the parts of a step add up to
  /// step_seconds; "validation" and "checkpoint" come on top.
  std::vector<std::pair<std::string, double>> seconds = {};
};

/// A text that the model has written after a step, and the prompt.
struct Sample {
  std::int64_t step = 0;
  std::string prompt, text;  ///< `text` begins with the prompt; bytes that are not UTF-8 are stored as U+FFFD
};

/// One line of JSON without its end; numbers that are not finite are null.
[[nodiscard]] SHARDLIB_INLINE std::string to_json(const Record& record);
[[nodiscard]] SHARDLIB_INLINE std::string to_json(const Sample& sample);

/// The objects of such a file in its order. A last line that is torn (the program was killed) is left out; any other
/// damage is an Error with file and line. Throws UsageError when the file cannot be read.
[[nodiscard]] SHARDLIB_INLINE std::vector<Record> read_records(const std::string& path);
/// The samples of a file, as `read_records` reads records.
[[nodiscard]] SHARDLIB_INLINE std::vector<Sample> read_samples(const std::string& path);

/// A file of JSON objects, one a line, each beginning with its "step". A line is written whole, with one system call.
/// Lines that the storage does not take wait in memory, with a warning, and are tried again with the next.
class JsonLines {
 public:
  /// What becomes of a file that is there: `overwrite` empties it, `append` goes on.
  enum class Mode { overwrite, append };

  JsonLines() = default;  ///< writes nowhere
  /// Opens or creates. Throws UsageError when that fails; `remedy` ends its message.
  JsonLines(std::string path, Mode mode, const std::string& remedy = "");
  JsonLines(JsonLines&& other) noexcept;
  JsonLines& operator=(JsonLines&& other) noexcept;
  ~JsonLines();

  [[nodiscard]] bool is_open() const { return file_ >= 0; }  ///< whether there is a file
  /// Takes the file for this process, until it is closed; false when another process has it.
  [[nodiscard]] bool lock();
  /// What `cut` has removed.
  struct Cut {
    std::int64_t lines = 0;  ///< whole ones
    bool torn = false;       ///< a last line that is not a whole record
    friend bool operator==(const Cut&, const Cut&) = default;
  };
  /// Removes what a run that goes on from `step` will write again: lines of that step and later, and a last line that a
  /// crash has torn. Throws Error for any other line that is not a record, and removes nothing then.
  Cut cut(std::int64_t step);
  /// Appends a line. Throws StorageError where more than 16 MiB wait.
  void write(const Record& record) { append(to_json(record)); }
  void write(const Sample& sample) { append(to_json(sample)); }
  /// What was written survives a crash of the machine from here on. Throws StorageError if lines still wait.
  void sync();

 private:
  void append(const std::string& line);
  /// Whether the file has all lines; else errno says why not.
  bool write_waiting();
  [[noreturn]] void fail(const char* what) const;

  std::string path_, waiting_;
  int file_ = -1;
};

}  // namespace shardlib::run

#ifndef SHARDLIB_COMPILED
#include "shardlib/run/impl/metrics.hpp"
#endif
