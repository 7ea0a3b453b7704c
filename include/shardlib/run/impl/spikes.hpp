// Definitions of spikes.hpp.
#pragma once

#include "shardlib/run/spikes.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>

namespace shardlib::run {

namespace detail {

inline std::string leap(const char* what, double value, const std::deque<double>& before, double deviations) {
  const auto count = static_cast<double>(before.size());
  const double mean = std::accumulate(before.begin(), before.end(), 0.0) / count;
  const double squares = std::accumulate(before.begin(), before.end(), 0.0,
                                         [mean](double sum, double x) { return sum + (x - mean) * (x - mean); });
  const double deviation = std::max(std::sqrt(squares / count), 0.01 * std::abs(mean));
  if (!(value > mean + deviations * deviation)) return {};
  const std::string how =
      deviation > 0 ? fmt::format("{:.3g} standard deviations above", (value - mean) / deviation) : "above";
  return fmt::format("the {} {:.4g} is {} {:.4g}, the mean of the last {} steps", what, value, how, mean,
                     before.size());
}

}  // namespace detail

SHARDLIB_INLINE SpikeWindow::SpikeWindow(std::int64_t steps, double deviations)
    : steps_(static_cast<std::size_t>(steps)), deviations_(deviations) {}

SHARDLIB_INLINE void SpikeWindow::add(double loss, double grad_norm) {
  losses_.push_back(loss);
  norms_.push_back(grad_norm);
  if (losses_.size() <= steps_) return;
  losses_.pop_front();
  norms_.pop_front();
}

SHARDLIB_INLINE std::string SpikeWindow::spike(double loss, double grad_norm) const {
  if (losses_.empty() || losses_.size() < steps_) return {};
  const std::string of_loss = detail::leap("loss", loss, losses_, deviations_);
  return of_loss.empty() ? detail::leap("gradient norm", grad_norm, norms_, deviations_) : of_loss;
}

}  // namespace shardlib::run
