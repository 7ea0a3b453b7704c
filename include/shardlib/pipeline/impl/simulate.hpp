// Definitions of simulate.hpp.
#pragma once

#include "shardlib/pipeline/simulate.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include "shardlib/pipeline/communication.hpp"
#include "shardlib/pipeline/impl/text.hpp"
#include "shardlib/support/error.hpp"

namespace shardlib::pipeline {

SHARDLIB_INLINE double TaskTimes::of(TaskKind kind) const {
  const double times[] = {fwd, bwd, bwdA, bwdW};
  return times[static_cast<std::size_t>(kind)];
}

SHARDLIB_INLINE Costs even_costs(const TaskLists& lists, const TaskTimes& whole) {
  const std::vector<int> owners = stage_owners(lists);
  Costs costs{.stages = {}};
  for (const int owner : owners) {
    const auto v = static_cast<double>(std::count(owners.begin(), owners.end(), owner));
    costs.stages.push_back({whole.fwd / v, whole.bwd / v, whole.bwdA / v, whole.bwdW / v});
  }
  return costs;
}

namespace detail {

inline void check_costs(const Costs& costs, std::size_t num_stages) {
  const auto fail = [](const std::string& why) { throw UsageError("simulate: " + why); };
  const auto check_time = [&](double value, const std::string& what) {
    if (!(value >= 0) || !std::isfinite(value))
      fail(what + " is " + short_number(value) + "; it must be a finite number of at least 0");
  };
  if (costs.stages.size() != 1 && costs.stages.size() != num_stages)
    fail("there are task times of " + std::to_string(costs.stages.size()) + " stages, but " +
         std::to_string(num_stages) + " stages; give one for each, or a single one for all");
  for (std::size_t s = 0; s < costs.stages.size(); ++s)
    for (const TaskKind kind : {TaskKind::fwd, TaskKind::bwd, TaskKind::bwdA, TaskKind::bwdW})
      check_time(costs.stages[s].of(kind), "the " + to_string(kind) + " time of stage " + std::to_string(s));
  check_time(costs.latency, "the latency");
  check_time(costs.bytes, "the size of a message");
  if (!(costs.bandwidth > 0)) fail("the bandwidth is " + short_number(costs.bandwidth) + "; it must be above 0");
}

/// Ranks that run their tasks in virtual time.
class Replay {
 public:
  Replay(const TaskLists& lists, const Costs& costs) : lists_(lists), costs_(costs), owners_(stage_owners(lists)) {
    check_costs(costs, owners_.size());
    for (const TaskList& list : lists) tasks_.push_back(parts_of(list));
    for (const auto& list : tasks_)
      for (const Task& task : list)
        if (task.stage < 0) throw UsageError("simulate: " + to_string(task) + " is of no stage; stages count from 0");
    place_.resize(lists.size());
    now_.resize(lists.size());
    intervals_.resize(lists.size());
  }

  Simulation run(std::string_view name) {
    for (bool progress = true; progress;) {
      progress = false;
      for (std::size_t rank = 0; rank < tasks_.size(); ++rank)
        while (step(rank)) progress = true;
    }
    for (std::size_t rank = 0; rank < tasks_.size(); ++rank)
      if (place_[rank] < tasks_[rank].size()) throw UsageError(std::string(name) + " cannot make progress: " + stuck());
    return result();
  }

 private:
  /// The task that must run before this one and has not run. The source of a gradient is given as bwd, even if bwdA
  /// makes it.
  [[nodiscard]] std::optional<Task> missing(const Task& task) const {
    if (const auto input = input_of(task, static_cast<int>(owners_.size())); input && !arrival_.contains(*input)) {
      const bool forward = input->payload == Payload::activation;
      return Task{forward ? TaskKind::fwd : TaskKind::bwd, task.stage + (forward ? -1 : 1), task.microbatch};
    }
    const auto own = [&](TaskKind kind) { return Task{kind, task.stage, task.microbatch}; };
    if (task.kind == TaskKind::bwdW && !done_.contains(own(TaskKind::bwdA))) return own(TaskKind::bwdA);
    if (task.kind != TaskKind::fwd && !done_.contains(own(TaskKind::fwd))) return own(TaskKind::fwd);
    return {};
  }

  bool step(std::size_t rank) {
    if (place_[rank] == tasks_[rank].size()) return false;
    const Task& task = tasks_[rank][place_[rank]];
    if (missing(task)) return false;
    const int stages = static_cast<int>(owners_.size());
    double begin = now_[rank];
    if (const auto input = input_of(task, stages)) begin = std::max(begin, arrival_.at(*input));
    const auto stage = static_cast<std::size_t>(task.stage);
    const double end = begin + costs_.stages[costs_.stages.size() == 1 ? 0 : stage].of(task.kind);
    if (const auto output = output_of(task, stages)) {
      double arrival = end;
      if (const auto to = target_rank(task, owners_)) {
        double& free = link_free_[{rank, *to}];
        free = std::max(free, end) + costs_.bytes / costs_.bandwidth;
        arrival = free + costs_.latency;
      }
      arrival_.emplace(*output, arrival);
    }
    done_.insert(task);
    intervals_[rank].push_back({static_cast<int>(rank), task, begin, end});
    now_[rank] = end;
    ++place_[rank];
    return true;
  }

