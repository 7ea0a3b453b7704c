// Learning-rate schedules.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numbers>
#include <string>

#include "shardlib/optim/impl/settings.hpp"
#include "shardlib/support/error.hpp"

namespace shardlib {

/// The learning rate of each step, counted from 0: linear warmup to the peak, then what `kind` says. A call throws
/// UsageError if a number is negative or not finite.
/// `LrSchedule{.peak = 3e-3, .warmup = 100, .decay_steps = 1000}(step)`
struct LrSchedule {
  /// The curve after the warmup.
  enum class Kind {
    constant,  ///< the peak
    linear,    ///< a linear decay
    cosine,    ///< half a cosine (Loshchilov and Hutter 2016)
    wsd        ///< warmup, stable, decay (Hu et al. 2024): the peak, then a linear decay
  };
  /// The rate of step 0, from which the warmup rises.
  enum class WarmupFrom {
    zero,       ///< step `warmup` is the first with the peak
    peak_share  ///< peak / warmup; step `warmup - 1` is the first with the peak
  };

  Kind kind = Kind::cosine;
  double peak = 1;
  std::int64_t warmup = 0;                          ///< number of steps
  WarmupFrom warmup_from = WarmupFrom::peak_share;  ///< where the warmup begins
  /// The decay ends with the last of this many steps, which include the warmup; later steps keep the final rate.
  /// There is no default: a call throws UsageError if it is 0 and the kind needs it.
  std::int64_t decay_steps = 0;
  double final_fraction = 0.1;  ///< the final rate is this times the peak
  double decay_fraction = 0.1;  ///< for wsd: the decay's share of decay_steps, at most what the warmup leaves

  [[nodiscard]] double operator()(std::int64_t step) const {
    const auto f = [](std::int64_t x) { return static_cast<double>(x); };
    if (step < 0) throw UsageError("LrSchedule: step " + std::to_string(step) + " is negative; steps count from 0");
    detail::require_setting("LrSchedule", "peak", peak);
    detail::require_setting("LrSchedule", "warmup", f(warmup));
    detail::require_setting("LrSchedule", "final_fraction", final_fraction);
    detail::require_setting("LrSchedule", "decay_fraction", decay_fraction);

    if (kind != Kind::constant && decay_steps < 1)  // at once, not after the warmup
      throw UsageError("LrSchedule: decay_steps is " + std::to_string(decay_steps) +
                       ", so no step is left for the decay; give the number of steps of the training, or choose "
                       "Kind::constant");
    if (step < warmup) return peak * f(warmup_from == WarmupFrom::zero ? step : step + 1) / f(warmup);
    if (kind == Kind::constant) return peak;
    const std::int64_t last = decay_steps - 1;
    std::int64_t first = warmup;  // the last step with the peak
    if (kind == Kind::wsd) {
      const std::int64_t decaying = std::llround(decay_fraction * f(decay_steps));
      first = std::max(first, last - std::max<std::int64_t>(decaying, decay_fraction > 0 ? 1 : 0));
      if (step <= first) return peak;
    }
    const double progress = std::fmin(last > first ? f(step - first) / f(last - first) : 1.0, 1.0);
    const double left = kind == Kind::cosine ? 0.5 * (1.0 + std::cos(std::numbers::pi * progress)) : 1.0 - progress;
    return peak * (final_fraction + (1.0 - final_fraction) * left);
  }
};

}  // namespace shardlib
