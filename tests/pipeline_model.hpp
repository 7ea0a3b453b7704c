// The GPT of examples/gpt_model.hpp, whole and in stages, small: what the tests of running pipelines compare.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <shardlib/pipeline/execute.hpp>
#include <shardlib/shardlib.hpp>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "../examples/gpt_stages.hpp"
#include "support.hpp"

namespace shardlib::test {

using Staged = pipeline::StagedMesh<"p", "p d t">;
using GptStaged = pipeline::StagedMesh<"p", "p r d s t">;
using Host = std::map<std::string, HostArray<f32>>;  // by the names of gpt::Model<f32>'s leaves

inline constexpr int microbatches = 8, layers = 8;
inline constexpr std::int64_t microbatch_rows = 2, length = 6, vocabulary = 32;
inline const Sizes model_sizes{{"M", 16}, {"Q", 1}, {"K", 2}, {"D", 4}, {"F", 24}, {"V", vocabulary}};
inline const Sizes activation_sizes{{"B", microbatch_rows}, {"L", length}, {"M", 16}};

/// A batch's ids; row by row they come in microbatches.
inline std::vector<i32> ids(std::uint64_t random) {
  std::vector<i32> values;
  for (std::int64_t i = 0; i < microbatches * microbatch_rows * length; ++i) {
    random = random * 6364136223846793005U + 1442695040888963407U;
    values.push_back(static_cast<i32>((random >> 33) % vocabulary));
  }
  return values;
}

inline gpt::Batch batch(const Mesh<"r d s t">& mesh, int microbatch) {
  const auto tensor = [&](const std::vector<i32>& all) {
    const auto begin = all.begin() + microbatch * microbatch_rows * length;
    return place<Tensor<i32, "B/r/d L/s">>(
        mesh, HostArray<i32>({microbatch_rows, length}, {begin, begin + microbatch_rows * length}));
  };
  const Sizes sizes{{"B", microbatch_rows}, {"L", length}};
  return {tensor(ids(1)), tensor(ids(2)), zeros<i32, "B/r/d L/s">(mesh, sizes),
          full<f32, "B/r/d L/s">(mesh, sizes, 1.0 / static_cast<double>(microbatches * microbatch_rows * length))};
}

struct Whole {
  Host weights, gradients;
  double loss = 0;
};

/// The body on devices that are threads of this process, also under mpirun.
inline void on_threads(const std::string& mesh, const DeviceBody& body) {
  const auto axes = parse_mesh(mesh);
  if (device_count(axes) == 1)
    detail::run_device(DevicePtr::make(axes, 0), 1, body);
  else
    detail::launch_threads(axes, body, {.threads = 1});
}

/// The model that is not cut, on the mesh that its stages would have: the gradients of the microbatches, one by one.
/// Computed once.
inline const Whole& unpipelined(bool tied, std::string_view of_stage = "d=1,s=1,t=1") {
  const std::string stage_mesh(of_stage);
  static std::map<std::pair<bool, std::string>, Whole> known;
  const auto found = known.find({tied, stage_mesh});
  if (found != known.end()) return found->second;
  Whole whole;
  on_threads(stage_mesh, [&](const DevicePtr& device) {
    const Mesh<"r d s t"> mesh(device);
    gpt::Model<f32> model;
    model.unembed.resize(tied ? 0 : 1);
    model.layers.resize(layers);
    initialize(mesh, model, model_sizes, 1, [](std::string_view name) {
      return Normal{name.find("norm") != std::string_view::npos ? 1.0 : 0.0, 0.3};
    });
    const auto names = leaf_names(model);
    const auto put = [&](Host& host, const gpt::Model<f32>& tree) {
      const auto values = fetch(tree);
      for (std::size_t i = 0; i < names.size() && mesh.rank() == 0; ++i) host.insert_or_assign(names[i], values[i]);
    };
    put(whole.weights, model);
    gpt::Model<f32> sum = zeros_like(model);
    double total = 0;
    for (int m = 0; m < microbatches; ++m) {
      const auto [loss, gradients] = value_and_grad(mesh, gpt::loss<f32>, model, batch(mesh, m), gpt::ModelConfig{});
      total += static_cast<double>(item(all_reduce<"+d +r +s +t -> ">(loss)));
      sum = map_tree([](const auto& a, const auto& b) { return a + b; }, sum, reduce_gradients(mesh, gradients));
    }
    put(whole.gradients, sum);
    if (mesh.rank() == 0) whole.loss = total;
  });
  return known[{tied, stage_mesh}] = std::move(whole);
}

/// The part of the model in stages that a device holds, and its rows of the microbatches.
struct Staging {
  Staging(const DevicePtr& device, const pipeline::Schedule& schedule, const Host& weights, bool tied)
      : mesh(device),
        layer_map(schedule, layers),
        mine(layer_map.of_rank(mesh.rank())),
        model(gpt::empty_stages(schedule, layer_map, mesh.rank(), tied)) {
    for_each_leaf(
        [&](std::string_view name, auto& leaf) {
          leaf = place<std::remove_cvref_t<decltype(leaf)>>(mesh.stage(), weights.at(name_in_model(name)));
        },
        model);
    for (int m = 0; m < microbatches; ++m) batches.push_back(batch(mesh.stage(), m));
  }
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;

