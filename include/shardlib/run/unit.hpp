// The units of a chart's values, and their text.
#pragma once

#include <fmt/format.h>

#include <charconv>
#include <cmath>
#include <cstddef>
#include <initializer_list>
#include <string>

namespace shardlib::run {

/// The format of a chart's values: a `number` 3.142, or 1.235e6; a `count` 12.3 k; a `percent` 41 %; `bytes` 1.5 GiB;
/// `seconds` 250 ms.
enum class Unit { number, count, percent, bytes, seconds };

namespace detail {

/// Four digits, and an exponent, "1.235e6", below a thousandth and from a million on, as `text.number` of the report's
/// script.
inline std::string number_text(double v) {
  const std::string four = fmt::format("{:.3e}", v);
  const bool plain = v == 0 || !std::isfinite(v) || (std::abs(v) >= 1e-3 && std::abs(v) < 1e6);
  const std::size_t e = plain ? four.size() : four.find('e');
  double digits = v;
  std::from_chars(four.data(), four.data() + e, digits);  // whatever the locale's point is
  return plain ? fmt::format("{}", digits) : fmt::format("{}e{}", digits, std::stoi(four.substr(e + 1)));
}

}  // namespace detail

/// The value as a text in its unit. `unit_text(Unit::bytes, 1.5e9)`
[[nodiscard]] inline std::string unit_text(Unit unit, double v) {
  const auto scaled = [&](double base, std::initializer_list<const char*> units) {
    double x = v;
    auto unit = units.begin();
    while (std::abs(x) >= base && unit + 1 != units.end()) {
      x /= base;
      ++unit;
    }
    return fmt::format("{:.4g}{}", x, *unit);
  };
  switch (unit) {
    case Unit::number:
      return detail::number_text(v);
    case Unit::count:
      return scaled(1e3, {"", " k", " M", " G", " T"});
    case Unit::percent:
      return fmt::format("{:.3g} %", 100 * v);
    case Unit::bytes:
      return scaled(1024, {" B", " KiB", " MiB", " GiB", " TiB"});
    case Unit::seconds:
      if (v == 0) return "0";
      if (std::abs(v) < 1e-3) return fmt::format("{:.3g} µs", 1e6 * v);
      return std::abs(v) < 1 ? fmt::format("{:.3g} ms", 1e3 * v) : fmt::format("{:.3g} s", v);
  }
  return "";
}

}  // namespace shardlib::run
