// How often the host waits for its device in a training step of gpt2: once.
#include <cstdint>
#include <string>

#include "../examples/gpt2_step.hpp"
#include "host_waits.hpp"
#include "nccl_stand_in.hpp"
#include "support.hpp"

using namespace shardlib;
using namespace shardlib::test;

namespace {

struct Case {
  const char* mesh;
  std::int64_t microbatches = 1;
  bool gathers_once = false;
  std::int64_t lora = 0;
};

void check_steps(const Case& c) {
  INFO(c.mesh << ", " << c.microbatches << " microbatches, " << (c.gathers_once ? "gathered once" : "gathered for each")
              << ", adapters of rank " << c.lora);
  gpt2::Options o;
  o.layers = 2, o.d_model = 16, o.heads = 4, o.d_ff = 24, o.context = 8, o.lora = c.lora;
  o.training.seq = 8;
  o.training.clip = 1e-4;
  o.gather.per_step = c.gathers_once;
  on_mesh(c.mesh,
          [&](const DevicePtr& device) {
            const gpt2::Setup s{gpt2::Mesh2(device), o, 32};
            gpt2::Trained<f32> trained;
            trained.base.state.weights = gpt2::initial_weights(s);
            trained.lora.state.weights = gpt2::initial_adapters(s);
            if (o.lora > 0) {
              trained.base.copies = cast_tree<gpt2::Model<f32>>(trained.base.state.weights);
              run::begin(trained.lora, o.optimizer);
            } else {
              run::begin(trained.base, o.optimizer);
            }
            check_waits(device, o.training, 4 / s.mesh.size("d"), c.microbatches,
                        [&](const run::Step& step) { return gpt2::train_step(s, trained, step); });
          },
          {.kind = DeviceKind::simulated});
}

}  // namespace

TEST_CASE("the host waits once for its device in a step of gpt2", "[simulated][nccl]") {
  if (under_mpi()) return;
  check_steps({"d=1,t=1"});
  const Temporarily nccl(tuning.nccl, &stand_in::functions);
  const Temporarily apart(tuning.nccl_apart, true);
  stand_in::take_faults();
  check_steps({"d=1,t=2"});
  check_steps({.mesh = "d=2,t=1", .microbatches = 2});
  check_steps({.mesh = "d=2,t=1", .microbatches = 2, .gathers_once = true});
  check_steps({.mesh = "d=2,t=1", .microbatches = 2, .lora = 2});
  CHECK(stand_in::take_faults().empty());
}
