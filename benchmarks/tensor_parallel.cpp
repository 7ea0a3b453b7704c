// Layers of a transformer with tensor parallelism over t, forward and backward, on random numbers. The residual stream
// is sharded along the sequence (Megatron's sequence parallelism), so each branch begins by a gather over t and ends by
// a scatter of its sums. Both are ops of their own, or a part of the products next to them (collective matmul), or they
// run during the other half of the batch (interleaved).
//
//   mpirun -n 2 tensor_parallel --mesh d=1,t=2 --form separate    prints JSON: seconds of each step, and the loss
//
// benchmarks/tensor_parallel.py runs it over links of several rates.
#include <shardlib/shardlib.hpp>

#include <cstdint>
#include <optional>
#include <utility>

#include "layers.hpp"

using namespace shardlib;

namespace {

using TensorParallelMesh = Mesh<"d t">;

struct Layer {
  Tensor<f32, "M"> norm1, norm2;
  Tensor<f32, "M H/t E"> qkv;  // the queries, keys and values of a head, one after the other
  Tensor<f32, "H/t D M"> out;
  Tensor<f32, "M F/t"> up;
  Tensor<f32, "F/t M"> down;
};

using Residual = Tensor<f32, "L/t B/d M">;
using Sum = Tensor<f32, "+d +t">;

auto heads(const auto& qkv) {
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

/// Half of the batch: its residual stream, and its collective under way.
using HalfResidual = Tensor<f32, "L/t A/d M">;
using HalfSummand = Tensor<f32, "L A/d M +t">;

auto enter(const HalfResidual& x, const Tensor<f32, "M">& norm) {
  return all_gather_start<"L/t A/d M -> L A/d M">(rms_norm<"M">(x, 1e-6) * norm);
}
auto leave(const HalfSummand& y) {
  return reduce_scatter_start<"L A/d M +t -> L/t A/d M">(y);
}

struct Half {
  HalfResidual x;
  std::optional<decltype(enter(HalfResidual(), Tensor<f32, "M">()))> entering = {};
  std::optional<decltype(leave(HalfSummand()))> leaving = {};

  /// Ends the branch before, and starts the next one.
  void next(const Tensor<f32, "M">* norm) {
    if (leaving) x = x + wait(*std::exchange(leaving, std::nullopt));
    if (norm != nullptr) entering = enter(x, *norm);
  }
  auto gathered() { return wait(*std::exchange(entering, std::nullopt)); }
};

/// The collectives of one half run during the products of the other. A branch is two functions, `up` and `down`.
void branches(Half& a, Half& b, const Tensor<f32, "M">& norm, const Tensor<f32, "M">* norm_after, const auto& up,
              const auto& down) {
  const auto of_a = up(a.gathered());
  b.next(&norm);
  a.leaving = leave(down(of_a));
  const auto of_b = up(b.gathered());
  a.next(norm_after);
  b.leaving = leave(down(of_b));
}

Sum interleaved(const Array<"layers", Layer>& all, const Residual& x) {
  const auto halves = unstack<"N">(rearrange<"L/t A/d N M -> N L/t A/d M">(split<"B/d -> A/d N">(x, {{"N", 2}})));
  Half a{halves[0]}, b{halves[1]};
  a.next(&all[0].norm1);
  for (std::size_t i = 0; i < all.size(); ++i) {
    const Layer& w = all[i];
    branches(
        a, b, w.norm1, &w.norm2,
        [&](const auto& h) { return einsum_unreduced<"L A/d M, M H/t E -> L A/d H/t E">(h, w.qkv); },
        [&](const auto& h) { return einsum_unreduced<"L A/d H/t D, H/t D M -> L A/d M +t">(heads(h), w.out); });
    branches(
        a, b, w.norm2, i + 1 < all.size() ? &all[i + 1].norm1 : nullptr,
        [&](const auto& h) { return gelu(einsum_unreduced<"L A/d M, M F/t -> L A/d F/t">(h, w.up)); },
        [&](const auto& h) { return einsum_unreduced<"L A/d F/t, F/t M -> L A/d M +t">(h, w.down); });
  }
  b.next(nullptr);
  return sum<"L/t A/d M -> +d +t">(square(a.x)) + sum<"L/t A/d M -> +d +t">(square(b.x));
}

Sum in_turn(const Array<"layers", Layer>& all, const Residual& x, const layers::Options& o) {
  Residual y = x;
  for (const Layer& w : all) y = o.form == "separate" ? separate(y, w) : collective_matmul(y, w);
  return sum<"L/t B/d M -> +d +t">(square(y));
}

Sum loss(const Array<"layers", Layer>& all, const Residual& x, const layers::Options& o) {
  return (o.form == "interleaved" ? interleaved(all, x) : in_turn(all, x, o)) /
         static_cast<double>(o.seq * o.batch * o.d_model);
}

}  // namespace

int main(int argc, char** argv) {
  return layers::program(argc, argv, "tensor_parallel", "Times layers with tensor parallelism, forward and backward.",
                         {.seq = 512, .layers = 4, .form = "collective-matmul", .mesh = "d=1,t=1"}, "d and t",
                         "how shards reach the products", {"separate", "collective-matmul", "interleaved"},
                         [](const DevicePtr& device, const layers::Options& o) {
                           layers::measure<TensorParallelMesh, Layer, Residual>(device, o, loss);
                         });
}
