// Where dropout stands in a training step: in the models of gpt_fsdp and gpt2, with or without a pipeline.
#pragma once

#include <shardlib/shapes.hpp>

#include <cstdint>

namespace gpt {

using namespace shardlib;

/// Every place draws from a stream of its own, keyed by global index, so that masks do not depend on the mesh or on the
/// order in which a pipeline runs its tasks. Without a rate nothing is dropped.
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
