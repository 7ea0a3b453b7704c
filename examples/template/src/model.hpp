// The model: predicts the next byte of a text from a decaying sum of the bytes before it.
#pragma once

#include <shardlib/shapes.hpp>

namespace my {
using namespace shardlib;

// All weights are sharded over axis d. The dtype is a parameter: the program trains in f32, a test checks f64.
template <dtype D>
struct Model {
  Tensor<D, "V M/d"> embed;
  Tensor<D, "M/d"> decay;
  Tensor<D, "M F/d"> up;
  Tensor<D, "F V/d"> out;
};

struct Batch {
  Tensor<i32, "B/d L"> inputs, targets;
};

/// The scores of the next byte at each position.
template <dtype D>
auto logits(const Model<D>& w, const Tensor<i32, "B/d L">& inputs) -> Tensor<D, "B/d L V"> {
  const auto embed = all_gather<"V M/d -> V M">(w.embed);
  const auto x = index_unreduced<"[V] M, B/d L -> B/d L M">(embed, inputs);
  // h_t = decay * h_(t-1) + x_t
  const auto decay = broadcast<"M -> B/d L M">(sigmoid(all_gather<"M/d -> M">(w.decay)),
                                               {{"B", inputs.size("B")}, {"L", inputs.size("L")}});
  const auto h = rms_norm<"M">(linear_scan<"L">(decay, x));
  const auto up = all_gather<"M F/d -> M F">(w.up);
  const auto y = gelu(einsum_unreduced<"B/d L M, M F -> B/d L F">(h, up));
  const auto out = all_gather<"F V/d -> F V">(w.out);
  return einsum_unreduced<"B/d L F, F V -> B/d L V">(y, out);
}

/// The mean over all positions. Each device has summed its part of the batch: +d.
template <dtype D>
auto loss(const Model<D>& w, const Batch& batch) -> Tensor<D, "+d"> {
  return mean<"B/d L -> +d">(cross_entropy(logits(w, batch.inputs), batch.targets));
}

/// Random weights.
template <dtype D, Spec A>
Model<D> initial_weights(const Mesh<A>& mesh, const Sizes& sizes) {
  return {random_normal<D, "V M/d">(mesh, sizes, {0, 1}), zeros<D, "M/d">(mesh, sizes),
          random_normal<D, "M F/d">(mesh, sizes, {0, 2}) * 0.1, random_normal<D, "F V/d">(mesh, sizes, {0, 3}) * 0.1};
}

}  // namespace my