  /// Rank and position, from 1, of a task.
  [[nodiscard]] std::optional<std::pair<std::size_t, std::size_t>> place_of(const Task& task) const {
    for (std::size_t rank = 0; rank < tasks_.size(); ++rank) {
      const auto found = std::find(tasks_[rank].begin(), tasks_[rank].end(), task);
      if (found != tasks_[rank].end())
        return std::pair{rank, static_cast<std::size_t>(found - tasks_[rank].begin()) + 1};
    }
    return {};
  }

  [[nodiscard]] std::string stuck() const {
    std::string reasons;
    std::vector<std::vector<std::string>> rows;
    for (std::size_t rank = 0; rank < lists_.size(); ++rank) {
      rows.push_back({"rank " + std::to_string(rank) + ":"});
      std::size_t place = 0;
      for (const FusedTask& task : lists_[rank]) {
        const bool here = place <= place_[rank] && place_[rank] < place + task.parts.size();
        place += task.parts.size();
        rows.back().push_back(here ? ">>" + to_string(task) + "<<" : to_string(task));
      }
      if (place_[rank] == tasks_[rank].size()) continue;
      const Task& task = tasks_[rank][place_[rank]];
      Task wanted = *missing(task);
      auto where = place_of(wanted);
      if (!where && wanted.kind == TaskKind::bwd) {
        wanted.kind = TaskKind::bwdA;
        where = place_of(wanted);
      }
      reasons += "  rank " + std::to_string(rank) + " waits at " + to_string(task) + " for " + to_string(wanted) +
                 ", " +
                 (where ? "which is task " + std::to_string(where->second) + " of rank " + std::to_string(where->first)
                        : std::string("which no rank has")) +
                 "\n";
    }
    return "its ranks wait for each other; move a task that is waited for further ahead in its rank's list\n" +
           reasons + aligned(rows);
  }

  [[nodiscard]] Simulation result() {
    Simulation result;
    result.idle.resize(lists_.size());
    result.peak_in_flight.resize(lists_.size());
    for (const auto& intervals : intervals_)
      for (const Interval& interval : intervals) result.makespan = std::max(result.makespan, interval.end);
    double idle = 0;
    for (std::size_t rank = 0; rank < lists_.size(); ++rank) {
      const auto v = static_cast<double>(std::count(owners_.begin(), owners_.end(), static_cast<int>(rank)));
      double busy = 0;
      int in_flight = 0;
      for (const Interval& interval : intervals_[rank]) {
        busy += interval.end - interval.begin;
        const TaskKind kind = interval.task.kind;
        if (kind == TaskKind::fwd) ++in_flight;
        result.peak_in_flight[rank] = std::max(result.peak_in_flight[rank], in_flight / v);
        if (kind == TaskKind::bwd || kind == TaskKind::bwdW) --in_flight;
      }
      // Sums of many times are a little off; a wait is never negative.
      result.idle[rank] = std::max(0.0, result.makespan - busy);
      idle += result.idle[rank];
      result.intervals.insert(result.intervals.end(), intervals_[rank].begin(), intervals_[rank].end());
    }
    if (result.makespan > 0) result.bubble = idle / (result.makespan * static_cast<double>(lists_.size()));
    return result;
  }

  const TaskLists& lists_;
  const Costs& costs_;
  std::vector<int> owners_;
  std::vector<std::vector<Task>> tasks_;
  std::vector<std::size_t> place_;  ///< of each rank's next task
  std::vector<double> now_;
  std::set<Task> done_;
  std::map<Message, double> arrival_;
  std::map<std::pair<std::size_t, int>, double> link_free_;
  std::vector<std::vector<Interval>> intervals_;  ///< of each rank
};

}  // namespace detail

SHARDLIB_INLINE Simulation simulate(const TaskLists& lists, const Costs& costs, std::string_view name) {
  return detail::Replay(lists, costs).run(name);
}

SHARDLIB_INLINE std::string to_string(const Simulation& simulation) {
  std::string text = "makespan " + detail::short_number(simulation.makespan) + ", bubble " +
                     detail::short_number(100 * simulation.bubble) + " %\n";
  std::vector<std::vector<std::string>> rows;
  for (std::size_t rank = 0; rank < simulation.idle.size(); ++rank)
    rows.push_back({"rank " + std::to_string(rank) + ":", "idle", detail::short_number(simulation.idle[rank]) + ",",
                    "activations in flight", detail::short_number(simulation.peak_in_flight[rank])});
  return text + detail::aligned(rows);
}

}  // namespace shardlib::pipeline
