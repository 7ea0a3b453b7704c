// Line charts as SVG for the report. Each series has a faint raw curve and a smooth one, on linear and log scales.
#pragma once

#include <string>
#include <vector>

#include "shardlib/run/unit.hpp"
#include "shardlib/support/inline.hpp"

namespace shardlib::run {

/// A curve of one run: its name, and `y` over `x`. NaN is a gap.
struct Series {
  std::string name;
  int color = 0;  ///< the number of the run; the page's style has the colours
  std::vector<double> x, y;
  bool marked = false;  ///< for few values: dashed, with marks, not smoothed
};

/// A note in a chart at `x`; `text` describes it, and `color` is as in a Series.
struct Annotation {
  double x = 0;
  std::string text;
  int color = 0;
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
};

/// Parts of a whole over time, the first at the bottom: `id` and `title` as of a Chart, the `unit` of the parts,
/// their `names`, and `x`.
struct StackedChart {
  std::string id, title;
  Unit unit = Unit::seconds;
  std::vector<double> x;
  std::vector<std::string> names;
  std::vector<std::vector<double>> parts;  ///< names.size() rows
};

/// The mean, or the median, over a window of up to 2 * half + 1 values around each of `at`. At the end the window is
/// cut off. At the beginning the mean's narrows on both sides, so that a falling curve begins where it does.
/// `smoothed(losses, 10, false, places)`
[[nodiscard]] SHARDLIB_INLINE std::vector<double> smoothed(const std::vector<double>& y, std::size_t half, bool median,
                                                           const std::vector<std::size_t>& at);

/// A card of HTML with the SVG. The curves are thinned to a few hundred points that keep each extreme.
[[nodiscard]] SHARDLIB_INLINE std::string to_html(const Chart& chart);
[[nodiscard]] SHARDLIB_INLINE std::string to_html(const StackedChart& chart);

}  // namespace shardlib::run

#ifndef SHARDLIB_COMPILED
#include "shardlib/run/impl/chart.hpp"
#endif
