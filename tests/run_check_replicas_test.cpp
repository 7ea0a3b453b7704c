// Values that the types call replicated, compared: by a call of one's own, and every few steps of a run.
#include <shardlib/run/check_replicas.hpp>
#include <shardlib/run/checkpoints.hpp>
#include <shardlib/run/training.hpp>
#include <shardlib/shardlib.hpp>

#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "support.hpp"

using namespace shardlib;
using namespace shardlib::test;

namespace {

struct Model {
  Tensor<f32, "M/d"> w;
  Tensor<f32, "M/t/d"> sharded;
  Array<"layers", Tensor<f32, "">> gains;
};

const Sizes sizes{{"M", 8}};

/// A tensor of one number, which only a device that has drifted off holds otherwise.
template <Spec S>
Tensor<f32, S> filled(const Mesh<"d t">& mesh, float number) {
  const auto like = ones<f32, S>(mesh, sizes);
  const auto values = std::make_shared<std::vector<f32>>(like.span().size(), number);
  return from_memory<f32, S>(mesh, sizes, std::span<const f32>(*values), values);
}

Model model(const Mesh<"d t">& mesh, float w, float sharded, float gain) {
  return {filled<"M/d">(mesh, w), filled<"M/t/d">(mesh, sharded), {filled<"">(mesh, 1), filled<"">(mesh, gain)}};
}

constexpr const char* end = ": a device has computed something else, or a program has changed its copy alone";

TEST_CASE("check_replicas: copies that differ are named with leaf, axes and devices", "[run][replicas]") {
  on_mesh("d=2,t=2", [](const Mesh<"d t">& mesh) {
    const int rank = mesh.device()->rank();
    const auto differ = [&](const Model& m, const run::ReplicatedNumbers& numbers = {}) {
      return error_of([&] { run::check_replicas(mesh, m, "after step 7", numbers); });
    };
    expect(differ(model(mesh, 1, 1, 1)) == "no error", "all alike");
    // A shard of its own may hold anything: no other device has it.
    expect(differ(model(mesh, 1, static_cast<float>(rank), 1)) == "no error", "sharded over both axes");
    expect(differ(model(mesh, rank < 2 ? 1 : 2, 1, 1)) == "no error", "sharded over d");

    std::string said = differ(model(mesh, rank == 3 ? 2 : 1, 1, 1));
    expect(said == std::string("check_replicas after step 7: the leaf `w` of spec `M/d` is replicated over t, but "
                               "device 2 holds one value, device 3 another") +
                       end,
           said);
    // -0 and 0 compare alike, but are not the same bits.
    said = differ(model(mesh, 1, 1, rank == 1 ? -0.0F : 0.0F));
    expect(said == std::string("check_replicas after step 7: the leaf `gains.1` of spec `` is replicated over d,t, "
                               "but devices 0, 2, 3 hold one value, device 1 another") +
                       end,
           said);
    said = differ(model(mesh, 1, 1, 1), {{"step", 7}, {"seed", rank == 0 ? 4U : 3U}});
    expect(said == std::string("check_replicas after step 7: `seed` is replicated over d,t, but devices 1, 2, 3 hold "
                               "one value, device 0 another") +
                       end,
           said);
    said = differ(model(mesh, rank % 2 == 0 ? 2 : 1, 1, static_cast<float>(rank)));
    expect(said.find("; 1 more differs" + std::string(end)) != std::string::npos, said);
  });
}

TEST_CASE("check_replicas: copies of NaN of the same bits are alike", "[run][replicas]") {
  on_mesh("d=1,t=2", [](const Mesh<"d t">& mesh) {
    run::check_replicas(mesh, model(mesh, std::numeric_limits<float>::quiet_NaN(), 1, 1), "now");
  });
}

TEST_CASE("training: --check-replicas names the first step that shows a difference", "[run][replicas]") {
  for (const std::int64_t every : {0, 1, 2}) {
    on_mesh("d=1,t=2", [every](const Mesh<"d t">& mesh) {
      run::Training training;
      training.steps = 6;
      training.check_replicas = every;
      training.sample.max_tokens = 0;
      Model state = model(mesh, 1, 1, 1);
      std::int64_t done = 0;
      run::Program program;
      program.checkpoints = run::checkpoints_of(mesh, state, training);
      program.step = [&](const run::Step&) {
        ++done;
        // As if an update were missed: nothing communicates the weights again.
        if (done == 4 && mesh.device()->rank() == 1) state.w = filled<"M/d">(mesh, 2);
        return run::StepResult{1, 1};
      };
      const std::string said = error_of([&] { run::train(mesh.device(), training, run::Data{}, "", program); });
      if (every == 0) return expect(said == "no error" && done == 6, said);
      const std::string alike =
          every == 1 ? " (after step 2 no device differed)" : " (after step 1 no device differed)";
      expect(said == "check_replicas after step 3" + alike +
                         ": the leaf `w` of spec `M/d` is replicated over t, but device 0 holds one value, device 1 "
                         "another" +
                         end,
             said);
      expect(done == 4, show(done) + " steps");
    });
  }
}

TEST_CASE("training: a loss that differs among devices is found", "[run][replicas]") {
  on_mesh("d=2,t=1", [](const Mesh<"d t">& mesh) {
    run::Training training;
    training.steps = 2;
    training.check_replicas = 1;
    training.sample.max_tokens = 0;
    Model state = model(mesh, 1, 1, 1);
    run::Program program;
    program.checkpoints = run::checkpoints_of(mesh, state, training);
    program.step = [&](const run::Step&) { return run::StepResult{mesh.device()->rank() == 0 ? 1.0 : 1.5, 1}; };
    const std::string said = error_of([&] { run::train(mesh.device(), training, run::Data{}, "", program); });
    expect(said == std::string("check_replicas after step 0: `loss` is replicated over d, but device 0 holds one "
                               "value, device 1 another") +
                       end,
           said);
  });
}

}  // namespace
