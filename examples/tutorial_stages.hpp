// The transformer of JaxPP's tutorial notebook in pipeline stages: blocks of attention and a feed-forward network, each
// followed by a LayerNorm, from made-up inputs to made-up targets. Without masks, embeddings or tokens.
//
// Dims: B batch, L length, M model, H heads, D head, F feed-forward. Mesh of a stage: d data parallel, each weight
// sharded over it as the notebook's over "fsdp"; t tensor parallel, which the notebook does not have.
#pragma once

#include <shardlib/pipeline/program.hpp>

#include <cmath>
#include <vector>

#include "model_parts.hpp"

namespace tutorial {

using namespace shardlib;

using gpt::gathered, gpt::Weight;

// Cell 26, sharded as in cell 28. With `Whole` a step has gathered the weights over d before its microbatches.
template <dtype C, bool Whole = false>
struct Norm {
  Weight<C, "M/t/d", Whole> scale, bias;
};
template <dtype C, bool Whole = false>
struct Block {
  Weight<C, "M/d H/t D", Whole> w_q, w_k, w_v;
  Weight<C, "H/t/d D", Whole> b_q, b_k, b_v;
  Weight<C, "H/t D M/d", Whole> w_o;
  Weight<C, "M/t/d", Whole> b_o;
  Norm<C, Whole> norm1;
  Weight<C, "M/d F/t", Whole> w_up;
  Weight<C, "F/t/d", Whole> b_up;
  Weight<C, "F/t M/d", Whole> w_down;
  Weight<C, "M/t/d", Whole> b_down;
  Norm<C, Whole> norm2;
};
/// The weights of one pipeline rank; on one rank they are the whole model's.
template <dtype C, bool Whole = false>
struct StageModel {
  Array<"layers/p", Block<C, Whole>> layers;
};
static_assert(fully_sharded<Mesh<"d t">, StageModel<f32>>);

// Between the branches, and between the stages, all is f32. C is the dtype of products, of the weights that they read
// and of what is sent in a stage.
using Hidden = Tensor<f32, "B/d L M">;
struct Batch {
  Hidden inputs, targets;
};

// The layers of cell 26.
template <dtype C, bool Whole>
auto norm(const Hidden& x, const Norm<C, Whole>& w) -> Hidden {
  const auto scale = cast<f32>(gathered<"M">(w.scale)), bias = cast<f32>(gathered<"M">(w.bias));
  return layer_norm<"M">(x, 1e-6) * scale + bias;
}

template <dtype C, bool Whole>
auto attention(const Tensor<C, "B/d L M">& x, const Block<C, Whole>& w) -> Hidden {
  const auto project = [&](const Weight<C, "M/d H/t D", Whole>& kernel, const Weight<C, "H/t/d D", Whole>& bias) {
    const auto y = einsum_unreduced<"B/d L M, M H/t D -> B/d L H/t D">(x, gathered<"M H/t D">(kernel));
    return y + gathered<"H/t D">(bias);
  };
  const double scale = 1.0 / std::sqrt(static_cast<double>(w.w_q.size("D")));
  const auto q = rename<"L -> Qlen">(project(w.w_q, w.b_q) * scale);
  const auto k = rename<"L -> Klen">(project(w.w_k, w.b_k)), v = rename<"L -> Klen">(project(w.w_v, w.b_v));
  const auto logits = einsum_unreduced<"B/d Qlen H/t D, B/d Klen H/t D -> B/d H/t Qlen Klen", f32>(q, k);
  const auto heads = einsum_unreduced<"B/d H/t L Klen, B/d Klen H/t D -> B/d L H/t D">(
      rename<"Qlen -> L">(cast<C>(softmax<"Klen">(logits))), v);
  const auto y = einsum_unreduced<"B/d L H/t D, H/t D M -> B/d L M +t">(heads, gathered<"H/t D M">(w.w_o));
  return cast<f32>(all_reduce<"B/d L M +t -> B/d L M", f32>(y)) + cast<f32>(gathered<"M">(w.b_o));
}

template <dtype C, bool Whole>
auto feed_forward(const Tensor<C, "B/d L M">& x, const Block<C, Whole>& w) -> Hidden {
  const auto up = einsum_unreduced<"B/d L M, M F/t -> B/d L F/t">(x, gathered<"M F/t">(w.w_up));
  const auto hidden = gelu(up + gathered<"F/t">(w.b_up));
  const auto y = einsum_unreduced<"B/d L F/t, F/t M -> B/d L M +t">(hidden, gathered<"F/t M">(w.w_down));
  return cast<f32>(all_reduce<"B/d L M +t -> B/d L M", f32>(y)) + cast<f32>(gathered<"M">(w.b_down));
}

template <dtype C, bool Whole>
auto block(const Hidden& x, const Block<C, Whole>& w) -> Hidden {
  const auto y = norm(x + attention(cast<C>(x), w), w.norm1);
  return norm(y + feed_forward(cast<C>(y), w), w.norm2);
}

// Cell 27: the mean of a microbatch. The notebook sums these over the microbatches, and so do gradients.
inline auto loss(const Hidden& predictions, const Hidden& targets) -> Tensor<f32, "+d +t"> {
  return to_partial<"+d -> +d +t">(mean<"B/d L M -> +d">(square(predictions - targets)));
}

// Cell 30: the stages of the model, as pipeline::value_and_grad calls them.
template <dtype C, bool Whole = false>
struct Stages {
  const pipeline::LayerMap& layer_map;
  const std::vector<Batch>& batches;  // of each microbatch
  RecomputePolicy recompute = {};

  [[nodiscard]] auto enter(const StageModel<C, Whole>&, const pipeline::StagePlace& at) const -> Hidden {
    return batch(at).inputs;
  }
  // Where it returns, the notebook has its pipeline_yield.
  [[nodiscard]] auto stage(const StageModel<C, Whole>& w, Hidden x, const pipeline::StagePlace& at) const -> Hidden {
    const std::size_t first = layer_map.first_of_stage(at.stage), count = layer_map.layers_of_stage(at.stage);
    for (std::size_t i = first; i < first + count; ++i)
      x = explicit_activation_checkpointing(block<C, Whole>, recompute)(x, w.layers.at(i));
    return x;
  }
  [[nodiscard]] auto loss(const StageModel<C, Whole>&, const Hidden& x, const pipeline::StagePlace& at) const
      -> Tensor<f32, "+d +t"> {
    return tutorial::loss(x, batch(at).targets);
  }

 private:
  [[nodiscard]] const Batch& batch(const pipeline::StagePlace& at) const {
    return batches.at(static_cast<std::size_t>(at.microbatch));
  }
};

}  // namespace tutorial