  [[nodiscard]] std::string name_in_model(std::string_view name) const {
    return gpt::name_in_model(std::string(name), mine);
  }
  /// `Program` is gpt::Stages<f32>, or spoils it.
  template <class Program>
  [[nodiscard]] Program program() const {
    if constexpr (std::is_same_v<Program, gpt::Stages<f32>>)
      return {layer_map, batches, {}};
    else
      return {{layer_map, batches, {}}};
  }

  GptStaged mesh;
  pipeline::LayerMap layer_map;
  std::vector<int> mine;
  gpt::StageModel<f32> model;
  std::vector<gpt::Batch> batches;
};

struct Result {
  double loss = 0, value = 0;
  Host gradients;  ///< of this rank's weights
  pipeline::LossAndGradients<Tensor<f32, "+d +p +r +s +t">, gradient_t<GptStaged, gpt::StageModel<f32>>> step;
};

/// A step of the model in stages, as this device sees it.
template <class Program>
Result staged(const DevicePtr& device, const pipeline::Schedule& schedule, const Host& weights, bool tied,
              const Sizes& sizes = activation_sizes) {
  const Staging staging(device, schedule, weights, tied);
  const GptStaged& mesh = staging.mesh;
  const auto program = staging.template program<Program>();
  Result result;
  result.step = pipeline::value_and_grad(mesh, schedule, microbatches, program, staging.model, sizes);
  const gpt::StageModel<f32> gradients = reduce_gradients(
      mesh, result.step.gradients, [&](std::string_view leaf) { return gpt::owners(schedule, tied, leaf); });
  result.loss = static_cast<double>(item(all_reduce<"+d +p +r +s +t -> ">(result.step.loss)));
  result.value = static_cast<double>(item(
      all_reduce<"+d +p +r +s +t -> ">(pipeline::value(mesh, schedule, microbatches, program, staging.model, sizes))));
  for_each_leaf([&](std::string_view name,
                    const auto& leaf) { result.gradients.insert_or_assign(staging.name_in_model(name), fetch(leaf)); },
                gradients);
  return result;
}
/// The largest difference, in parts of the largest number that is due.
inline double distance(const HostArray<f32>& is, const HostArray<f32>& due, const std::string& what) {
  expect(is.data.size() == due.data.size(), what + ": another size");
  double scale = 0, worst = 0;
  for (std::size_t i = 0; i < due.data.size(); ++i) {
    scale = std::max(scale, std::abs(static_cast<double>(due.data[i])));
    worst = std::max(worst, std::abs(static_cast<double>(due.data[i]) - static_cast<double>(is.data[i])));
  }
  expect(scale > 0, what + ": all zero");
  return worst / scale;
}

inline void expect_close(const Result& result, const Whole& whole, const std::string& what) {
  expect(std::abs(result.loss - whole.loss) < 1e-6 * whole.loss,
         what + ": the loss is " + show(result.loss) + " instead of " + show(whole.loss));
  expect(result.value == result.loss, what + ": the loss without gradients is " + show(result.value));
  for (const auto& [name, gradient] : result.gradients) {
    const double apart = distance(gradient, whole.gradients.at(name), what + ", " + name);
    expect(apart <= 1e-5, what + ": the gradient of " + name + " differs by " + show(apart));
  }
}

/// Those that differ in what ranks hold, or in how backward passes are cut; and the others.
inline std::vector<pipeline::Schedule> main_schedules(int p) {
  using namespace pipeline;
  return {Std1F1B(p), ZeroBubble(p), Interleaved1F1B({.num_stages = 2 * p, .mpmd_dim = p}),
          DualPipeV({.num_stages = 2 * p, .mpmd_dim = p})};
}
inline std::vector<pipeline::Schedule> schedules(int p) {
  using namespace pipeline;
  auto all = main_schedules(p);
  all.insert(all.end(),
             {GPipe(p), Eager1F1B(p), Interleaved1F1B({.num_stages = p, .mpmd_dim = p}),
              KimiK2({.num_stages = 2 * p, .mpmd_dim = p}), InterleavedGPipe({.num_stages = 2 * p, .mpmd_dim = p}),
              Interleaved1F1B({.num_stages = 2 * p, .mpmd_dim = p, .fuse_steady_state = true})});
  return all;
}

}  // namespace shardlib::test
