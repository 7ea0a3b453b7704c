// The models of the trainers share these: batches, weights and their gathers, norms of heads, and dropout. This header
// needs the types alone.
#pragma once

#include <shardlib/shapes.hpp>

#include <cstdint>
#include <type_traits>

namespace gpt {

using namespace shardlib;

/// One batch: a segment is a document, and attention does not leave it. `weights` are each token's share of the loss;
/// those of a step, over all devices and microbatches, add up to 1.
template <Spec S>
struct TokenTensors {
  Tensor<i32, S> inputs, targets, segments;
  Tensor<f32, S> weights;
};

/// A weight at rest, or with `Whole` as a step gathers it before its microbatches, over d and s: "M F/t" for
/// "M/d/s F/t".
template <dtype C, Spec S, bool Whole>
using Weight = Tensor<C, Whole ? without_axis<without_axis<S, "d">, "s"> : S>;

/// A weight as a layer reads it: gathered over the axes that `To` lacks. The backward pass of the gather sums the
/// gradient over these axes, in f32 also if C is bf16, and leaves other sums pending. A weight that already has the
/// spec `To`, because the step has gathered it once, is returned as it is; its gradient keeps all sums pending.
template <Spec To, dtype C, Spec S>
auto gathered(const Tensor<C, S>& w, Site site = Site::current()) -> Tensor<C, To> {
  if constexpr (std::is_same_v<Tensor<C, S>, Tensor<C, To>>)
    return w;
  else
    return all_gather<make_op<S, To>, backward_sum<f32>>(w, site);
}

/// Normalizes each head (Qwen 3). All heads share the scale. Its dim `Padded` is D with padding.
template <Spec Padded, dtype C, Spec S, Spec N>
auto head_norm(const Tensor<C, S>& x, const Tensor<C, N>& norm, double epsilon) -> Tensor<C, S> {
  const auto padded = gathered<Padded>(norm);
  const auto scale = narrow<make_op<Padded, "D">>(padded, 0, x.size("D"));
  return rms_norm<"D">(x, scale, epsilon);
}

/// Where dropout stands in a step. Every place draws from a stream of its own, keyed by global index, so that masks do
/// not depend on the mesh or on the order in which a pipeline runs its tasks. Without a rate nothing is dropped.
struct Dropout {
  double rate = 0;
  RandomKey key;
  [[nodiscard]] Dropout at(std::uint64_t place) const { return {rate, {key.seed, key.stream * 64 + place}}; }
};

/// The dropout of one training step. Each microbatch has its own masks, also in a run that is resumed with the same
/// --microbatches.
struct StepDropout {
  double rate = 0;
  std::uint64_t seed = 0;
  std::int64_t step = 0, microbatches = 1;
  [[nodiscard]] Dropout of(std::int64_t microbatch) const {
    return {rate, {seed + 1, static_cast<std::uint64_t>(step * microbatches + microbatch) * 1024}};
  }
};

template <Spec S>
auto drop(const Tensor<f32, S>& x, const Dropout& d) -> Tensor<f32, S> {
  return d.rate > 0 ? dropout(x, d.rate, d.key) : x;
}

}  // namespace gpt
