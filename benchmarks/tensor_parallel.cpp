// Layers of a transformer with tensor parallelism over t, forward and backward, on random numbers. The residual stream
// is sharded along the sequence (Megatron's sequence parallelism), so each branch begins by a gather over t and ends by
// a scatter of its sums. Both are ops of their own, or a part of the products beside them (collective matmul).
//
//   mpirun -n 2 tensor_parallel --mesh d=1,t=2 --form separate    prints a JSON object: seconds of each step, and the loss
//
// benchmarks/tensor_parallel.py runs it over links of several rates.
#include <fmt/format.h>

#include <shardlib/run/options.hpp>
#include <shardlib/run/plan.hpp>
#include <shardlib/shardlib.hpp>

#include <chrono>
#include <cmath>
#include <cstdint>
#include <string>

using namespace shardlib;

namespace {

using TensorParallelMesh = Mesh<"d t">;

struct Options {
  std::int64_t seq = 512, batch = 2, layers = 4, d_model = 512, heads = 8, d_head = 64, d_ff = 2048, steps = 5;
  std::string form = "collective-matmul", mesh = "d=1,t=1";
  bool count = false;
};

struct Layer {
  Tensor<f32, "M"> norm1, norm2;
  Tensor<f32, "M H/t E"> qkv;  // the queries, keys and values of a head, one after the other
  Tensor<f32, "H/t D M"> out;
  Tensor<f32, "M F/t"> up;
  Tensor<f32, "F/t M"> down;
};

using Residual = Tensor<f32, "L/t B/d M">;

auto heads(const Tensor<f32, "L B/d H/t E">& qkv) -> Tensor<f32, "L B/d H/t D"> {
  const std::int64_t size = qkv.size("E") / 3;
  const auto part = [&](std::int64_t i) { return narrow<"E -> D">(qkv, i * size, size); };
  return causal_attention<"L", "D">(part(0), part(1), part(2));
}

Residual separate(const Residual& x, const Layer& w) {
  const auto attended = all_gather<"L B/d M">(rms_norm<"M">(x, 1e-6) * w.norm1);
  const auto y = heads(einsum_unreduced<"L B/d M, M H/t E -> L B/d H/t E">(attended, w.qkv));
  const Residual middle = x + einsum<"L B/d H/t D, H/t D M -> L/t B/d M">(y, w.out);
  const auto fed = all_gather<"L B/d M">(rms_norm<"M">(middle, 1e-6) * w.norm2);
  const auto h = gelu(einsum_unreduced<"L B/d M, M F/t -> L B/d F/t">(fed, w.up));
  return middle + einsum<"L B/d F/t, F/t M -> L/t B/d M">(h, w.down);
}

Residual collective_matmul(const Residual& x, const Layer& w) {
  const auto attended = gathering<over<"t">>(rms_norm<"M">(x, 1e-6) * w.norm1);
  const auto y = heads(einsum_unreduced<"L B/d M, M H/t E -> L B/d H/t E">(attended, w.qkv));
  const Residual middle = x + einsum_scatter<"L B/d H/t D, H/t D M -> L/t B/d M">(y, w.out);
  const auto fed = gathering<over<"t">>(rms_norm<"M">(middle, 1e-6) * w.norm2);
  const auto h = gelu(einsum_unreduced<"L B/d M, M F/t -> L B/d F/t">(fed, w.up));
  return middle + einsum_scatter<"L B/d F/t, F/t M -> L/t B/d M">(h, w.down);
}

using Layers = Array<"layers", Layer>;

auto loss(const Layers& layers, const Residual& x, const Options& o) -> Tensor<f32, "+d +t"> {
  Residual y = x;
  for (const Layer& w : layers) y = o.form == "separate" ? separate(y, w) : collective_matmul(y, w);
  return sum<"L/t B/d M -> +d +t">(square(y)) / static_cast<double>(o.seq * o.batch * o.d_model);
}

void measure(const DevicePtr& device, const Options& o) {
  const TensorParallelMesh mesh(device);
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
    value = item(all_reduce<"+d +t -> ">(found.first));
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
  run::Options options("tensor_parallel", "Times layers with tensor parallelism, forward and backward.");
  options.add("--mesh", o.mesh, "devices along d and t: threads, or ranks under mpirun");
  options.add("--form", o.form, "how shards reach the products", run::one_of({"separate", "collective-matmul"}));
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
