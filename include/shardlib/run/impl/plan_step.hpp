// The report of `train` in a dry run, which counts one step.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "shardlib/io/data/token_batch.hpp"
#include "shardlib/run/impl/batches.hpp"
#include "shardlib/run/plan.hpp"
#include "shardlib/run/training.hpp"

namespace shardlib::run::detail {

inline Plan plan_step(const DevicePtr& device, const Training& t, const Program& program) {
  const std::int64_t rows = t.batch / t.microbatches / BatchPlace(*device, t).parts;
  const std::vector parts(static_cast<std::size_t>(t.microbatches), io::detail::empty_rows(rows, t.seq));
  Plan plan = count_step(device, [&] {
    program.step({0, lr_schedule(t)(0), parts, [](const StepResult&) { return true; }});
  });
  plan.parameters = program.parameters;
  plan.weights = program.weight_bytes;
  plan.copies = program.copy_bytes;
  plan.gradients = program.gradient_bytes.value_or(program.weight_bytes);
  plan.optimizer = program.optimizer_bytes;
  plan.model_flops = program.flops_per_token * static_cast<double>(t.batch * t.seq);
  return plan;
}

}  // namespace shardlib::run::detail
