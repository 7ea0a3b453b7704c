// How often the host waits for its device in a training step: once, for the loss and the gradient norm together.
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "../examples/gpt_fsdp.hpp"
#include "nccl_stand_in.hpp"
#include "support.hpp"

using namespace shardlib;
using namespace shardlib::test;

namespace {

/// How often the host has waited for the device.
std::uint64_t waits(const DevicePtr& device) {
  return device->pool()->device_memory()->queue()->waits();
}

/// The numbers of step_result are those of item and global_norm.
void check_result(const DevicePtr& device) {
  struct Gradients {
    Tensor<f32, "M/d"> sharded;
    Tensor<bf16, "N"> whole;
  };
  const Mesh<"d"> mesh(device);
  const Sizes sizes{{"M", 10}, {"N", 3}};
  const Gradients grads{random_normal<f32, "M/d">(mesh, sizes, {1, 0}), random_normal<bf16, "N">(mesh, sizes, {2, 0})};
  const auto scalar = [&](double value) { return full<f32, "">(mesh, {}, value); };
  const run::Scalars losses{scalar(0.3), scalar(-1.7), scalar(1e-3)}, load{scalar(0.1), scalar(0.7)};
  const auto squares = squared_global_norm(mesh, grads);
  const std::uint64_t before = device->exec().on_device() ? waits(device) : 0;
  const run::StepResult result = run::step_result(losses, squares, {{"load", load}, {"none", {}}});
  if (device->exec().on_device()) expect(waits(device) - before == 1, "one wait");
  const auto number = [](const Tensor<f32, "">& x) -> double { return item(x); };
  expect(result.loss == number(losses[0]) + number(losses[1]) + number(losses[2]), "the loss");
  expect(result.grad_norm == global_norm(mesh, grads) && result.grad_norm > 1, "the norm");
  expect(result.numbers.size() == 2 && result.numbers[0].first == "load" && result.numbers[1].second == 0, "names");
  expect(result.numbers[0].second == number(load[0]) / 2 + number(load[1]) / 2, "a mean");
  const LeafRules frozen{{{"*", {.rate = 0}}}};
  expect(run::step_result({}, squared_global_norm(mesh, grads, frozen)).grad_norm == 0, "the norm of nothing");
}

/// The rows of a microbatch on each device.
io::TokenBatch tokens(std::int64_t rows, std::int64_t length, double weight) {
  io::TokenBatch batch = io::detail::empty_rows(rows, length);
  for (std::size_t i = 0; i < batch.inputs.size(); ++i) {
    batch.inputs[i] = static_cast<i32>(7 * i % 32);
    batch.targets[i] = static_cast<i32>(11 * i % 32);
    batch.weights[i] = static_cast<float>(weight);
  }
  return batch;
}

/// Steps of gpt_fsdp, of so many microbatches, wait once each.
void check_steps(const std::string& mesh, std::int64_t microbatches, bool gathers_once) {
  INFO(mesh << ", " << microbatches << " microbatches, " << (gathers_once ? "gathered once" : "gathered for each"));
  constexpr std::int64_t rows = 4, length = 8;
  Options o;
  o.layers = 2, o.d_model = 16, o.d_head = 4, o.d_ff = 24, o.vocabulary = 32;
  o.training.seq = length;
  o.training.clip = 1e-3;
  o.gather.per_step = gathers_once;
  on_mesh(mesh,
          [&](const DevicePtr& device) {
            const GptMesh on(device);
            Trained<f32> trained;
            trained.state.weights = gpt::initial_weights(on, o, 1);
            run::begin(trained, o.optimizer);
            const std::vector<io::TokenBatch> batches(
                static_cast<std::size_t>(microbatches),
                tokens(rows / microbatches / (on.size("r") * on.size("d")), length, 1.0 / (rows * length)));
            for (std::int64_t number = 0; number < 2; ++number) {
              const auto accepts = [&](const run::StepResult& result) { return result.grad_norm > o.training.clip; };
              const std::uint64_t before = waits(device);
              const auto result = train_step(on, trained, o, {number, 1e-3, batches, accepts});
              expect(waits(device) - before == 1, show(waits(device) - before) + " waits");
              expect(result.loss > 0 && accepts(result), "it is clipped");
            }
          },
          {.kind = DeviceKind::simulated});
}

}  // namespace

TEST_CASE("step_result has the numbers of item and global_norm, for one wait", "[run]") {
  on_mesh("d=2", check_result, {.kind = DeviceKind::cpu});
  on_mesh("d=2", check_result, {.kind = DeviceKind::simulated});
}

TEST_CASE("the host waits once for its device in a step of gpt_fsdp", "[simulated][nccl]") {
  if (under_mpi()) return;
  check_steps("r=1,d=1,s=1,t=1", 1, false);
  const Temporarily nccl(tuning.nccl, &stand_in::functions);
  const Temporarily apart(tuning.nccl_apart, true);
  stand_in::take_faults();
  check_steps("r=2,d=1,s=1,t=2", 1, false);
  check_steps("r=1,d=2,s=2,t=1", 2, false);
  check_steps("r=1,d=2,s=2,t=1", 2, true);
  CHECK(stand_in::take_faults().empty());
}
