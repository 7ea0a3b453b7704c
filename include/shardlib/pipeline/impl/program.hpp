// Definitions of program.hpp.
#pragma once

#include "shardlib/pipeline/program.hpp"

#include <algorithm>
#include <string>

#include "shardlib/support/error.hpp"

namespace shardlib::pipeline {

SHARDLIB_INLINE LayerMap::LayerMap(const Schedule& schedule, std::int64_t layers) {
  const int stages = schedule.num_stages();
  if (layers < 1 || layers % stages != 0)
    throw UsageError(std::to_string(layers) + " layers cannot be cut evenly into the " + std::to_string(stages) +
                     " stages of " + schedule.name() + "; choose a multiple of " + std::to_string(stages) +
                     ", or fewer stages");
  per_stage_ = static_cast<int>(layers / stages);
  for (int rank = 0; rank < schedule.mpmd_dim(); ++rank) stages_.push_back(schedule.stages_of(rank));
  for (int stage = 0; stage < stages; ++stage) owners_.push_back(schedule.rank_of(stage));
}

SHARDLIB_INLINE std::vector<int> LayerMap::of_rank(int rank) const {
  std::vector<int> layers;
  for (const int stage : stages_.at(static_cast<std::size_t>(rank)))
    for (int i = 0; i < per_stage_; ++i) layers.push_back(stage * per_stage_ + i);
  return layers;
}

SHARDLIB_INLINE std::size_t LayerMap::first_of_stage(int stage) const {
  const auto& stages = stages_.at(static_cast<std::size_t>(owners_.at(static_cast<std::size_t>(stage))));
  return static_cast<std::size_t>(std::ranges::find(stages, stage) - stages.begin()) *
         static_cast<std::size_t>(per_stage_);
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
