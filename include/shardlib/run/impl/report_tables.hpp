// The data of a run for the report, and the report's tables: summary, events, samples, configuration.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <set>
#include <string>
#include <vector>

#include "shardlib/run/impl/chart.hpp"
#include "shardlib/run/metrics.hpp"
#include "shardlib/run/options.hpp"
#include "shardlib/run/progress.hpp"
#include "shardlib/support/error.hpp"
#include "shardlib/support/print.hpp"
#include "shardlib/support/text.hpp"

namespace shardlib::run::detail {

/// The contents of a run's folder.
struct RunData {
  std::string name, path;
  int number = 0;
  std::vector<Record> records;
  std::vector<Sample> samples;
  std::vector<ConfigEntry> config;
};

inline RunData read_run(const std::string& path) {
  namespace fs = std::filesystem;
  RunData run;
  run.path = path;
  if (fs::is_directory(path)) {
    const std::string metrics = path + "/metrics.jsonl", samples = path + "/samples.jsonl",
                      config = path + "/config.toml";
    if (!fs::exists(metrics)) throw UsageError("the folder '" + path + "' is not a run: it has no metrics.jsonl");
    run.records = read_records(metrics);
    if (fs::exists(samples)) run.samples = read_samples(samples);
    if (fs::exists(config)) run.config = config_entries_of_file(config);
    const fs::path whole = fs::absolute(path).lexically_normal();
    run.name = (whole.has_filename() ? whole : whole.parent_path()).filename().string();
  } else {
    const std::string give = "give the folder of a run, or its metrics.jsonl";
    if (!fs::exists(path)) throw UsageError("there is no folder or file '" + path + "': " + give);
    run.records = read_records(path);
    if (run.records.empty()) throw UsageError("'" + path + "' has no record of a run: " + give);
    run.name = fs::path(path).filename().string();
  }
  if (run.records.empty()) throw UsageError("the run '" + path + "' has no records yet");
  return run;
}

/// Runs whose names differ: equal ones have their paths.
inline std::vector<RunData> read_runs(const std::vector<std::string>& paths) {
  if (paths.empty()) throw UsageError("name at least one run");
  std::vector<RunData> runs;
  for (const std::string& path : paths) {
    runs.push_back(read_run(path));
    runs.back().number = static_cast<int>(runs.size()) - 1;
  }
  std::vector<std::string> names;
  for (const RunData& run : runs)
    names.push_back(std::ranges::count(runs, run.name, &RunData::name) > 1 ? run.path : run.name);
  for (std::size_t i = 0; i < runs.size(); ++i) runs[i].name = names[i];
  return runs;
}

/// The tokens and the seconds of a step; 0 if they are not known.
inline double tokens_of(const Record& r) {
  const double tokens = r.tokens_per_second * r.step_seconds;
  return std::isfinite(tokens) ? tokens : 0.0;
}
inline double seconds_of(const Record& r) {
  return std::isfinite(r.step_seconds) ? r.step_seconds : 0.0;
}

inline std::string swatch(const RunData& run) {
  return "<span class=\"run\">" + swatch(fmt::format("c{}", run.number % 8)) + markup_escape(run.name) + "</span>";
}

inline std::string summary_table(const std::vector<RunData>& runs) {
  const std::vector<std::string> heads{"steps",       "loss at the end", "best validation loss",
                                       "tokens seen", "tokens/s",        "MFU",
                                       "step time",   "memory",          "training time"};
  std::string out = "<div class=\"box\"><table class=\"summary\"><tr><th>run</th>";
  for (const std::string& head : heads) out += "<th class=\"num\">" + head + "</th>";
  out += "</tr>";
  const auto shown = [](Unit q, double v) { return std::isfinite(v) ? unit_text(q, v) : std::string("–"); };
  for (const RunData& run : runs) {
    double tokens = 0, seconds = 0, best = std::nan(""), last_loss = 0, memory = std::nan("");
    std::int64_t best_step = 0;
    for (const Record& r : run.records) {
      tokens += tokens_of(r);
      seconds += seconds_of(r);
      if (r.memory_bytes) memory = std::max(std::isfinite(memory) ? memory : 0.0, static_cast<double>(*r.memory_bytes));
      if (r.validation_loss && !(*r.validation_loss >= best)) {
        best = *r.validation_loss;
        best_step = r.step;
      }
    }
    // The mean over the last hundredth: one step's loss is mostly its batch's. A step without an update is none.
    std::size_t left = std::max<std::size_t>(1, run.records.size() / 100), tail = 0;
    bool diverged = false;
    for (auto r = run.records.rbegin(); r != run.records.rend() && (left > 0 || (tail == 0 && !diverged)); ++r) {
      if (left > 0) --left;
      if (r->skipped) continue;
      if (!std::isfinite(r->loss)) {
        diverged = true;
        continue;
      }
      last_loss += r->loss;
      ++tail;
    }
    last_loss = tail > 0 ? last_loss / static_cast<double>(tail) : std::nan("");
    const auto median = [&](const auto& value) {
      std::vector<double> values;
      for (const Record& record : run.records) values.push_back(value(record));
      return middle_of(values, true);
    };
    std::vector<std::string> cells{
        std::to_string(run.records.back().step + 1),
        tail == 0 && diverged ? "not finite" : shown(Unit::number, last_loss),
        shown(Unit::number, best) + (std::isfinite(best) ? fmt::format(" at step {}", best_step) : ""),
        shown(Unit::count, tokens),
        shown(Unit::count, median([](const Record& r) { return r.tokens_per_second; })),
        shown(Unit::percent, median([](const Record& r) { return r.mfu.value_or(std::nan("")); })),
        shown(Unit::seconds, median([](const Record& r) { return r.step_seconds; })),
        shown(Unit::bytes, memory),
        duration_text(seconds)};
    out += "<tr><td>" + swatch(run) + "</td>";
    for (std::size_t i = 0; i < cells.size(); ++i)
      out += fmt::format("<td class=\"num\" data-label=\"{}\">{}</td>", heads[i], cells[i]);
    out += "</tr>";
  }
  return out +
         "</table><p class=\"sub\">The loss at the end is the mean over the last hundredth of the steps.</p></div>\n";
}

/// Unusual actions of the runs: resumed, skipped a step, went back. If there are many, only the newest.
inline std::string events_section(const std::vector<RunData>& runs) {
  constexpr std::size_t most = 50;
  std::string out;
  for (const RunData& run : runs) {
    std::vector<std::string> rows;
    for (const Record& record : run.records)
      for (const std::string& event : record.events)
        rows.push_back(
            fmt::format("<tr><td class=\"num step\">{}</td><td>{}</td></tr>", record.step, markup_escape(event)));
    if (rows.empty()) continue;
    const std::size_t first = rows.size() - std::min(rows.size(), most);
    out += "<div class=\"box\">" + (runs.size() > 1 ? "<p class=\"sub\">" + swatch(run) + "</p>" : std::string()) +
           (first > 0 ? fmt::format("<p class=\"sub\">the last {} of {}</p>", most, rows.size()) : "") +
           "<table><tr><th class=\"num step\">step</th><th>what happened</th></tr>";
    for (std::size_t i = first; i < rows.size(); ++i) out += rows[i];
    out += "</table></div>\n";
  }
  return out.empty() ? "" : "<h2>Events</h2>" + out;
}

inline std::string samples_section(const std::vector<RunData>& runs) {
  constexpr std::size_t most = 12, longest = 4000;
  std::string out;
  for (const RunData& run : runs) {
    if (run.samples.empty()) continue;
    out += "<div class=\"box\">" + (runs.size() > 1 ? "<p class=\"sub\">" + swatch(run) + "</p>" : std::string());
    std::vector<std::size_t> kept = sampled(run.samples.size(), most);
    std::reverse(kept.begin(), kept.end());
    for (const std::size_t i : kept) {
      const Sample& sample = run.samples[i];
      const bool begins = sample.text.starts_with(sample.prompt);
      std::string rest = begins ? sample.text.substr(sample.prompt.size()) : sample.text;
      if (rest.size() > longest) rest = as_utf8(rest.substr(0, longest)) + " …";
      out += fmt::format("<details id=\"sample-{}-{}\"{}><summary>after {}</summary><pre><b>{}</b>{}</pre></details>",
                         run.number, i, i + 1 == run.samples.size() ? " open" : "",
                         shardlib::detail::counted(sample.step + 1, "step"),
                         begins ? detail::markup_escape(sample.prompt) : "", detail::markup_escape(rest));
    }
    out += "</div>\n";
  }
  return out.empty() ? "" : "<h2>Sampled texts</h2><div class=\"grid2\">" + out + "</div>\n";
}

/// The configuration of one run, a table for each section of its file.
inline std::string sections_of(const RunData& run) {
  std::string out = "<div class=\"sections\">", open = "\n";  // the name of no section
  for (const ConfigEntry& entry : run.config) {
    const std::size_t point = entry.key.find('.');
    const std::string section = point == std::string::npos ? "" : entry.key.substr(0, point);
    if (section != open)
      out += fmt::format("{}<table><tr><th>{}</th><th>value</th></tr>\n", open == "\n" ? "" : "</table>",
                         section.empty() ? "key" : markup_escape(section));
    open = section;
    out += fmt::format("<tr><td><code>{}</code></td><td><code>{}</code></td></tr>\n",
                       markup_escape(point == std::string::npos ? entry.key : entry.key.substr(point + 1)),
                       markup_escape(entry.value));
  }
  return out + "</table></div>";
}

inline std::string config_table(const std::vector<RunData>& runs) {
  std::vector<std::string> keys;
  for (const RunData& run : runs)
    for (const ConfigEntry& entry : run.config)
      if (std::ranges::find(keys, entry.key) == keys.end()) keys.push_back(entry.key);
  if (keys.empty()) return "";
  std::string out = "<h2>Configuration</h2><div class=\"box\">";
  if (runs.size() == 1) return out + sections_of(runs.front()) + "</div>\n";
  std::string head = "<tr><th>key</th>", differing, rest;
  for (const RunData& run : runs) head += "<th>" + swatch(run) + "</th>";
  head += "</tr>";
  for (const std::string& key : keys) {
    std::set<std::string> values;
    std::string row = "<td><code>" + detail::markup_escape(key) + "</code></td>";
    for (const RunData& run : runs) {
      const auto at = std::ranges::find(run.config, key, &ConfigEntry::key);
      const std::string value = at == run.config.end() ? "–" : at->value;
      values.insert(value);
      row += "<td><code>" + detail::markup_escape(value) + "</code></td>";
    }
    const bool differs = values.size() > 1;
    (differs ? differing : rest) += (differs ? "<tr class=\"differs\">" : "<tr>") + row + "</tr>\n";
  }
  out += differing.empty() ? "<p>The configurations are the same.</p>" : "<table>" + head + differing + "</table>";
  return out + "<details id=\"same\"><summary>the same in all runs</summary><table>" + head + rest +
         "</table></details></div>\n";
}

}  // namespace shardlib::run::detail
