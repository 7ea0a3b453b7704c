// Definitions of unit.hpp.
#pragma once

#include "shardlib/run/unit.hpp"

#include <fmt/format.h>

#include <cmath>
#include <initializer_list>

namespace shardlib::run {

SHARDLIB_INLINE std::string unit_text(Unit unit, double v) {
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
      return v != 0 && (std::abs(v) < 1e-3 || std::abs(v) >= 1e5) ? fmt::format("{:.3g}", v) : fmt::format("{:.4g}", v);
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
