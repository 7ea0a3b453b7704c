// Definitions of report.hpp.
#pragma once

#include "shardlib/run/report.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <set>
#include <utility>

#include "shardlib/io/file.hpp"
#include "shardlib/run/chart.hpp"
#include "shardlib/run/impl/plot.hpp"
#include "shardlib/run/impl/report_page.hpp"
#include "shardlib/run/metrics.hpp"
#include "shardlib/run/options.hpp"
#include "shardlib/run/progress.hpp"
#include "shardlib/support/error.hpp"
#include "shardlib/support/print.hpp"

namespace shardlib::run {

namespace detail {

/// The contents of a run's folder.
struct RunData {
  std::string name, path;
  int color = 0;
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
    if (!fs::exists(path)) throw UsageError("there is no run '" + path + "'");
    run.records = read_records(path);
    run.name = fs::path(path).filename().string();
  }
  if (run.records.empty()) throw UsageError("the run '" + path + "' has no records yet");
  return run;
}

inline std::string color_rules() {
  std::string out;
  for (int i = 0; i < 8; ++i) {
    out += fmt::format(
        "path.c{0}{{stroke:var(--c{0})}}circle.c{0}{{fill:var(--c{0})}}i.c{0}{{background:var(--c{0})}}"
        "path.p{0}{{fill:var(--p{0})}}i.p{0}{{background:var(--p{0})}}\n",
        i);
  }
  return out;
}

/// One value of each record; NaN where it has none.
template <class F>
Series series_of(const RunData& run, const F& value) {
  Series series{run.name, run.color, {}, {}, false};
  for (const Record& record : run.records) {
    series.x.push_back(static_cast<double>(record.step));
    series.y.push_back(value(record));
  }
  return series;
}

template <class F>
std::string chart_of(const std::vector<RunData>& runs, const char* id, const char* title, Unit unit, bool from_zero,
                     bool robust, const F& value) {
  Chart chart{id, title, unit, {}, from_zero, robust};
  bool any = false;
  for (const RunData& run : runs) {
    chart.series.push_back(series_of(run, value));
    for (const double y : chart.series.back().y) any = any || std::isfinite(y);
  }
  return any ? to_html(chart) : "";
}

inline std::string loss_chart(const std::vector<RunData>& runs) {
  const bool validated = std::any_of(runs.begin(), runs.end(), [](const RunData& run) {
    return std::any_of(run.records.begin(), run.records.end(),
                       [](const Record& r) { return r.validation_loss.has_value(); });
  });
  Chart chart{"loss", validated ? "Loss (dashed: validation)" : "Loss", Unit::number, {}, false, false};
  for (const RunData& run : runs) chart.series.push_back(series_of(run, [](const Record& r) { return r.loss; }));
  for (const RunData& run : runs) {
    // Alone, the run leaves the other colours free.
    Series validation{run.name + ", validation", runs.size() == 1 ? 1 : run.color, {}, {}, true};
    for (const Record& record : run.records) {
      if (!record.validation_loss) continue;
      validation.x.push_back(static_cast<double>(record.step));
      validation.y.push_back(*record.validation_loss);
    }
    if (!validation.x.empty()) chart.series.push_back(std::move(validation));
    for (const Record& record : run.records)
      for (const std::string& event : record.events)
        chart.annotations.push_back({static_cast<double>(record.step), event, run.color});
  }
  return to_html(chart);
}

/// Where the time of a step goes. The rest is "other". Empty if the run has no parts.
inline std::string breakdown_chart(const RunData& run, bool alone) {
  StackedChart chart{"breakdown" + std::to_string(run.color),
                     alone ? "Time of a step" : "Time of a step, " + run.name,
                     Unit::seconds,
                     {},
                     {},
                     {}};
  bool complete = true;  // to rounding
  for (const Record& record : run.records) {
    double rest = record.step_seconds;
    for (const auto& [name, seconds] : record.seconds) {
      if (std::find(chart.names.begin(), chart.names.end(), name) == chart.names.end()) chart.names.push_back(name);
      rest -= seconds;
    }
    complete = complete && rest <= 1e-6 * record.step_seconds;
  }
  if (chart.names.empty()) return "";
  if (!complete) chart.names.emplace_back("other");
  chart.parts.resize(chart.names.size());
  for (const Record& record : run.records) {
    chart.x.push_back(static_cast<double>(record.step));
    for (auto& part : chart.parts) part.push_back(0);
    double rest = record.step_seconds;
    for (const auto& [name, seconds] : record.seconds) {
      const auto at = std::find(chart.names.begin(), chart.names.end(), name) - chart.names.begin();
      chart.parts[static_cast<std::size_t>(at)].back() = seconds;
      rest -= seconds;
    }
    if (!complete) chart.parts.back().back() = std::max(rest, 0.0);
  }
  return to_html(chart);
}

template <class F>
double median_of(const std::vector<Record>& records, const F& value) {
  std::vector<double> values;
  for (const Record& record : records) {
    if (const double v = value(record); std::isfinite(v)) values.push_back(v);
  }
  if (values.empty()) return std::nan("");
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

inline std::string swatch(const RunData& run) {
  return fmt::format("<span class=\"run\"><i class=\"c{}\"></i>{}</span>", run.color % 8,
                     detail::markup_escape(run.name));
}

inline std::string summary_table(const std::vector<RunData>& runs) {
  std::string out = "<div class=\"box\"><table><tr><th>run</th>";
  for (const char* head : {"steps", "final loss", "best validation loss", "tokens seen", "tokens/s", "MFU", "step time",
                           "memory", "training time"})
    out += fmt::format("<th class=\"num\">{}</th>", head);
  out += "</tr>";
  const auto shown = [](Unit q, double v) { return std::isfinite(v) ? unit_text(q, v) : std::string("–"); };
  for (const RunData& run : runs) {
    double tokens = 0, seconds = 0, best = std::nan(""), last_loss = 0, memory = std::nan("");
    std::int64_t best_step = 0;
    for (const Record& r : run.records) {
      if (std::isfinite(r.tokens_per_second)) tokens += r.tokens_per_second * r.step_seconds;
      seconds += std::isfinite(r.step_seconds) ? r.step_seconds : 0.0;
      if (r.memory_bytes) memory = std::max(std::isfinite(memory) ? memory : 0.0, static_cast<double>(*r.memory_bytes));
      if (r.validation_loss && !(*r.validation_loss >= best)) {
        best = *r.validation_loss;
        best_step = r.step;
      }
    }
    // The mean over the last hundredth: one step's loss is mostly its batch's.
    const std::size_t tail = std::max<std::size_t>(1, run.records.size() / 100);
    for (std::size_t i = run.records.size() - tail; i < run.records.size(); ++i)
      last_loss += run.records[i].loss / static_cast<double>(tail);
    const auto median = [&](const auto& value) { return median_of(run.records, value); };
    std::vector<std::string> cells{
        std::to_string(run.records.back().step + 1),
        shown(Unit::number, last_loss),
        shown(Unit::number, best) + (std::isfinite(best) ? fmt::format(" at step {}", best_step) : ""),
        shown(Unit::count, tokens),
        shown(Unit::count, median([](const Record& r) { return r.tokens_per_second; })),
        shown(Unit::percent, median([](const Record& r) { return r.mfu.value_or(std::nan("")); })),
        shown(Unit::seconds, median([](const Record& r) { return r.step_seconds; })),
        shown(Unit::bytes, memory),
        duration_text(seconds)};
    out += "<tr><td>" + swatch(run) + "</td>";
    for (const std::string& cell : cells) out += "<td class=\"num\">" + cell + "</td>";
    out += "</tr>";
  }
  return out + "</table></div>\n";
}

/// Unusual actions of the runs: resumed, skipped a step, went back. If there are many, only the newest.
inline std::string events_section(const std::vector<RunData>& runs) {
  constexpr std::size_t most = 50;
  std::string out;
  for (const RunData& run : runs) {
    std::vector<std::string> rows;
    for (const Record& record : run.records)
      for (const std::string& event : record.events)
        rows.push_back(fmt::format("<tr><td class=\"num\">{}</td><td>{}</td></tr>", record.step, markup_escape(event)));
    if (rows.empty()) continue;
    const std::size_t first = rows.size() - std::min(rows.size(), most);
    out += "<div class=\"box\">" + (runs.size() > 1 ? "<p class=\"sub\">" + swatch(run) + "</p>" : std::string()) +
           (first > 0 ? fmt::format("<p class=\"sub\">the last {} of {}</p>", most, rows.size()) : "") +
           "<table><tr><th class=\"num\">step</th><th>what happened</th></tr>";
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
      out += fmt::format("<details{}><summary>after step {}</summary><pre><b>{}</b>{}</pre></details>",
                         i + 1 == run.samples.size() ? " open" : "", sample.step + 1,
                         begins ? detail::markup_escape(sample.prompt) : "", detail::markup_escape(rest));
    }
    out += "</div>\n";
  }
  return out.empty() ? "" : "<h2>Sampled texts</h2><div class=\"grid2\">" + out + "</div>\n";
}

inline std::string config_table(const std::vector<RunData>& runs) {
  std::vector<std::string> keys;
  for (const RunData& run : runs) {
    for (const ConfigEntry& entry : run.config) {
      if (std::find(keys.begin(), keys.end(), entry.key) == keys.end()) keys.push_back(entry.key);
    }
  }
  if (keys.empty()) return "";
  const bool many = runs.size() > 1;
  std::string head = "<tr><th>key</th>", differing, rest;
  for (const RunData& run : runs) head += "<th>" + (many ? swatch(run) : std::string("value")) + "</th>";
  head += "</tr>";
  for (const std::string& key : keys) {
    std::set<std::string> values;
    std::string row = "<td><code>" + detail::markup_escape(key) + "</code></td>";
    for (const RunData& run : runs) {
      const auto at = std::find_if(run.config.begin(), run.config.end(), [&](const auto& e) { return e.key == key; });
      const std::string value = at == run.config.end() ? "–" : at->value;
      values.insert(value);
      row += "<td><code>" + detail::markup_escape(value) + "</code></td>";
    }
    const bool differs = values.size() > 1;
    (differs ? differing : rest) += (differs ? "<tr class=\"differs\">" : "<tr>") + row + "</tr>\n";
  }
  std::string out = "<h2>Configuration</h2><div class=\"box\">";
  if (!many) return out + "<table>" + head + rest + "</table></div>\n";
  out += differing.empty() ? "<p>The configurations are the same.</p>" : "<table>" + head + differing + "</table>";
  return out + "<details><summary>the same in all runs</summary><table>" + head + rest + "</table></details></div>\n";
}

}  // namespace detail

