// Pipelines on GPUs that communicate by NCCL, over a stand-in for it: messages between stages go from GPU to GPU.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "nccl_stand_in.hpp"
#include "pipeline_model.hpp"
#include "shardlib/pipeline/communication.hpp"

using namespace shardlib;
using namespace shardlib::test;
using stand_in::take_faults;

namespace {

constexpr std::size_t activation = sizeof(f32) * microbatch_rows * length * 16;

/// Runs `body` on the simulated device with the stand-in, each device as in a process of its own. Checks that the
/// stand-in has found no fault.
void on_nccl(const std::string& mesh, const DeviceBody& body) {
  const Temporarily nccl(tuning.nccl, &stand_in::functions);
  const Temporarily apart(tuning.nccl_apart, true);
  take_faults();
  on_mesh(mesh, body, {.kind = DeviceKind::simulated, .watchdog = {.timeout = std::chrono::minutes(2)}});
  CHECK(take_faults() == std::vector<std::string>{});
}

/// How many messages the ranks send in a step, and between how many pairs of a sender and a receiver they can.
std::pair<int, int> messages_of(const pipeline::Schedule& schedule) {
  int messages = 0;
  std::set<std::pair<int, int>> pairs;
  const auto plan = pipeline::communication_plan(schedule.tasks(microbatches));
  for (int rank = 0; rank < static_cast<int>(plan.size()); ++rank)
    for (const pipeline::Operation& operation : plan[static_cast<std::size_t>(rank)])
      if (operation.kind == pipeline::Operation::Kind::send) {
        ++messages;
        pairs.insert({rank, operation.peer});
        pairs.insert({operation.peer, rank});
      }
  return {messages, static_cast<int>(pairs.size())};
}

/// The first step sends its messages through host memory, the second one from GPU to GPU, with the same results.
void check_steps(const std::string& mesh, const pipeline::Schedule& schedule) {
  INFO(schedule.name() << " on " << mesh);
  const Whole& whole = unpipelined(false);
  const auto [messages, pairs] = messages_of(schedule);
  const auto ranks = static_cast<std::size_t>(parse_mesh(mesh)[0].size);
  std::vector<std::size_t> taken(2 * ranks);  // of host memory, by each rank in each step
  const int before = stand_in::world.launched[stand_in::Kind::send];
  on_nccl(mesh, [&](const DevicePtr& device) {
    const Staging staging(device, schedule, whole.weights, false);
    const auto program = staging.program<gpt::Stages<f32>>();
    std::vector<std::vector<f32>> results;
    for (std::size_t step = 0; step < 2; ++step) {
      device->host_pool()->reset_peak();
      const std::size_t live = device->host_pool()->stats().live;
      const auto& queue = *device->pool()->device_memory()->queue();
      const std::uint64_t waits = queue.waits();
      const auto made =
          pipeline::value_and_grad(staging.mesh, schedule, microbatches, program, staging.model, activation_sizes);
      taken[2 * static_cast<std::size_t>(staging.mesh.rank()) + step] = device->host_pool()->stats().peak - live;
      const gpt::StageModel<f32> gradients = reduce_gradients(
          staging.mesh, made.gradients, [&](std::string_view leaf) { return gpt::owners(schedule, false, leaf); });
      const double norm = pipeline::global_norm(staging.mesh, gradients, [](std::string_view) { return true; });
      expect(norm > 0 && (step == 0 || queue.waits() - waits == 1),
             "the host waits for the norm, and for nothing else");
      results.push_back({static_cast<f32>(item(all_reduce<"+d +p +r +s +t -> ">(made.loss)))});
      for_each_leaf(
          [&](std::string_view name, const auto& leaf) {
            const HostArray<f32> values = fetch(leaf);
            const double apart = distance(values, whole.gradients.at(staging.name_in_model(name)), std::string(name));
            expect(apart <= 1e-4, "the gradient of " + std::string(name) + " differs by " + show(apart));
            results.back().insert(results.back().end(), values.data.begin(), values.data.end());
          },
          gradients);
    }
    expect(results[0] == results[1], schedule.name() + ": other bits than through host memory");
    expect(std::abs(static_cast<double>(results[0][0]) - whole.loss) < 1e-6 * whole.loss, "the loss");
  });
  CHECK(stand_in::world.launched[stand_in::Kind::send] - before == messages + pairs);
  for (std::size_t rank = 0; rank < ranks; ++rank) {
    CHECK(taken[2 * rank] >= activation);
    CHECK(taken[2 * rank + 1] < activation);
  }
}

}  // namespace

