// Layers of a transformer with tensor parallelism over t, forward and backward, on random numbers. The residual stream
// is sharded along the sequence (Megatron's sequence parallelism), so each branch begins by a gather over t and ends by
// a scatter of its sums. Both are ops of their own, or a part of the products beside them (collective matmul).
//
//   mpirun -n 2 tensor_parallel --mesh d=1,t=2 --form separate    prints JSON: seconds of each step, and the loss
//
// benchmarks/tensor_parallel.py runs it over links of several rates.
#include <shardlib/shardlib.hpp>

#include <cstdint>

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

auto loss(const Array<"layers", Layer>& all, const Residual& x, const layers::Options& o) -> Tensor<f32, "+d +t"> {
  Residual y = x;
  for (const Layer& w : all) y = o.form == "separate" ? separate(y, w) : collective_matmul(y, w);
  return sum<"L/t B/d M -> +d +t">(square(y)) / static_cast<double>(o.seq * o.batch * o.d_model);
}

}  // namespace

int main(int argc, char** argv) {
  return layers::program(argc, argv, "tensor_parallel", "Times layers with tensor parallelism, forward and backward.",
                         {.seq = 512, .layers = 4, .form = "collective-matmul", .mesh = "d=1,t=1"}, "d and t",
                         "how shards reach the products", {"separate", "collective-matmul"},
                         [](const DevicePtr& device, const layers::Options& o) {
                           layers::measure<TensorParallelMesh, Layer, Residual>(device, o, loss);
                         });
}
