// The check that the settings of optimizers and schedules share.
#pragma once

#include <cmath>
#include <string>
#include <string_view>

#include "shardlib/runtime/bindings.hpp"
#include "shardlib/support/error.hpp"

namespace shardlib::detail {

/// Throws UsageError unless the setting, of a leaf or of all, is a finite number of at least 0.
/// `require_setting("AdamW", "epsilon", 1e-8)`
inline void require_setting(std::string_view owner, std::string_view name, double value, std::string_view leaf = {}) {
  if (std::isfinite(value) && value >= 0) return;
  throw UsageError(std::string(owner) + ": " + std::string(name) +
                   (leaf.empty() ? "" : " of the leaf `" + std::string(leaf) + "`") + " is " + show_number(value) +
                   "; give a finite number of at least 0");
}

}  // namespace shardlib::detail
