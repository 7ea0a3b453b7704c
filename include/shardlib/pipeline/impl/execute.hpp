// Definitions of execute.hpp.
#pragma once

#include "shardlib/pipeline/execute.hpp"

#include <algorithm>
#include <cstddef>
#include <fstream>
#include <map>
#include <memory>
#include <typeinfo>

#include "shardlib/autodiff/accumulator.hpp"
#include "shardlib/autodiff/backward.hpp"
#include "shardlib/autodiff/overlap.hpp"
#include "shardlib/pipeline/communication.hpp"
#include "shardlib/pipeline/impl/outputs.hpp"
#include "shardlib/pipeline/impl/prepare.hpp"
#include "shardlib/support/error.hpp"
#include "shardlib/support/stopwatch.hpp"

namespace shardlib::pipeline {

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

using core::ProgramState;

/// The sum of what a stage's microbatches add, in the order of the microbatches.
class OrderedSum {
 public:
  void add(int microbatch, std::vector<ValuePtr> values) {
    in_order_.add(microbatch, std::move(values), [&](std::vector<ValuePtr> now) {
      sums_.resize(now.size());
      for (std::size_t i = 0; i < now.size(); ++i)
        if (now[i]) sums_[i].add(std::move(now[i]));
    });
  }
  /// Null where nothing was added.
  std::vector<ValuePtr> take() {
    std::vector<ValuePtr> values;
    for (auto& sum : sums_) values.push_back(sum.take());
    return values;
  }

 private:
  InOrder<std::vector<ValuePtr>> in_order_;
  std::vector<core::Accumulator> sums_;
};

/// A number that identifies the steady clock of this process: processes of one machine share it until the machine is
/// started again. 0: unknown.
inline double clock_id() {
  std::string id;
  std::getline(std::ifstream("/proc/sys/kernel/random/boot_id"), id);
  return id.empty() ? 0 : static_cast<double>(std::hash<std::string>{}(id) >> 12);  // as many bits as a double has
}

inline ValuePtr zero_of(const core::Value& shape) {
  auto zero = core::Handle<core::Value>::make(shape);
  zero->storage = core::Handle<core::Storage>::make(core::allocate(*zero));
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
        rank_(program.axis.empty() ? 0 : program.device->whole()->axis_index(program.axis)),
        state_(core::program_state(program.device)) {
    if (owners_.back() == rank_)
      for (const StageOutput& output : program.outputs) outputs_.emplace_back(output, program.microbatches);
  }

  StepValues run() {
    state_.residual_bytes = 0;
    // Receives are posted a task early: the message arrives while that task runs.
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
    for (LastStageOutput& output : outputs_) result.outputs.push_back(output.take());
    result.intervals = std::move(intervals_);
    return result;
  }

 private:
  /// The state that a forward task keeps for the backward pass.
  struct Tape {
    std::vector<core::Slot> received, made;
    std::unique_ptr<core::Backward> pass = nullptr;
    std::int64_t bytes = 0;  ///< of what it keeps, weights and what is handed over aside
  };

  [[nodiscard]] int num_stages() const { return static_cast<int>(owners_.size()); }
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
    const double begin = core::steady_seconds();
    const bool is_forward = task.kind == TaskKind::fwd;
    const auto outside = state_.stopwatch.change(is_forward ? core::Stopwatch::forward : core::Stopwatch::backward);
    if (is_forward)
      forward(task, std::move(input));
    else
      backward(task, std::move(input));
    state_.pass = ProgramState::Pass::none;
    state_.stopwatch.change(outside);
    intervals_.push_back({rank_, task, begin, core::steady_seconds()});
  }

  /// The result of another stage, on another rank or on this one.
  std::vector<ValuePtr> take(const Message& message) {
    if (const auto it = incoming_.find(message); it != incoming_.end()) {
      auto values = it->second.wait();
      incoming_.erase(it);
      return values;
    }
    return std::move(made_.extract(message).mapped());
  }

