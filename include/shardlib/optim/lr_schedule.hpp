// Learning-rate schedules.
#pragma once

#include <cmath>
#include <cstdint>
#include <numbers>

namespace shardlib {

/// Linear warmup to `peak` over `warmup` steps, then a cosine decay to `final_fraction * peak` at the last of `steps`
/// steps (Loshchilov and Hutter 2016). Steps count from 0. `warmup_cosine(step, 1000, 100, 3e-3)`
inline double warmup_cosine(std::int64_t step, std::int64_t steps, std::int64_t warmup, double peak,
                            double final_fraction = 0.1) {
  if (step < warmup) return peak * static_cast<double>(step + 1) / static_cast<double>(warmup);
  const double progress =
      steps - 1 > warmup ? static_cast<double>(step - warmup) / static_cast<double>(steps - 1 - warmup) : 1.0;
  const double cosine = 0.5 * (1.0 + std::cos(std::numbers::pi * std::fmin(progress, 1.0)));
  return peak * (final_fraction + (1.0 - final_fraction) * cosine);
}

}  // namespace shardlib
