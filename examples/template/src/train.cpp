// Trains the model on a text: train FILE [STEPS]
#include <fmt/format.h>

#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <string>
#include <string_view>

#include <shardlib/shardlib.hpp>

#include "model.hpp"

using namespace shardlib;

namespace {

constexpr std::int64_t batch_size = 16, length = 64;

/// The windows of a step: the same on every device, which keeps its shard of them.
my::Batch batch_of(const Mesh<"d">& mesh, const std::string& text, std::int64_t step) {
  HostArray<i32> inputs({batch_size, length}), targets({batch_size, length});
  const std::size_t starts = text.size() - static_cast<std::size_t>(length);
  for (std::size_t b = 0; b < batch_size; ++b) {
    const std::size_t start = (static_cast<std::size_t>(step) * 7919 + b * 104729) % starts;
    for (std::size_t i = 0; i < length; ++i) {
      inputs.data[b * length + i] = static_cast<unsigned char>(text[start + i]);
      targets.data[b * length + i] = static_cast<unsigned char>(text[start + i + 1]);
    }
  }
  return {place<Tensor<i32, "B/d L">>(mesh, inputs), place<Tensor<i32, "B/d L">>(mesh, targets)};
}

void train(const Mesh<"d">& mesh, const std::string& text, std::int64_t steps) {
  auto weights = my::initial_weights<f32>(mesh, {{"V", 256}, {"M", 64}, {"F", 256}});
  const AdamW adamw;
  auto moments = AdamW::init(weights);
  for (std::int64_t step = 0; step < steps; ++step) {
    const auto [loss, grads] = value_and_grad(mesh, my::loss<f32>, weights, batch_of(mesh, text, step));
    const double scale = clip_factor(global_norm(mesh, grads), 1.0);
    adamw.update(weights, moments, grads, 3e-3, scale, step, [](std::string_view leaf) { return leaf != "decay"; });
    const f32 value = item(all_reduce<"+d -> ">(loss));
    if (mesh.rank() == 0 && (step % 50 == 0 || step + 1 == steps)) fmt::print("step {:4}  loss {:.4f}\n", step, value);
  }
}

}  // namespace

int main(int argc, char** argv) {
  return run_program(argc, argv, [&] {
    if (argc < 2) throw UsageError("usage: train FILE [STEPS]");
    std::ifstream file(argv[1], std::ios::binary);
    if (!file) throw UsageError(std::string("cannot read '") + argv[1] + "': check the path");
    const std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
    if (text.size() < 2 * static_cast<std::size_t>(length))
      throw UsageError(std::string(argv[1]) + ": no text of at least " + std::to_string(2 * length) + " bytes");
    const std::int64_t steps = argc > 2 ? std::atoll(argv[2]) : 300;
    if (steps < 1) throw UsageError(std::string("STEPS is '") + argv[2] + "'; give a number of at least 1");
    launch({{"d", under_mpi() ? world_size() : 2}},
           [&](const DevicePtr& device) { train(Mesh<"d">(device), text, steps); });
    return 0;
  });
}
