// Decides about a step whose loss or gradient norm is not finite or is a spike, far above those of earlier steps.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <numeric>
#include <optional>
#include <span>
#include <string>

#include "shardlib/run/training.hpp"
#include "shardlib/runtime/bindings.hpp"
#include "shardlib/support/error.hpp"

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

/// Decides whether a step may update. The loss and the gradient norm are the same on all devices, so all devices make
/// the same decision without communication.
class Judge {
 public:
  /// The loop's next action after a step.
  enum class StepVerdict { accepted, skipped, rewind, distrust_checkpoint };
  static constexpr int most_skips = 10, most_rewinds = 3;
  static constexpr std::int64_t first_steps = 10;  ///< steps after a checkpoint that show whether its state is good

  /// A step that was accepted.
  struct AcceptedStep {
    std::int64_t number = 0;
    double loss = 0, grad_norm = 0;
  };

  explicit Judge(const Training& training)
      : training_(training), window_(training.spike_window, training.spike_deviations) {}

  /// The run continues at this step, after those records. `resumed`: from a checkpoint of an earlier process.
  void begin(std::int64_t step, std::span<const AcceptedStep> before, bool resumed) {
    window_.clear();
    for (const AcceptedStep& other : before)
      if (other.number < step) window_.add(other.loss, other.grad_norm);
    skips_ = 0;
    if (resumed) resumed_at_ = step;
  }
  [[nodiscard]] bool watches() const { return training_.on_spike != "none"; }

  /// Implements Step::accepts. Throws Error if --on-spike has no other action.
  bool accepts(const StepResult& result, std::int64_t step) {
    const bool finite = std::isfinite(result.loss) && std::isfinite(result.grad_norm);
    const std::string spike = finite && watches() ? window_.spike(result.loss, result.grad_norm) : "";
    why_ = finite
               ? spike
               : fmt::format("loss {} and gradient norm {} are not finite", shardlib::detail::show_number(result.loss),
                             shardlib::detail::show_number(result.grad_norm));
    if (why_.empty()) {
      window_.add(result.loss, result.grad_norm);
      skips_ = 0;
      return decide(StepVerdict::accepted);
    }
    if (training_.on_spike == "skip" && ++skips_ <= most_skips) return decide(StepVerdict::skipped);
    if (!finite && resumed_at_ && step < *resumed_at_ + first_steps + skips_)
      return decide(StepVerdict::distrust_checkpoint);
    if (training_.on_spike == "rewind") return decide(StepVerdict::rewind);
    fail(step, finite);
  }
  [[noreturn]] void fail(std::int64_t step, bool finite) const {
    throw Error(fmt::format(
        "step {}: {}{}; lower --learning-rate, look at the data of this step, {}or continue with "
        "--on-spike {}rewind{}",
        step, why_, skips_ > 0 ? fmt::format(", and {} steps in a row were skipped", most_skips) : "",
        finite ? "" : "find the first op with a NaN, if one has it, by --find-nan, ", skips_ > 0 ? "" : "skip or ",
        training_.directory.empty() ? "" : ". The last checkpoint is untouched"));
  }

  [[nodiscard]] StepVerdict verdict() const { return verdict_; }
  [[nodiscard]] bool goes_back() const {
    return verdict_ == StepVerdict::rewind || verdict_ == StepVerdict::distrust_checkpoint;
  }
  [[nodiscard]] const std::string& why() const { return why_; }
  /// A checkpoint of an earlier process is set aside only once. After that, trouble is the run's own.
  void trust() { resumed_at_.reset(); }
  /// The event in the run's records for its return from this step to the checkpoint `to`. The run had begun from
  /// `resumed_at`.
  [[nodiscard]] std::string event_of_return(std::int64_t step, std::int64_t to, std::int64_t resumed_at) const {
    return verdict_ == StepVerdict::distrust_checkpoint
               ? fmt::format(
                     "step {}: {}; the checkpoint of step {} is set aside as diverged, and the run continues "
                     "from the one of step {}",
                     step, why_, resumed_at, to)
               : fmt::format(
                     "step {}: {}; the run goes back to the checkpoint of step {}, and from there on with the "
                     "batches after this one",
                     step, why_, to);
  }
  /// Records that the run goes back to this checkpoint. Throws Error if that has not helped before.
  void rewinds(std::int64_t step, std::int64_t to) {
    rewinds_ = to == rewound_to_ ? rewinds_ + 1 : 1;
    rewound_to_ = to;
    if (rewinds_ > most_rewinds)
      throw Error(
          fmt::format("step {}: {}; {} times the run has gone back to the checkpoint of step {}, each time with "
                      "later data: lower --learning-rate, or start from an older checkpoint",
                      step, why_, most_rewinds, to));
  }

 private:
  bool decide(StepVerdict verdict) {
    verdict_ = verdict;
    return verdict == StepVerdict::accepted;
  }

  const Training& training_;
  SpikeWindow window_;
  StepVerdict verdict_ = StepVerdict::accepted;
  std::string why_;
  int skips_ = 0, rewinds_ = 0;
  std::int64_t rewound_to_ = -1;
  std::optional<std::int64_t> resumed_at_;
};

}  // namespace shardlib::run::detail
