// Definitions of run_directory.hpp.
#pragma once

#include "shardlib/run/run_directory.hpp"

#include <fmt/chrono.h>
#include <fmt/format.h>

#include <algorithm>
#include <ctime>
#include <exception>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <system_error>
#include <utility>

#include "shardlib/device/launch.hpp"
#include "shardlib/io/checkpoint/folder.hpp"
#include "shardlib/io/file.hpp"
#include "shardlib/io/impl/json.hpp"
#include "shardlib/io/impl/posix.hpp"
#include "shardlib/run/impl/option_values.hpp"
#include "shardlib/run/impl/removed_file.hpp"
#include "shardlib/run/options.hpp"
#include "shardlib/support/environment.hpp"
#include "shardlib/support/error.hpp"
#include "shardlib/support/print.hpp"
#include "shardlib/support/text.hpp"
#include "shardlib/support/version.hpp"

namespace shardlib::run {

namespace detail {

/// "config.toml" -> "config.1.toml": the first number that is free.
inline std::string free_name(const std::filesystem::path& path) {
  for (int i = 1;; ++i) {
    std::filesystem::path name = path;
    name.replace_extension("." + std::to_string(i) + path.extension().string());
    if (!std::filesystem::exists(name)) return name.string();
  }
}

/// Whether the folder has checkpoints and nothing else, as `shardlib-checkpoint from-seqax` makes it.
inline bool is_imported(const std::string& folder) {
  const auto is_checkpoints = [](const auto& entry) { return entry.path().filename() == "checkpoints"; };
  return std::ranges::all_of(std::filesystem::directory_iterator(folder), is_checkpoints) &&
         !io::list_checkpoints(folder + "/checkpoints").empty();
}

/// Whether the folder is that of a run, or of checkpoints that a run may resume.
inline bool is_run(const std::filesystem::path& folder) {
  std::error_code none;  // what may not be looked at cannot be written either
  const auto has = [&](const char* name) { return std::filesystem::exists(folder / name, none); };
  return (has("config.toml") && has("run.json")) || has("checkpoints/LATEST");
}

/// Whether a run writes the file or folder itself, if it is directly in the run's folder.
inline bool is_written_by_run(const std::filesystem::path& path) {
  const RunDirectory run(path.parent_path().string(), "", Resume::automatic, false);
  const std::vector kept_aside{run.config(), run.starts(), run.metrics(), run.samples()};
  const std::vector others{run.console(),
                           run.report(),
                           run.tokenizer(),
                           run.checkpoints(),
                           run.trace(),
                           run.step_graph(),
                           run.tensorboard(),
                           run.path() + "/flight_recorder",
                           run.path() + "/timeline.svg"};
  const std::string number = path.stem().extension().string();  // ".1" of config.1.toml, a former config.toml
  const bool former = number.size() > 1 && number.find_first_not_of("0123456789", 1) == std::string::npos;
  const std::filesystem::path first =
      former ? path.parent_path() / path.stem().stem().concat(path.extension().string()) : path;
  return std::ranges::find(kept_aside, first.string()) != kept_aside.end() ||
         std::ranges::find(others, path.string()) != others.end();
}

/// The absolute path without symbolic links, also of what does not exist yet. It is empty if links lead in a circle.
inline std::filesystem::path resolved(const std::filesystem::path& path) {
  namespace fs = std::filesystem;
  std::error_code error;
  fs::path whole = fs::weakly_canonical(fs::absolute(path, error), error);
  // A link that leads to what does not exist yet stays one.
  for (int links = 0; links < 40 && fs::is_symlink(whole, error); ++links)
    whole = fs::weakly_canonical(whole.parent_path() / fs::read_symlink(whole, error), error);
  return whole.has_filename() ? whole : whole.parent_path();
}

/// Whether there is a file below the folder. An export into a new run has made its folder already.
inline bool has_files(const std::string& folder) {
  const auto all =
      std::filesystem::recursive_directory_iterator(folder, std::filesystem::directory_options::skip_permission_denied);
  return std::ranges::any_of(all, [](const auto& entry) { return !entry.is_directory() || entry.is_symlink(); });
}

/// "2025-11-28T00:40:00Z".
inline std::string utc_now() {
  return fmt::format("{:%Y-%m-%dT%H:%M:%SZ}", fmt::gmtime(std::time(nullptr)));
}

/// The words of this process's command line.
inline std::vector<std::string> command_line() {
  std::ifstream file("/proc/self/cmdline", std::ios::binary);
  std::vector<std::string> words;
  for (std::string word; std::getline(file, word, '\0');) words.push_back(as_utf8(word));
  return words;
}

}  // namespace detail

SHARDLIB_INLINE RunDirectory::RunDirectory(std::string path, std::string config, Resume resume, bool writer)
    : path_(std::move(path)), config_text_(std::move(config)), writer_(writer) {
  namespace fs = std::filesystem;
  if (path_.empty()) throw UsageError("the path of the run's folder is empty");
  if (!writer_) return;
  try {
    io::make_folders(path_);
  } catch (const Error& error) {
    throw UsageError(std::string(error.what()) + "; choose another one for the run");
  }
  const bool has_config = fs::exists(this->config()), has_metrics = fs::exists(metrics());
  if (!has_config && !has_metrics && detail::has_files(path_) &&
      !(resume == Resume::automatic && detail::is_imported(path_)))
    throw UsageError("the folder '" + path_ + "' holds other files and no run: choose another folder");
  metrics_ = JsonLines(metrics(), JsonLines::Mode::append);
  if (!metrics_.lock())
    throw Error("another process is writing to the run's folder '" + path_ +
                "': wait until it ends, or choose another one");
  // Asked again now that no other process can be creating it.
  resumed_ = fs::exists(this->config());
  if (!resumed_ && fs::file_size(metrics()) > 0)
    throw UsageError("the run's folder '" + path_ +
                     "' holds metrics.jsonl but no config.toml: choose another one, or move the file away");
  if (resumed_ && resume == Resume::never)
    throw UsageError("the run's folder '" + path_ +
                     "' already holds a run: choose another one, or resume that run (leave out --no-resume)");
  if (resumed_)
    changes_ = config_changes(config_entries_of_file(this->config()),
                              config_entries(config_text_, "the present configuration"));
}

SHARDLIB_INLINE std::vector<std::string> RunDirectory::begin(std::int64_t step, bool trains) {
  std::vector<std::string> notes;
  if (!writer_) return notes;
  namespace fs = std::filesystem;
  if (!resumed_) io::replace_file(config(), io::as_bytes(config_text_), true);
  console_ = std::make_unique<ConsoleLog>(console(), fmt::format("==== {}, from step {}\n", detail::utc_now(), step));
  for (const std::string& folder : {path_, checkpoints()}) io::remove_stale_temporaries(folder);
  const auto keep_aside = [&](const std::string& path) {
    const std::string aside = detail::free_name(path);
    fs::copy_file(path, aside);
    for (const std::string& kept : {aside, path_}) io::sync_path(kept);  // before the original changes
    return fs::path(aside).filename().string();
  };
  const bool from_start = resumed_ && step == 0 && fs::file_size(metrics()) > 0;
  if (from_start)
    notes.push_back("the run in " + path_ + " starts again from step 0; its former records are in " +
                    keep_aside(metrics()));
  const auto [removed, torn] = metrics_.cut(step);
  const auto note_torn = [&](const std::string& file) {
    notes.push_back("the last line of " + file + " was torn, as the run ended while it wrote it: it is dropped");
  };
  if (torn) note_torn("metrics.jsonl");
  if (removed > 0 && !from_start)
    notes.push_back(fmt::format("{} after the checkpoint removed from metrics.jsonl: resuming from step {}",
                                shardlib::detail::counted(removed, "record"), step));
  if (from_start && fs::exists(samples())) keep_aside(samples());
  samples_ = JsonLines(samples(), JsonLines::Mode::append);
  if (samples_.cut(step).torn) note_torn("samples.jsonl");
  if (trains && !changes_.empty()) {
    notes.push_back("the configuration has changed (the former one is in " + keep_aside(config()) + "):");
    for (const std::string& change : changes_) notes.push_back("  " + change);
    io::replace_file(config(), io::as_bytes(config_text_), true);
  }
  kept_[config()] = io::as_text(io::read_file(config()));
  return notes;
}

SHARDLIB_INLINE std::vector<std::string> RunDirectory::note_start(std::int64_t step, const std::vector<AxisSize>& axes,
                                                                  const std::string& dtype) {
  std::vector<std::string> notes;
  if (!writer_) return notes;
  using json = nlohmann::ordered_json;
  json all = json::array();
  if (std::filesystem::exists(starts())) {
    try {
      all = io::detail::parse_json<json>(io::as_text(io::read_file(starts())));
      if (!all.is_array()) throw Error("not a list");
    } catch (const std::exception&) {  // it says where the run has been; the run does not need it
      const std::string aside = detail::free_name(starts());
      io::rename_path(starts(), aside);
      notes.push_back("run.json is no longer a list of starts: it is now " + aside + ", and a new one begins");
      all = json::array();
    }
  }
  std::error_code no_directory;  // the folder may be gone
  all.push_back({{"start", detail::utc_now()},
                 {"step", step},
                 {"host", detail::as_utf8(shardlib::detail::host_name())},
                 {"command", detail::command_line()},
                 {"directory", detail::as_utf8(std::filesystem::current_path(no_directory).string())},
                 {"shardlib", shardlib::detail::version_text()},
                 {"commit", shardlib::detail::commit_text()},
                 {"launcher", launcher_name()},
                 {"dtype", dtype},
                 {"mesh", to_string(axes)},
                 {"devices", under_mpi() ? "ranks" : "threads"}});
  kept_[starts()] = all.dump(1) + "\n";
  io::replace_file(starts(), io::as_bytes(kept_[starts()]), true);
  return notes;
}

SHARDLIB_INLINE void RunDirectory::keep_tokenizer(const io::Tokenizer& used, const std::string& name) {
  if (!writer_) return;
  const bool exists = io::file_exists(tokenizer());
  if (used.fingerprint() == "bytes") {
    if (exists) io::remove_folder(tokenizer());
    return;
  }
  const auto is_copy = [&] {
    try {
      return io::is_tokenizer_copy(name, tokenizer()) ||
             io::load_tokenizer(tokenizer())->fingerprint() == used.fingerprint();
    } catch (const Error&) {  // a damaged copy is written again
      return false;
    }
  };
  if (!exists || !is_copy()) io::copy_tokenizer(name, tokenizer());
  for (const auto& file : std::filesystem::directory_iterator(tokenizer()))
    if (file.is_regular_file()) kept_[file.path().string()] = io::as_text(io::read_file(file.path().string()));
}

SHARDLIB_INLINE void RunDirectory::keep_step_graph(const std::string& svg) {
  if (!writer_ || svg.empty()) return;
  kept_[step_graph()] = svg;
  io::replace_file(step_graph(), io::as_bytes(svg));
}

SHARDLIB_INLINE std::string RunDirectory::tokenizer_of(const std::string& name) const {
  if (name == "bytes" || path_.empty() || !io::file_exists(tokenizer()) || !io::file_exists(config())) return name;
  const ConfigEntry trained{"data.tokenizer", detail::TomlText()(&name)};
  const std::vector<ConfigEntry> entries = config_entries_of_file(config());
  return std::ranges::find(entries, trained) == entries.end() ? name : tokenizer();
}

SHARDLIB_INLINE std::vector<std::string> RunDirectory::go_back(std::int64_t step) {
  std::vector<std::string> events;
  if (!writer_) return events;
  io::detail::on_own_paths([&] {
    keep_files();  // a cut reads the file at the path
    for (const Record& record : read_records(metrics()))
      if (record.step >= step) std::ranges::copy(record.events, std::back_inserter(events));
    metrics_.cut(step);
    samples_.cut(step);
  });
  return events;
}

SHARDLIB_INLINE void RunDirectory::sync() {
  io::detail::on_own_paths([this] {
    keep_files();
    for (JsonLines* const file : {&metrics_, &samples_}) file->sync();
  });
}

SHARDLIB_INLINE void RunDirectory::keep_files() {
  for (JsonLines* const file : {&metrics_, &samples_}) file->keep_place();
  if (console_) console_->keep_place();
  for (const auto& [path, text] : kept_) {
    if (io::file_exists(path)) continue;
    std::error_code exists;
    std::filesystem::create_directory(std::filesystem::path(path).parent_path(), exists);
    io::replace_file(path, io::as_bytes(text), true);
    detail::warn_removed(path);
  }
}

SHARDLIB_INLINE void require_no_run_file(const std::string& path, const std::string& option, const std::string& run) {
  namespace fs = std::filesystem;
  const fs::path own = run.empty() ? fs::path() : detail::resolved(run);
  for (fs::path at = detail::resolved(path); at.has_relative_path(); at = at.parent_path()) {
    const fs::path folder = at.parent_path();
    if ((folder == own || detail::is_run(folder)) && detail::is_written_by_run(at))
      throw UsageError(
          fmt::format("{} '{}': '{}' is the folder of a run, which writes {} itself; choose another name or folder",
                      option, path, folder == own ? run : folder.string(), at.filename().string()));
  }
}

}  // namespace shardlib::run
