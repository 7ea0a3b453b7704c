// The units of a chart's values, and their text.
#pragma once

#include <string>

#include "shardlib/support/inline.hpp"

namespace shardlib::run {

/// The format of a chart's values: a `number` 3.142, or 1.235e6; a `count` 12.3 k; a `percent` 41 %; `bytes` 1.5 GiB;
/// `seconds` 250 ms.
enum class Unit { number, count, percent, bytes, seconds };

/// The value as a text in its unit. `unit_text(Unit::bytes, 1.5e9)`
[[nodiscard]] SHARDLIB_INLINE std::string unit_text(Unit unit, double value);

}  // namespace shardlib::run

#ifndef SHARDLIB_COMPILED
#include "shardlib/run/impl/unit.hpp"
#endif
