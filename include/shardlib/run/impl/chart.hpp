// Definitions of chart.hpp.
#pragma once

#include "shardlib/run/chart.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <numeric>
#include <utility>

#include "shardlib/run/impl/plot.hpp"
#include "shardlib/support/markup.hpp"
#include "shardlib/support/print.hpp"

namespace shardlib::run {

SHARDLIB_INLINE std::vector<double> smoothed(const std::vector<double>& y, std::size_t half, bool median,
                                             const std::vector<std::size_t>& at) {
  std::vector<double> out, window;
  for (const std::size_t i : at) {
    const std::size_t before = std::min(half, i), after = std::min({half, y.size() - 1 - i, median ? half : before});
    window.clear();
    for (std::size_t k = i - before; k <= i + after; ++k) {
      if (std::isfinite(y[k])) window.push_back(y[k]);
    }
    if (window.empty()) {
      out.push_back(std::nan(""));
    } else if (median) {
      const auto middle = window.begin() + static_cast<std::ptrdiff_t>(window.size() / 2);
      std::nth_element(window.begin(), middle, window.end());
      out.push_back(*middle);
    } else {
      out.push_back(std::accumulate(window.begin(), window.end(), 0.0) / static_cast<double>(window.size()));
    }
  }
  return out;
}

namespace detail {

/// What is drawn of a series.
struct Curve {
  const Series* series = nullptr;
  std::vector<double> x, y;            ///< smooth
  std::vector<std::size_t> kept, raw;  ///< of the series: where the smooth curve has its points; what the raw one shows
};

/// The linear scale without the beginning, which is often far above all that follows, and without outliers.
inline Scale zoomed_scale(const std::vector<Curve>& curves, double first, double last) {
  std::vector<double> values;
  for (const Curve& curve : curves) {
    std::vector<double> later;
    for (std::size_t k = 0; k < curve.x.size(); ++k) {
      if (curve.x[k] >= first + 0.1 * (last - first)) values.push_back(curve.y[k]);
    }
    for (const std::size_t i : curve.raw) {
      if (curve.series->x[i] >= first + 0.1 * (last - first) && std::isfinite(curve.series->y[i]))
        later.push_back(curve.series->y[i]);
    }
    std::sort(later.begin(), later.end());
    if (later.empty()) continue;
    values.push_back(later[later.size() / 20]);
    values.push_back(later[later.size() - 1 - later.size() / 20]);
  }
  return scale_of(values, false, false);
}

inline std::string draw_curves(const std::vector<Curve>& curves, const std::vector<Annotation>& annotations,
                               const Scale& x, const Scale& y) {
  // A picture of its own clips what is outside.
  std::string svg = fmt::format("<svg x=\"0\" y=\"{}\" width=\"{}\" height=\"{}\" viewBox=\"0 {} {} {}\">", plot_top,
                                plot_width, plot_bottom - plot_top, plot_top, plot_width, plot_bottom - plot_top);
  const auto path = [&](const char* kind, const Series& s, const std::string& d) {
    svg += fmt::format("<path class=\"{} c{}\" d=\"{}\"/>", kind, s.color % 8, d);
  };
  for (const Annotation& note : annotations)
    svg += fmt::format("<path class=\"note c{}\" d=\"M{:.1f} {}V{}\"><title>{}</title></path>", note.color % 8,
                       x_pixel(x, note.x), plot_top, plot_bottom, markup_escape(note.text));
  for (const Curve& curve : curves) {
    if (!curve.raw.empty()) path("raw", *curve.series, svg_path(curve.series->x, curve.series->y, curve.raw, x, y));
  }
  for (const Curve& curve : curves) {
    const Series& s = *curve.series;
    path(s.marked ? "marked" : "smooth", s, svg_path(curve.x, curve.y, sampled(curve.x.size(), curve.x.size()), x, y));
    if (curve.x.size() > 1 && (!s.marked || curve.x.size() > 25)) continue;
    for (std::size_t i = 0; i < curve.x.size(); ++i) {
      if (std::isfinite(curve.y[i]) && std::isfinite(y.at(curve.y[i])))
        svg += fmt::format("<circle class=\"mark c{}\" r=\"3.5\" cx=\"{:.1f}\" cy=\"{:.1f}\"/>", s.color % 8,
                           x_pixel(x, curve.x[i]), y_pixel(y, curve.y[i]));
    }
  }
  return svg + "</svg>";
}

}  // namespace detail

SHARDLIB_INLINE std::string to_html(const Chart& chart) {
  double first = std::numeric_limits<double>::infinity(), last = -first;
  std::size_t longest = 0;
  for (const Series& s : chart.series) {
    if (s.x.empty()) continue;
    first = std::min(first, s.x.front());
    last = std::max(last, s.x.back());
    if (!s.marked) longest = std::max(longest, s.x.size());
  }
  if (!std::isfinite(first)) first = last = 0;
  // The same window for all runs, so that their curves can be compared.
  const std::size_t half = longest / 100;
  std::vector<detail::Curve> curves;
  std::vector<double> all;
  std::string data;
  for (const Series& s : chart.series) {
    if (s.x.empty()) continue;
    detail::Curve curve{&s, {}, {}, detail::sampled(s.x.size(), 2 * detail::plot_buckets), {}};
    const bool smooth = !s.marked && half > 0;
    curve.y = smoothed(s.y, smooth ? half : 0, chart.robust, curve.kept);
    for (const std::size_t i : curve.kept) curve.x.push_back(s.x[i]);
    if (smooth) curve.raw = detail::thinned(s.y, detail::plot_buckets);
    data += fmt::format("{}{{\"name\":{},\"color\":{},\"x\":{},\"y\":{}", data.empty() ? "" : ",",
                        detail::json_text(s.name), s.color % 8, detail::json_steps(s.x, curve.kept),
                        detail::json_numbers(s.y, curve.kept));
    const auto each = detail::sampled(curve.y.size(), curve.y.size());
    data += smooth ? ",\"smooth\":" + detail::json_numbers(curve.y, each) + "}" : "}";
    all.insert(all.end(), s.y.begin(), s.y.end());
    curves.push_back(std::move(curve));
  }
  const detail::Scale x = detail::x_scale(first, last);
  const detail::Scale linear = detail::scale_of(all, false, chart.starts_at_zero);
  const detail::Scale zoomed = detail::zoomed_scale(curves, first, last);
  std::vector<std::pair<const char*, detail::Scale>> views{{"linear", linear}};
  if (longest > 20 && linear.high - linear.low > 1.5 * (zoomed.high - zoomed.low)) views.push_back({"zoom", zoomed});
  if (std::any_of(all.begin(), all.end(), [](double v) { return std::isfinite(v) && v > 0; }))
    views.push_back({"log", detail::scale_of(all, true, false)});
  std::string svg, buttons;
  for (const auto& [name, scale] : views) {
    svg += fmt::format("<g class=\"{}\">{}{}</g>", name, detail::grid(x, scale, chart.unit),
                       detail::draw_curves(curves, chart.annotations, x, scale));
    buttons += fmt::format("<button type=\"button\" aria-pressed=\"{}\">{}</button>", buttons.empty(), name);
  }
  return detail::card(chart.id, chart.title, "<span class=\"views\">" + buttons + "</span>", x,
                      detail::name_of(chart.unit), svg, "{\"series\":[" + data + "]}");
}

SHARDLIB_INLINE std::string to_html(const StackedChart& chart) {
  const std::size_t n = chart.x.size();
  const detail::Scale x = detail::x_scale(n == 0 ? 0 : chart.x.front(), n == 0 ? 1 : chart.x.back());
  const auto kept = detail::sampled(n, detail::plot_buckets), each = detail::sampled(kept.size(), kept.size());
  std::vector<double> steps, means;
  for (const std::size_t i : kept) steps.push_back(chart.x[i]);
  std::vector<std::vector<double>> edges{std::vector<double>(kept.size(), 0)};
  std::string data, legend, svg;
  for (std::size_t p = 0; p < chart.parts.size(); ++p) {
    const std::vector<double> part = smoothed(chart.parts[p], n / 100, true, kept);
    edges.push_back(edges.back());
    for (const std::size_t k : each) edges.back()[k] += std::isfinite(part[k]) ? part[k] : 0.0;
    means.push_back(std::accumulate(chart.parts[p].begin(), chart.parts[p].end(), 0.0) / static_cast<double>(n));
    data += fmt::format("{}{{\"name\":{},\"part\":{},\"x\":{},\"y\":{}}}", p == 0 ? "" : ",",
                        detail::json_text(chart.names[p]), p % 8, detail::json_steps(chart.x, kept),
                        detail::json_numbers(part, each));
  }
  const double whole = std::accumulate(means.begin(), means.end(), 0.0);
  const detail::Scale y = detail::scale_of(edges.back(), false, true);
  for (std::size_t p = 0; p < means.size(); ++p) {
    legend += fmt::format("<span class=\"key\"><i class=\"p{}\"></i>{} {} ({:.0f} %)</span>", p % 8,
                          detail::markup_escape(chart.names[p]), unit_text(chart.unit, means[p]),
                          whole > 0 ? 100 * means[p] / whole : 0.0);
    const std::vector<std::size_t> back(each.rbegin(), each.rend());
    std::string lower = detail::svg_path(steps, edges[p], back, x, y);
    if (lower.empty()) continue;
    lower[0] = 'L';
    svg += fmt::format("<path class=\"area p{}\" d=\"{}{}Z\"/>", p % 8,
                       detail::svg_path(steps, edges[p + 1], each, x, y), lower);
  }
  return detail::card(chart.id, chart.title, "<span class=\"keys\">" + legend + "</span>", x,
                      detail::name_of(chart.unit), detail::grid(x, y, chart.unit) + svg, "{\"series\":[" + data + "]}");
}

}  // namespace shardlib::run
