// The ranks of a pipeline agree on their tasks, and on the way of their messages, before they run them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "shardlib/comm/collective_call.hpp"
#include "shardlib/pipeline/execute.hpp"
#include "shardlib/pipeline/staged_mesh.hpp"
#include "shardlib/support/error.hpp"

namespace shardlib::pipeline::detail {

/// The ranks compare these facts about the schedule that each is about to run.
struct SharedLists {
  std::uint64_t fingerprint = 0;
  char name[120] = {};  ///< of the schedule, for the error
};

/// A number of the lists that is the same on all ranks.
inline std::uint64_t fingerprint_of(const StageProgram& program, const TaskLists& lists) {
  core::Fingerprint print;
  print.add(program.axis);
  for (const TaskList& list : lists) {
    for (const FusedTask& fused : list)
      for (const Task& task : fused.parts) print.add(to_string(task));
    print.add("of a rank");
  }
  return print.value();
}

/// Throws unless all ranks run the same lists: messages have no names, and one could be taken for another. Ranks
/// compare them before each step: a rank that alone changes its lists would wait forever. Forward passes alone,
/// which need not wait for each other, compare them where they change.
inline void require_same_lists(const StageProgram& program, std::uint64_t fingerprint, const std::string& schedule) {
  SharedLists& known = program.device->local<SharedLists>();
  if (!program.differentiate && known.fingerprint == fingerprint) return;
  SharedLists now{.fingerprint = fingerprint};
  const std::string name = schedule + " for " + std::to_string(program.microbatches) + " microbatches";
  name.copy(now.name, sizeof now.name - 1);
  Communicator& group = program.device->group({program.axis});
  const auto ranks = static_cast<std::size_t>(group.size());
  const Buffer mine = program.device->host_pool()->allocate(sizeof now);
  const Buffer all = program.device->host_pool()->allocate(ranks * sizeof now);
  *mine.as<SharedLists>() = now;
  group.all_gather(mine, all).wait();
  const std::span theirs(all.as<SharedLists>(), ranks);
  const auto other =
      std::ranges::find_if(theirs, [&](const SharedLists& one) { return one.fingerprint != theirs[0].fingerprint; });
  if (other != theirs.end())
    throw UsageError("pipeline: rank " + std::to_string(other - theirs.begin()) + " of " + std::string(program.axis) +
                     " runs other tasks (" + other->name + ") than rank 0 (" + theirs[0].name +
                     "); give all ranks the same schedule, for the same number of microbatches");
  known = now;
}

/// Chooses the way of the messages between this rank's stages and those of others (set_direct). Lists or sizes that
/// differ count as another purpose, because they can need other kernels.
inline void choose_way(const StageProgram& program, const TaskLists& lists, std::uint64_t fingerprint) {
  core::Fingerprint purpose;
  purpose.add(fingerprint).add(program.differentiate ? "with gradients" : "");
  for (const ValuePtr& activation : program.activations)
    for (int i = 0; i < activation->global.size(); ++i) purpose.add(core::to_string(activation->global[i]));
  const std::vector<int> owners = stage_owners(lists);
  const int rank = program.device->whole()->axis_index(program.axis);
  std::set<int> peers;
  for (std::size_t stage = 1; stage < owners.size(); ++stage) {
    const int before = owners[stage - 1], after = owners[stage];
    if (before != after && (before == rank || after == rank)) peers.insert(before == rank ? after : before);
  }
  set_direct(program.device, program.axis, purpose.value(), {peers.begin(), peers.end()});
}

/// The ranks agree on what they run, and on the way of their messages. In a dry run no other rank can answer, and no
/// message travels.
inline void prepare(const StageProgram& program, const TaskLists& lists, const std::string& schedule) {
  if (program.axis.empty() || program.device->is_dry()) return;
  const std::uint64_t fingerprint = fingerprint_of(program, lists);
  require_same_lists(program, fingerprint, schedule);
  choose_way(program, lists, fingerprint);
}

}  // namespace shardlib::pipeline::detail