TEST_CASE("pipeline: from the second step on, under every schedule, messages go from GPU to GPU", "[pipeline][nccl]") {
  if (under_mpi()) return;
  std::uint64_t seed = 0;
  for (const pipeline::Schedule& schedule : schedules(2)) {
    const Temporarily early(tuning.simulated_seed, seed++);
    check_steps("p=2,d=1,s=1,t=1", schedule);
  }
  for (const pipeline::Schedule& schedule : main_schedules(4)) {
    const Temporarily early(tuning.simulated_seed, seed++);
    check_steps("p=4,d=1,s=1,t=1", schedule);
  }
}

namespace {
std::atomic<int> losses_left;
/// Fails at the given one of its losses.
struct Stopping : gpt::Stages<f32> {
  [[nodiscard]] auto loss(const gpt::StageModel<f32>& w, const gpt::Residual& x, const pipeline::StagePlace& at) const {
    if (losses_left-- == 0) throw Error("my own");
    return gpt::Stages<f32>::loss(w, x, at);
  }
};
}  // namespace

TEST_CASE("pipeline: a rank that stops ends those that exchange messages with it by NCCL", "[pipeline][nccl]") {
  if (under_mpi()) return;
  const Whole& whole = unpipelined(false);
  const pipeline::ZeroBubble schedule(4);
  losses_left = microbatches + 3;  // in the second step
  const std::string text = error_of([&] {
    on_nccl("p=4,d=1,s=1,t=1", [&](const DevicePtr& device) {
      const Staging staging(device, schedule, whole.weights, false);
      for (int step = 0; step < 2; ++step)
        static_cast<void>(pipeline::value_and_grad(staging.mesh, schedule, microbatches, staging.program<Stopping>(),
                                                   staging.model, activation_sizes));
    });
  });
  CHECK(text.ends_with("my own"));
  CHECK(losses_left < 0);
  CHECK(take_faults().empty());
}

TEST_CASE("pipeline: the sum of a weight that stages share goes from GPU to GPU from the second one on",
          "[pipeline][nccl]") {
  if (under_mpi()) return;
  using pipeline::StagedMesh;
  constexpr std::int64_t shortest = 1000;
  std::vector<std::vector<std::size_t>> taken(3);  // of host memory, by each rank for each sum
  on_nccl("p=3,d=1", [&](const DevicePtr& device) {
    const StagedMesh<"p", "p d"> mesh(device);
    const auto sum_twice = [&]<class D>(D, std::int64_t size) {
      for (int step = 0; step < 2; ++step) {
        const auto part = mesh.part_of_sum(full<D, "M">(mesh.stage(), {{"M", size}}, mesh.rank() + 1));
        if (mesh.rank() == 1) continue;
        device->host_pool()->reset_peak();
        const std::size_t live = device->host_pool()->stats().live;
        const auto sum = mesh.sum_over({0, 2}, part);
        taken[static_cast<std::size_t>(mesh.rank())].push_back(device->host_pool()->stats().peak - live);
        expect(fetch(sum).data == std::vector<D>(static_cast<std::size_t>(size), 4), "1 + 3");
      }
    };
    // Each dtype and each size begins anew: its kernels may be others, which have to be loaded.
    sum_twice(f32{}, shortest);
    sum_twice(f64{}, shortest);
    sum_twice(f32{}, 2 * shortest);
  });
  for (const std::size_t rank : {std::size_t{0}, std::size_t{2}}) {
    REQUIRE(taken[rank].size() == 6);
    for (std::size_t sum = 0; sum < 6; ++sum) {
      INFO("rank " << rank << ", sum " << sum);
      CHECK((taken[rank][sum] >= shortest * sizeof(f32)) == (sum % 2 == 0));
    }
  }
}

TEST_CASE("pipeline: sums over the same ranks of two axes take their ways apart from each other", "[pipeline][nccl]") {
  if (under_mpi()) return;
  using pipeline::StagedMesh;
  on_nccl("p=2,q=2", [&](const DevicePtr& device) {
    const StagedMesh<"p", "p q"> along_p(device);
    const StagedMesh<"q", "p q"> along_q(device);
    const auto sum_of = [](const auto& mesh, double own) {
      const auto part = mesh.part_of_sum(full<f32, "M">(mesh.stage(), {{"M", 8}}, own));
      return fetch(mesh.sum_over({0, 1}, part)).data[0];
    };
    // The devices of q=0 have exchanged messages along p before, and their neighbors along q have not.
    if (along_q.rank() == 0) expect(sum_of(along_p, along_p.rank() + 1) == 3, "1 + 2 along p");
    for (int step = 0; step < 2; ++step) expect(sum_of(along_q, along_q.rank() + 1) == 3, "1 + 2 along q");
  });
}
