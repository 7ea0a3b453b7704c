// The tasks that a pipeline schedule is made of, in the notation of JaxPP.
//
//   fwd_2__0     stage 2 takes microbatch 0 forward
//   bwd_2__0     and backward: gradients of its activations and of its weights
//   bwdA_2__0    the first half of the backward pass alone: gradients of the activations, which stage 1 waits for
//   bwdW_2__0    the second half: gradients of the weights, which no other task waits for
//   FusedTask(fwd_3__0, bwd_3__0)      several tasks that run one right after the other
#pragma once

#include <compare>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "shardlib/support/inline.hpp"

namespace shardlib::pipeline {

/// The kind of a task: `fwd` is a forward pass and `bwd` a backward pass; `bwdA` is its half for the activations,
/// `bwdW` that for the weights.
enum class TaskKind { fwd, bwd, bwdA, bwdW };

/// A task of one stage for one microbatch, with its `kind`. Stages and microbatches count from 0.
struct Task {
  TaskKind kind = TaskKind::fwd;
  int stage = 0, microbatch = 0;
  friend auto operator<=>(const Task&, const Task&) = default;
};

/// An entry of a task list: a task, or the parts of several fused ones. What a part produces leaves when that part is
/// done.
struct FusedTask {
  std::vector<Task> parts;

  FusedTask(Task task) : parts{task} {}  // NOLINT(google-explicit-constructor): a list of tasks is a list of these
  explicit FusedTask(std::vector<Task> tasks) : parts(std::move(tasks)) {}
  friend bool operator==(const FusedTask&, const FusedTask&) = default;
};

/// The tasks of one rank, in the order in which it runs them.
using TaskList = std::vector<FusedTask>;
/// The lists of all ranks of the stage axis.
using TaskLists = std::vector<TaskList>;

[[nodiscard]] SHARDLIB_INLINE std::string to_string(TaskKind kind);
[[nodiscard]] SHARDLIB_INLINE std::string to_string(const Task& task);
[[nodiscard]] SHARDLIB_INLINE std::string to_string(const FusedTask& task);

/// A line for each rank, with the tasks below each other.
[[nodiscard]] SHARDLIB_INLINE std::string to_string(const TaskLists& lists);

/// Reads what `to_string` writes of a task; spaces around a task do not matter. Throws UsageError.
[[nodiscard]] SHARDLIB_INLINE FusedTask parse_task(std::string_view text);

/// The tasks of a list without their fusion.
[[nodiscard]] SHARDLIB_INLINE std::vector<Task> parts_of(const TaskList& list);

/// The rank of each stage: the first one that has a task of it, -1 for a stage without a task. Negative stages are left
/// out.
[[nodiscard]] SHARDLIB_INLINE std::vector<int> stage_owners(const TaskLists& lists);

}  // namespace shardlib::pipeline

#ifndef SHARDLIB_COMPILED
#include "shardlib/pipeline/impl/task.hpp"
#endif
