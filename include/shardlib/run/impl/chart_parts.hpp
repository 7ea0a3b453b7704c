// Small parts of charts and of the report's page: numbers and texts as JSON, middles of values.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "shardlib/run/unit.hpp"
#include "shardlib/support/print.hpp"

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

}  // namespace shardlib::run::detail
