// What a chart's values measure, and their text.
#pragma once

#include <string>

#include "shardlib/detail/inline.hpp"

namespace shardlib::run {

/// How a chart's values are written: 3.142; 12.3 k; 41 %; 1.5 GiB; 250 ms.
enum class Quantity { number, count, percent, bytes, seconds };

[[nodiscard]] SHARDLIB_INLINE std::string quantity_text(Quantity quantity, double value);

}  // namespace shardlib::run

#ifndef SHARDLIB_COMPILED
#include "shardlib/run/quantity_inl.hpp"
#endif
