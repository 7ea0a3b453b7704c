// The messages between the ranks of a pipeline and their order: the task list of a rank with its sends and receives.
// Activations go from a stage to the next one. `bwd` and `bwdA` send gradients back. Stages on one rank pass values
// within it. If sends do not wait for the receiver, ranks that run their operations in order cannot deadlock, even if
// they wait at each receive.
#pragma once

#include <compare>
#include <optional>
#include <string>
#include <vector>

#include "shardlib/pipeline/task.hpp"
#include "shardlib/support/inline.hpp"

namespace shardlib::pipeline {

/// The content of a message: an `activation` forward, or its `gradient` backward.
enum class Payload { activation, gradient };

/// One payload on its way between two neighboring stages, for one microbatch: a tensor, or a few, always the same.
struct Message {
  Payload payload = Payload::activation;
  int boundary = 0;  ///< b lies between the stages b and b + 1
  int microbatch = 0;
  friend auto operator<=>(const Message&, const Message&) = default;
};
[[nodiscard]] SHARDLIB_INLINE std::string to_string(const Message& message);

/// The message that the task needs from the next or the previous stage. Nothing for the forward pass of the first
/// stage, the backward pass of the last one, and bwdW. `input_of({TaskKind::fwd, 1, 0}, 4)`
[[nodiscard]] SHARDLIB_INLINE std::optional<Message> input_of(const Task& task, int num_stages);
/// The message that the task makes for the next or the previous stage. `output_of({TaskKind::fwd, 1, 0}, 4)`
[[nodiscard]] SHARDLIB_INLINE std::optional<Message> output_of(const Task& task, int num_stages);

/// The rank that the task's output goes to, where that is another one; `owners` has the rank of each stage.
/// `target_rank(task, stage_owners(lists))`
[[nodiscard]] SHARDLIB_INLINE std::optional<int> target_rank(const Task& task, const std::vector<int>& owners);

/// A step of a rank, of one `Kind`: it runs a task, or receives or sends a message.
struct Operation {
  enum class Kind { receive, run, send };
  Kind kind = Kind::run;  ///< what the rank does
  Task task;              ///< to run; for `receive` the one that needs the message, for `send` the one that has made it
  Message message{};      ///< not for `run`
  int peer = -1;          ///< the other rank; not for `run`
  friend bool operator==(const Operation&, const Operation&) = default;
};
[[nodiscard]] SHARDLIB_INLINE std::string to_string(const Operation& operation);

/// The operations of one rank, in order.
using Operations = std::vector<Operation>;

/// The operations of each rank. A task's receive comes before it, its send right after it. Between two ranks messages
/// are received in the order in which they are sent, so they need no tags; where a rank needs them in another order, it
/// receives the earlier ones ahead of their use. With `receive_ahead` n all receives stand n tasks earlier, to be
/// posted without waiting: a transfer then runs during n tasks, and takes n buffers more. The lists must be valid
/// (`validate`), as those of Schedule::tasks are. `communication_plan(schedule.tasks(8))`
[[nodiscard]] SHARDLIB_INLINE std::vector<Operations> communication_plan(const TaskLists& lists, int receive_ahead = 0);

}  // namespace shardlib::pipeline

#ifndef SHARDLIB_COMPILED
#include "shardlib/pipeline/impl/communication.hpp"
#endif
