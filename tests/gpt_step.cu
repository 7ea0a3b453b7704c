// A step of the GPT of examples/gpt_model.hpp for a CUDA device, with norms, attention, checkpointing, a backward pass and
// AdamW: scripts/test-cuda.sh compiles it as a GPU build does, and nothing runs it.
#include <cstdint>
#include <shardlib/shardlib.hpp>
#include <string_view>

#include "../examples/gpt_model.hpp"

using namespace shardlib;

double step(const Mesh<"r d s t">& mesh, gpt::Model<f32>& weights, gpt::Model<f32>& mu, gpt::Model<f32>& nu,
            const gpt::Batch& batch, const gpt::ModelConfig& config, std::int64_t number) {
  const auto [loss, parts] = value_and_grad(mesh, gpt::loss<f32>, weights, batch, config);
  const gpt::Model<f32> grads = reduce_gradients(mesh, parts);
  const auto total = all_reduce<"+d +r +s +t -> ">(loss);
  AdamW().update(weights, mu, nu, grads, 1e-3, 1 / global_norm(mesh, grads), number,
                 [](std::string_view leaf) { return leaf.find("norm") == std::string_view::npos; });
  return item(total);
}
