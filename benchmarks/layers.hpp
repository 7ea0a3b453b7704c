// The benchmarks of layers on several devices share sizes, random weights, the timing of steps and the command line.
#pragma once

#include <fmt/format.h>

#include <shardlib/run/options.hpp>
#include <shardlib/run/plan.hpp>
#include <shardlib/shardlib.hpp>

#include <chrono>
#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <string>

namespace layers {

using namespace shardlib;

struct Options {
  std::int64_t seq, batch = 2, layers, d_model = 512, heads = 8, d_head = 64, d_ff = 2048, steps = 5;
  std::string form, mesh;
  bool count = false;
};

/// Times steps of `loss(layers, x, o)`, forward and backward, and prints a JSON object: seconds of each, and the loss.
/// A Layer has the weights norm1, norm2, qkv, out, up and down. In a dry run it plans one step.
template <class Mesh, class Layer, class Residual, class Loss>
void measure(const DevicePtr& device, const Options& o, const Loss& loss) {
  const Mesh mesh(device);
  const Sizes sizes{{"L", o.seq},    {"B", o.batch},      {"M", o.d_model}, {"H", o.heads},
                    {"D", o.d_head}, {"E", 3 * o.d_head}, {"F", o.d_ff}};
  std::uint64_t stream = 0;
  const auto draw = [&]<Spec S>(Tensor<f32, S>& w, std::int64_t fan_in) {
    w = random_normal<f32, S>(mesh, sizes, {1, stream++}) / std::sqrt(static_cast<double>(fan_in));
  };
  Array<"layers", Layer> all;
  for (std::int64_t i = 0; i < o.layers; ++i) {
    Layer& w = all.emplace_back();
    w.norm1 = w.norm2 = ones<f32, "M">(mesh, sizes);
    draw(w.qkv, o.d_model);
    draw(w.out, o.heads * o.d_head);
    draw(w.up, o.d_model);
    draw(w.down, o.d_ff);
  }
  Residual x;
  draw(x, 1);
  double value = 0;
  const auto step = [&] {
    const auto found = value_and_grad(mesh, loss, all, x, o);
    value = item(all_reduce<"">(found.first));
  };
  if (device->is_dry()) {
    device->local<run::Plan>() = run::count_step(device, step);
    return;
  }
  std::string seconds;
  for (std::int64_t i = -1; i < o.steps; ++i) {  // the first one does not count
    const auto begin = std::chrono::steady_clock::now();
    step();
    if (i < 0) continue;
    seconds += fmt::format("{}{:.5f}", seconds.empty() ? "" : ", ",
                           std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
  }
  if (mesh.rank() == 0) fmt::print("{{\"seconds\": [{}], \"loss\": {}}}\n", seconds, value);
}

/// The program `name`: reads `o`, then runs `body(device, o)`, or prints what a device sends in a step. `forms` are the
/// values of --form, and `of_forms` is its help.
template <class Body>
int program(int argc, char** argv, const char* name, const char* about, Options o, const char* axes,
            const char* of_forms, std::initializer_list<const char*> forms, const Body& body) {
  return run_program(argc, argv, [&] {
    run::Options options(name, about);
    options.add("--mesh", o.mesh, fmt::format("devices along {}: threads, or ranks under mpirun", axes));
    options.add("--form", o.form, of_forms, run::one_of(forms));
    options.add("--seq", o.seq, "tokens of a sequence", run::size());
    options.add("--batch", o.batch, "sequences", run::size());
    options.add("--layers", o.layers, "number of layers", run::size());
    options.add("--d-model", o.d_model, "width of a token", run::size());
    options.add("--heads", o.heads, "heads of attention", run::size());
    options.add("--d-head", o.d_head, "width of a head", run::size());
    options.add("--d-ff", o.d_ff, "width of the feed-forward branch", run::size());
    options.add("--steps", o.steps, "how often it is measured", run::size());
    options.flag("--count", o.count, "print what a device sends in a step instead, in bytes");
    if (!options.parse(argc, argv)) return 0;
    const auto mesh = parse_mesh(o.mesh);
    const DeviceBody measured = [&](const DevicePtr& device) { body(device, o); };
    if (o.count)
      fmt::print("{}\n", run::plan(mesh, measured).sent());
    else
      launch(mesh, measured);
    return 0;
  });
}

}  // namespace layers
