// Definitions of timeline.hpp.
#pragma once

#include "shardlib/pipeline/timeline.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdio>
#include <iterator>
#include <map>
#include <set>
#include <utility>

#include "shardlib/pipeline/impl/text.hpp"
#include "shardlib/support/error.hpp"
#include "shardlib/support/text.hpp"

namespace shardlib::pipeline {

namespace detail {

/// Intervals from time 0 on, and the caption above them.
struct TimelinePanel {
  std::string name;
  std::vector<Interval> intervals;
  double makespan = 0, bubble = 0;
};

inline TimelinePanel panel_of(const std::string& name, std::vector<Interval> intervals, int ranks) {
  TimelinePanel panel{name, std::move(intervals)};
  double first = panel.intervals.front().begin, last = first, busy = 0;
  for (const Interval& interval : panel.intervals) {
    first = std::min(first, interval.begin);
    last = std::max(last, interval.end);
    busy += interval.end - interval.begin;
  }
  for (Interval& interval : panel.intervals) {
    interval.begin -= first;
    interval.end -= first;
  }
  panel.makespan = last - first;
  // Measured intervals may overlap a little; that is not a negative bubble.
  if (panel.makespan > 0) panel.bubble = std::max(0.0, 1 - busy / (panel.makespan * ranks));
  return panel;
}

inline std::string time_text(double value, bool seconds) {
  if (!seconds || value == 0) return short_number(value);
  if (std::abs(value) < 1e-3) return short_number(1e6 * value) + " µs";
  return std::abs(value) < 1 ? short_number(1e3 * value) + " ms" : short_number(value) + " s";
}

/// A round step so that up to ten of them cover the span.
inline double tick_step(double span) {
  const double base = std::pow(10.0, std::floor(std::log10(span / 10)));
  for (const double factor : {1.0, 2.0, 5.0})
    if (span / (factor * base) <= 10) return factor * base;
  return 10 * base;
}

class TimelineDrawing {
 public:
  explicit TimelineDrawing(const Timeline& timeline)
      : title_(shardlib::detail::markup_escape(timeline.title)), seconds_(!timeline.measured.empty()) {
    for (const auto* intervals : {&timeline.planned, &timeline.measured})
      for (const Interval& interval : *intervals) take(interval);
    if (!timeline.planned.empty()) panels_.push_back(panel_of("planned", timeline.planned, ranks_));
    if (!timeline.measured.empty()) panels_.push_back(panel_of("measured", timeline.measured, ranks_));
    for (const TimelinePanel& panel : panels_) span_ = std::max(span_, panel.makespan);
    if (panels_.empty()) throw UsageError("timeline: there is nothing to draw; give it planned or measured intervals");
    if (span_ <= 0) span_ = 1;
    // So wide that a microbatch's number fits into the boxes, as long as a picture can be looked at.
    const std::size_t tasks =
        std::max(timeline.planned.size(), timeline.measured.size()) / static_cast<std::size_t>(ranks_);
    width_ = std::clamp(18.0 * static_cast<double>(tasks), 1120.0, 8000.0);
  }

  std::string draw() {
    double y = 26;
    for (const TimelinePanel& panel : panels_) y = draw_panel(panel, y);
    y = draw_axis(y);
    draw_legend(y);
    const std::string size = short_number(left + width_ + right) + " " + short_number(y + 26);
    return "<svg xmlns=\"http://www.w3.org/2000/svg\" role=\"img\" viewBox=\"0 0 " + size +
           "\" font-family=\"sans-serif\" font-size=\"11\"><title>" + title_ +
           "</title><style>.fwd{fill:#8ab8f0}.bwd{fill:#f5b17b}.bwdA{fill:#f7d36b}.bwdW{fill:#a8d8a0}"
           ".task{stroke:#fff;stroke-width:.5}.grid{stroke:#ddd}.row{fill:#f2f2f2}</style>"
           "<rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>" +
           text(left, 16, title_, "font-size=\"14\"") + svg_ + "</svg>\n";
  }

 private:
  static constexpr double left = 60, right = 20, row = 24;

  void take(const Interval& interval) {
    if (interval.rank < 0 || interval.task.stage < 0 || !std::isfinite(interval.begin) ||
        !std::isfinite(interval.end) || interval.end < interval.begin)
      throw UsageError("timeline: " + to_string(interval.task) + " on rank " + std::to_string(interval.rank) +
                       " lasts from " + short_number(interval.begin) + " to " + short_number(interval.end) +
                       "; give a rank of at least 0 and a time that does not run backwards");
    ranks_ = std::max(ranks_, interval.rank + 1);
    stages_[interval.rank].insert(interval.task.stage);
    kinds_.insert(interval.task.kind);
  }

