// Definitions of report.hpp: the tables for other programs.
#pragma once

#include "shardlib/run/report.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "shardlib/run/impl/report_tables.hpp"
#include "shardlib/run/metrics.hpp"
#include "shardlib/support/inline.hpp"
#include "shardlib/support/print.hpp"

namespace shardlib::run {

namespace detail {

inline std::string csv_cell(const std::string& text) {
  if (text.find_first_of(",\"\r\n") == std::string::npos) return text;
  std::string out = "\"";
  for (const char c : text) out += c == '"' ? std::string("\"\"") : std::string(1, c);
  return out + "\"";
}

}  // namespace detail

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
