// Definitions of progress.hpp.
#pragma once

#include "shardlib/run/progress.hpp"

#include <fcntl.h>
#include <fmt/format.h>

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <iterator>
#include <sstream>
#include <vector>

#include "shardlib/run/console.hpp"
#include "shardlib/support/stopwatch.hpp"

namespace shardlib::run {

namespace detail {

/// The terminal to which the mpirun above this process writes; -1 if there is no such mpirun, or its output is another.
inline int terminal_of_mpirun(int file) {
  pid_t process = ::getppid();
  for (int above = 0; above < 8 && process > 1; ++above) {
    std::ifstream stat(fmt::format("/proc/{}/stat", process));
    const std::string text(std::istreambuf_iterator<char>(stat), {});
    const std::size_t begin = text.find('('), end = text.rfind(')');  // a name may hold brackets
    if (begin == std::string::npos || end == std::string::npos || end < begin) return -1;
    const std::string_view name = std::string_view(text).substr(begin + 1, end - begin - 1);
    if (name.starts_with("mpirun") || name.starts_with("mpiexec") || name == "orterun" || name == "prterun") {
      const std::string output = fmt::format("/proc/{}/fd/{}", process, file);
      const int there = ::open(output.c_str(), O_WRONLY | O_NOCTTY | O_CLOEXEC | O_NONBLOCK);
      if (there >= 0 && ::isatty(there) != 0) return there;
      if (there >= 0) ::close(there);
      return -1;
    }
    process = 0;
    std::istringstream rest(text.substr(end + 1));
    char state = 0;
    rest >> state >> process;
  }
  return -1;
}

}  // namespace detail

SHARDLIB_INLINE Terminal terminal_of(int file) {
  const auto set = [](const char* name) {
    const char* const value = std::getenv(name);
    return value != nullptr && *value != '\0' ? std::string_view(value) : std::string_view();
  };
  Terminal terminal;
  if (::isatty(file) == 0) return terminal;
  // Open MPI gives its ranks terminals of its own, whatever its output is. A file would fill with escape codes.
  if (!set("OMPI_COMM_WORLD_RANK").empty()) {
    static const int outputs = detail::terminal_of_mpirun(STDOUT_FILENO);
    static const int errors = detail::terminal_of_mpirun(STDERR_FILENO);
    file = file == STDERR_FILENO ? errors : outputs;
  }
  if (file < 0) return terminal;
  terminal.live = set("TERM") != "dumb";
  terminal.color = terminal.live && set("NO_COLOR").empty();
  terminal.file = file;
  return terminal;
}

SHARDLIB_INLINE std::string duration_text(double seconds) {
  if (!(seconds < 1e9)) return "long";
  const auto s = static_cast<std::int64_t>(std::max(seconds, 0.0) + 0.5);
  if (s < 120) return fmt::format("{} s", s);
  if (s < 2 * 3600) return fmt::format("{} min", s / 60);
  if (s < 48 * 3600) return fmt::format("{} h {:02} min", s / 3600, s / 60 % 60);
  return fmt::format("{} d {:02} h", s / 86400, s / 3600 % 24);
}

namespace detail {

/// A part of the line. On a narrow terminal, parts with the highest rank are dropped first.
struct ProgressField {
  std::string text;
  int rank = 0;
};

/// "[=====>              ]  30 %"
inline std::string progress_bar(std::int64_t done, std::int64_t steps) {
  constexpr std::size_t width = 20;
  const double share =
      std::clamp(static_cast<double>(done) / static_cast<double>(std::max<std::int64_t>(steps, 1)), 0.0, 1.0);
  std::string bar(static_cast<std::size_t>(share * static_cast<double>(width)), '=');
  if (bar.size() < width) bar += '>';
  return fmt::format("[{:<{}}] {:>3.0f} %", bar, width, std::floor(100 * share));
}

inline std::vector<ProgressField> progress_fields(const Record& r, std::int64_t steps, double tokens_per_second,
                                                  double seconds_left, bool bar) {
  std::vector<ProgressField> fields{{fmt::format("step {:>5}/{}", r.step, steps), 0}};
  if (bar) fields.push_back({progress_bar(r.step + 1, steps), 3});
  fields.push_back({fmt::format("loss {:.4f}", r.loss), 0});
  if (r.validation_loss) fields.push_back({fmt::format("validation loss {:.4f}", *r.validation_loss), 0});
  fields.push_back({fmt::format("lr {:.2e}", r.learning_rate), 5});
  fields.push_back({fmt::format("grad norm {:6.3f}", r.grad_norm), 4});
  for (const auto& [name, number] : r.numbers) fields.push_back({fmt::format("{} {:.3f}", name, number), 4});
  fields.push_back({fmt::format("{:>7.0f} tokens/s", tokens_per_second), 2});
  if (r.mfu) fields.push_back({fmt::format("MFU {:.0f} %", 100 * *r.mfu * tokens_per_second / r.tokens_per_second), 6});
  fields.push_back({fmt::format("{:>4} left", duration_text(seconds_left)), 1});
  return fields;
}

inline std::string join_fields(const std::vector<ProgressField>& fields) {
  std::string text;
  for (const ProgressField& field : fields) text += (text.empty() ? "" : "  ") + field.text;
  return text;
}

}  // namespace detail

SHARDLIB_INLINE Progress::Progress(std::int64_t first, std::int64_t steps)
    : Progress(first, steps, std::cout, terminal_of(STDOUT_FILENO), shardlib::detail::steady_seconds, log_console) {}

SHARDLIB_INLINE Progress::Progress(std::int64_t first, std::int64_t steps, std::ostream& out, Terminal terminal,
                                   Clock clock, Log log)
    : out_(&out),
      terminal_(terminal),
      clock_(std::move(clock)),
      log_(std::move(log)),
      first_(first),
      steps_(steps),
      start_(clock_()),
      now_(start_) {}

SHARDLIB_INLINE Progress::~Progress() {
  finish();
}

SHARDLIB_INLINE void Progress::smooth(const Record& record) {
  const double tokens = record.tokens_per_second * record.step_seconds;
  if (!(record.step_seconds > 0) || !std::isfinite(tokens)) return;
  // The first step is slower than others, because memory comes from the system: the second one replaces it.
  constexpr std::int64_t most = 20;
  const double share = 1 / static_cast<double>(std::clamp<std::int64_t>(seen_++, 1, most));
  tokens_ += share * (tokens - tokens_);
  seconds_ += share * (record.step_seconds - seconds_);
  all_seconds_ += record.step_seconds;
}

SHARDLIB_INLINE double Progress::seconds_left(const Record& record) const {
  const auto done = static_cast<double>(std::max<std::int64_t>(record.step + 1 - first_, 1));
  const double between = std::max(now_ - start_ - all_seconds_, 0.0) / done;  // validations, samples, checkpoints
  return (seconds_ + between) * static_cast<double>(std::max<std::int64_t>(steps_ - record.step - 1, 0));
}

SHARDLIB_INLINE std::string Progress::line(const Record& record) const {
  constexpr int columns = 100;
  return fitted(record, columns, false);
}

SHARDLIB_INLINE std::string Progress::fitted(const Record& record, int width, bool bar) const {
  const double speed = seen_ > 0 ? tokens_ / seconds_ : record.tokens_per_second;
  std::vector<detail::ProgressField> fields = detail::progress_fields(record, steps_, speed, seconds_left(record), bar);
  const auto room = static_cast<std::size_t>(std::max(width, 1));
  while (detail::join_fields(fields).size() > room) {
    const auto first_to_go =
        std::max_element(fields.begin(), fields.end(), [](const auto& a, const auto& b) { return a.rank < b.rank; });
    if (first_to_go->rank == 0) break;
    fields.erase(first_to_go);
  }
  return detail::join_fields(fields).substr(0, room);
}

SHARDLIB_INLINE void Progress::clear() {
  if (drawn_) *out_ << "\r\x1b[K";
  drawn_ = false;
}

SHARDLIB_INLINE void Progress::draw() {
  int width = terminal_.width;
  winsize size{};
  if (terminal_.file >= 0 && ::ioctl(terminal_.file, TIOCGWINSZ, &size) == 0 && size.ws_col > 0) width = size.ws_col;
  // The last column stays free: many terminals would go to the next line there.
  const std::string text = fitted(last_, width - 1, true);
  const char* const dim = terminal_.color ? "\x1b[36m" : "";
  *out_ << "\r" << dim << text << (terminal_.color ? "\x1b[0m" : "") << "\x1b[K" << std::flush;
  drawn_ = true;
  drawn_at_ = now_;
}

SHARDLIB_INLINE void Progress::step(const Record& record) {
  if (out_ == nullptr) return;
  const std::lock_guard lock(mutex_);
  now_ = clock_();
  last_ = record;
  smooth(record);
  const bool last = record.step + 1 >= steps_;
  const bool stays = record.validation_loss.has_value();
  const bool plain = stays || record.step % 10 == 0 || last;
  if (plain && log_) log_(line(record) + "\n");
  logged_ = plain;
  stands_ = stays || (plain && !terminal_.live);
  if (stands_) {
    clear();
    *out_ << line(record) << "\n" << std::flush;
  } else if (terminal_.live && (drawn_at_ < 0 || last || now_ - drawn_at_ >= 0.1 || !drawn_)) {
    draw();
  }
}

SHARDLIB_INLINE void Progress::message(std::string_view text) {
  if (out_ == nullptr) return;
  const std::lock_guard lock(mutex_);
  const bool again = drawn_;
  clear();
  *out_ << text << "\n" << std::flush;
  if (log_) log_(std::string(text) + "\n");
  if (again) draw();
}

SHARDLIB_INLINE void Progress::pause() {
  if (out_ == nullptr) return;
  const std::lock_guard lock(mutex_);
  clear();
  *out_ << std::flush;
}

SHARDLIB_INLINE void Progress::finish() {
  if (out_ == nullptr) return;
  const std::lock_guard lock(mutex_);
  clear();
  // The line of a step that was not drawn last, or was drawn over, is written once more to stay.
  if (!stands_) *out_ << line(last_) << "\n";
  *out_ << std::flush;
  if (!logged_ && log_) log_(line(last_) + "\n");
  stands_ = logged_ = true;
}

}  // namespace shardlib::run
