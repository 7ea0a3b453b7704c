// Definitions of execute.hpp.
#pragma once

#include "shardlib/pipeline/execute.hpp"

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <map>
#include <optional>
#include <tuple>
#include <typeinfo>

#include "shardlib/accumulator.hpp"
#include "shardlib/backward.hpp"
#include "shardlib/error.hpp"
#include "shardlib/pipeline/communication.hpp"

namespace shardlib::pipeline {

SHARDLIB_INLINE LayerMap::LayerMap(const Schedule& schedule, std::int64_t layers) {
  const int stages = schedule.num_stages();
  if (layers < 1 || layers % stages != 0)
    throw UsageError(std::to_string(layers) + " layers do not divide into the " + std::to_string(stages) +
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
  throw UsageError(schedule.name() + " is for " + std::to_string(schedule.mpmd_dim()) + " ranks, but the mesh has " +
                   std::string(axis) + "=" + std::to_string(ranks) + "; choose " + std::string(axis) + "=" +
                   std::to_string(schedule.mpmd_dim()) + ", or a schedule for " + std::to_string(ranks) +
                   (ranks == 1 ? " rank" : " ranks"));
}

SHARDLIB_INLINE Costs measured_costs(const std::vector<Interval>& intervals) {
  struct Sum {
    double seconds = 0;
    int tasks = 0;
  };
  std::map<std::pair<int, TaskKind>, Sum> sums;
  int stages = 0;
  for (const auto& [rank, task, begin, end] : intervals) {
    Sum& sum = sums[{task.stage, task.kind}];
    sum.seconds += end - begin;
    ++sum.tasks;
    stages = std::max(stages, task.stage + 1);
  }
  Costs costs;
  costs.stages.assign(static_cast<std::size_t>(stages), TaskTimes{0, 0, 0, 0});
  for (const auto& [key, sum] : sums) {
    TaskTimes& times = costs.stages[static_cast<std::size_t>(key.first)];
    (key.second == TaskKind::fwd    ? times.fwd
     : key.second == TaskKind::bwd  ? times.bwd
     : key.second == TaskKind::bwdA ? times.bwdA
                                    : times.bwdW) = sum.seconds / sum.tasks;
  }
  return costs;
}

namespace detail {

using core::State;

/// The sum of what a stage's microbatches add, in the order of the microbatches, whatever the order in which they come.
class OrderedSum {
 public:
  void add(int microbatch, std::vector<ValuePtr> values) {
    early_.emplace(microbatch, std::move(values));
    while (!early_.empty() && early_.begin()->first == next_) {
      auto& now = early_.begin()->second;
      sums_.resize(now.size());
      for (std::size_t i = 0; i < now.size(); ++i)
        if (now[i]) sums_[i].add(std::move(now[i]));
      early_.erase(early_.begin());
      ++next_;
    }
  }
  /// Null where nothing was added.
  std::vector<ValuePtr> take() {
    std::vector<ValuePtr> values;
    for (auto& sum : sums_) values.push_back(sum.take());
    return values;
  }

 private:
  int next_ = 0;
  std::map<int, std::vector<ValuePtr>> early_;
  std::vector<core::Accumulator> sums_;
};

inline ValuePtr zero_of(const core::Value& shape) {
  auto zero = std::make_shared<core::Value>(shape);
  zero->storage = std::make_shared<core::Storage>(core::Storage{core::allocate(*zero), nullptr});
  zero->device->exec().zero(zero->data().data(), zero->bytes());
  return zero;
}

/// One rank's part of a step.
class Runner {
 public:
  Runner(const StageProgram& program, const TaskLists& lists)
      : program_(program),
        lists_(lists),
        owners_(stage_owners(lists)),
        rank_(program.device->whole()->coordinate(program.axis)),
        state_(core::state(program.device)) {}

  StepValues run() {
    if (program_.measure) group().barrier();
    start_ = now();
    live_at_start_ = program_.device->pool()->stats().live;
    state_.kept = 0;
    // Receives stand a task early: the message comes while that task runs.
    const std::vector<Operations> plan = communication_plan(lists_, 1);
    for (const Operation& operation : plan[static_cast<std::size_t>(rank_)]) {
      try {
        perform(operation);
      } catch (const Error& error) {
        if (typeid(error) != typeid(Error)) throw;
        throw Error(to_string(operation) + ": " + error.what());
      }
    }
    StepValues result;
    if (const auto loss = losses_.take(); !loss.empty()) result.loss = loss[0];
    result.gradients = gradients();
    const auto stages = std::ranges::count(owners_, rank_);
    result.peak_in_flight = static_cast<double>(peak_tapes_) / static_cast<double>(stages);
    if (program_.measure && !program_.device->is_dry()) result.intervals = all_intervals();
    return result;
  }

 private:
  /// What a forward task leaves for the backward pass.
  struct Tape {
    std::vector<core::Slot> received, made;
    std::unique_ptr<core::Backward> pass = nullptr;
  };

  static double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
  }
  [[nodiscard]] int num_stages() const { return static_cast<int>(owners_.size()); }
  [[nodiscard]] Communicator& group() const { return program_.device->group({program_.axis}); }
  [[nodiscard]] bool is_last(const Task& task) const { return task.stage + 1 == num_stages(); }

  void perform(const Operation& operation) {
    switch (operation.kind) {
      case Operation::Kind::receive: {
        const bool forward = operation.message.payload == Payload::activation;
        incoming_.emplace(operation.message, Incoming(forward ? program_.activations : program_.cotangents,
                                                      program_.axis, operation.peer));
        break;
      }
      case Operation::Kind::send: {
        const auto made = made_.extract(operation.message);
        for (const ValuePtr& value : made.mapped()) send(*value, program_.axis, operation.peer);
        break;
      }
      case Operation::Kind::run:
        perform(operation.task);
        break;
    }
  }

  void perform(const Task& task) {
    std::vector<ValuePtr> input;
    if (const auto message = input_of(task, num_stages())) input = take(*message);
    const double begin = now() - start_;
    const bool is_forward = task.kind == TaskKind::fwd;
    const auto outside = state_.stopwatch.change(is_forward ? core::Stopwatch::forward : core::Stopwatch::backward);
    if (is_forward)
      forward(task, std::move(input));
    else
      backward(task, std::move(input));
    state_.pass = State::Pass::none;
    state_.stopwatch.change(outside);
    intervals_.push_back({rank_, task, begin, now() - start_});
  }

  /// What another stage has made: of another rank, or of this one.
  std::vector<ValuePtr> take(const Message& message) {
    if (const auto it = incoming_.find(message); it != incoming_.end()) {
      auto values = it->second.wait();
      incoming_.erase(it);
      return values;
    }
    return std::move(made_.extract(message).mapped());
  }

  void forward(const Task& task, std::vector<ValuePtr> input) {
    state_.pass = State::Pass::forward;
    const bool records = program_.differentiate;
    Tape tape;
    if (records) {
      for (ValuePtr& value : input) {
        value = core::as_leaf(*value);
        tape.received.push_back(value->slot);
      }
    }
    auto made = program_.forward({task.stage, num_stages(), task.microbatch}, input);
    for (ValuePtr& value : made) {
      tape.made.push_back(value->slot);
      value = core::detached(*value);
    }
    if (is_last(task)) {
      losses_.add(task.microbatch, std::move(made));
    } else {
      check(task, made);
      made_.emplace(*output_of(task, num_stages()), std::move(made));
    }
    if (!records) return;
    tapes_.emplace(std::pair(task.stage, task.microbatch), std::move(tape));
    peak_tapes_ = std::max(peak_tapes_, tapes_.size());
    const std::size_t live = program_.device->pool()->stats().live;
    state_.kept = std::max(state_.kept, std::max(live, live_at_start_) - live_at_start_);
  }

  /// The next stage expects the sizes that were announced.
  void check(const Task& task, const std::vector<ValuePtr>& made) const {
    for (std::size_t i = 0; i < made.size(); ++i) {
      const core::Value &is = *made[i], &due = *program_.activations[i];
      for (int k = 0; k < due.global.size(); ++k)
        if (is.global[k] != due.global[k])
          throw Error("stage " + std::to_string(task.stage) + " hands over `" +
                      std::string(shardlib::to_string(*due.spec).view()) + "` with " +
                      std::string(due.spec->dims[k].name) + " = " + core::to_string(is.global[k]) +
                      ", but the sizes given for the pipeline say " + core::to_string(due.global[k]) +
                      "; give what a microbatch has (" + program_.device->describe() + ")");
    }
  }

  void backward(const Task& task, std::vector<ValuePtr> cotangents) {
    state_.pass = State::Pass::backward;
    const auto it = tapes_.find({task.stage, task.microbatch});
    Tape& tape = it->second;
    const std::size_t received = tape.received.size();
    if (!tape.pass) {
      if (is_last(task)) cotangents = {program_.seed};
      std::vector<std::pair<core::Slot, ValuePtr>> roots;
      for (std::size_t i = 0; i < cotangents.size(); ++i)
        roots.emplace_back(std::move(tape.made[i]), std::move(cotangents[i]));
      auto leaves = std::exchange(tape.received, {});
      leaves.insert(leaves.end(), program_.weights.begin(), program_.weights.end());
      tape.pass = std::make_unique<core::Backward>(std::move(roots), std::move(leaves));
    }
    std::vector<bool> wanted(leaf_count(task), true);
    if (task.kind == TaskKind::bwdA)
      std::fill(wanted.begin() + static_cast<std::ptrdiff_t>(received), wanted.end(), false);
    auto found = tape.pass->run(wanted);
    if (task.kind != TaskKind::bwdA) tapes_.erase(it);
    const auto weights = found.begin() + static_cast<std::ptrdiff_t>(found.size() - program_.weights.size());
    if (task.kind != TaskKind::bwdW && task.stage > 0) {
      std::vector<ValuePtr> made(found.begin(), weights);
      for (std::size_t i = 0; i < made.size(); ++i)
        made[i] = made[i] ? core::with_spec(made[i], *program_.cotangents[i]->spec) : zero_of(*program_.cotangents[i]);
      made_.emplace(*output_of(task, num_stages()), std::move(made));
    }
    if (task.kind != TaskKind::bwdA)
      sums_[task.stage].add(task.microbatch, std::vector<ValuePtr>(weights, found.end()));
  }
  /// What a stage's pass has cotangents for: what it received, and all weights of the rank.
  [[nodiscard]] std::size_t leaf_count(const Task& task) const {
    return (task.stage > 0 ? program_.activations.size() : 0) + program_.weights.size();
  }

  /// The sums of all stages of the rank; of a weight that several of them use, in their order.
  std::vector<ValuePtr> gradients() {
    OrderedSum all;
    int place = 0;
    for (auto& [stage, sum] : sums_) all.add(place++, sum.take());
    return all.take();
  }

  /// The intervals of all ranks, from the first device of each.
  [[nodiscard]] std::vector<Interval> all_intervals() const {
    std::size_t most = 0;
    for (const TaskList& list : lists_) most = std::max(most, parts_of(list).size());
    const auto& pool = program_.device->pool();
    const Buffer mine = pool->allocate(2 * most * sizeof(double));
    const Buffer all = pool->allocate(lists_.size() * mine.bytes());
    std::fill_n(mine.as<double>(), 2 * most, 0.0);
    for (std::size_t i = 0; i < intervals_.size(); ++i) {
      mine.as<double>()[2 * i] = intervals_[i].begin;
      mine.as<double>()[2 * i + 1] = intervals_[i].end;
    }
    group().all_gather(mine, all).wait();
    std::vector<Interval> result;
    for (std::size_t rank = 0; rank < lists_.size(); ++rank) {
      const double* times = all.as<double>() + 2 * most * rank;
      for (const Task& task : parts_of(lists_[rank])) {
        result.push_back({static_cast<int>(rank), task, times[0], times[1]});
        times += 2;
      }
    }
    return result;
  }

  const StageProgram& program_;
  const TaskLists& lists_;
  std::vector<int> owners_;
  int rank_;
  State& state_;
  double start_ = 0;
  std::size_t live_at_start_ = 0;
  std::map<Message, Incoming> incoming_;
  std::map<Message, std::vector<ValuePtr>> made_;  ///< not sent or taken yet
  std::map<std::pair<int, int>, Tape> tapes_;      ///< by stage and microbatch
  std::size_t peak_tapes_ = 0;
  OrderedSum losses_;
  std::map<int, OrderedSum> sums_;  ///< by stage
  std::vector<Interval> intervals_;
};

SHARDLIB_INLINE StepValues run(const StageProgram& program, const TaskLists& lists) {
  return Runner(program, lists).run();
}

SHARDLIB_INLINE TaskLists forward_lists(const Schedule& schedule, int microbatches) {
  TaskLists lists(static_cast<std::size_t>(schedule.mpmd_dim()));
  for (int microbatch = 0; microbatch < microbatches; ++microbatch)
    for (int stage = 0; stage < schedule.num_stages(); ++stage)
      lists[static_cast<std::size_t>(schedule.rank_of(stage))].push_back(Task{TaskKind::fwd, stage, microbatch});
  return lists;
}

}  // namespace detail
}  // namespace shardlib::pipeline
