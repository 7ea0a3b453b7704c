// The records of a run: a JSON object for each step in metrics.jsonl, and sampled texts in samples.jsonl.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "shardlib/support/inline.hpp"

namespace shardlib::io::detail {
class Descriptor;
}

namespace shardlib::run {

/// One training step with its loss, learning_rate and grad_norm, tokens_per_second and step_seconds.
struct Record {
  std::int64_t step = 0;  ///< the number of the step, from 0
  double time = 0;        ///< end of the step, in seconds since 1970; 0 if unknown
  double loss = 0, learning_rate = 0, grad_norm = 0, tokens_per_second = 0, step_seconds = 0;
  std::optional<double> mfu = {};                            ///< model FLOPs utilization, 1 is the peak of the devices
  std::optional<std::int64_t> memory_bytes = {};             ///< the most bytes in use so far, on the fullest device
  std::optional<double> validation_loss = {};                ///< the loss of a validation after this step
  bool skipped = false;                                      ///< the step has made no update
  std::vector<std::string> events = {};                      ///< unusual actions of the run, before or in this step
  std::vector<std::pair<std::string, double>> numbers = {};  ///< the program's own, StepResult::numbers
  /// The first device's time by part of the step: {"forward", 0.2}, ... In a training run the parts of a step add up to
  /// step_seconds; "validation", "histograms" and "checkpoint" are extra.
  std::vector<std::pair<std::string, double>> seconds = {};
};

/// The record's numbers by the names that TensorBoard and exports show: train/loss, train/grad_norm, validation/loss,
/// speed/mfu, memory/bytes, time/forward and so on; train/skipped is 1 for a step without an update.
/// `numbers_of(record)`
[[nodiscard]] SHARDLIB_INLINE std::vector<std::pair<std::string, double>> numbers_of(const Record& record);

/// A text that the model has written after a step, with its prompt.
struct Sample {
  std::int64_t step = 0;
  std::string prompt, text;  ///< `text` begins with the prompt; bytes that are not UTF-8 are stored as U+FFFD
};

namespace detail {
/// Each line of records begins with this text.
inline constexpr std::string_view record_begin = "{\"step\": ";
/// Whether the text begins as a record does, or is the beginning of one. Samples and the records of other programs have
/// a "step", too. `begins_as_record(R"({"step": 0, "loss": 5.5, "learning_rate": 0.1)")`
[[nodiscard]] SHARDLIB_INLINE bool begins_as_record(std::string_view text);
}  // namespace detail

/// One line of JSON without its line end. Numbers that are not finite are null.
[[nodiscard]] SHARDLIB_INLINE std::string to_json(const Record& record);
[[nodiscard]] SHARDLIB_INLINE std::string to_json(const Sample& sample);

/// The objects of such a file in order. A torn last line (the program was killed) is left out. Any other damage is an
/// Error with file and line. Throws UsageError if the file cannot be read.
[[nodiscard]] SHARDLIB_INLINE std::vector<Record> read_records(const std::string& path);
/// The samples of a file, read as `read_records` reads records.
[[nodiscard]] SHARDLIB_INLINE std::vector<Sample> read_samples(const std::string& path);

/// A file of JSON objects, one a line, each beginning with its "step". A line is written with one system call. Lines
/// that the storage refuses wait in memory, with a warning, and are tried again with the next line.
class JsonLines {
 public:
  /// The treatment of an existing file: `overwrite` empties it, `append` continues it.
  enum class Mode { overwrite, append };

  JsonLines() = default;  ///< writes nowhere
  /// Opens or creates the file. Throws UsageError if that fails; `remedy` ends its message.
  JsonLines(std::string path, Mode mode, const std::string& remedy = "");
  JsonLines(JsonLines&&) = default;  // a copy would write the waiting lines, too
  JsonLines& operator=(JsonLines&&) = default;

  [[nodiscard]] bool is_open() const { return file_ != nullptr; }  ///< whether there is a file
  /// Locks the file for this process until it is closed. Returns false if another process has the lock.
  [[nodiscard]] bool lock();
  /// The lines that `cut` has removed.
  struct Removed {
    std::int64_t lines = 0;  ///< whole lines
    bool torn = false;       ///< a last line that is not a whole record
    friend bool operator==(const Removed&, const Removed&) = default;
  };
  /// Removes the lines of `step` and later, which a resumed run writes again, and a last line that a crash has torn.
  /// Throws Error for any other line that is not a record, and removes nothing then.
  Removed cut(std::int64_t step);
  /// Appends a line. Throws StorageError if more than 16 MiB wait.
  void write(const Record& record) { append(to_json(record)); }
  void write(const Sample& sample) { append(to_json(sample)); }
  /// Flushes the file to disk (fsync). Throws StorageError if lines still wait.
  void sync();
  /// Writes the file again if it was removed. Throws StorageError if it was moved, or if the path has another file, as
  /// of a run that was started in the place of this one.
  void keep_place();

 private:
  void append(const std::string& line);
  /// Writes the waiting lines. Returns false if the file does not have all of them; errno then has the reason.
  bool write_waiting();
  [[noreturn]] void fail(const char* what) const;

  std::string path_, waiting_;
  std::shared_ptr<const io::detail::Descriptor> file_;
};

}  // namespace shardlib::run

#ifndef SHARDLIB_COMPILED
#include "shardlib/run/impl/metrics.hpp"
#endif
