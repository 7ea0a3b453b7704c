// Definitions of metrics.hpp.
#pragma once

#include "shardlib/run/metrics.hpp"

#include <fmt/format.h>

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <exception>
#include <nlohmann/json.hpp>
#include <system_error>
#include <thread>

#include "shardlib/io/impl/json.hpp"
#include "shardlib/io/impl/posix.hpp"
#include "shardlib/run/impl/removed_file.hpp"
#include "shardlib/support/error.hpp"
#include "shardlib/support/print.hpp"
#include "shardlib/support/text.hpp"
#include "shardlib/support/warning.hpp"

namespace shardlib::run {

namespace detail {

// ordered_json: the parts of a step keep the order in which they were written.

/// Calls f(line, begin, number) for each whole line; what follows the last end of line is torn.
template <class F>
void for_each_line(const std::string& text, const F& f) {
  std::int64_t number = 1;
  for (std::size_t begin = 0, end = 0; (end = text.find('\n', begin)) != std::string::npos; begin = end + 1)
    f(text.substr(begin, end - begin), begin, number++);
}

[[noreturn]] inline void fail_record(const std::string& path, std::int64_t number, const std::string& line,
                                     const std::string& why = "") {
  throw Error(fmt::format("{}:{}: this is not a record of a run{}: {}; remove the line or choose another run", path,
                          number, why.empty() ? "" : " (" + why + ")", shardlib::detail::excerpt(line, 60)));
}

inline double number_or_nan(const nlohmann::ordered_json& object, const char* key) {
  const nlohmann::ordered_json& value = io::detail::member(object, key);
  return value.is_null() ? std::nan("") : value.get<double>();
}

template <class T>
std::optional<T> maybe(const nlohmann::ordered_json& object, const char* key) {
  const auto at = object.find(key);
  return at == object.end() || at->is_null() ? std::nullopt : std::optional<T>(at->get<T>());
}

inline void read_object(const nlohmann::ordered_json& object, Record& record) {
  record.step = io::detail::member(object, "step").get<std::int64_t>();
  record.loss = number_or_nan(object, "loss");
  record.learning_rate = number_or_nan(object, "learning_rate");
  record.grad_norm = number_or_nan(object, "grad_norm");
  record.tokens_per_second = number_or_nan(object, "tokens_per_second");
  record.step_seconds = number_or_nan(object, "step_seconds");
  record.time = maybe<double>(object, "time").value_or(0);
  record.mfu = maybe<double>(object, "mfu");
  record.memory_bytes = maybe<std::int64_t>(object, "memory_bytes");
  record.validation_loss = maybe<double>(object, "validation_loss");
  record.skipped = maybe<bool>(object, "skipped").value_or(false);
  record.events = maybe<std::vector<std::string>>(object, "events").value_or(std::vector<std::string>());
  if (const auto numbers = object.find("numbers"); numbers != object.end()) {
    for (const auto& [name, value] : numbers->items())
      record.numbers.emplace_back(name, number_or_nan(*numbers, name.c_str()));
  }
  if (const auto parts = object.find("seconds"); parts != object.end()) {
    for (const auto& [name, value] : parts->items()) record.seconds.emplace_back(name, value.get<double>());
  }
}

inline void read_object(const nlohmann::ordered_json& object, Sample& sample) {
  sample.step = io::detail::member(object, "step").get<std::int64_t>();
  sample.prompt = io::detail::member(object, "prompt").get<std::string>();
  sample.text = io::detail::member(object, "text").get<std::string>();
}

template <class T>
std::vector<T> read_objects(const std::string& path) {
  std::vector<T> objects;
  const std::string text = whole_file(path);
  std::int64_t lines = 0;
  for_each_line(text, [&](const std::string& line, std::size_t, std::int64_t number) {
    lines = number;
    try {
      T object;
      read_object(io::detail::parse_json<nlohmann::ordered_json>(line), object);
      objects.push_back(std::move(object));
    } catch (const Error& error) {
      fail_record(path, number, line, error.what());
    } catch (const std::exception&) {
      fail_record(path, number, line);
    }
  });
  // A crash leaves the beginning of a line, or zeros. A file of one such line alone is no file of a run.
  const std::string rest = text.substr(text.rfind('\n') + 1);
  if (lines > 0 && !rest.empty() && rest[0] != '\0' && !rest.starts_with(record_begin.substr(0, rest.size())))
    fail_record(path, lines + 1, rest, "it does not begin with {\"step\":");
  return objects;
}

SHARDLIB_INLINE bool begins_as_record(std::string_view text) {
  for (const std::string_view key :
       {record_begin, std::string_view(R"(, "loss": )"), std::string_view(R"(, "learning_rate": )")}) {
    if (!text.starts_with(key.substr(0, text.size()))) return false;
    text.remove_prefix(std::min(key.size(), text.size()));
    text.remove_prefix(std::min(text.find_first_not_of("+-.0123456789enul"), text.size()));  // a number, or null
  }
  return true;
}

}  // namespace detail

SHARDLIB_INLINE std::string to_json(const Record& r) {
  const auto number = [](double x) { return detail::json_number(x); };
  std::string out = std::string(detail::record_begin);
  out += fmt::format(
      R"({}, "loss": {}, "learning_rate": {}, "grad_norm": {}, "tokens_per_second": {}, "step_seconds": {})", r.step,
      number(r.loss), number(r.learning_rate), number(r.grad_norm), number(r.tokens_per_second),
      number(r.step_seconds));
  if (r.time != 0) out += fmt::format(", \"time\": {:.3f}", r.time);
  if (r.mfu) out += ", \"mfu\": " + number(*r.mfu);
  if (r.memory_bytes) out += ", \"memory_bytes\": " + std::to_string(*r.memory_bytes);
  if (r.validation_loss) out += ", \"validation_loss\": " + number(*r.validation_loss);
  if (r.skipped) out += ", \"skipped\": true";
  for (std::size_t i = 0; i < r.events.size(); ++i)
    out += (i == 0 ? ", \"events\": [" : ", ") + detail::quote(detail::as_utf8(r.events[i])) +
           (i + 1 == r.events.size() ? "]" : "");
  const auto object = [&](const char* key, const std::vector<std::pair<std::string, double>>& fields) {
    for (std::size_t i = 0; i < fields.size(); ++i)
      out += (i == 0 ? fmt::format(", \"{}\": {{", key) : ", ") + detail::quote(fields[i].first) + ": " +
             number(fields[i].second) + (i + 1 == fields.size() ? "}" : "");
  };
  object("numbers", r.numbers);
  object("seconds", r.seconds);
  return out + "}";
}

SHARDLIB_INLINE std::vector<std::pair<std::string, double>> numbers_of(const Record& r) {
  std::vector<std::pair<std::string, double>> out{{"train/loss", r.loss},
                                                  {"train/learning_rate", r.learning_rate},
                                                  {"train/grad_norm", r.grad_norm},
                                                  {"speed/tokens_per_second", r.tokens_per_second},
                                                  {"speed/step_seconds", r.step_seconds}};
  if (r.mfu) out.emplace_back("speed/mfu", *r.mfu);
  if (r.memory_bytes) out.emplace_back("memory/bytes", static_cast<double>(*r.memory_bytes));
  if (r.validation_loss) out.emplace_back("validation/loss", *r.validation_loss);
  if (r.skipped) out.emplace_back("train/skipped", 1);
  for (const auto& [name, number] : r.numbers) out.emplace_back("train/" + name, number);
  for (const auto& [name, seconds] : r.seconds) out.emplace_back("time/" + name, seconds);
  return out;
}

SHARDLIB_INLINE std::string to_json(const Sample& s) {
  return fmt::format(R"({{"step": {}, "prompt": {}, "text": {}}})", s.step, detail::quote(detail::as_utf8(s.prompt)),
                     detail::quote(detail::as_utf8(s.text)));
}

SHARDLIB_INLINE std::vector<Record> read_records(const std::string& path) {
  return detail::read_objects<Record>(path);
}

SHARDLIB_INLINE std::vector<Sample> read_samples(const std::string& path) {
  return detail::read_objects<Sample>(path);
}

// ---- the file -------------------------------------------------------------------------------------------------------

SHARDLIB_INLINE JsonLines::JsonLines(std::string path, Mode mode, const std::string& remedy) : path_(std::move(path)) {
  const int flags = O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC | (mode == Mode::overwrite ? O_TRUNC : 0);
  const int file = ::open(path_.c_str(), flags, 0666);
  if (file < 0)
    throw UsageError("cannot write the file '" + path_ + "': " + std::strerror(errno) +
                     (remedy.empty() ? "" : "; " + remedy));
  file_ = std::make_shared<const io::detail::Descriptor>(file);
}

SHARDLIB_INLINE void JsonLines::fail(const char* what) const {
  throw StorageError(std::string("cannot ") + what + " the file '" + path_ + "': " + std::strerror(errno));
}

SHARDLIB_INLINE bool JsonLines::lock() {
  // Some file systems have no locks. There two processes cannot be told apart, and the run continues.
  // A reader that asks whether the run is in progress has the lock for a moment, so try more than once.
  for (int tries = 0;; ++tries) {
    if (::flock(file_->number(), LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK) return true;
    if (tries == 5) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
}

namespace detail {

/// The step of a line that JsonLines has written; nothing for any other text.
inline std::optional<std::int64_t> step_of_line(const std::string& line) {
  constexpr std::string_view beginning = "{\"step\": ";
  std::int64_t step = 0;
  const bool ours =
      line.starts_with(beginning) &&
      std::from_chars(line.data() + beginning.size(), line.data() + line.size(), step).ec == std::errc() &&
      nlohmann::json::accept(line);
  return ours ? std::optional(step) : std::nullopt;
}

}  // namespace detail

SHARDLIB_INLINE JsonLines::Removed JsonLines::cut(std::int64_t step) {
  const std::string text = detail::whole_file(path_);
  std::size_t keep = 0, end = 0;
  Removed cut;
  detail::for_each_line(text, [&](const std::string& line, std::size_t begin, std::int64_t number) {
    end = begin + line.size() + 1;
    const auto at = detail::step_of_line(line);
    if (!at && end == text.size()) {
      cut.torn = true;
      return;
    }
    if (!at) detail::fail_record(path_, number, line);
    if (*at >= step || cut.lines > 0) {
      ++cut.lines;
    } else {
      keep = end;
    }
  });
  cut.torn = cut.torn || end < text.size();
  if (keep < text.size() && ::ftruncate(file_->number(), static_cast<off_t>(keep)) != 0) fail("cut");
  std::size_t waits = 0;
  detail::for_each_line(waiting_, [&](const std::string& line, std::size_t begin, std::int64_t) {
    if (begin == waits && detail::step_of_line(line) < step) waits += line.size() + 1;
  });
  waiting_.erase(waits);
  return cut;
}

SHARDLIB_INLINE bool JsonLines::write_waiting() {
  struct stat status {};
  const bool regular = ::fstat(file_->number(), &status) == 0 && S_ISREG(status.st_mode);
  for (std::size_t done = 0; done < waiting_.size();) {
    const ssize_t wrote = ::write(file_->number(), waiting_.data() + done, waiting_.size() - done);
    if (wrote < 0 && errno == EINTR) continue;
    if (wrote < 0) {
      const int error = errno;
      // Keeps complete lines and removes a partial one.
      const std::size_t whole = done == 0 ? std::string::npos : waiting_.rfind('\n', done - 1);
      const std::size_t kept = whole == std::string::npos ? 0 : whole + 1;
      if (regular && ::ftruncate(file_->number(), status.st_size + static_cast<off_t>(kept)) != 0) fail("cut");
      waiting_.erase(0, regular ? kept : done);
      errno = error;
      return false;
    }
    done += static_cast<std::size_t>(wrote);
  }
  waiting_.clear();
  return true;
}

SHARDLIB_INLINE void JsonLines::append(const std::string& line) {
  if (!is_open()) return;
  constexpr std::size_t most = std::size_t{16} << 20;
  const bool first = waiting_.empty();
  waiting_ += line + '\n';
  if (write_waiting()) return;
  if (waiting_.size() > most) fail("write to");
  if (first)
    shardlib::detail::warn(
        fmt::format("cannot write to the file '{}': {}; its lines wait in memory and are tried again", path_,
                    std::strerror(errno)));
}

SHARDLIB_INLINE void JsonLines::sync() {
  if (!is_open()) return;
  if (!write_waiting()) fail("write to");
  // Not every file can: a pipe answers EINVAL.
  if (::fdatasync(file_->number()) != 0 && errno != EINVAL) fail("write to");
}

SHARDLIB_INLINE void JsonLines::keep_place() {
  if (!is_open()) return;
  switch (detail::place_of(file_->number(), path_)) {
    case detail::FilePlace::there:
      return;
    case detail::FilePlace::replaced:
      throw StorageError("another file has replaced '" + path_ +
                         "' while this run writes to it: another run may have begun in its place");
    case detail::FilePlace::unknown:
      fail("look for");
    case detail::FilePlace::moved:
      throw StorageError("the file '" + path_ + "' was moved away while this run writes to it: move it back");
    case detail::FilePlace::removed:
      break;
  }
  JsonLines again;
  again.path_ = path_;
  again.waiting_ = detail::whole_file(detail::descriptor_path(file_->number())) + waiting_;
  const std::string place = detail::linked_path(path_);
  const int made = ::open(place.c_str(), O_RDWR | O_CREAT | O_EXCL | O_APPEND | O_CLOEXEC, 0666);
  if (made < 0) fail("write to");
  again.file_ = std::make_shared<const io::detail::Descriptor>(made);
  if (!again.lock()) throw StorageError("another process has begun to write to the file '" + path_ + "'");
  if (!again.write_waiting()) {
    const int error = errno;
    ::unlink(place.c_str());
    errno = error;
    fail("write to");
  }
  detail::warn_removed(path_);
  *this = std::move(again);
}

}  // namespace shardlib::run
