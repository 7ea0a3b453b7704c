// Layers of a transformer with context parallelism over s, forward and backward, on random numbers. Weights are whole
// on each device and no sum of gradients is taken, so that attention alone communicates.
//
//   mpirun -n 2 ring_attention --mesh d=1,s=2 --form zigzag    prints JSON: seconds of each step, and the loss
//
// benchmarks/ring_attention.py runs it over links of several rates.
#include <shardlib/shardlib.hpp>

#include <cstdint>
#include <optional>
#include <string>

#include "layers.hpp"

using namespace shardlib;

namespace {

using ContextMesh = Mesh<"d s">;

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

auto loss(const Array<"layers", Layer>& all, const Residual& x, const layers::Options& o) -> Tensor<f32, "+d +s"> {
  Residual y = x;
  for (const Layer& w : all) y = layer(y, w, o.form);
  return sum<"B/d L/s M -> +d +s">(square(y)) / static_cast<double>(o.seq * o.batch * o.d_model);
}

}  // namespace

int main(int argc, char** argv) {
  return layers::program(argc, argv, "ring_attention", "Times layers with context parallelism, forward and backward.",
                         {.seq = 2048, .layers = 2, .form = "zigzag", .mesh = "d=1,s=1"}, "d and s",
                         "the order of tokens along the ring, or heads in its place",
                         {"zigzag", "contiguous", "ulysses"}, [](const DevicePtr& device, const layers::Options& o) {
                           layers::measure<ContextMesh, Layer, Residual>(device, o, loss);
                         });
}
