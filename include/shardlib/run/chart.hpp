// Charts of the report: thinned values as JSON, which the page's script draws, and a table of values.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "shardlib/run/unit.hpp"
#include "shardlib/support/inline.hpp"

namespace shardlib::run {

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

/// At most `most` values, each the mean, or the median, of its neighbors. `thinned(losses, 2000, false)`
[[nodiscard]] SHARDLIB_INLINE ThinnedSeries thinned(const Series& series, std::size_t most, bool median);

/// A figure of HTML that the page's script draws, with a table of values. Each series has at most `points` values.
/// `to_html(loss, 2000)`
[[nodiscard]] SHARDLIB_INLINE std::string to_html(const Chart& chart, std::size_t points);

}  // namespace shardlib::run

#ifndef SHARDLIB_COMPILED
#include "shardlib/run/impl/chart.hpp"
#endif