SHARDLIB_INLINE std::string report(const std::vector<std::string>& paths) {
  if (paths.empty()) throw UsageError("report: name at least one run");
  std::vector<detail::RunData> runs;
  for (const std::string& path : paths) {
    runs.push_back(detail::read_run(path));
    runs.back().color = static_cast<int>(runs.size()) - 1;
  }
  const auto same_name = [&](const std::string& name) {
    return std::count_if(runs.begin(), runs.end(), [&](const auto& run) { return run.name == name; }) > 1;
  };
  std::vector<std::string> names;
  for (const detail::RunData& run : runs) names.push_back(same_name(run.name) ? run.path : run.name);
  for (std::size_t i = 0; i < runs.size(); ++i) runs[i].name = names[i];

  std::string title, legend;
  for (const detail::RunData& run : runs) {
    title += (title.empty() ? "" : " · ") + detail::markup_escape(run.name);
    legend += detail::swatch(run) + " ";
  }
  std::string out =
      "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">"
      "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\"><title>" +
      title + "</title><style>" + detail::report_style + detail::color_rules() + "</style></head>\n<body><main>";
  out += runs.size() == 1 ? "<h1>" + title + "</h1>" : "<h1>" + std::to_string(runs.size()) + " runs compared</h1>";
  out +=
      "<p class=\"sub\">Training report by shardlib. Curves are means (medians for speeds and times) over 2 % of the "
      "longest run; "
      "each step's own value is faint behind.</p>\n";
  out += detail::summary_table(runs) + "<h2>Training</h2>";
  if (runs.size() > 1) out += "<p class=\"keys\">" + legend + "</p>";
  out += "<div class=\"grid2\">\n" + detail::loss_chart(runs);
  const auto add = [&](const char* id, const char* name, Unit unit, bool robust, const auto& value) {
    out += detail::chart_of(runs, id, name, unit, true, robust, value);
  };
  add("grad_norm", "Gradient norm", Unit::number, false, [](const Record& r) { return r.grad_norm; });
  add("learning_rate", "Learning rate", Unit::number, false, [](const Record& r) { return r.learning_rate; });
  add("speed", "Tokens per second", Unit::count, true, [](const Record& r) { return r.tokens_per_second; });
  add("mfu", "MFU, of the machine's measured peak", Unit::percent, true,
      [](const Record& r) { return r.mfu.value_or(std::nan("")); });
  add("memory", "Memory of the fullest device", Unit::bytes, true,
      [](const Record& r) { return r.memory_bytes ? static_cast<double>(*r.memory_bytes) : std::nan(""); });
  std::set<std::string> numbers;
  for (const detail::RunData& run : runs)
    for (const Record& record : run.records)
      for (const auto& [name, number] : record.numbers) numbers.insert(name);
  for (const std::string& name : numbers)
    add(("number_" + name).c_str(), name.c_str(), Unit::number, false, [&](const Record& r) {
      for (const auto& [of, number] : r.numbers)
        if (of == name) return number;
      return std::nan("");
    });
  std::string parts;
  for (const detail::RunData& run : runs) parts += detail::breakdown_chart(run, runs.size() == 1);
  if (parts.empty())
    add("step_seconds", "Time of a step", Unit::seconds, true, [](const Record& r) { return r.step_seconds; });
  out += parts + "</div>\n" + detail::events_section(runs) + detail::samples_section(runs) + detail::config_table(runs);
  return out + "</main><script>" + detail::report_script + "</script></body></html>\n";
}

SHARDLIB_INLINE void write_report(const std::vector<std::string>& runs, const std::string& file) {
  const std::string page = report(runs);
  io::remove_stale_temporaries(std::filesystem::path(file).parent_path().string());
  io::replace_file(file, io::as_bytes(page));
}

}  // namespace shardlib::run
