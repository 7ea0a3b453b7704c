// A pipeline schedule in virtual time: the length of a training step, the waits of each rank, the memory.
#pragma once

#include <limits>
#include <string>
#include <string_view>
#include <vector>

#include "shardlib/pipeline/task.hpp"
#include "shardlib/support/inline.hpp"

namespace shardlib::pipeline {

/// Seconds, or any other unit, that a stage takes for one microbatch: fwd, bwd, bwdA and bwdW `of` each kind of task.
struct TaskTimes {
  double fwd = 1, bwd = 2, bwdA = 1, bwdW = 1;
  [[nodiscard]] SHARDLIB_INLINE double of(TaskKind kind) const;
};

/// The costs that the simulator assumes. A transfer overlaps with the tasks of both ranks. Each direction between two
/// ranks carries one message at a time, for bytes / bandwidth; a message arrives `latency` after that.
struct Costs {
  std::vector<TaskTimes> stages = {TaskTimes{}};  ///< times of each stage; a single entry holds for all stages
  double latency = 0;
  double bytes = 0;                                            ///< bytes of a message
  double bandwidth = std::numeric_limits<double>::infinity();  ///< bytes in a unit of time
};

/// The costs of a model that takes `whole` on each rank, which is split evenly among the rank's stages: for comparing
/// schedules with different numbers of stages. Transfers take no time. `simulate(lists, even_costs(lists))`
[[nodiscard]] SHARDLIB_INLINE Costs even_costs(const TaskLists& lists, const TaskTimes& whole = {});

/// When a rank ran a task: from `begin` to `end`.
struct Interval {
  int rank = 0;
  Task task;
  double begin = 0, end = 0;
};

/// The result of `simulate`: when each task runs, and what ranks wait for and keep.
struct Simulation {
  std::vector<Interval> intervals;  ///< rank by rank, in the order of its tasks
  double makespan = 0;              ///< from the first task's begin to the last one's end
  double bubble = 0;                ///< the part of all ranks' time in which they wait, 0 to 1
  std::vector<double> idle;         ///< idle time of each rank, within the makespan
  /// Microbatches whose activations a rank keeps, the most at once. A stage keeps them from the begin of its forward
  /// task to the end of `bwd` or `bwdW`; on a rank of v stages that counts 1/v, as each holds 1/v of the rank's layers.
  std::vector<double> peak_in_flight;
};

/// Runs the lists: each rank runs its tasks in order, as soon as their inputs have arrived. Fused tasks run like single
/// ones. Throws UsageError when the costs do not fit, and when the tasks can never all run: then with the lists, in
/// which the task that each rank is stuck at is marked, and what it waits for. `name` stands at the beginning of the
/// message. `simulate(schedule.tasks(8), {.latency = 0.1})`
[[nodiscard]] SHARDLIB_INLINE Simulation simulate(const TaskLists& lists, const Costs& costs = {},
                                                  std::string_view name = "the schedule");

/// A few lines to print: makespan, bubble, and each rank's idle time and activations.
[[nodiscard]] SHARDLIB_INLINE std::string to_string(const Simulation& simulation);

}  // namespace shardlib::pipeline

#ifndef SHARDLIB_COMPILED
#include "shardlib/pipeline/impl/simulate.hpp"
#endif
