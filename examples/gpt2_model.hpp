// The GPTs of gpt2.cpp: GPT-2 (pre-norm, GELU, tied embedding) and miniGPT (post-norm, ReLU, an output layer of its
// own), with all partitioning and communication spelled out. It needs the types alone (shardlib/shapes.hpp).
//
// C is the dtype of computation, f32 or bf16: of products, of the weights that the layers read, of their gradients and
// of what goes over the wire. Sums over devices are taken in f32; norms, softmax, the residual stream and the loss are
// f32. Dims: B batch, L length, M model, H heads, D head, E all heads' (H * D), F feed-forward, V vocabulary, P
// positions, R rank of adapters. Mesh: d data parallel (FSDP), t tensor parallel.
#pragma once

#include <shardlib/shapes.hpp>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <tuple>
#include <utility>

#include "model_parts.hpp"

namespace gpt2 {

using namespace shardlib;

// ---- weights: at rest, every tensor is sharded over the whole mesh --------------------------------------------------

using gpt::Weight;

template <dtype C, bool Whole = false>
struct Norm {
  Weight<C, "M/t/d", Whole> scale, bias;
};

/// A low-rank adapter (Hu et al. 2021): x a b_q is added to a layer's queries, likewise to its keys and values. The
/// three share `a`.
template <dtype C, bool Whole = false>
struct Adapter {
  Weight<C, "M/t/d R", Whole> a;
  Weight<C, "R/d H/t D", Whole> b_q, b_k, b_v;
};

template <dtype C, bool Whole = false>
struct Layer {
  Norm<C, Whole> norm1, norm2;
  Weight<C, "M/d H/t D", Whole> w_q, w_k, w_v;
  Weight<C, "E/t/d", Whole> b_q, b_k, b_v;
  Weight<C, "H/t D M/d", Whole> w_o;
  Weight<C, "M/t/d", Whole> b_o;
  Weight<C, "M/d F/t", Whole> w_up;
  Weight<C, "F/t/d", Whole> b_up;
  Weight<C, "F/t/d M", Whole> w_down;
  Weight<C, "M/t/d", Whole> b_down;
  Array<"adapter", Adapter<C, Whole>> adapter;  // one with --lora, else none
};

/// The output layer of a model that does not use the embedding for it.
template <dtype C, bool Whole = false>
struct Unembed {
  Weight<C, "V/t/d M", Whole> w;
  Weight<C, "V/t/d", Whole> b;
};

template <dtype C, bool Whole = false>
struct Model {
  Weight<C, "V/t/d M", Whole> embed;
  Weight<C, "P M/t/d", Whole> positions;
  Array<"layers", Layer<C, Whole>> layers;
  Array<"final_norm", Norm<C, Whole>> final_norm;  // one in GPT-2, none in miniGPT
  Array<"unembed", Unembed<C, Whole>> unembed;     // none in GPT-2: tied to embed
};

/// The weights that --lora trains, next to a model that does not change.
template <dtype C>
struct Adapters {
  Array<"layers", Adapter<C>> layers;
};

static_assert(fully_sharded<Mesh<"d t">, Model<f32>> && fully_sharded<Mesh<"d t">, Adapters<f32>>);

// ---- configuration --------------------------------------------------------------------------------------------------

struct ModelConfig {
  bool post_norm = false;  // normalize after adding a branch (miniGPT), not before the branch (GPT-2)
  bool relu = false;       // in place of GELU
  double epsilon = 1e-5;   // of the norms
  RecomputePolicy recompute = {};
  bool prefetch = false;     // gather the next layer's weights while a layer runs; not if nothing is recomputed
  double adapter_scale = 0;  // what adapters add is multiplied by this
};

using gpt::Dropout, gpt::drop;

using Batch = gpt::TokenTensors<"B/d L">;

/// Keys and values of the positions that sampling has passed.
template <dtype C>
struct Cache {
  Tensor<C, "B/d Klen H/t D"> k, v;
};

using Ids = Tensor<i32, "B/d L">;
using Residual = Tensor<f32, "B/d L M/t">;

// ---- one layer ------------------------------------------------------------------------------------------------------

// Weights are gathered over d just before their use, or, with prefetch, while the layer before runs: this is FSDP.
template <dtype C, Spec S>
auto gathered(const Tensor<C, S>& w) {
  if constexpr (is_sharded<S, "d">) return all_gather<over<"d">, backward_sum<f32>>(w);
  if constexpr (!is_sharded<S, "d">) return w;
}
template <dtype C, bool Whole = false>
auto gathered(const Norm<C, Whole>& w) {
  return std::pair{all_gather<"M", backward_sum<f32>>(w.scale), all_gather<"M", backward_sum<f32>>(w.bias)};
}
// The gathers that prefetch starts: all of a layer, in its order. A small one that the layer started itself would wait
// behind the large ones of the next layer.
template <dtype C>
auto gathered_layer(const Layer<C>& w) {
  return std::tuple{gathered(w.norm1), gathered(w.w_q),  gathered(w.b_q),    gathered(w.w_k),   gathered(w.b_k),
                    gathered(w.w_v),   gathered(w.b_v),  gathered(w.w_o),    gathered(w.b_o),   gathered(w.norm2),
                    gathered(w.w_up),  gathered(w.b_up), gathered(w.w_down), gathered(w.b_down)};
}

template <dtype C, bool Whole = false>
auto norm(const Tensor<C, "B/d L M">& x, const Norm<C, Whole>& w, const ModelConfig& config) -> Tensor<C, "B/d L M"> {
  const auto [scale, bias] = gathered(w);
  return layer_norm<"M">(x, scale, bias, config.epsilon);
}

// Gathers the residual stream over t; GPT-2 normalizes it.
template <dtype C, bool Whole = false>
auto branch_input(const Residual& x, const Norm<C, Whole>& w, const ModelConfig& config) -> Tensor<C, "B/d L M"> {
  const auto whole = all_gather<"B/d L M/t -> B/d L M", backward_sum<f32>>(cast<C>(x));
  return config.post_norm ? whole : norm<C>(whole, w, config);
}

// Adds a branch, whose sum over t is still pending, and its bias; miniGPT normalizes the result.
template <dtype C, bool Whole = false>
auto add_branch(const Residual& x, const Tensor<C, "B/d L M +t">& y, const Weight<C, "M/t/d", Whole>& bias,
                const Norm<C, Whole>& w, const ModelConfig& config, const Dropout& dropout) -> Residual {
  // bf16: half the bytes on the wire, summed in f32 and rounded once.
  const auto scattered = cast<f32>(reduce_scatter<"B/d L M +t -> B/d L M/t", f32>(y));
  const auto sum = x + drop(scattered + cast<f32>(gathered(bias)), dropout);
  if (!config.post_norm) return sum;
  const auto whole = all_gather<"B/d L M/t -> B/d L M", backward_sum<f32>>(cast<C>(sum));
  return shard<"B/d L M -> B/d L M/t">(cast<f32>(norm<C>(whole, w, config)));
}

// The product that an adapter multiplies by its b_q, b_k and b_v. It is empty without an adapter.
template <dtype C, bool Whole>
auto adapted_input(const Tensor<C, "B/d L M">& x, const Adapter<C, Whole>& adapter, const ModelConfig& config)
    -> Tensor<C, "B/d L R"> {
  if (!adapter.a) return {};
  const auto a = all_gather<"M R", backward_sum<f32>>(adapter.a);
  return einsum_unreduced<"B/d L M, M R -> B/d L R">(x, a) * config.adapter_scale;
}

template <dtype C>
using Heads = Tensor<C, "B/d L H/t D">;

// Attention in einsums, for sampling: `seen` says which keys each query sees.
template <dtype C>
auto spelled_attention(const Heads<C>& q, const Tensor<C, "B/d Klen H/t D">& k, const Tensor<C, "B/d Klen H/t D">& v,
                       const Tensor<bool_, "B/d Qlen Klen">& seen) -> Heads<C> {
  const auto logits =
      einsum_unreduced<"B/d Qlen H/t D, B/d Klen H/t D -> B/d H/t Qlen Klen", f32>(rename<"L -> Qlen">(q), k);
  const double scale = 1.0 / std::sqrt(static_cast<double>(q.size("D")));
  const auto probabilities = cast<C>(softmax<"Klen">(where(seen, logits * scale, -1e30)));
  return einsum_unreduced<"B/d H/t L Klen, B/d Klen H/t D -> B/d L H/t D">(rename<"Qlen -> L">(probabilities), v);
}

// New tokens see the cache, to which their keys and values are added at `places` (position of each token in the
// sequence, one-hot).
template <dtype C>
auto cached_attention(const Heads<C>& q, const Heads<C>& k, const Heads<C>& v,
                      const Tensor<bool_, "B/d Qlen Klen">& seen, const Tensor<C, "L Klen">& places, Cache<C>& cache)
    -> Heads<C> {
  cache.k = cache.k + einsum_unreduced<"L Klen, B/d L H/t D -> B/d Klen H/t D">(places, k);
  cache.v = cache.v + einsum_unreduced<"L Klen, B/d L H/t D -> B/d Klen H/t D">(places, v);
  return spelled_attention<C>(q, cache.k, cache.v, seen);
}

// `attend` gives each head's output from the queries, keys and values.
template <dtype C, bool Whole = false, class Attend>
auto attention(const Tensor<C, "B/d L M">& x, const Layer<C, Whole>& w, const ModelConfig& config, const Attend& attend)
    -> Tensor<C, "B/d L M +t"> {
  // Heads are sharded over t: this is tensor parallelism.
  const Adapter<C, Whole> adapter = w.adapter.empty() ? Adapter<C, Whole>{} : w.adapter[0];
  const auto low = adapted_input(x, adapter, config);
  const auto project = [&](const auto& w_x, const auto& b_x, const auto& adapter_b) {
    const auto whole = gathered(w_x);
    const auto bias = split<"E/t -> H/t D">(gathered(b_x), {{"D", w_x.size("D")}});
    const auto y = einsum_bias<"B/d L M, M H/t D -> B/d L H/t D">(x, whole, bias);
    return save_for_backward(low ? y + einsum_unreduced<"B/d L R, R H/t D -> B/d L H/t D">(low, gathered(adapter_b))
                                 : y);
  };
  const auto q = project(w.w_q, w.b_q, adapter.b_q), k = project(w.w_k, w.b_k, adapter.b_k),
             v = project(w.w_v, w.b_v, adapter.b_v);
  const auto heads = attend(q, k, v);
  const auto w_o = gathered(w.w_o);
  return einsum_unreduced<"B/d L H/t D, H/t D M -> B/d L M +t">(heads, w_o);
}

template <dtype C, bool Whole = false>
auto feed_forward(const Tensor<C, "B/d L M">& x, const Layer<C, Whole>& w, const ModelConfig& config)
    -> Tensor<C, "B/d L M +t"> {
  const auto w_up = gathered(w.w_up);
  const auto b_up = gathered(w.b_up);
  const auto y = config.relu ? relu(save_for_backward(einsum_bias<"B/d L M, M F/t -> B/d L F/t">(x, w_up, b_up)))
                             : einsum_bias_gelu<"B/d L M, M F/t -> B/d L F/t">(x, w_up, b_up);
  return einsum_unreduced<"B/d L F/t, F/t M -> B/d L M +t">(y, gathered(w.w_down));
}

template <dtype C, bool Whole = false, class Attend>
auto layer(const Residual& x, const Layer<C, Whole>& w, const ModelConfig& config, const Dropout& dropout,
           const Attend& attend) -> Residual {
  const auto attended = attention<C>(branch_input<C>(x, w.norm1, config), w, config, attend);
  const auto y = add_branch<C>(x, attended, w.b_o, w.norm1, config, dropout.at(0));
  const auto fed = feed_forward<C>(branch_input<C>(save_for_backward(y), w.norm2, config), w, config);
  return add_branch<C>(y, fed, w.b_down, w.norm2, config, dropout.at(1));
}

// ---- the model ------------------------------------------------------------------------------------------------------

template <dtype C, bool Whole = false>
auto embedding(const Model<C, Whole>& w, const Tensor<C, "V/t M">& table, const Ids& ids,
               const Tensor<i32, "L">& positions) -> Residual {
  const auto tokens =
      reduce_scatter<"B/d L M +t -> B/d L M/t", f32>(index_unreduced<"[V/t] M, B/d L -> B/d L M +t">(table, ids));
  const auto all_positions = gathered(w.positions);
  return cast<f32>(tokens) + cast<f32>(index_unreduced<"[P] M/t, L -> L M/t">(all_positions, positions));
}

// The input of the output layer.
template <dtype C, bool Whole = false>
auto output_input(const Model<C, Whole>& w, const Residual& x, const ModelConfig& config) -> Tensor<C, "B/d L M"> {
  const auto y = all_gather<"B/d L M/t -> B/d L M", backward_sum<f32>>(cast<C>(x));
  return w.final_norm.empty() ? y : norm<C>(y, w.final_norm[0], config);
}

template <dtype C, bool Whole = false>
auto unembedding(const Model<C, Whole>& w, const Tensor<C, "V/t M">& table, const Residual& x,
                 const ModelConfig& config) -> Tensor<f32, "B/d L V/t"> {
  const auto y = output_input<C>(w, x, config);
  if (w.unembed.empty()) return einsum_unreduced<"B/d L M, V/t M -> B/d L V/t", f32>(y, table);
  const auto w_out = gathered(w.unembed[0].w);
  return einsum_unreduced<"B/d L M, V/t M -> B/d L V/t", f32>(y, w_out) + cast<f32>(gathered(w.unembed[0].b));
}

// Embedding and layers. A token sees those of its segment that do not come later.
template <dtype C, bool Whole = false>
auto trunk(const Model<C, Whole>& w, const Tensor<C, "V/t M">& table, const Ids& inputs, const Ids& segments,
           const Tensor<i32, "L">& positions, const ModelConfig& config, const Dropout& dropout) -> Residual {
  Residual x = drop(embedding<C>(w, table, inputs, positions), config.post_norm ? Dropout{} : dropout.at(0));
  for (std::uint64_t i = 0; i < w.layers.size(); ++i) {
    const auto body = [](const Residual& r, const Ids& ids, const Layer<C, Whole>& weights, const ModelConfig& f,
                         const Dropout& d) {
      return layer<C>(r, weights, f, d, [&](const auto& q, const auto& k, const auto& v) {
        return causal_attention<"L", "D">(q, k, v, ids);
      });
    };
    const auto d = dropout.at(i + 1);
    if constexpr (!Whole)
      if (config.prefetch) x = prefetch(x, gathered_layer<C>, w.layers, i);
    x = explicit_activation_checkpointing(body, config.recompute)(x, segments, w.layers[i], config, d);
  }
  return x;
}

template <dtype C, bool Whole = false>
auto logits(const Model<C, Whole>& w, const Ids& inputs, const Ids& segments, const Tensor<i32, "L">& positions,
            const ModelConfig& config, const Dropout& dropout) -> Tensor<f32, "B/d L V/t"> {
  const auto table = gathered(w.embed);
  return unembedding<C>(w, table, trunk<C>(w, table, inputs, segments, positions, config, dropout), config);
}

// The value of `loss`, given the output x of the last layer.
template <dtype C, bool Whole = false>
auto mean_loss(const Model<C, Whole>& w, const Tensor<C, "V/t M">& table, const Residual& x, const Batch& batch,
               const ModelConfig& config) -> Tensor<f32, "+d +t"> {
  // With a tied embedding, logits that are too many to store are computed again.
  const auto losses = w.unembed.empty() ? linear_cross_entropy<"B/d L M, V/t M -> B/d L V/t">(
                                              output_input<C>(w, x, config), table, batch.targets)
                                        : cross_entropy(unembedding<C>(w, table, x, config), batch.targets);
  return sum<"B/d L +t -> +d +t">(losses * batch.weights);
}

// The mean loss of the tokens that count. Each device of the mesh holds a part of the sum, as value_and_grad requires.
template <dtype C, bool Whole = false>
auto loss(const Model<C, Whole>& w, const Batch& batch, const Tensor<i32, "L">& positions, const ModelConfig& config,
          const Dropout& dropout) -> Tensor<f32, "+d +t"> {
  const auto table = gathered(w.embed);
  const auto x = trunk<C>(w, table, batch.inputs, batch.segments, positions, config, dropout);
  const auto total = mean_loss<C>(w, table, x, batch, config);
  // The backward pass begins here. The weights of the last layers arrive during that of the output layer.
  if constexpr (!Whole)
    if (config.prefetch) return prefetch(total, gathered_layer<C>, w.layers, w.layers.size());
  return total;
}

/// The model with the adapters in its layers. It shares their tensors.
template <dtype C>
auto adapted(Model<C> w, const Adapters<C>& adapters) -> Model<C> {
  for (std::size_t i = 0; i < adapters.layers.size(); ++i) w.layers[i].adapter = {adapters.layers[i]};
  return w;
}
/// `loss` as a function of the adapters, by which it is differentiated. The model gets no gradient.
template <dtype C>
auto adapted_loss(const Adapters<C>& adapters, const Model<C>& w, const Batch& batch, const Tensor<i32, "L">& positions,
                  const ModelConfig& config, const Dropout& dropout) -> Tensor<f32, "+d +t"> {
  return loss<C>(adapted(w, adapters), batch, positions, config, dropout);
}

/// A layer's weight with the adapter's product added: the same model without an adapter.
inline auto merged(const Tensor<f32, "M/d H/t D">& w, const Tensor<f32, "M/t/d R">& a,
                   const Tensor<f32, "R/d H/t D">& b, const ModelConfig& config) -> Tensor<f32, "M/d H/t D"> {
  const auto rows = shard<"M R -> M/d R">(all_gather<"M R">(a));
  return w + einsum_unreduced<"M/d R, R H/t D -> M/d H/t D">(rows, gathered(b)) * config.adapter_scale;
}

// Sampling: the logits of new tokens at `positions`, whose keys and values are added to the caches.
template <dtype C>
auto extend(const Model<C>& w, Array<"layers", Cache<C>>& caches, const Ids& ids, const Tensor<i32, "L">& positions,
            const Tensor<bool_, "B/d Qlen Klen">& seen, const Tensor<C, "L Klen">& places, const ModelConfig& config)
    -> Tensor<f32, "B/d L V/t"> {
  const auto table = gathered(w.embed);
  Residual x = embedding<C>(w, table, ids, positions);
  for (std::size_t i = 0; i < w.layers.size(); ++i)
    x = layer<C>(x, w.layers[i], config, {}, [&](const auto& q, const auto& k, const auto& v) {
      return cached_attention<C>(q, k, v, seen, places, caches[i]);
    });
  return unembedding<C>(w, table, x, config);
}

}  // namespace gpt2