  static std::string text(double x, double y, const std::string& what, const std::string& attributes = "") {
    return "<text x=\"" + short_number(x) + "\" y=\"" + short_number(y) + "\" " + attributes + ">" + what + "</text>";
  }
  static std::string box(double x, double y, double w, double h, const std::string& attributes) {
    return "<rect x=\"" + pixels(x) + "\" y=\"" + pixels(y) + "\" width=\"" + pixels(w) + "\" height=\"" + pixels(h) +
           "\" " + attributes;
  }
  static std::string pixels(double value) {
    char digits[32];
    std::snprintf(digits, sizeof digits, "%.2f", value);
    return digits;
  }

  double draw_panel(const TimelinePanel& panel, double y) {
    svg_ += text(left, y + 14,
                 panel.name + ": " + time_text(panel.makespan, seconds_) + ", bubble " +
                     short_number(100 * panel.bubble) + " %");
    y += 20;
    for (int rank = 0; rank < ranks_; ++rank) {
      const double top = y + row * rank;
      svg_ += text(left - 6, top + 16, "rank " + std::to_string(rank), "text-anchor=\"end\"") +
              box(left, top + 1, width_ * panel.makespan / span_, row - 2, "class=\"row\"/>");
    }
    for (const Interval& interval : panel.intervals) draw_task(interval, y + row * interval.rank);
    return y + row * ranks_ + 6;
  }

  void draw_task(const Interval& interval, double top) {
    const Task& task = interval.task;
    const double x = left + width_ * interval.begin / span_, w = width_ * (interval.end - interval.begin) / span_;
    // A rank's later stages are paler.
    const auto& stages = stages_[interval.rank];
    const auto chunk = static_cast<double>(std::distance(stages.begin(), stages.find(task.stage)));
    const double opacity = 1 - 0.6 * chunk / static_cast<double>(std::max<std::size_t>(2, stages.size()));
    const std::string label = std::to_string(task.microbatch);
    svg_ += "<g>" +
            box(x, top + 1, w, row - 2,
                "class=\"task " + to_string(task.kind) + "\" fill-opacity=\"" + short_number(opacity) + "\"/>") +
            "<title>" + to_string(task) + " on rank " + std::to_string(interval.rank) + ": " +
            time_text(interval.begin, seconds_) + " to " + time_text(interval.end, seconds_) + "</title>";
    if (w > 3 + 7 * static_cast<double>(label.size()))
      svg_ += "<text x=\"" + pixels(x + w / 2) + "\" y=\"" + pixels(top + 16) + "\" text-anchor=\"middle\">" + label +
              "</text>";
    svg_ += "</g>";
  }

  double draw_axis(double y) {
    const double step = tick_step(span_);
    for (int i = 0; i * step <= span_ * (1 + 1e-9); ++i) {
      const double x = left + width_ * i * step / span_;
      svg_ += "<path class=\"grid\" d=\"M" + pixels(x) + " " + pixels(y - 4) + "v6\"/>" +
              text(x, y + 14, time_text(i * step, seconds_), "text-anchor=\"middle\"");
    }
    return y + 24;
  }

  void draw_legend(double y) {
    double x = left;
    for (const TaskKind kind : kinds_) {
      svg_ += box(x, y, 14, 14, "class=\"" + to_string(kind) + "\"/>") + text(x + 20, y + 11, to_string(kind));
      x += 80;
    }
    const bool chunks = std::any_of(stages_.begin(), stages_.end(), [](const auto& s) { return s.second.size() > 1; });
    svg_ += text(x, y + 11,
                 chunks ? "numbers are microbatches; paler: a later stage of the rank" : "numbers are microbatches");
  }

  std::string title_;
  bool seconds_;
  int ranks_ = 0;
  std::map<int, std::set<int>> stages_;  ///< of each rank
  std::set<TaskKind> kinds_;
  std::vector<TimelinePanel> panels_;
  double span_ = 0, width_ = 0;
  std::string svg_;
};

}  // namespace detail

SHARDLIB_INLINE std::string to_svg(const Timeline& timeline) {
  return detail::TimelineDrawing(timeline).draw();
}

}  // namespace shardlib::pipeline
