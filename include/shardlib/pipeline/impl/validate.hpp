// Definitions of validate.hpp.
#pragma once

#include "shardlib/pipeline/validate.hpp"

#include <algorithm>
#include <cstddef>
#include <set>
#include <string>

#include "shardlib/pipeline/simulate.hpp"
#include "shardlib/support/error.hpp"

namespace shardlib::pipeline {

namespace detail {

/// The checks of one schedule, task by task.
class Validation {
 public:
  Validation(std::string_view name, const std::vector<int>& owners, int microbatches)
      : name_(name), owners_(owners), microbatches_(microbatches) {}

  void take(int rank, const Task& task) {
    const std::string what = to_string(task);
    const int stages = static_cast<int>(owners_.size());
    if (task.stage < 0 || task.stage >= stages)
      fail(rank, what + " is of a stage that does not exist: the stages are 0 to " + std::to_string(stages - 1) +
                     "; remove it, or make the schedule for more stages");
    if (task.microbatch < 0 || task.microbatch >= microbatches_)
      fail(rank, what + " is of a microbatch that does not exist: the microbatches are 0 to " +
                     std::to_string(microbatches_ - 1) + "; remove it, or run more microbatches");
    if (const int owner = owners_[static_cast<std::size_t>(task.stage)]; owner != rank)
      fail(rank, what + " is listed here, but stage " + std::to_string(task.stage) + " belongs to rank " +
                     std::to_string(owner) + ", which holds its weights; move it there");
    if (has(task, task.kind)) fail(rank, what + " is listed here twice; remove one");
    if (task.kind == TaskKind::bwd || task.kind == TaskKind::bwdA) {
      need(rank, task, TaskKind::fwd, "the backward pass needs what the forward pass has kept");
      const TaskKind other = task.kind == TaskKind::bwd ? TaskKind::bwdA : TaskKind::bwd;
      if (has(task, other)) fail_double(rank, task, other);
    } else if (task.kind == TaskKind::bwdW) {
      if (has(task, TaskKind::bwd)) fail_double(rank, task, TaskKind::bwd);
      need(rank, task, TaskKind::bwdA, "the gradients of the weights need those of the activations");
    }
    seen_.insert(task);
  }

  void finish() const {
    for (int stage = 0; stage < static_cast<int>(owners_.size()); ++stage) {
      const int rank = owners_[static_cast<std::size_t>(stage)];
      for (int microbatch = 0; microbatch < microbatches_; ++microbatch) {
        const Task fwd{TaskKind::fwd, stage, microbatch};
        const auto text = [&](TaskKind kind) { return to_string(Task{kind, stage, microbatch}); };
        if (!seen_.contains(fwd))
          fail(rank, to_string(fwd) + " is missing; each stage takes each microbatch forward once");
        if (has(fwd, TaskKind::bwd)) continue;
        if (!has(fwd, TaskKind::bwdA))
          fail(rank, text(TaskKind::bwd) + " is missing; add it, or " + text(TaskKind::bwdA) + " and " +
                         text(TaskKind::bwdW));
        if (!has(fwd, TaskKind::bwdW))
          fail(rank, text(TaskKind::bwdW) + " is missing, though " + text(TaskKind::bwdA) +
                         " is there: the weights of "
                         "stage " +
                         std::to_string(stage) + " would lack the gradients of microbatch " +
                         std::to_string(microbatch) + "; add it after that task");
      }
    }
  }

  [[noreturn]] void fail(int rank, const std::string& why) const {
    throw UsageError(name_ + ", rank " + std::to_string(rank) + ": " + why);
  }

 private:
  [[nodiscard]] bool has(const Task& task, TaskKind kind) const {
    return seen_.contains({kind, task.stage, task.microbatch});
  }

  void need(int rank, const Task& task, TaskKind kind, const std::string& why) const {
    if (has(task, kind)) return;
    fail(rank, to_string(task) + " has no " + to_string(Task{kind, task.stage, task.microbatch}) + " before it; " +
                   why + ", so that must come first");
  }

  [[noreturn]] void fail_double(int rank, const Task& task, TaskKind other) const {
    fail(rank, to_string(task) + " comes after " + to_string(Task{other, task.stage, task.microbatch}) +
                   ": bwd is bwdA and bwdW in one, so the gradients would count twice; keep one of the two forms");
  }

  std::string name_;
  const std::vector<int>& owners_;
  int microbatches_;
  std::set<Task> seen_;
};

}  // namespace detail

SHARDLIB_INLINE void validate(std::string_view name, const TaskLists& lists, const std::vector<int>& owners,
                              int microbatches) {
  const std::string title(name);
  if (microbatches < 1)
    throw UsageError(title + ": " + std::to_string(microbatches) + " microbatches; a training step needs at least 1");
  if (owners.empty()) throw UsageError(title + ": it has no stage; give it at least one");
  detail::Validation validation(title, owners, microbatches);
  const int ranks = static_cast<int>(lists.size());
  for (std::size_t stage = 0; stage < owners.size(); ++stage)
    if (owners[stage] < 0 || owners[stage] >= ranks)
      throw UsageError(title + ": stage " + std::to_string(stage) + " is on no rank; there are " +
                       std::to_string(ranks) + " lists of tasks, so give it to a rank from 0 to " +
                       std::to_string(ranks - 1));
  for (int rank = 0; rank < ranks; ++rank)
    if (std::find(owners.begin(), owners.end(), rank) == owners.end())
      validation.fail(rank, "it has no stage, so it would only wait; use fewer ranks, or more stages");
  for (int rank = 0; rank < ranks; ++rank)
    for (const Task& task : parts_of(lists[static_cast<std::size_t>(rank)])) validation.take(rank, task);
  validation.finish();
  (void)simulate(lists, {}, title);
}

}  // namespace shardlib::pipeline
