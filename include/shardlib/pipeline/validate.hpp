// Checks that lists of tasks are a schedule that can run and computes the right gradients.
#pragma once

#include <string_view>
#include <vector>

#include "shardlib/pipeline/task.hpp"
#include "shardlib/support/inline.hpp"

namespace shardlib::pipeline {

/// Checks that every stage has every microbatch's forward task once, and its backward pass once, as `bwd` or as `bwdA`
/// and `bwdW`; that backward comes after forward and `bwdW` after `bwdA`; that the tasks of a stage are on its rank,
/// `owners[stage]`; that each rank has a stage; and that ranks which run their tasks in order all get to the end.
/// Throws UsageError with the schedule's name, the task, the rank and what to do; where ranks would wait for each other
/// forever, with all lists and the tasks they are stuck at. `validate("mine", lists, stage_owners(lists), 8)`
SHARDLIB_INLINE void validate(std::string_view name, const TaskLists& lists, const std::vector<int>& owners,
                              int microbatches);

}  // namespace shardlib::pipeline

#ifndef SHARDLIB_COMPILED
#include "shardlib/pipeline/impl/validate.hpp"
#endif
