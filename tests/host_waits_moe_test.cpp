// How often the host waits for its device in a training step of moe with slots: once.
#include <cstdint>
#include <string>

#include "../examples/moe_step.hpp"
#include "host_waits.hpp"
#include "nccl_stand_in.hpp"
#include "support.hpp"

using namespace shardlib;
using namespace shardlib::test;

namespace {

void check_steps(const std::string& mesh, std::int64_t microbatches, bool gathers_once) {
  INFO(mesh << ", " << microbatches << " microbatches, " << (gathers_once ? "gathered once" : "gathered for each"));
  moe::Options o;
  o.layers = 2, o.d_model = 16, o.d_head = 4, o.d_ff = 24, o.experts = 4, o.vocabulary = 32;
  o.config.capacity = 1.25;
  o.training.seq = 8;
  o.training.clip = 1e-4;
  o.gather.per_step = gathers_once;
  on_mesh(mesh,
          [&](const DevicePtr& device) {
            const moe::MoeMesh on(device);
            moe::Trained<f32> trained;
            trained.state.weights = moe::initial_weights(on, o, 1);
            run::begin(trained, o.optimizer);
            check_waits(device, o.training, 4 / (on.size("d") * on.size("e")), microbatches,
                        [&](const run::Step& step) { return moe::train_step<f32>(on, trained, o, step); });
          },
          {.kind = DeviceKind::simulated});
}

}  // namespace

TEST_CASE("the host waits once for its device in a step of moe with slots", "[simulated][nccl]") {
  if (under_mpi()) return;
  check_steps("d=1,e=1,s=1,t=1", 1, false);
  const Temporarily nccl(tuning.nccl, &stand_in::functions);
  const Temporarily apart(tuning.nccl_apart, true);
  stand_in::take_faults();
  check_steps("d=1,e=2,s=1,t=1", 2, false);
  check_steps("d=1,e=2,s=1,t=1", 2, true);
  check_steps("d=1,e=1,s=1,t=2", 1, false);
  CHECK(stand_in::take_faults().empty());
}
