// Layers of a transformer with context parallelism over s, forward and backward, on random numbers. Weights are whole
// on each device and no sum of gradients is taken, so that attention alone communicates.
//
//   mpirun -n 2 ring_attention --mesh d=1,s=2 --form zigzag    prints a JSON object: seconds of each step, and the loss
//
// benchmarks/ring_attention.py runs it over links of several rates.
#include <fmt/format.h>

#include <shardlib/run/options.hpp>
#include <shardlib/run/plan.hpp>
#include <shardlib/shardlib.hpp>

#include <chrono>
#include <cmath>
#include <cstdint>
#include <optional>
#include <string>

using namespace shardlib;

namespace {

using ContextMesh = Mesh<"d s">;

struct Options {
  std::int64_t seq = 2048, batch = 2, layers = 2, d_model = 512, heads = 8, d_head = 64, d_ff = 2048, steps = 5;
  std::string form = "zigzag", mesh = "d=1,s=1";
  bool count = false;
};

struct Layer {
  Tensor<f32, "M"> norm1, norm2;
  Tensor<f32, "M H E"> qkv;  // the queries, keys and values of a head, one after the other
  Tensor<f32, "H D M"> out;
  Tensor<f32, "M F"> up;
  Tensor<f32, "F M"> down;
};

using Residual = Tensor<f32, "B/d L/s M">;
using Heads = Tensor<f32, "B/d L/s H D">;

Heads attended(const Heads& q, const Heads& k, const Heads& v, const std::string& form) {
  if (form == "ulysses") return ulysses_attention<"L/s H -> L H/s", "D">(q, k, v);
  const auto order = form == "zigzag" ? SequenceOrder::zigzag : SequenceOrder::contiguous;
  return causal_attention<"L", "D", over<"s">>(q, k, v, std::nullopt, order);
}

Residual layer(const Residual& x, const Layer& w, const std::string& form) {
  const auto normed = rms_norm<"M">(x, 1e-6) * w.norm1;
  const auto qkv = einsum_unreduced<"B/d L/s M, M H E -> B/d L/s H E">(normed, w.qkv);
  const std::int64_t size = qkv.size("E") / 3;
  const auto part = [&](std::int64_t i) { return narrow<"E -> D">(qkv, i * size, size); };
  const auto y = attended(part(0), part(1), part(2), form);
  const Residual middle = x + einsum_unreduced<"B/d L/s H D, H D M -> B/d L/s M">(y, w.out);
  const auto h = gelu(einsum_unreduced<"B/d L/s M, M F -> B/d L/s F">(rms_norm<"M">(middle, 1e-6) * w.norm2, w.up));
  return middle + einsum_unreduced<"B/d L/s F, F M -> B/d L/s M">(h, w.down);
}

using Layers = Array<"layers", Layer>;

auto loss(const Layers& layers, const Residual& x, const Options& o) -> Tensor<f32, "+d +s"> {
  Residual y = x;
  for (const Layer& w : layers) y = layer(y, w, o.form);
  return sum<"B/d L/s M -> +d +s">(square(y)) / static_cast<double>(o.seq * o.batch * o.d_model);
}

void measure(const DevicePtr& device, const Options& o) {
  const ContextMesh mesh(device);
  const Sizes sizes{{"L", o.seq},    {"B", o.batch},      {"M", o.d_model}, {"H", o.heads},
                    {"D", o.d_head}, {"E", 3 * o.d_head}, {"F", o.d_ff}};
  std::uint64_t stream = 0;
  const auto draw = [&]<Spec S>(Tensor<f32, S>& w, std::int64_t fan_in) {
    w = random_normal<f32, S>(mesh, sizes, {1, stream++}) / std::sqrt(static_cast<double>(fan_in));
  };
  Layers layers;
  for (std::int64_t i = 0; i < o.layers; ++i) {
    Layer& w = layers.emplace_back();
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
    const auto found = value_and_grad(mesh, loss, layers, x, o);
    value = item(all_reduce<"+d +s -> ">(found.first));
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

int program(int argc, char** argv) {
  Options o;
  run::Options options("ring_attention", "Times layers with context parallelism, forward and backward.");
  options.add("--mesh", o.mesh, "devices along d and s: threads, or ranks under mpirun");
  options.add("--form", o.form, "the order of tokens along the ring, or heads in its place",
              run::one_of({"zigzag", "contiguous", "ulysses"}));
  options.add("--seq", o.seq, "tokens of a sequence", run::size());
  options.add("--batch", o.batch, "sequences", run::size());
  options.add("--layers", o.layers, "number of layers", run::size());
  options.add("--d-model", o.d_model, "width of a token", run::size());
  options.add("--heads", o.heads, "heads of attention", run::size());
  options.add("--d-head", o.d_head, "width of a head", run::size());
  options.add("--d-ff", o.d_ff, "width of the feed-forward branch", run::size());
  options.add("--steps", o.steps, "how often it is measured", run::size());
  options.flag("--count", o.count, "print what a device sends in a step instead, in bytes");
  if (!options.parse(argc, argv)) {
    fmt::print("{}", options.answer());
    return 0;
  }
  const auto mesh = parse_mesh(o.mesh);
  const auto body = [&](const DevicePtr& device) { measure(device, o); };
  if (o.count) {
    fmt::print("{}\n", run::plan(mesh, body).sent());
    return 0;
  }
  launch(mesh, body);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  return run_program(argc, argv, [&] { return program(argc, argv); });
}
