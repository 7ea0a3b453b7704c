// The bytes that a step keeps between forward and backward passes: microbatches in flight.
#include <cmath>
#include <cstdint>
#include <shardlib/pipeline/execute.hpp>
#include <shardlib/shardlib.hpp>
#include <utility>
#include <vector>

#include "support.hpp"

using namespace shardlib;
using namespace shardlib::test;

namespace {

using Staged = pipeline::StagedMesh<"p", "p d t">;
constexpr int ranks = 4, layers = 32;
constexpr std::int64_t rows = 64, width = 64;
const Sizes sizes{{"B", rows}, {"M", width}};

struct Weights {
  Array<"layers/p", Tensor<f32, "M/d/t">> layers;
};

/// Layers that keep one large block, rows by columns, until the weight's gradient is done. All else, what stages hand
/// over, weights and cotangents, is a row or a column.
struct Wide {
  using X = Tensor<f32, "B">;
  pipeline::LayerMap layer_map;
  DevicePtr device;

  [[nodiscard]] X enter(const Weights&, const pipeline::StagePlace&) const {
    return ones<f32, "B">(Mesh<"d t">(device), sizes);
  }
  [[nodiscard]] X stage(const Weights& w, X x, const pipeline::StagePlace& at) const {
    const auto columns = full<f32, "M">(Mesh<"d t">(device), sizes, 0.1);
    const auto first = layer_map.first_of_stage(at.stage);
    for (std::size_t i = first; i < first + layer_map.layers_of_stage(at.stage); ++i)
      x = einsum_unreduced<"B M, M -> B">(einsum_unreduced<"B, M -> B M">(x, columns),
                                          all_gather<"M/d/t -> M">(w.layers.at(i)));
    return x;
  }
  [[nodiscard]] auto loss(const Weights&, const X& x, const pipeline::StagePlace&) const -> Tensor<f32, "+d +t"> {
    return to_partial<" -> +d +t">(sum<"B -> ">(x));
  }
};

/// The most bytes of the pool that each rank keeps, as multiples of what all its layers keep of one microbatch.
std::vector<double> kept(const pipeline::Schedule& schedule, int microbatches) {
  std::vector<double> result(ranks);
  detail::launch_threads({{"p", ranks}, {"d", 1}, {"t", 1}},
                         [&](const DevicePtr& device) {
                           const Staged mesh(device);
                           const Wide program{pipeline::LayerMap(schedule, layers), mesh.stage().device()};
                           Weights w;
                           for (std::size_t i = 0; i < program.layer_map.of_rank(mesh.rank()).size(); ++i)
                             w.layers.push_back(full<f32, "M/d/t">(mesh.stage(), sizes, 0.01));
                           const auto step = pipeline::value_and_grad(mesh, schedule, microbatches, program, w, sizes);
                           constexpr double layer = rows * width * sizeof(f32);
                           result[static_cast<std::size_t>(mesh.rank())] =
                               static_cast<double>(detail::program_state(device).residual_bytes) /
                               (layer * layers / ranks);
                         },
                         {.threads = 1});
  return result;
}

}  // namespace

TEST_CASE("pipeline: the memory that ranks keep is that of the microbatches in flight", "[pipeline]") {
  using namespace pipeline;
  const std::vector<std::pair<Schedule, std::vector<double>>> table{
      {GPipe(ranks), {16, 16, 16, 16}},
      {Std1F1B(ranks), {4, 3, 2, 1}},
      {Eager1F1B(ranks), {7, 5, 3, 1}},
      {ZeroBubble(ranks), {4, 4, 4, 4}},
      {Interleaved1F1B({.num_stages = 2 * ranks, .mpmd_dim = ranks}), {5.5, 4.5, 3.5, 2.5}},
      {KimiK2({.num_stages = 2 * ranks, .mpmd_dim = ranks}), {6, 5, 4, 3}},
      {DualPipeV({.num_stages = 2 * ranks, .mpmd_dim = ranks}), {4.5, 4.5, 4.5, 4.5}}};
  for (const auto& [schedule, due] : table) {
    const std::vector<double> is = kept(schedule, 16);
    for (std::size_t rank = 0; rank < ranks; ++rank) {
      INFO(schedule.name() << ", rank " << rank << ": " << is[rank] << " instead of " << due[rank]);
      CHECK(std::abs(is[rank] - due[rank]) < 0.2);
    }
  }
}
