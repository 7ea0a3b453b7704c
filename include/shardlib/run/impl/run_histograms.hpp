// The histograms of a run, which --histogram-every asks for.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "shardlib/device/device.hpp"
#include "shardlib/io/checkpoint/writer.hpp"
#include "shardlib/run/leaf_histograms.hpp"
#include "shardlib/run/metrics.hpp"
#include "shardlib/run/tensorboard.hpp"
#include "shardlib/run/training.hpp"
#include "shardlib/runtime/value.hpp"
#include "shardlib/support/error.hpp"
#include "shardlib/support/stopwatch.hpp"

namespace shardlib::run::detail {

/// Whether the step of this number ends a row of `every` steps; 0: no step does.
inline bool due(std::int64_t step, std::int64_t every) {
  return every > 0 && (step + 1) % every == 0;
}

/// The weights of a state by the tags of their histograms: the leaves below its member `weights`, or, if it has none,
/// all.
inline std::vector<ScaledLeaf> weights_of(const io::detail::NamedValues& state) {
  constexpr std::string_view member = "weights.";
  const auto is_weight = [&](const auto& leaf) { return leaf.first.starts_with(member); };
  const bool has_member = std::ranges::any_of(state, is_weight);
  std::vector<ScaledLeaf> weights;
  for (const auto& leaf : state) {
    if (has_member && !is_weight(leaf)) continue;
    std::string name = leaf.first.substr(has_member ? member.size() : 0);
    std::ranges::replace(name, '.', '/');  // TensorBoard groups tags by their parts
    weights.push_back({"weights/" + name, leaf.second});
  }
  return weights;
}

/// Histograms of the weights after a step, and of the gradients that its update has used.
class RunHistograms {
 public:
  RunHistograms(const DevicePtr& device, const Training& training, const Checkpoints& checkpoints)
      : device_(device), every_(training.tensorboard ? training.histogram_every : 0), checkpoints_(checkpoints) {}

  /// Step::show_gradients of the step. The gradients stay in memory until `write`.
  [[nodiscard]] auto gradients_of(std::int64_t step) -> decltype(Step::show_gradients) {
    if (!due(step, every_)) return {};
    return [this](std::vector<shardlib::detail::ValuePtr> gradients, double scale) {
      gradients_ = std::move(gradients);
      scale_ = scale;
    };
  }

  /// Writes the histograms of the record's step if they are due, and notes the time. Collective; `events` may be null.
  void write(Record& record, TensorBoard* events) {
    if (!due(record.step, every_)) return;
    const double begin = shardlib::detail::steady_seconds();
    std::vector<ScaledLeaf> leaves = weights_of(checkpoints_.leaves());
    const std::size_t weights = leaves.size();
    if (!gradients_.empty() && gradients_.size() != weights)
      throw Error(
          fmt::format("--histogram-every: Step::show_gradients got {} gradients of {} weights: give one for each "
                      "leaf of the weights, in their order",
                      gradients_.size(), weights));
    for (std::size_t i = 0; i < gradients_.size(); ++i)
      leaves.push_back({"gradients" + leaves[i].name.substr(leaves[i].name.find('/')), gradients_[i], scale_});
    gradients_.clear();
    for (const auto& [tag, histogram] : leaf_histograms(*device_, leaves))
      if (events != nullptr) events->histogram(tag, record.step, histogram);
    record.seconds.emplace_back("histograms", shardlib::detail::steady_seconds() - begin);
  }

 private:
  DevicePtr device_;
  std::int64_t every_;
  const Checkpoints& checkpoints_;
  std::vector<shardlib::detail::ValuePtr> gradients_;
  double scale_ = 1;
};

}  // namespace shardlib::run::detail
