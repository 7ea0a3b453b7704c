// The texts that gpt_pipeline prints without training: the tasks and transfers of its schedule (--show-schedule), and
// the rank that holds each array (--show-placement).
#pragma once

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <shardlib/comm/dry.hpp>
#include <shardlib/io/checkpoint/checkpoint.hpp>
#include <shardlib/pipeline/communication.hpp>
#include <shardlib/pipeline/program.hpp>
#include <shardlib/pipeline/simulate.hpp>
#include <shardlib/run/plan.hpp>
#include <shardlib/run/trained.hpp>
#include <shardlib/shardlib.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

namespace pipeline_text {

using namespace shardlib;

// A device of each rank of the stage axis, which is the mesh's first axis. It need not exist: nothing is computed.
inline std::vector<DevicePtr> dry_devices(const std::vector<AxisSize>& mesh) {
  std::vector<DevicePtr> devices;
  const int ranks = mesh.at(0).size, behind = device_count(mesh) / ranks;
  for (int rank = 0; rank < ranks; ++rank)
    devices.push_back(DevicePtr::make(mesh, rank * behind, std::make_shared<DryWorld>()));
  return devices;
}

// A stage takes as long as its layers. A rank with an equal part of the model's layers takes 1 forward, 2 backward.
inline pipeline::Costs costs_of(const pipeline::Schedule& schedule, const pipeline::LayerMap& layer_map,
                                double layers) {
  pipeline::Costs costs;
  costs.stages.clear();
  for (int stage = 0; stage < schedule.num_stages(); ++stage) {
    const double share = static_cast<double>(layer_map.layers_of_stage(stage)) * schedule.mpmd_dim() / layers;
    costs.stages.push_back({.fwd = share, .bwd = 2 * share, .bwdA = share, .bwdW = share});
  }
  return costs;
}

// The tasks of each rank, their simulation, and the messages of a step between each two ranks. `bytes` has a message
// of one device.
inline std::string schedule_text(const pipeline::Schedule& schedule, const pipeline::LayerMap& layer_map,
                                 std::int64_t layers, int microbatches, std::int64_t bytes) {
  const pipeline::TaskLists lists = schedule.tasks(microbatches);
  const auto result = pipeline::simulate(lists, costs_of(schedule, layer_map, static_cast<double>(layers)));
  std::string text = to_string(lists);
  std::vector<std::size_t> counts;
  for (int stage = 0; stage < schedule.num_stages(); ++stage) counts.push_back(layer_map.layers_of_stage(stage));
  text += fmt::format("\nlayers of each stage: {}\n", fmt::join(counts, " "));
  text += fmt::format("times: {:g} layers take 1 forward and 2 backward; embedding, loss and transfers take none\n",
                      static_cast<double>(layers) / schedule.mpmd_dim());
  text += to_string(result);

  struct Sum {
    std::int64_t activations = 0, gradients = 0;
  };
  std::map<std::pair<int, int>, Sum> sums;  // by sender and receiver
  const auto plan = pipeline::communication_plan(lists);
  for (std::size_t rank = 0; rank < plan.size(); ++rank)
    for (const pipeline::Operation& operation : plan[rank])
      if (operation.kind == pipeline::Operation::Kind::send) {
        Sum& sum = sums[{static_cast<int>(rank), operation.peer}];
        ++(operation.message.payload == pipeline::Payload::activation ? sum.activations : sum.gradients);
      }
  text += fmt::format("\ntransfers of a step: {} a message of one device\n", run::detail::short_bytes(bytes));
  text += fmt::format("{:>6}{:>6}{:>14}{:>12}{:>14}\n", "from", "to", "activations", "gradients", "sent");
  for (const auto& [ends, sum] : sums)
    text += fmt::format("{:>6}{:>6}{:>14}{:>12}{:>14}\n", ends.first, ends.second, sum.activations, sum.gradients,
                        run::detail::short_bytes((sum.activations + sum.gradients) * bytes));
  return text;
}

// A table of the arrays of a rank. An array that all layers have is one row. `held` has the layers' numbers in the
// model, and `name_in_model` renames the other leaves.
template <class Weights>
std::string weights_text(const Weights& weights, const std::vector<int>& held, const io::Rename& name_in_model) {
  struct Row {
    std::string name, type, shape;
    std::int64_t bytes = 0;  // of one device
  };
  std::vector<Row> rows;
  std::size_t name_width = 5, type_width = 4, shape_width = 5;
  for_each_leaf(
      [&]<class D, Spec S>(std::string_view name, const Tensor<D, S>& leaf) {
        const auto bytes = static_cast<std::int64_t>(leaf.value()->bytes());
        constexpr std::string_view first = "layers/0/", layer = "layers/";
        if (name.starts_with(layer) && !name.starts_with(first)) return;
        Row row{"", fmt::format("{}[{}]", shardlib::name(dtype_v<D>), std::string_view(S)),
                fmt::format("{}", fmt::join(leaf.global_shape(), " ")), bytes};
        if (name.starts_with(first)) {
          row.name = fmt::format("layers/*/{}", name.substr(first.size()));
          row.bytes *= static_cast<std::int64_t>(held.size());
        } else {
          row.name = name_in_model(std::string(name));
        }
        name_width = std::max(name_width, row.name.size());
        type_width = std::max(type_width, row.type.size());
        shape_width = std::max(shape_width, row.shape.size());
        rows.push_back(std::move(row));
      },
      weights);
  std::string text = fmt::format("  {:<{}}  {:<{}}  {:<{}}{:>12}\n", "array", name_width, "type", type_width, "shape",
                                 shape_width, "a device");
  for (const Row& row : rows)
    text += fmt::format("  {:<{}}  {:<{}}  {:<{}}{:>12}\n", row.name, name_width, row.type, type_width, row.shape,
                        shape_width, run::detail::short_bytes(row.bytes));
  return text;
}

// What the rank holds at rest: a table of the weights, and the bytes of other arrays, most of which have their
// sharding.
template <class W, class C>
std::string placement_text(const pipeline::Schedule& schedule, int rank, const std::vector<int>& held,
                           const io::Rename& name_in_model, const run::Trained<W, C>& trained) {
  const run::TrainState<W>& state = trained.state;
  const auto stages = schedule.stages_of(rank);
  std::string text = fmt::format("rank {}: stage{} {}, layer{} {}\n", rank, stages.size() == 1 ? "" : "s",
                                 fmt::join(stages, " "), held.size() == 1 ? "" : "s", fmt::join(held, " "));
  text += weights_text(state.weights, held, name_in_model);
  const auto total = [&](std::string_view what, std::int64_t bytes) {
    text += fmt::format("  {:<40}{:>12}\n", what, run::detail::short_bytes(bytes));
  };
  total("all weights", run::shard_bytes(state.weights));
  if constexpr (!std::is_same_v<W, C>) total("copies for computation, same sharding", run::shard_bytes(trained.copies));
  total("gradients, same sharding", run::shard_bytes(trained.copies));
  for (const W& mu : state.mu) total("the optimizer's mu, same sharding", run::shard_bytes(mu));
  for (const W& nu : state.nu) total("the optimizer's nu, same sharding", run::shard_bytes(nu));
  for (const auto& rows : state.rows) total("the optimizer's rows", run::shard_bytes(rows));
  for (const auto& cols : state.cols) total("the optimizer's cols", run::shard_bytes(cols));
  for (const W& ema : state.ema) total("the average, same sharding", run::shard_bytes(ema));
  return text;
}

}  // namespace pipeline_text
