// The memory that a trainer's state takes, for its plans.
#pragma once

#include <cstdint>
#include <type_traits>

#include "shardlib/run/plan.hpp"
#include "shardlib/run/training.hpp"

namespace shardlib::run {

/// Notes in `program` the parameters and bytes of weights, of their copies in the dtype of computation and of
/// gradients. Gradients have the copies' dtype, and f32 if they are sums of microbatches.
/// `note_state(program, training, weights, copies)`
template <class W, class C>
void note_state(Program& program, const Training& training, const W& weights, const C& copies) {
  const std::int64_t in_c = shard_bytes(copies);
  program.parameters = parameter_count(weights);
  program.weight_bytes = shard_bytes(weights);
  program.copy_bytes = std::is_same_v<W, C> ? 0 : in_c;
  program.gradient_bytes = training.microbatches == 1 ? in_c : program.weight_bytes;
}

}  // namespace shardlib::run
