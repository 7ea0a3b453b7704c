// Drawing of charts: scales, ticks, thinned curves as SVG paths, numbers for the page's script.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "shardlib/run/unit.hpp"
#include "shardlib/support/print.hpp"

namespace shardlib::run::detail {

inline constexpr double plot_width = 640, plot_height = 290;
inline constexpr double plot_left = 62, plot_right = 628, plot_top = 10, plot_bottom = 250;
inline constexpr std::size_t plot_buckets = 300;  // about two pixels each

struct Scale {
  bool log = false;
  double low = 0, high = 1;
  /// 0 to 1 within the scale.
  [[nodiscard]] double at(double v) const {
    if (log) return v > 0 ? std::log(v / low) / std::log(high / low) : std::nan("");
    return (v - low) / (high - low);
  }
};

inline double x_pixel(const Scale& x, double v) {
  return plot_left + x.at(v) * (plot_right - plot_left);
}
inline double y_pixel(const Scale& y, double v) {
  // Far outside is as good as just outside, and the picture's clip hides both.
  return std::clamp(plot_bottom - y.at(v) * (plot_bottom - plot_top), -2 * plot_height, 3 * plot_height);
}

/// Numbers at which to draw lines: 1, 2 or 5 times a power of ten; powers of two for bytes.
inline std::vector<double> ticks(const Scale& scale, int about, Unit unit) {
  std::vector<double> values;
  if (scale.log) {
    const double decades = std::log10(scale.high / scale.low);
    const int first = static_cast<int>(std::floor(std::log10(scale.low)));
    const int last = static_cast<int>(std::ceil(std::log10(scale.high)));
    const int stride = std::max(1, static_cast<int>(std::ceil(decades / about)));
    for (int power = first; power <= last; power += stride) {
      for (const double factor : {1.0, 1.5, 2.0, 3.0, 5.0, 7.0}) {
        const bool wanted = factor == 1 || (decades < 3 && (factor == 2 || factor == 5)) || decades < 0.8;
        const double v = factor * std::pow(10.0, power);
        if (wanted && v >= scale.low * (1 - 1e-9) && v <= scale.high * (1 + 1e-9)) values.push_back(v);
      }
    }
    if (values.size() >= 2) return values;
    values.clear();
  }
  const double raw = (scale.high - scale.low) / about;
  const double power = std::pow(10.0, std::floor(std::log10(raw)));
  double step = power * (raw / power < 1.5 ? 1 : raw / power < 3.5 ? 2 : raw / power < 7.5 ? 5 : 10);
  if (unit == Unit::bytes) step = std::exp2(std::max(std::round(std::log2(raw)), 0.0));
  for (double k = std::ceil(scale.low / step - 1e-9); k * step <= scale.high + 1e-9 * step; ++k)
    values.push_back(k == 0 ? 0.0 : k * step);
  return values;
}

/// What encloses the finite values, a little wider; on a log scale at most six decades below the largest.
inline Scale scale_of(const std::vector<double>& values, bool log, bool from_zero) {
  double low = std::numeric_limits<double>::infinity(), high = -low;
  for (const double v : values) {
    if (!std::isfinite(v) || (log && v <= 0)) continue;
    low = std::min(low, v);
    high = std::max(high, v);
  }
  if (low > high) return {log, log ? 0.1 : 0.0, 1.0};
  if (log) {
    low = std::max(low, high * 1e-6);
    const double margin = std::max(std::pow(high / low, 0.04), 1.01);
    return {true, low / margin, high * margin};
  }
  if (from_zero) low = std::min(low, 0.0);
  const double margin = std::max({0.04 * (high - low), 1e-3 * std::abs(high), 1e-12});
  return {false, from_zero && low == 0 ? 0.0 : low - margin, high + margin};
}

/// The points that a curve of `buckets` columns needs: the first and both extremes of each column, in order.
inline std::vector<std::size_t> thinned(const std::vector<double>& y, std::size_t buckets) {
  std::vector<std::size_t> kept;
  if (y.size() <= 2 * buckets) {
    for (std::size_t i = 0; i < y.size(); ++i) kept.push_back(i);
    return kept;
  }
  for (std::size_t b = 0; b < buckets; ++b) {
    const std::size_t begin = b * y.size() / buckets, end = (b + 1) * y.size() / buckets;
    std::size_t low = begin, high = begin;
    for (std::size_t i = begin; i < end; ++i) {
      if (!(y[i] >= y[low])) low = i;
      if (!(y[i] <= y[high])) high = i;
    }
    kept.push_back(std::min(low, high));
    if (low != high) kept.push_back(std::max(low, high));
  }
  if (kept.back() != y.size() - 1) kept.push_back(y.size() - 1);
  return kept;
}

/// Evenly chosen points, the last one included.
inline std::vector<std::size_t> sampled(std::size_t size, std::size_t most) {
  std::vector<std::size_t> kept;
  const std::size_t count = std::min(size, most);
  for (std::size_t i = 0; i < count; ++i) kept.push_back(count == 1 ? 0 : i * (size - 1) / (count - 1));
  return kept;
}

inline std::string svg_path(const std::vector<double>& xs, const std::vector<double>& ys,
                            const std::vector<std::size_t>& kept, const Scale& x, const Scale& y) {
  std::string path;
  bool pen_down = false;
  for (const std::size_t i : kept) {
    const bool drawable = std::isfinite(ys[i]) && std::isfinite(y.at(ys[i]));
    if (drawable) path += fmt::format("{}{:.1f} {:.1f}", pen_down ? "L" : "M", x_pixel(x, xs[i]), y_pixel(y, ys[i]));
    pen_down = drawable;
  }
  return path;
}

inline std::string grid(const Scale& x, const Scale& y, Unit unit) {
  std::string out;
  for (const double v : ticks(y, 5, unit)) {
    const double at = y_pixel(y, v);
    out += fmt::format(
        "<line class=\"grid\" x1=\"{}\" x2=\"{}\" y1=\"{:.1f}\" y2=\"{:.1f}\"/>"
        "<text class=\"tick\" x=\"{}\" y=\"{:.1f}\" text-anchor=\"end\">{}</text>",
        plot_left, plot_right, at, at, plot_left - 7, at + 4, unit_text(unit, v));
  }
  for (const double v : ticks(x, 6, Unit::count)) {
    const std::string text = x.high < 1e5 ? fmt::format("{:.10g}", v) : unit_text(Unit::count, v);
    out += fmt::format("<text class=\"tick\" x=\"{:.1f}\" y=\"{}\" text-anchor=\"middle\">{}</text>", x_pixel(x, v),
                       plot_bottom + 18, text);
  }
  return out;
}

inline Scale x_scale(double low, double high) {
  return {false, low, high > low ? high : low + 1};
}

/// Numbers for the hover readout; five digits are more than the eye takes from a picture.
inline std::string json_numbers(const std::vector<double>& values, const std::vector<std::size_t>& kept) {
  std::string out = "[";
  for (const std::size_t i : kept) {
    out += out.size() > 1 ? "," : "";
    out += std::isfinite(values[i]) ? fmt::format("{:.5g}", values[i]) : "null";
  }
  return out + "]";
}
inline std::string json_steps(const std::vector<double>& values, const std::vector<std::size_t>& kept) {
  std::string out = "[";
  for (const std::size_t i : kept) out += fmt::format("{}{:.0f}", out.size() > 1 ? "," : "", values[i]);
  return out + "]";
}

/// Inside <script>, so that no text can end the element.
inline std::string json_text(const std::string& text) {
  std::string out;
  for (const char c : quote(as_utf8(text))) out += c == '<' ? std::string("\\u003c") : std::string(1, c);
  return out;
}

inline std::string card(const std::string& id, const std::string& title, const std::string& beside, const Scale& x,
                        const char* unit, const std::string& svg, const std::string& data) {
  return fmt::format(
      "<figure class=\"card\" id=\"{}\" data-view=\"linear\" data-low=\"{}\" data-high=\"{}\" data-left=\"{}\" "
      "data-right=\"{}\" data-unit=\"{}\"><figcaption><b>{}</b>{}</figcaption><svg viewBox=\"0 0 {} {}\" "
      "role=\"img\" "
      "aria-label=\"{}\">{}<line class=\"cursor\" y1=\"{}\" y2=\"{}\" x1=\"-9\" x2=\"-9\"/><text class=\"tick\" "
      "x=\"{}\" "
      "y=\"{}\" text-anchor=\"middle\">step</text></svg><div class=\"readout\" hidden></div>"
      "<script type=\"application/json\">{}</script></figure>\n",
      id, x.low, x.high, plot_left, plot_right, unit, markup_escape(title), beside, plot_width, plot_height,
      markup_escape(title), svg, plot_top, plot_bottom, (plot_left + plot_right) / 2, plot_height - 3, data);
}

inline const char* name_of(Unit unit) {
  switch (unit) {
    case Unit::number:
      return "number";
    case Unit::count:
      return "count";
    case Unit::percent:
      return "percent";
    case Unit::bytes:
      return "bytes";
    case Unit::seconds:
      return "seconds";
  }
  return "";
}

}  // namespace shardlib::run::detail
