// Definitions of program.hpp.
#pragma once

#include "shardlib/pipeline/program.hpp"

#include <algorithm>
#include <numeric>
#include <string>

#include "shardlib/support/error.hpp"

namespace shardlib::pipeline {

namespace detail {

inline std::vector<int> even_counts(const Schedule& schedule, std::int64_t layers) {
  const int stages = schedule.num_stages();
  if (layers < stages)
    throw UsageError(std::to_string(layers) + (layers == 1 ? " layer is" : " layers are") + " too few for the " +
                     std::to_string(stages) + " stages of " + schedule.name() +
                     ": each needs one; choose more layers, or fewer stages");
  std::vector<int> counts;
  for (int stage = 0; stage < stages; ++stage)
    counts.push_back(static_cast<int>(layers / stages + (stage < layers % stages ? 1 : 0)));
  return counts;
}

}  // namespace detail

SHARDLIB_INLINE LayerMap::LayerMap(const Schedule& schedule, std::int64_t layers)
    : LayerMap(schedule, detail::even_counts(schedule, layers)) {}

SHARDLIB_INLINE LayerMap::LayerMap(const Schedule& schedule, const std::vector<int>& counts) : counts_(counts) {
  const int stages = schedule.num_stages();
  if (std::ssize(counts) != stages)
    throw UsageError(std::to_string(counts.size()) + " numbers of layers are given for the " + std::to_string(stages) +
                     " stages of " + schedule.name() + "; give one for each stage");
  if (const auto none = std::ranges::find_if(counts, [](int n) { return n < 1; }); none != counts.end())
    throw UsageError("stage " + std::to_string(none - counts.begin()) + " of " + schedule.name() + " has " +
                     std::to_string(*none) + " layers; each stage needs at least one");
  for (int rank = 0; rank < schedule.mpmd_dim(); ++rank) stages_.push_back(schedule.stages_of(rank));
  for (int stage = 0; stage < stages; ++stage) owners_.push_back(schedule.rank_of(stage));
}

SHARDLIB_INLINE std::size_t LayerMap::layers_before_stage(int stage) const {
  return std::accumulate(counts_.begin(), counts_.begin() + stage, std::size_t{0},
                         [](std::size_t sum, int count) { return sum + static_cast<std::size_t>(count); });
}

SHARDLIB_INLINE std::vector<int> LayerMap::of_rank(int rank) const {
  std::vector<int> layers;
  for (const int stage : stages_.at(static_cast<std::size_t>(rank))) {
    const auto first = static_cast<int>(layers_before_stage(stage));
    for (int i = 0; i < counts_[static_cast<std::size_t>(stage)]; ++i) layers.push_back(first + i);
  }
  return layers;
}

SHARDLIB_INLINE std::size_t LayerMap::first_of_stage(int stage) const {
  const auto& stages = stages_.at(static_cast<std::size_t>(owners_.at(static_cast<std::size_t>(stage))));
  std::size_t before = 0;
  for (auto held = stages.begin(); *held != stage; ++held) before += layers_of_stage(*held);
  return before;
}

SHARDLIB_INLINE std::vector<int> ranks_of(const Schedule& schedule, const std::vector<int>& stages) {
  std::vector<int> ranks;
  for (const int stage : stages) ranks.push_back(schedule.rank_of(stage));
  std::ranges::sort(ranks);
  const auto twice = std::ranges::unique(ranks);
  ranks.erase(twice.begin(), twice.end());
  return ranks;
}

SHARDLIB_INLINE void must_fit(const Schedule& schedule, std::string_view axis, int ranks) {
  if (schedule.mpmd_dim() == ranks) return;
  if (axis.empty())
    throw UsageError(schedule.name() + " is for " + std::to_string(schedule.mpmd_dim()) +
                     " ranks, but the mesh has no stage axis; choose a schedule for 1 rank, as GPipe(1)");
  throw UsageError(schedule.name() + " is for " + std::to_string(schedule.mpmd_dim()) + " ranks, but the mesh has " +
                   std::string(axis) + "=" + std::to_string(ranks) + "; choose " + std::string(axis) + "=" +
                   std::to_string(schedule.mpmd_dim()) + ", or a schedule for " + std::to_string(ranks) +
                   (ranks == 1 ? " rank" : " ranks"));
}

}  // namespace shardlib::pipeline
