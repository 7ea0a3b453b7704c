// Steps whose loss or gradient norm leaps out of those before.
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
  /// Of `steps` steps. A spike lies more than `deviations` standard deviations above their mean, where a deviation
  /// counts as at least 1 % of the mean. Until there are so many steps, nothing is a spike.
  SpikeWindow(std::int64_t steps, double deviations);
  /// A step that has made an update; of more than the window holds, the oldest is dropped.
  void add(double loss, double grad_norm);
  /// Forgets all of them.
  void clear() { losses_.clear(), norms_.clear(); }
  /// What leaps, "the gradient norm 87.2 is 31 standard deviations above 1.3, the mean of the last 100 steps"; empty if
  /// nothing does.
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
