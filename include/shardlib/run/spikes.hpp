// Detects steps whose loss or gradient norm is far above those of earlier steps.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <string>

#include "shardlib/support/inline.hpp"

namespace shardlib::run {

/// The losses and gradient norms of the last steps. `SpikeWindow(100, 6)`
class SpikeWindow {
 public:
  /// Keeps the last `steps` steps. A spike lies more than `deviations` standard deviations above their mean; a
  /// deviation counts as at least 1 % of the mean. Until the window is full, nothing is a spike.
  SpikeWindow(std::int64_t steps, double deviations);
  /// Adds a step that has made an update. If the window is full, it drops the oldest.
  void add(double loss, double grad_norm);
  /// Removes all steps from the window.
  void clear() { losses_.clear(), norms_.clear(); }
  /// Describes the spike, "the gradient norm 87.2 is 31 standard deviations above 1.3, the mean of the last 100 steps".
  /// Empty if there is none.
  [[nodiscard]] std::string spike(double loss, double grad_norm) const;

 private:
  std::size_t steps_;
  double deviations_;
  std::deque<double> losses_, norms_;
};

}  // namespace shardlib::run

#ifndef SHARDLIB_COMPILED
#include "shardlib/run/impl/spikes.hpp"
#endif