  void forward(const Task& task, std::vector<ValuePtr> input) {
    state_.pass = ProgramState::Pass::forward;
    core::complete_gathers(state_);
    const bool records = program_.differentiate;
    const std::int64_t others = live() - bytes_of(input);  // what was received is the tape's
    Tape tape;
    if (records) {
      state_.tape = ++state_.sequence;  // of this microbatch; the weights are leaves of each
      for (const core::Slot& weight : program_.weights) weight.node->tape = state_.tape;
      for (ValuePtr& value : input) {
        value = core::as_leaf(*value);
        tape.received.push_back(value->slot);
      }
    }
    auto made = program_.forward({task.stage, num_stages(), task.microbatch}, input);
    const std::size_t roots = is_last(task) ? made.size() - program_.outputs.size() : made.size();
    for (std::size_t i = 0; i < made.size(); ++i) {
      if (i < roots && is_last(task)) core::require_mesh(*made[i], program_.device, "the loss");
      if (i < roots) tape.made.push_back(made[i]->slot);
      made[i] = core::detached(*made[i]);
    }
    tape.bytes = std::max<std::int64_t>(0, live() - others - bytes_of(made));
    if (is_last(task)) {
      for (std::size_t i = 0; i < outputs_.size(); ++i) outputs_[i].add(task.microbatch, made[roots + i]);
      made.resize(roots);
      losses_.add(task.microbatch, std::move(made));
    } else {
      check(task, made);
      made_.emplace(*output_of(task, num_stages()), std::move(made));
    }
    if (!records) return;
    tape_bytes_ += tape.bytes;
    tapes_.emplace(std::pair(task.stage, task.microbatch), std::move(tape));
    peak_tapes_ = std::max(peak_tapes_, tapes_.size());
    state_.residual_bytes = std::max(state_.residual_bytes, static_cast<std::size_t>(tape_bytes_));
  }
  [[nodiscard]] std::int64_t live() const { return static_cast<std::int64_t>(program_.device->pool()->stats().live); }
  static std::int64_t bytes_of(const std::vector<ValuePtr>& values) {
    std::int64_t bytes = 0;
    for (const ValuePtr& value : values) bytes += static_cast<std::int64_t>(value->bytes());
    return bytes;
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
    state_.pass = ProgramState::Pass::backward;
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
    if (task.kind != TaskKind::bwdA) {
      tape_bytes_ -= tape.bytes;
      tapes_.erase(it);
    }
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
  /// The tensors for which a stage's backward pass has cotangents: its input, and all weights of the rank.
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

  const StageProgram& program_;
  const TaskLists& lists_;
  std::vector<int> owners_;
  int rank_;
  ProgramState& state_;
  std::map<Message, Incoming> incoming_;
  std::map<Message, std::vector<ValuePtr>> made_;  ///< not sent or taken yet
  std::map<std::pair<int, int>, Tape> tapes_;      ///< by stage and microbatch
  std::size_t peak_tapes_ = 0;
  std::int64_t tape_bytes_ = 0;
  OrderedSum losses_;
  std::vector<LastStageOutput> outputs_;  ///< on the rank of the last stage
  std::map<int, OrderedSum> sums_;        ///< by stage
  std::vector<Interval> intervals_;
};

SHARDLIB_INLINE StepValues run(const StageProgram& program, const TaskLists& lists, const std::string& schedule) {
  prepare(program, lists, schedule);
  return Runner(program, lists).run();
}

SHARDLIB_INLINE std::vector<Interval> all_intervals(const DevicePtr& device, std::string_view axis,
                                                    const TaskLists& lists, const std::vector<Interval>& mine) {
  if (device->is_dry()) return {};
  if (axis.empty()) return mine;
  Communicator& group = device->group({axis});
  const std::size_t own = parts_of(lists.at(static_cast<std::size_t>(group.rank()))).size();
  if (mine.size() != own)
    throw Error("all_intervals: rank " + std::to_string(group.rank()) + " gives " + std::to_string(mine.size()) +
                " intervals, but its list has " + std::to_string(own) +
                " tasks; give the schedule's lists and the intervals of one step");
  std::size_t most = 0;
  for (const TaskList& list : lists) most = std::max(most, parts_of(list).size());
  const std::size_t count = 2 + 2 * most;  // whose clock, its time now, and the tasks' times before now
  const Buffer sent = device->host_pool()->allocate(count * sizeof(double));
  const Buffer all = device->host_pool()->allocate(lists.size() * sent.bytes());
  std::fill_n(sent.as<double>(), count, 0.0);
  group.barrier();
  sent.as<double>()[0] = clock_id();
  const double together = sent.as<double>()[1] = core::steady_seconds();
  for (std::size_t i = 0; i < mine.size(); ++i) {
    sent.as<double>()[2 + 2 * i] = mine[i].begin - together;
    sent.as<double>()[3 + 2 * i] = mine[i].end - together;
  }
  group.all_gather(sent, all).wait();
  // Ranks of several machines have clocks of their own: then all left the barrier at the same time.
  const double* first = all.as<double>();
  bool one_clock = first[0] != 0;
  for (std::size_t rank = 0; rank < lists.size(); ++rank) one_clock = one_clock && first[count * rank] == first[0];
  std::vector<Interval> result;
  for (std::size_t rank = 0; rank < lists.size(); ++rank) {
    const double* from = first + count * rank;
    const double later = one_clock ? from[1] - first[1] : 0;
    const double* times = from + 2;
    for (const Task& task : parts_of(lists[rank])) {
      result.push_back({static_cast<int>(rank), task, times[0] + later, times[1] + later});
      times += 2;
    }
  }
  return result;
}

SHARDLIB_INLINE TaskLists forward_lists(const Schedule& schedule, int microbatches) {
  if (microbatches < 1)
    throw UsageError(schedule.name() + ": " + std::to_string(microbatches) +
                     " microbatches; a forward pass needs at least 1");
  TaskLists lists(static_cast<std::size_t>(schedule.mpmd_dim()));
  for (int microbatch = 0; microbatch < microbatches; ++microbatch)
    for (int stage = 0; stage < schedule.num_stages(); ++stage)
      lists[static_cast<std::size_t>(schedule.rank_of(stage))].push_back(Task{TaskKind::fwd, stage, microbatch});
  return lists;
}

}  // namespace detail
}  // namespace shardlib::pipeline
