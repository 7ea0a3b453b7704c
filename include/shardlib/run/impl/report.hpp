// Definitions of report.hpp.
#pragma once

#include "shardlib/run/report.hpp"

#include <fmt/format.h>

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstddef>
#include <filesystem>
#include <iterator>
#include <set>
#include <utility>

#include "shardlib/io/file.hpp"
#include "shardlib/run/impl/chart.hpp"
#include "shardlib/run/impl/report_page.hpp"
#include "shardlib/run/impl/report_script_curves.hpp"
#include "shardlib/run/impl/report_script_input.hpp"
#include "shardlib/run/impl/report_script_page.hpp"
#include "shardlib/run/impl/report_tables.hpp"
#include "shardlib/run/metrics.hpp"
#include "shardlib/support/error.hpp"
#include "shardlib/support/print.hpp"
#include "shardlib/support/stopwatch.hpp"
#include "shardlib/support/text.hpp"

namespace shardlib::run {

namespace detail {

/// One value of each record; NaN where it has none.
template <class F>
Series series_of(const RunData& run, const F& value) {
  Series series{run.name, run.number, {}, {}};
  for (const Record& record : run.records) {
    series.x.push_back(static_cast<double>(record.step));
    series.y.push_back(value(record));
  }
  return series;
}

inline Chart loss_chart(const std::vector<RunData>& runs) {
  const bool validated = std::ranges::any_of(runs, [](const RunData& run) {
    return std::ranges::any_of(run.records, [](const Record& r) { return r.validation_loss.has_value(); });
  });
  Chart chart{"loss", validated ? "Loss (dashed: validation)" : "Loss", Unit::number, {}, false, false};
  for (const RunData& run : runs) chart.series.push_back(series_of(run, [](const Record& r) { return r.loss; }));
  for (const RunData& run : runs) {
    // Alone, the run leaves the other colors free.
    Series validation{run.name + ", validation", run.number, {}, {}, true, runs.size() == 1 ? 1 : -1};
    for (const Record& record : run.records) {
      if (!record.validation_loss) continue;
      validation.x.push_back(static_cast<double>(record.step));
      validation.y.push_back(*record.validation_loss);
    }
    if (!validation.x.empty()) chart.series.push_back(std::move(validation));
    for (const Record& record : run.records)
      for (const std::string& event : record.events)
        chart.annotations.push_back({static_cast<double>(record.step), event, run.number});
  }
  return chart;
}

/// Where the time of a step goes. The rest is "other". Without series if the run has no parts.
inline Chart breakdown_chart(const RunData& run, bool alone) {
  Chart chart{"breakdown" + std::to_string(run.number), alone ? "Time of a step" : "Time of a step, " + run.name,
              Unit::seconds};
  chart.stacked = true;
  std::vector<std::string> names;
  const auto rest_of = [](const Record& record) {
    double rest = record.step_seconds;
    for (const auto& [name, seconds] : record.seconds) rest -= seconds;
    return rest;
  };
  bool complete = true;  // to rounding
  for (const Record& record : run.records) {
    for (const auto& [name, seconds] : record.seconds)
      if (std::ranges::find(names, name) == names.end()) names.push_back(name);
    complete = complete && rest_of(record) <= 1e-6 * record.step_seconds;
  }
  for (const std::string& part : names)
    chart.series.push_back(series_of(run, [&](const Record& record) {
      for (const auto& [name, seconds] : record.seconds)
        if (name == part) return seconds;
      return 0.0;
    }));
  if (!names.empty() && !complete) {
    names.emplace_back("other");
    chart.series.push_back(series_of(run, [&](const Record& record) { return std::max(rest_of(record), 0.0); }));
  }
  for (std::size_t i = 0; i < names.size(); ++i) chart.series[i].name = names[i];
  return chart;
}

/// The runs' data for the page's script: their names, and the tokens and seconds at some of their steps. The script
/// interpolates between these steps.
inline std::string page_data(const std::vector<RunData>& runs, double every) {
  constexpr std::size_t most = 1000;
  std::string out;
  for (const RunData& run : runs) {
    double tokens_so_far = 0, seconds_so_far = 0;
    std::vector<double> steps, tokens, seconds;
    const std::vector<std::size_t> shown = sampled(run.records.size(), most);
    for (std::size_t i = 0; i < run.records.size(); ++i) {
      const Record& record = run.records[i];
      tokens_so_far += tokens_of(record);
      seconds_so_far += seconds_of(record);
      if (shown[steps.size()] != i) continue;
      steps.push_back(static_cast<double>(record.step));
      tokens.push_back(tokens_so_far);
      seconds.push_back(seconds_so_far);
    }
    out += fmt::format("{}{{\"name\":{},\"color\":\"c{}\",\"step\":{},\"tokens\":{},\"seconds\":{}}}",
                       out.empty() ? "" : ",", json_text(run.name), run.number % 8, json_steps(steps),
                       json_numbers(tokens), json_numbers(seconds));
  }
  return fmt::format(
      "<script type=\"application/json\" id=\"page\">{{\"runs\":[{}],\"every\":{},\"written\":{:.0f}}}</script>", out,
      every, every > 0 ? shardlib::detail::unix_seconds() : 0.0);
}

inline std::vector<Chart> charts_of(const std::vector<RunData>& runs) {
  std::vector<Chart> charts{loss_chart(runs)};
  const auto add = [&](const std::string& id, const std::string& title, Unit unit, bool robust, const auto& value) {
    Chart chart{id, title, unit, {}, true, robust};
    for (const RunData& run : runs) {
      Series series = series_of(run, value);
      if (std::ranges::any_of(series.y, [](double y) { return std::isfinite(y); }))
        chart.series.push_back(std::move(series));
    }
    if (!chart.series.empty()) charts.push_back(std::move(chart));
  };
  add("grad_norm", "Gradient norm", Unit::number, false, [](const Record& r) { return r.grad_norm; });
  add("learning_rate", "Learning rate", Unit::number, false, [](const Record& r) { return r.learning_rate; });
  add("speed", "Tokens per second", Unit::count, true, [](const Record& r) { return r.tokens_per_second; });
  add("mfu", "MFU, of the devices' peak", Unit::percent, true,
      [](const Record& r) { return r.mfu.value_or(std::nan("")); });
  add("memory", "Memory of the fullest device", Unit::bytes, true,
      [](const Record& r) { return r.memory_bytes ? static_cast<double>(*r.memory_bytes) : std::nan(""); });
  std::set<std::string> numbers;
  for (const RunData& run : runs)
    for (const Record& record : run.records)
      for (const auto& [name, number] : record.numbers) numbers.insert(name);
  for (const std::string& name : numbers)
    add("number_" + markup_escape(name), name, Unit::number, false, [&](const Record& r) {
      for (const auto& [of, number] : r.numbers)
        if (of == name) return number;
      return std::nan("");
    });
  bool parts = false;
  for (const RunData& run : runs) {
    Chart chart = breakdown_chart(run, runs.size() == 1);
    if (chart.series.empty()) continue;
    parts = true;
    charts.push_back(std::move(chart));
  }
  if (!parts)
    add("step_seconds", "Time of a step", Unit::seconds, true, [](const Record& r) { return r.step_seconds; });
  return charts;
}

inline std::string csv_cell(const std::string& text) {
  if (text.find_first_of(",\"\r\n") == std::string::npos) return text;
  std::string out = "\"";
  for (const char c : text) out += c == '"' ? std::string("\"\"") : std::string(1, c);
  return out + "\"";
}

}  // namespace detail

SHARDLIB_INLINE std::string report(const std::vector<std::string>& paths, double every) {
  const std::vector<detail::RunData> runs = detail::read_runs(paths);
  std::string title, legend;
  for (const detail::RunData& run : runs) {
    title += (title.empty() ? "" : " · ") + detail::markup_escape(run.name);
    legend += detail::swatch(run) + " ";
  }
  std::string out =
      "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">"
      "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\"><title>" +
      title + "</title><style>" + detail::report_style +
      "</style><noscript><style>.plot,#help{display:none}</style></noscript></head>\n<body><main>";
  out += runs.size() == 1 ? "<h1>" + title + "</h1>" : "<h1>" + std::to_string(runs.size()) + " runs compared</h1>";
  out += "<p class=\"sub\">Training report by shardlib</p>\n" + detail::summary_table(runs) + "<h2>Training</h2>";
  out += "<noscript><p class=\"sub\">The charts need JavaScript. The tables of values below do not.</p></noscript>";
  out += "<div class=\"bar\" id=\"bar\">" + (runs.size() > 1 ? "<span class=\"keys\">" + legend + "</span>" : "") +
         "</div>\n<p class=\"sub\" id=\"help\">" + detail::report_help + "</p>\n" + detail::page_data(runs, every);
  out += "<div class=\"grid2\">\n";
  const std::vector<detail::Chart> charts = detail::charts_of(runs);
  std::size_t series = 0;
  for (const detail::Chart& chart : charts) series += chart.series.size();
  // The page stays small however many numbers a program adds.
  const std::size_t points = std::clamp<std::size_t>(16'000 * runs.size() / series, 400, 2000);
  for (const detail::Chart& chart : charts) out += to_html(chart, chart.id == "loss" ? 3 * points : points);
  out += "</div>\n" + detail::events_section(runs) + detail::samples_section(runs) + detail::config_table(runs);
  return out + "</main><script>(() => {" + detail::report_script_curves + detail::report_script_page +
         detail::report_script_input + "})();</script></body></html>\n";
}

SHARDLIB_INLINE void write_report(const std::vector<std::string>& runs, const std::string& file, double every) {
  const std::string page = report(runs, every);
  io::remove_stale_temporaries(std::filesystem::path(file).parent_path().string());
  io::replace_file(file, io::as_bytes(page));
}

SHARDLIB_INLINE bool in_progress(const std::string& run) {
  const int file = ::open((run + "/metrics.jsonl").c_str(), O_RDONLY | O_CLOEXEC);
  if (file < 0) return false;
  const bool locked = ::flock(file, LOCK_SH | LOCK_NB) != 0 && errno == EWOULDBLOCK;
  ::close(file);
  return locked;
}

SHARDLIB_INLINE std::string to_csv(const std::vector<std::string>& paths) {
  const std::vector<detail::RunData> runs = detail::read_runs(paths);
  std::vector<std::string> names;
  std::vector<std::vector<std::pair<std::string, double>>> rows;
  for (const auto& run : runs)
    for (const Record& record : run.records)
      for (const auto& [name, value] : rows.emplace_back(numbers_of(record)))
        if (std::ranges::find(names, name) == names.end()) names.push_back(name);
  std::string out = "run,step,time";
  for (const std::string& name : names) out += "," + detail::csv_cell(name);
  out += "\r\n";
  auto row = rows.begin();
  for (const auto& run : runs)
    for (const Record& record : run.records) {
      const auto& numbers = *row++;
      fmt::format_to(std::back_inserter(out), "{},{},", detail::csv_cell(run.name), record.step);
      if (record.time != 0) fmt::format_to(std::back_inserter(out), "{:.3f}", record.time);
      for (const std::string& name : names) {
        const auto found = std::ranges::find(numbers, name, &std::pair<std::string, double>::first);
        out += ",";
        if (found != numbers.end()) fmt::format_to(std::back_inserter(out), "{}", found->second);
      }
      out += "\r\n";
    }
  return out;
}

SHARDLIB_INLINE std::string to_jsonl(const std::vector<std::string>& paths) {
  std::string out;
  for (const auto& run : detail::read_runs(paths))
    for (const Record& record : run.records) {
      out += fmt::format(R"({{"run": {}, "step": {})", detail::quote(detail::as_utf8(run.name)), record.step);
      if (record.time != 0) out += fmt::format(", \"time\": {:.3f}", record.time);
      for (const auto& [name, value] : numbers_of(record))
        out += ", " + detail::quote(detail::as_utf8(name)) + ": " + detail::json_number(value);
      out += "}\n";
    }
  return out;
}

}  // namespace shardlib::run
