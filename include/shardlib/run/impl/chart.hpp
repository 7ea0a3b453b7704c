// Charts of the report: thinned values as JSON, which the page's script draws, and a table of values. Before them small
// parts that the page's tables have, too.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <numeric>
#include <string>
#include <string_view>
#include <vector>

#include "shardlib/run/unit.hpp"
#include "shardlib/support/print.hpp"
#include "shardlib/support/text.hpp"

namespace shardlib::run::detail {

/// Evenly chosen indices, the first and the last one included.
inline std::vector<std::size_t> sampled(std::size_t size, std::size_t most) {
  std::vector<std::size_t> kept;
  const std::size_t count = std::min(size, most);
  for (std::size_t i = 0; i < count; ++i) kept.push_back(count == 1 ? 0 : i * (size - 1) / (count - 1));
  return kept;
}

/// The mean or the median of the finite values; NaN where there is none. It reorders the values.
inline double middle_of(std::vector<double>& values, bool median) {
  std::erase_if(values, [](double v) { return !std::isfinite(v); });
  if (values.empty()) return std::nan("");
  if (!median) {
    double sum = 0;  // divided first: values near the largest double must not overflow
    for (const double v : values) sum += v / static_cast<double>(values.size());
    return sum;
  }
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

/// Five digits are more than the eye takes from a picture.
inline std::string json_numbers(const std::vector<double>& values) {
  std::string out = "[";
  for (const double v : values) {
    out += out.size() > 1 ? "," : "";
    out += std::isfinite(v) ? fmt::format("{:.5g}", v) : "null";
  }
  return out + "]";
}

/// The first step, and each later one as its distance from the step before, which takes fewer digits.
inline std::string json_steps(const std::vector<double>& steps) {
  std::string out = "[";
  for (std::size_t i = 0; i < steps.size(); ++i)
    out += fmt::format("{}{:.0f}", i > 0 ? "," : "", i > 0 ? steps[i] - steps[i - 1] : steps[i]);
  return out + "]";
}

/// Inside <script>, so that no text can end the element.
inline std::string json_text(const std::string& text) {
  std::string out;
  for (const char c : quote(as_utf8(text))) out += c == '<' ? std::string("\\u003c") : std::string(1, c);
  return out;
}

inline const char* name_of(Unit unit) {
  constexpr const char* names[] = {"number", "count", "percent", "bytes", "seconds"};
  return names[static_cast<std::size_t>(unit)];
}

/// A square of the page's color `name`.
inline std::string swatch(std::string_view name) {
  return fmt::format("<i style=\"background:var(--{})\"></i>", name);
}

// ---- curves ---------------------------------------------------------------------------------------------------------

/// A curve of one run: its name, and `y` over ascending steps `x`. NaN is a gap.
struct Series {
  std::string name;
  int run = 0;  ///< the number of the run: readers hide the run's curves by it
  std::vector<double> x, y;
  bool marked = false;  ///< for few values: dashed, with marks, not smoothed
  int color = -1;       ///< a number of the page's style; -1: that of the run
};

/// A note in a chart at step `x`; `text` describes it, and `run` is as in a Series.
struct Annotation {
  double x = 0;
  std::string text;
  int run = 0;
};

/// Curves in one picture: its `id` in the page, its `title`, the `unit` of `y`, the `series`, and `annotations` as
/// vertical lines.
struct Chart {
  std::string id, title;
  Unit unit = Unit::number;
  std::vector<Series> series = {};
  bool starts_at_zero = false;  ///< the linear scale starts at zero
  bool robust = false;          ///< smoothed by the median: for times and speeds, where single outliers say nothing
  std::vector<Annotation> annotations = {};
  bool stacked = false;  ///< the series are parts of a whole, of one run, the first at the bottom
};

/// A curve with few values: `y` at steps `x`. Each value stands for as many steps; `low` and `high` are the extremes of
/// those steps, and empty if no value stands for more than one.
struct ThinnedSeries {
  std::vector<double> x, y, low, high;
};

inline int color_of(const Series& series) {
  return (series.color < 0 ? series.run : series.color) % 8;
}

/// The curves as text: a row for each of up to twelve ranges of steps. What a picture says must be readable without it.
inline std::string values_table(const Chart& chart) {
  double first = std::numeric_limits<double>::infinity(), last = -first;
  for (const Series& s : chart.series) {
    first = std::min(first, s.x.front());
    last = std::max(last, s.x.back());
  }
  std::string out = "<table><tr><th class=\"num\">step</th>";
  for (const Series& s : chart.series) out += "<th class=\"num\">" + markup_escape(s.name) + "</th>";
  out += "</tr>";
  const double steps = last - first + 1, rows = std::min(steps, 12.0);
  for (double row = 0; row < rows; ++row) {
    const double begin = first + std::floor(row * steps / rows), end = first + std::floor((row + 1) * steps / rows);
    out += end - begin > 1 ? fmt::format("<tr><td class=\"num\">{:.0f} – {:.0f}</td>", begin, end - 1)
                           : fmt::format("<tr><td class=\"num\">{:.0f}</td>", begin);
    for (const Series& s : chart.series) {
      const auto from = std::lower_bound(s.x.begin(), s.x.end(), begin), to = std::lower_bound(from, s.x.end(), end);
      std::vector<double> values(s.y.begin() + (from - s.x.begin()), s.y.begin() + (to - s.x.begin()));
      const double value = middle_of(values, chart.robust || chart.stacked);
      out += "<td class=\"num\">" + (std::isfinite(value) ? unit_text(chart.unit, value) : std::string("–")) + "</td>";
    }
    out += "</tr>";
  }
  return out + "</table>";
}

/// The parts of a whole with their means and shares.
inline std::string parts_legend(const Chart& chart) {
  std::vector<double> means;
  for (const Series& s : chart.series)
    means.push_back(std::accumulate(s.y.begin(), s.y.end(), 0.0) / static_cast<double>(s.y.size()));
  const double whole = std::accumulate(means.begin(), means.end(), 0.0);
  std::string out;
  for (std::size_t p = 0; p < means.size(); ++p)
    out += fmt::format("<span class=\"key\">{}{} {} ({:.0f} %)</span>", swatch(fmt::format("p{}", p % 8)),
                       markup_escape(chart.series[p].name), unit_text(chart.unit, means[p]),
                       whole > 0 ? 100 * means[p] / whole : 0.0);
  return "<span class=\"keys\">" + out + "</span>";
}

/// At most `most` values, each the mean, or the median, of its neighbors. `thinned(losses, 2000, false)`
inline ThinnedSeries thinned(const Series& series, std::size_t most, bool median) {
  const std::size_t n = series.x.size();
  if (n <= most) return {series.x, series.y, {}, {}};
  ThinnedSeries out;
  std::vector<double> values;
  for (std::size_t b = 0; b < most; ++b) {
    const std::size_t begin = b * n / most, end = (b + 1) * n / most;
    double low = std::nan(""), high = std::nan("");
    values.assign(series.y.begin() + static_cast<std::ptrdiff_t>(begin),
                  series.y.begin() + static_cast<std::ptrdiff_t>(end));
    for (const double v : values) {
      if (!std::isfinite(v)) continue;
      if (!(v >= low)) low = v;
      if (!(v <= high)) high = v;
    }
    // The ends of the curve are the ends of the run.
    out.x.push_back(series.x[b == 0 ? 0 : b + 1 == most ? n - 1 : (begin + end - 1) / 2]);
    out.y.push_back(middle_of(values, median));
    out.low.push_back(low);
    out.high.push_back(high);
  }
  return out;
}

/// A figure of HTML that the page's script draws, with a table of values. Each series has at most `points` values.
/// `to_html(loss, 2000)`
inline std::string to_html(const Chart& given, std::size_t points) {
  constexpr std::size_t most_notes = 200;
  Chart chart = given;
  std::erase_if(chart.series, [](const Series& s) { return s.x.empty(); });
  std::string series, notes;
  for (std::size_t p = 0; p < chart.series.size(); ++p) {
    const Series& s = chart.series[p];
    const ThinnedSeries shown = thinned(s, points, chart.robust || chart.stacked);
    const std::string color = chart.stacked ? fmt::format("p{}", p % 8) : fmt::format("c{}", color_of(s));
    series +=
        fmt::format("{}{{\"name\":{},\"run\":{},\"color\":\"{}\",\"marked\":{},\"step\":{},\"y\":{}", p > 0 ? "," : "",
                    json_text(s.name), s.run, color, s.marked, json_steps(shown.x), json_numbers(shown.y));
    if (!shown.low.empty() && !chart.stacked)
      series += ",\"low\":" + json_numbers(shown.low) + ",\"high\":" + json_numbers(shown.high);
    series += "}";
  }
  const std::size_t first_note = chart.annotations.size() - std::min(chart.annotations.size(), most_notes);
  for (std::size_t i = first_note; i < chart.annotations.size(); ++i) {
    const Annotation& note = chart.annotations[i];
    notes += fmt::format("{}{{\"step\":{:.0f},\"run\":{},\"text\":{}}}", i > first_note ? "," : "", note.x, note.run,
                         json_text(note.text));
  }
  return fmt::format(
      "<figure class=\"card\" id=\"{}\"><figcaption><b>{}</b>{}</figcaption>"
      "<div class=\"plot\"><svg aria-hidden=\"true\"></svg></div>"
      "<details class=\"values\" id=\"{}-values\"><summary>Values</summary>{}</details>"
      "<script type=\"application/json\">{{\"unit\":\"{}\",\"zero\":{},\"robust\":{},\"stacked\":{},\"series\":[{}],"
      "\"notes\":[{}]}}</script></figure>\n",
      chart.id, markup_escape(chart.title), chart.stacked ? parts_legend(chart) : "", chart.id, values_table(chart),
      name_of(chart.unit), chart.starts_at_zero || chart.stacked, chart.robust || chart.stacked, chart.stacked, series,
      notes);
}

}  // namespace shardlib::run::detail
