// The progress of a run: one live line with a bar on a terminal, otherwise plain lines at intervals.
#pragma once

#include <cstdint>
#include <functional>
#include <mutex>
#include <ostream>
#include <string>
#include <string_view>

#include "shardlib/run/metrics.hpp"
#include "shardlib/support/inline.hpp"

namespace shardlib::run {

/// The capabilities of the output.
struct Terminal {
  bool live = false;   ///< a line can be redrawn
  bool color = false;  ///< escape codes for colors are understood and wanted
  int width = 80;      ///< characters a line
  int file = -1;       ///< if it is a terminal, its width is read before each drawing
};

/// The capabilities of an open file. A terminal is live unless TERM is "dumb", and colored unless NO_COLOR is set
/// (no-color.org). Under Open MPI, whose ranks get terminals of their own, mpirun's output counts, if it is on this
/// machine.
[[nodiscard]] SHARDLIB_INLINE Terminal terminal_of(int file);

/// A readable duration: "95 s", "12 min", "3 h 05 min", "2 d 04 h".
[[nodiscard]] SHARDLIB_INLINE std::string duration_text(double seconds);

/// Shows training steps as they complete. Speed and time left are smoothed over about 20 steps, without the first one;
/// the time left counts what passes between steps, too. Print other text with message(), or between pause() and the
/// next step. It may be called from several threads. A default-constructed object prints nothing; it is for ranks that
/// print nothing.
class Progress {
 public:
  /// A clock: seconds since some fixed moment.
  using Clock = std::function<double()>;
  /// Gets all permanent lines, and those that would be printed without a terminal.
  using Log = std::function<void(std::string_view)>;

  Progress() = default;
  /// Shows the steps `first` to `steps` - 1 on standard output, and logs them by `log_console`.
  Progress(std::int64_t first, std::int64_t steps);
  Progress(std::int64_t first, std::int64_t steps, std::ostream& out, Terminal terminal, Clock clock, Log log = {});
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;
  /// Calls finish(), so that an error message starts on a new line.
  ~Progress();

  /// Shows the step, which counts from 0 as in the record. On a terminal it redraws the line, at most ten times a
  /// second; elsewhere it prints each tenth step and the last. A step with a validation loss always gets a permanent
  /// line.
  void step(const Record& record);
  /// Prints one or more permanent lines above the live one.
  void message(std::string_view text);
  /// Removes the live line until the next step, so that other output is not disturbed.
  void pause();
  /// Makes the last step's line permanent.
  void finish();

 private:
  void smooth(const Record& record);
  [[nodiscard]] double seconds_left(const Record& record) const;
  [[nodiscard]] std::string line(const Record& record) const;
  [[nodiscard]] std::string fitted(const Record& record, int width, bool bar) const;
  void clear();
  void draw();

  std::ostream* out_ = nullptr;
  Terminal terminal_;
  Clock clock_;
  Log log_;
  std::int64_t first_ = 0, steps_ = 0;
  double start_ = 0, now_ = 0, drawn_at_ = -1;
  double tokens_ = 0, seconds_ = 0;  ///< of a step, smoothed
  double all_seconds_ = 0;           ///< of the steps seen
  std::int64_t seen_ = 0;
  Record last_;
  bool drawn_ = false, stands_ = true, logged_ = true;
  std::mutex mutex_;
};

}  // namespace shardlib::run

#ifndef SHARDLIB_COMPILED
#include "shardlib/run/impl/progress.hpp"
#endif
