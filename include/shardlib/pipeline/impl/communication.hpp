// Definitions of communication.hpp.
#pragma once

#include "shardlib/pipeline/communication.hpp"

#include <algorithm>
#include <cstddef>
#include <map>
#include <utility>

#include "shardlib/support/error.hpp"

namespace shardlib::pipeline {

SHARDLIB_INLINE std::string to_string(const Message& message) {
  const int b = message.boundary;
  const bool forward = message.payload == Payload::activation;
  return std::string(forward ? "activation" : "gradient") + " of microbatch " + std::to_string(message.microbatch) +
         " from stage " + std::to_string(forward ? b : b + 1) + " to " + std::to_string(forward ? b + 1 : b);
}

SHARDLIB_INLINE std::optional<Message> input_of(const Task& task, int num_stages) {
  if (task.kind == TaskKind::fwd && task.stage > 0)
    return Message{Payload::activation, task.stage - 1, task.microbatch};
  if ((task.kind == TaskKind::bwd || task.kind == TaskKind::bwdA) && task.stage < num_stages - 1)
    return Message{Payload::gradient, task.stage, task.microbatch};
  return {};
}

SHARDLIB_INLINE std::optional<Message> output_of(const Task& task, int num_stages) {
  if (task.kind == TaskKind::fwd && task.stage < num_stages - 1)
    return Message{Payload::activation, task.stage, task.microbatch};
  if ((task.kind == TaskKind::bwd || task.kind == TaskKind::bwdA) && task.stage > 0)
    return Message{Payload::gradient, task.stage - 1, task.microbatch};
  return {};
}

SHARDLIB_INLINE std::string to_string(const Operation& operation) {
  if (operation.kind == Operation::Kind::run) return to_string(operation.task);
  const bool send = operation.kind == Operation::Kind::send;
  return std::string(send ? "send" : "receive") + "(" + to_string(operation.message) + ", rank " +
         std::to_string(operation.peer) + ")";
}

SHARDLIB_INLINE std::optional<int> target_rank(const Task& task, const std::vector<int>& owners) {
  if (!output_of(task, static_cast<int>(owners.size()))) return {};
  const auto stage = static_cast<std::size_t>(task.stage);
  const int peer = owners[task.kind == TaskKind::fwd ? stage + 1 : stage - 1];
  return peer == owners[stage] ? std::nullopt : std::optional(peer);
}

SHARDLIB_INLINE std::vector<Operations> communication_plan(const TaskLists& lists, int receive_ahead) {
  if (receive_ahead < 0)
    throw UsageError("communication_plan: receive_ahead is " + std::to_string(receive_ahead) +
                     "; it counts the tasks by which receives are posted early, so give 0 or more");
  const std::vector<int> owners = stage_owners(lists);
  const int num_stages = static_cast<int>(owners.size());
  std::map<std::pair<int, int>, std::vector<Message>> sent;  // by sender and receiver, in the sender's order
  struct Need {
    std::size_t place;  ///< of the task in its list
    Task task;
  };
  std::map<std::pair<int, Message>, Need> needs;  // by receiver
  std::vector<std::vector<Task>> tasks;
  for (std::size_t r = 0; r < lists.size(); ++r) {
    const int rank = static_cast<int>(r);
    tasks.push_back(parts_of(lists[r]));
    for (std::size_t place = 0; place < tasks[r].size(); ++place) {
      const Task& task = tasks[r][place];
      if (const auto to = target_rank(task, owners)) sent[{rank, *to}].push_back(*output_of(task, num_stages));
      if (const auto input = input_of(task, num_stages)) needs.insert({{rank, *input}, {place, task}});
    }
  }

  // The receives before each task. Going backwards, no receive comes after one whose message is sent later.
  std::vector<std::vector<Operations>> receives;
  for (const auto& list : tasks) receives.emplace_back(list.size());
  for (const auto& [ends, messages] : sent) {
    const auto [from, to] = ends;
    auto& slots = receives[static_cast<std::size_t>(to)];
    std::size_t place = slots.size();
    for (auto message = messages.rbegin(); message != messages.rend(); ++message) {
      const Need& need = needs.at({to, *message});
      place = std::min(place, need.place);
      const std::size_t posted = place - std::min(place, static_cast<std::size_t>(receive_ahead));
      slots[posted].push_back({Operation::Kind::receive, need.task, *message, from});
    }
  }

  std::vector<Operations> plan(lists.size());
  for (std::size_t r = 0; r < lists.size(); ++r) {
    for (std::size_t place = 0; place < tasks[r].size(); ++place) {
      const Task& task = tasks[r][place];
      plan[r].insert(plan[r].end(), receives[r][place].rbegin(), receives[r][place].rend());
      plan[r].push_back({Operation::Kind::run, task, {}, -1});
      if (const auto to = target_rank(task, owners))
        plan[r].push_back({Operation::Kind::send, task, *output_of(task, num_stages), *to});
    }
  }
  return plan;
}

}  // namespace shardlib::pipeline
