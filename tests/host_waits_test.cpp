// How often the host waits for its device in a training step: once, for the loss and the gradient norm together.
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "../examples/gpt_fsdp.hpp"
#include "host_waits.hpp"
#include "nccl_stand_in.hpp"
#include "support.hpp"

using namespace shardlib;
using namespace shardlib::test;

namespace {

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

/// Steps of gpt_fsdp, of so many microbatches, wait once each.
void check_steps(const std::string& mesh, std::int64_t microbatches, bool gathers_once) {
  INFO(mesh << ", " << microbatches << " microbatches, " << (gathers_once ? "gathered once" : "gathered for each"));
  constexpr std::int64_t rows = 4;
  Options o;
  o.layers = 2, o.d_model = 16, o.d_head = 4, o.d_ff = 24, o.vocabulary = 32;
  o.training.seq = 8;
  o.training.clip = 1e-3;
  o.gather.per_step = gathers_once;
  on_mesh(mesh,
          [&](const DevicePtr& device) {
            const GptMesh on(device);
            Trained<f32> trained;
            trained.state.weights = gpt::initial_weights(on, o, 1);
            run::begin(trained, o.optimizer);
            check_waits(device, o.training, rows / (on.size("r") * on.size("d")), microbatches,
                        [&](const run::Step& step) { return train_step(on, trained, o, step); });
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
