// Detects steps whose loss or gradient norm is far above those of earlier steps.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <numeric>
#include <string>

namespace shardlib::run::detail {

/// The losses and gradient norms of the last steps. `SpikeWindow(100, 6)`
class SpikeWindow {
 public:
  /// Keeps the last `steps` steps. A spike lies more than `deviations` standard deviations above their mean; a
  /// deviation counts as at least 1 % of the mean. Until the window is full, nothing is a spike.
  SpikeWindow(std::int64_t steps, double deviations)
      : steps_(static_cast<std::size_t>(steps)), deviations_(deviations) {}
  /// Adds a step that has made an update. If the window is full, it drops the oldest.
  void add(double loss, double grad_norm) {
    losses_.push_back(loss);
    norms_.push_back(grad_norm);
    if (losses_.size() <= steps_) return;
    losses_.pop_front();
    norms_.pop_front();
  }
  /// Removes all steps from the window.
  void clear() { losses_.clear(), norms_.clear(); }
  /// Describes the spike, "the gradient norm 87.2 is 31 standard deviations above 1.3, the mean of the last 100 steps".
  /// Empty if there is none.
  [[nodiscard]] std::string spike(double loss, double grad_norm) const {
    if (losses_.empty() || losses_.size() < steps_) return {};
    const std::string of_loss = leap("loss", loss, losses_);
    return of_loss.empty() ? leap("gradient norm", grad_norm, norms_) : of_loss;
  }

 private:
  [[nodiscard]] std::string leap(const char* what, double value, const std::deque<double>& before) const {
    const auto count = static_cast<double>(before.size());
    const double mean = std::accumulate(before.begin(), before.end(), 0.0) / count;
    const double squares = std::accumulate(before.begin(), before.end(), 0.0,
                                           [mean](double sum, double x) { return sum + (x - mean) * (x - mean); });
    const double deviation = std::max(std::sqrt(squares / count), 0.01 * std::abs(mean));
    if (!(value > mean + deviations_ * deviation)) return {};
    const std::string how =
        deviation > 0 ? fmt::format("{:.3g} standard deviations above", (value - mean) / deviation) : "above";
    return fmt::format("the {} {:.4g} is {} {:.4g}, the mean of the last {} steps", what, value, how, mean,
                       before.size());
  }

  std::size_t steps_;
  double deviations_;
  std::deque<double> losses_, norms_;
};

}  // namespace shardlib::run::detail
