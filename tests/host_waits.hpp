// How often the host waits for the simulated device in a training step.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "shardlib/run/training.hpp"
#include "shardlib/shardlib.hpp"
#include "support.hpp"

namespace shardlib::test {

/// How often the host has waited for the device.
inline std::uint64_t waits(const DevicePtr& device) {
  return device->pool()->device_memory()->queue()->waits();
}

/// The rows of a microbatch on each device.
inline io::TokenBatch tokens(std::int64_t rows, std::int64_t length, double weight) {
  io::TokenBatch batch = io::detail::empty_rows(rows, length);
  for (std::size_t i = 0; i < batch.inputs.size(); ++i) {
    batch.inputs[i] = static_cast<i32>(7 * i % 32);
    batch.targets[i] = static_cast<i32>(11 * i % 32);
    batch.weights[i] = static_cast<float>(weight);
  }
  return batch;
}

/// step(run::Step) with so many rows of each device, in so many microbatches, waits once, for a loss and a norm by
/// which it is clipped.
template <class F>
void check_waits(const DevicePtr& device, const run::Training& training, std::int64_t rows, std::int64_t microbatches,
                 const F& step) {
  const std::int64_t all = rows * training.seq * device->size();
  const std::vector<io::TokenBatch> batches(static_cast<std::size_t>(microbatches),
                                            tokens(rows / microbatches, training.seq, 1.0 / static_cast<double>(all)));
  for (std::int64_t number = 0; number < 2; ++number) {
    const auto accepts = [&](const run::StepResult& result) { return result.grad_norm > training.clip; };
    const std::uint64_t before = waits(device);
    const run::StepResult result = step(run::Step{number, 1e-3, batches, accepts});
    expect(waits(device) - before == 1, show(waits(device) - before) + " waits");
    expect(result.loss > 0 && accepts(result), "it is clipped");
  }
}

}  // namespace shardlib::test
