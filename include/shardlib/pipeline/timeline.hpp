// A drawing of the tasks of each rank over time: a schedule as planned, or planned above measured.
#pragma once

#include <string>
#include <vector>

#include "shardlib/pipeline/simulate.hpp"
#include "shardlib/support/inline.hpp"

namespace shardlib::pipeline {

/// The picture of `to_svg`: a title, and the tasks of each rank, as planned and as measured.
struct Timeline {
  std::string title;
  std::vector<Interval> planned;        ///< intervals of a Simulation
  std::vector<Interval> measured = {};  ///< in seconds, as then are the planned ones; drawn from the first begin on
};

/// The picture as one SVG that needs nothing else: a row for each rank, a box with the microbatch for each task, the
/// task and its times where the mouse points. Planned and measured have the same scale. Throws UsageError for an
/// interval that ends before it begins, or has no rank.
[[nodiscard]] SHARDLIB_INLINE std::string to_svg(const Timeline& timeline);

}  // namespace shardlib::pipeline

#ifndef SHARDLIB_COMPILED
#include "shardlib/pipeline/impl/timeline.hpp"
#endif
