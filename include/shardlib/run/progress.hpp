// Progress of a run: one live line on a terminal, plain lines at intervals elsewhere.
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

/// What the output can do.
struct Terminal {
  bool live = false;   ///< a line can be drawn over
  bool color = false;  ///< escape codes for colours are understood and wanted
  int width = 80;      ///< characters a line
  int file = -1;       ///< asked for the present width before each drawing, where it is a terminal
};

/// What an open file can do: a terminal is live unless TERM is "dumb" or Open MPI's mpirun stands between, and coloured
/// unless NO_COLOR is set (no-color.org).
[[nodiscard]] SHARDLIB_INLINE Terminal terminal_of(int file);

/// A duration as people read it: "95 s", "12 min", "3 h 05 min", "2 d 04 h".
[[nodiscard]] SHARDLIB_INLINE std::string duration_text(double seconds);

/// Shows training steps as they are done. Text of others goes through message(), or between pause() and the next step.
/// Safe to call from several threads. An object made without arguments shows nothing: for ranks that do not speak.
class Progress {
 public:
  /// Seconds from some fixed moment.
  using Clock = std::function<double()>;

  Progress() = default;
  /// Steps `first` to `steps` - 1 on standard output.
  Progress(std::int64_t first, std::int64_t steps);
  Progress(std::int64_t first, std::int64_t steps, std::ostream& out, Terminal terminal, Clock clock);
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;
  /// As finish(), so that an error's message stands on a line of its own.
  ~Progress();

  /// Shows the step: at every call on a terminal (ten times a second at most), else each tenth step and the last. A
  /// step with a validation loss always gets a line that stays.
  void step(const Record& record);
  /// Prints a line (or several) that stays, above the live one.
  void message(std::string_view text);
  /// Takes the live line away; what is printed then is not disturbed until the next step.
  void pause();
  /// Leaves the last step's line standing.
  void finish();

 private:
  [[nodiscard]] std::string line(const Record& record) const;
  [[nodiscard]] std::string fitted(const Record& record, int width) const;
  void clear();
  void draw();

  std::ostream* out_ = nullptr;
  Terminal terminal_;
  Clock clock_;
  std::int64_t first_ = 0, steps_ = 0;
  double start_ = 0, now_ = 0, drawn_at_ = -1;
  Record last_;
  bool has_last_ = false, drawn_ = false, stands_ = true;
  std::mutex mutex_;
};

}  // namespace shardlib::run

#ifndef SHARDLIB_COMPILED
#include "shardlib/run/impl/progress.hpp"
#endif
