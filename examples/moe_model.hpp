// The model of moe.cpp: a GPT whose feed-forward layers are mixtures of experts, with all communication spelled out.
//
// Sequences are sharded over d and e, their length over s, experts over e, heads and the width of experts over t. The
// tokens of a device are sorted by expert. Then they travel to their experts' devices along e, as many as there are
// (dropless) or in slots of a fixed number (capacity), and back. Indices choose rows, not products with one-hot rows.
// Dims: B batch, L length, M model, Q query heads per key-value head, H key-value heads, D head, F feed-forward of an
// expert, G of the shared one, X experts, K experts of a token, V vocabulary; P places (devices), T = U W tokens of a
// place, of U sequences W each, R = T K their choices ("rows"), A all rows, S rows at their experts, C slots.
//
// The dtype of computation C is f32 or bf16: of products, of the weights that the layers read, of their gradients and
// of what is sent. The router's logits and shares, sums over devices, norms, softmax, the residual stream and the loss
// are f32.
#pragma once

#include <shardlib/shardlib.hpp>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>
#include <utility>

#include "model_parts.hpp"

namespace moe {

using namespace shardlib;
using MoeMesh = Mesh<"d e s t">;

// ---- weights: at rest, every tensor is sharded over the whole mesh -------------------------------------------------

// With `Whole` a weight is gathered over d, e and s before the microbatches. Experts, which are sharded over e, are
// gathered over d and s alone.
template <dtype C, Spec S, bool Whole>
using Weight = Tensor<C, Whole ? without_axis<without_axis<without_axis<S, "d">, "e">, "s"> : S>;
template <dtype C, Spec S, bool Whole>
using ExpertWeight = Tensor<C, Whole ? without_axis<without_axis<S, "d">, "s"> : S>;

template <dtype C, bool Whole>
struct SharedOf {
  Weight<C, "M/d/e/s G/t", Whole> w_gate, w_up, w_down;
  Array<"mix", Weight<C, "I M/t/d/e/s", Whole>> mix;  // one in Qwen's: a token's share of this expert; I is 1
};
template <dtype C, bool Whole>
struct LayerOf {
  Weight<C, "M/t/d/e/s", Whole> norm1, norm2;
  Weight<C, "M/d/e/s Q H/t D", Whole> w_q;
  Weight<C, "M/d/e/s H/t D", Whole> w_k, w_v;
  Weight<C, "M/d/e/s Q H/t D", Whole> w_o;
  // One each in Qwen 2, of all heads.
  Array<"bias", Weight<C, "HQD/t/d/e/s", Whole>> b_q;
  Array<"bias", Weight<C, "HD/t/d/e/s", Whole>> b_k, b_v;
  Array<"norm", Weight<C, "E/t/d/e/s", Whole>> q_norm, k_norm;  // one each in Qwen 3; E is D, padded
  Weight<C, "M/t/d/e/s X", Whole> router;
  ExpertWeight<C, "X/e M/d/s F/t", Whole> w_gate, w_up, w_down;
  Array<"shared", SharedOf<C, Whole>> shared;  // none, or an expert of every token
};
template <dtype C, bool Whole>
struct ModelOf {
  Weight<C, "V/t M/d/e/s", Whole> embed, unembed;
  Array<"layers", LayerOf<C, Whole>> layers;
  Weight<C, "M/t/d/e/s", Whole> final_norm;
};
using Layer = LayerOf<f32, false>;
using Model = ModelOf<f32, false>;
static_assert(fully_sharded<MoeMesh, Model>);

/// The configuration of the model, without tensors.
struct ModelConfig {
  RopeAngles rope;  ///< of rotary positions
  double norm_epsilon = 1e-6;
  RecomputePolicy recompute = {};
  SequenceOrder order = SequenceOrder::contiguous;  ///< of a batch's tokens along L/s
  std::int64_t top_k = 2;
  bool norm_topk_prob = true;  ///< whether the weights of a token's experts add up to 1 (Hugging Face's name)
  double capacity = 0;         ///< slots of an expert, as a multiple of its share of the tokens; 0: dropless
  double balance = 0.01;       ///< of the loss that balances the experts (Fedus et al. 2021, arXiv:2101.03961)
  double router_z = 1e-3;  ///< of the loss that keeps the router's logits small (Zoph et al. 2022, arXiv:2202.08906)
};

using Batch = gpt::TokenTensors<"B/d/e L/s">;
using Residual = Tensor<f32, "B/d/e L/s M/t">;
template <dtype C>
using Hidden = Tensor<C, "B/d/e L/s M">;
using Loss = Tensor<f32, "+d +e +s +t">;
using gpt::gathered;  // a weight as a layer reads it
using gpt::head_norm;

// ---- routing -------------------------------------------------------------------------------------------------------

template <dtype C>
using Tokens = Tensor<C, "P/s/d/e T M">;
using Sum = Tensor<f32, "P/s/d/e T M/t">;  // of its experts, for each token

// The rows of a place in the order of their experts: the token and the weight of each one, and how many each expert
// has.
struct Routing {
  Tensor<i32, "P/s/d/e R"> token;
  Tensor<f32, "P/s/d/e R"> weight;
  Tensor<i32, "P/s/d/e X"> counts;
};
/// How evenly the experts are used: the rows of the fullest expert as a multiple of the mean, and the share of the rows
/// that found no slot.
struct Balance {
  Tensor<f32, ""> load, dropped;
};
struct Routed {
  Routing routing;
  Loss loss;
  Balance balance;
};

// The slots that an expert has for a place.
inline std::int64_t slots(const ModelConfig& config, std::int64_t tokens, std::int64_t experts) {
  const double share = static_cast<double>(tokens * config.top_k) / static_cast<double>(experts);
  // A token chooses an expert once at most.
  return static_cast<std::int64_t>(std::clamp(std::ceil(share * config.capacity), 1.0, static_cast<double>(tokens)));
}

// A softmax over the experts, the best K of them, and their shares, among themselves if so configured.
template <dtype C>
auto route(const Tokens<C>& x, const Tensor<C, "M X">& router, const ModelConfig& config) -> Routed {
  const MoeMesh mesh(x.device());
  const std::int64_t experts = router.size("X"), tokens = x.size("P") * x.size("T");
  const auto all_rows = static_cast<double>(tokens * config.top_k);
  const auto logits = einsum_unreduced<"P/s/d/e T M, M X -> P/s/d/e T X", f32>(x, router);
  const auto shares = softmax<"X">(logits);
  const auto [best, chosen] = top_k<"X", "K">(shares, config.top_k);
  const auto share_of_row = config.norm_topk_prob ? best / sum<"P/s/d/e T K -> P/s/d/e T">(best) : best;
  const auto weights = merge<"T K -> J">(share_of_row);
  const auto expert = merge<"T K -> R">(chosen);
  const auto order = argsort<"R">(expert);
  const auto one = ones<f32, "P/s/d/e R">(mesh, {{"P", x.size("P")}, {"R", expert.size("R")}});
  const auto counts = scatter_add<"P/s/d/e R, P/s/d/e R -> P/s/d/e [X]">(one, expert, {{"X", experts}});
  const Routing routing{floor_divide(order, static_cast<double>(config.top_k)),
                        index_unreduced<"P/s/d/e [J], P/s/d/e R -> P/s/d/e R">(weights, order), cast<i32>(counts)};

  // Of the tokens of all devices: the part of the rows that each expert gets, and the mean share that the router gives
  // it. The latter is still a pending sum, and so is the loss.
  const auto part = all_reduce<"X +d +e +s -> X">(sum<"P/s/d/e X -> X +d +e +s">(counts)) / all_rows;
  const auto share = sum<"P/s/d/e T X -> X +d +e +s">(shares) / static_cast<double>(tokens);
  const auto balance = sum<"X +d +e +s -> +d +e +s">(share * part) * (config.balance * static_cast<double>(experts));
  const auto z = sum<"P/s/d/e T -> +d +e +s">(square(logsumexp<"P/s/d/e T X -> P/s/d/e T">(logits)));
  const auto kept =
      config.capacity == 0 ? counts : minimum(counts, static_cast<double>(slots(config, x.size("T"), experts)));
  const auto served = all_reduce<"+d +e +s -> ">(sum<"P/s/d/e X -> +d +e +s">(kept)) / all_rows;
  return {routing,
          to_partial<over<"t">>(balance + z * (config.router_z / static_cast<double>(tokens))),
          {max<"X -> ">(part) * static_cast<double>(experts), 1.0 - served}};
}

// ---- the experts, over e -------------------------------------------------------------------------------------------

template <dtype C>
struct Experts {
  Tensor<C, "X/e M F/t"> w_gate, w_up, w_down;
};
template <dtype C, bool Whole>
Experts<C> gathered_experts(const LayerOf<C, Whole>& w) {
  return {gathered<"X/e M F/t">(w.w_gate), gathered<"X/e M F/t">(w.w_up), gathered<"X/e M F/t">(w.w_down)};
}
template <dtype C, Spec S>
auto swiglu(const Tensor<C, S>& gate, const Tensor<C, S>& up) {
  return map([](auto g, auto u) { return swish(g) * u; }, gate, up);
}

// The most rows that a device gets, of all devices. A plan, which has no counts, is for a load of 1.25.
inline std::int64_t most_rows(const Tensor<i32, "P/s/d X/e">& received, std::int64_t mean) {
  const MoeMesh mesh(received.device());
  const auto by_device = split<"X/e -> Y/e Z">(
      split<"P/s/d -> O/s/d N">(received, {{"O", mesh.size("s") * mesh.size("d")}}), {{"Y", mesh.size("e")}});
  const auto most = all_reduce_max<"O/s/d Y/e -> ">(sum<"O/s/d N Y/e Z -> O/s/d Y/e">(by_device));
  return std::max<std::int64_t>(1, item(most, static_cast<i32>(mean * 5 / 4)));
}

// Every row reaches its expert. The counts travel first; then a device knows how many rows it gets. Rows travel in
// shards over t.
template <dtype C>
auto dropless(const Tokens<C>& x, const Routing& r, const Experts<C>& w) -> Sum {
  const MoeMesh mesh(x.device());
  const Scope scope(mesh);  // each layer has an S of its own
  const std::int64_t rows = r.token.size("R"), places = x.size("P");
  const auto received = all_to_all<"P/s/d/e X -> P/s/d X/e">(r.counts);
  const std::int64_t bound = most_rows(received, rows) * places;
  const auto shards = shard<"P/s/d/e T M -> P/s/d/e T M/t">(x);
  const auto sorted = index_unreduced<"P/s/d/e [T] M/t, P/s/d/e R -> P/s/d/e R M/t">(shards, r.token);
  const auto here = ragged_all_to_all<"A/s/d/e M/t -> S/s/d/e M/t">(merge<"P/s/d/e R -> A/s/d/e">(sorted), r.counts,
                                                                    received, {{"S", bound}});
  const auto rows_of_experts = all_gather<"S/s/d/e M/t -> S/s/d/e M", backward_sum<f32>>(here);
  const auto gate = grouped_einsum<"S/s/d/e M, X/e M F/t -> S/s/d/e F/t">(rows_of_experts, w.w_gate, received);
  const auto up = grouped_einsum<"S/s/d/e M, X/e M F/t -> S/s/d/e F/t">(rows_of_experts, w.w_up, received);
  const auto y = grouped_einsum<"S/s/d/e F/t, X/e M F/t -> S/s/d/e M +t">(swiglu(gate, up), w.w_down, received);
  const auto done = reduce_scatter<"S/s/d/e M +t -> S/s/d/e M/t", f32>(y);
  const auto back = ragged_all_to_all<"S/s/d/e M/t -> A/s/d/e M/t">(done, received, r.counts, {{"A", rows * places}});
  return scatter_add<"P/s/d/e R M/t, P/s/d/e R -> P/s/d/e [T] M/t">(
      cast<f32>(split<"A/s/d/e -> P/s/d/e R">(back, {{"P", places}})) * r.weight, r.token, {{"T", x.size("T")}});
}

// An expert has C slots for each place. Rows that find no slot are dropped: their tokens continue without this expert.
// Empty slots are sent, too.
template <dtype C>
auto with_capacity(const Tokens<C>& x, const Routing& r, const Experts<C>& w, const ModelConfig& config) -> Sum {
  const MoeMesh mesh(x.device());
  const auto first = cumsum<"X">(r.counts) - r.counts;
  const auto slot = iota<"C">(mesh, slots(config, x.size("T"), r.counts.size("X")));
  const auto used = greater(r.counts, slot);
  const auto at = where(used, first + slot, 0.0);
  const auto token = index_unreduced<"P/s/d/e [J], P/s/d/e X C -> P/s/d/e X C">(rename<"R -> J">(r.token), at);
  const auto weight = index_unreduced<"P/s/d/e [J], P/s/d/e X C -> P/s/d/e X C">(rename<"R -> J">(r.weight), at);
  const auto shards = shard<"P/s/d/e T M -> P/s/d/e T M/t">(x);
  const auto sent = masked(used, index_unreduced<"P/s/d/e [T] M/t, P/s/d/e X C -> P/s/d/e X C M/t">(shards, token));
  const auto here = all_to_all<"P/s/d/e X C M/t -> P/s/d X/e C M/t">(sent);
  const auto rows = all_gather<"P/s/d X/e C M/t -> P/s/d X/e C M", backward_sum<f32>>(here);
  const auto gate = einsum_unreduced<"P/s/d X/e C M, X/e M F/t -> P/s/d X/e C F/t">(rows, w.w_gate);
  const auto up = einsum_unreduced<"P/s/d X/e C M, X/e M F/t -> P/s/d X/e C F/t">(rows, w.w_up);
  const auto done = einsum<"P/s/d X/e C F/t, X/e M F/t -> P/s/d X/e C M/t", f32>(swiglu(gate, up), w.w_down);
  const auto back = all_to_all<"P/s/d X/e C M/t -> P/s/d/e X C M/t">(done);
  return scatter_add<"P/s/d/e X C M/t, P/s/d/e X C -> P/s/d/e [T] M/t">(cast<f32>(back) * masked(used, weight), token,
                                                                        {{"T", x.size("T")}});
}

// ---- one layer -----------------------------------------------------------------------------------------------------

template <dtype C, Spec S>
auto normalized(const Residual& x, const Tensor<C, S>& norm, const ModelConfig& config) -> Hidden<C> {
  const auto whole = all_gather<"B/d/e L/s M/t -> B/d/e L/s M", backward_sum<f32>>(cast<C>(x));
  const auto scale = gathered<"M">(norm);
  return rms_norm<"M">(whole, scale, config.norm_epsilon);
}

template <dtype C>
using Queries = Tensor<C, "B/d/e L/s Q H/t D">;
template <dtype C>
struct Projected {
  Queries<C> q;
  Tensor<C, "B/d/e L/s H/t D"> k, v;
};
// The queries, keys and values of the tokens at these positions.
template <dtype C, bool Whole>
auto queries_keys_values(const Hidden<C>& x, const LayerOf<C, Whole>& w, const ModelConfig& config, Positions positions)
    -> Projected<C> {
  auto q = einsum_unreduced<"B/d/e L/s M, M Q H/t D -> B/d/e L/s Q H/t D">(x, gathered<"M Q H/t D">(w.w_q));
  auto k = einsum_unreduced<"B/d/e L/s M, M H/t D -> B/d/e L/s H/t D">(x, gathered<"M H/t D">(w.w_k));
  auto v = einsum_unreduced<"B/d/e L/s M, M H/t D -> B/d/e L/s H/t D">(x, gathered<"M H/t D">(w.w_v));
  const Sizes groups{{"Q", q.size("Q")}, {"D", q.size("D")}}, heads{{"D", q.size("D")}};
  for (const auto& bias : w.b_q)
    q = q + rearrange<"H/t Q D -> Q H/t D">(split<"HQD/t -> H/t Q D">(gathered<"HQD/t">(bias), groups));
  for (const auto& bias : w.b_k) k = k + split<"HD/t -> H/t D">(gathered<"HD/t">(bias), heads);
  for (const auto& bias : w.b_v) v = v + split<"HD/t -> H/t D">(gathered<"HD/t">(bias), heads);
  for (const auto& norm : w.q_norm) q = head_norm<"E">(q, norm, config.norm_epsilon);
  for (const auto& norm : w.k_norm) k = head_norm<"E">(k, norm, config.norm_epsilon);
  return {rope<"L", "D">(q, config.rope, positions), rope<"L", "D">(k, config.rope, positions), v};
}
template <dtype C, bool Whole>
auto joined(const Queries<C>& y, const LayerOf<C, Whole>& w) -> Residual {
  return cast<f32>(einsum<"B/d/e L/s Q H/t D, M Q H/t D -> B/d/e L/s M/t", f32>(y, gathered<"M Q H/t D">(w.w_o)));
}
// Keys and values go to the devices of s that hold later tokens.
template <dtype C, bool Whole>
auto attention(const Hidden<C>& x, const Tensor<i32, "B/d/e L/s">& segments, const LayerOf<C, Whole>& w,
               const ModelConfig& config) -> Residual {
  const auto [q, k, v] = queries_keys_values(x, w, config, config.order);
  return joined(causal_attention<"L", "D", over<"s">>(q, k, v, segments, std::nullopt, config.order), w);
}

template <dtype C, bool Whole>
auto shared_expert(const Hidden<C>& x, const SharedOf<C, Whole>& w) -> Residual {
  const auto gate = einsum_unreduced<"B/d/e L/s M, M G/t -> B/d/e L/s G/t">(x, gathered<"M G/t">(w.w_gate));
  const auto up = einsum_unreduced<"B/d/e L/s M, M G/t -> B/d/e L/s G/t">(x, gathered<"M G/t">(w.w_up));
  const auto sums = einsum<"B/d/e L/s G/t, M G/t -> B/d/e L/s M/t", f32>(swiglu(gate, up), gathered<"M G/t">(w.w_down));
  const auto y = cast<f32>(sums);
  if (w.mix.empty()) return y;
  const auto share = sigmoid(einsum_unreduced<"B/d/e L/s M, I M -> B/d/e L/s I", f32>(x, gathered<"I M">(w.mix[0])));
  return einsum_unreduced<"B/d/e L/s M/t, B/d/e L/s I -> B/d/e L/s M/t">(y, share);
}

template <dtype C, bool Whole>
auto feed_forward(const Hidden<C>& x, const LayerOf<C, Whole>& w, const ModelConfig& config)
    -> std::pair<Residual, Routed> {
  const auto shards = stack_shards<"B/d/e L/s M -> P/s/d/e U W M">(x);
  const auto tokens = merge<"U W -> T">(shards);
  const Routed routed = route(tokens, gathered<"M X">(w.router), config);
  const Experts<C> experts = gathered_experts(w);
  const auto y = config.capacity == 0 ? dropless(tokens, routed.routing, experts)
                                      : with_capacity(tokens, routed.routing, experts, config);
  const auto out = unstack_shards<"P/s/d/e U W M/t -> B/d/e L/s M/t">(split<"T -> U W">(y, {{"W", shards.size("W")}}));
  return {w.shared.empty() ? out : out + shared_expert(x, w.shared[0]), routed};
}

/// The values that a layer passes to the next one: the residual stream, the sum of the routers' losses so far, and how
/// evenly the layers use their experts.
struct Carry {
  Residual x;
  Loss loss;
  Balance balance;
};

template <dtype C, bool Whole>
auto layer(const Carry& before, const Tensor<i32, "B/d/e L/s">& segments, const LayerOf<C, Whole>& w,
           const ModelConfig& config) -> Carry {
  const auto x = before.x + attention(normalized(before.x, w.norm1, config), segments, w, config);
  const auto [out, routed] = feed_forward(normalized(x, w.norm2, config), w, config);
  return {x + out, before.loss + routed.loss, routed.balance};
}

// ---- the model -----------------------------------------------------------------------------------------------------

template <dtype C, bool Whole>
auto token_embeddings(const ModelOf<C, Whole>& w, const Tensor<i32, "B/d/e L/s">& inputs) -> Residual {
  return cast<f32>(reduce_scatter<"B/d/e L/s M +t -> B/d/e L/s M/t", f32>(
      index_unreduced<"[V/t] M, B/d/e L/s -> B/d/e L/s M +t">(gathered<"V/t M">(w.embed), inputs)));
}

/// Of the last batch, averaged over the layers.
struct Metrics {
  Loss cross_entropy;
  Balance balance;
};

// The loss and its metrics. `microbatches` is the number of such batches in a step.
template <dtype C, bool Whole = false>
auto loss(const ModelOf<C, Whole>& w, const Batch& batch, const ModelConfig& config, std::int64_t microbatches)
    -> std::pair<Loss, Metrics> {
  const MoeMesh mesh(batch.inputs.device());
  const auto none = to_partial<over<"d e s t">>(zeros<f32, "">(mesh, {}));
  Carry carry{token_embeddings(w, batch.inputs), none, {zeros<f32, "">(mesh, {}), zeros<f32, "">(mesh, {})}};
  Balance total = carry.balance;
  for (const LayerOf<C, Whole>& weights : w.layers) {
    carry =
        explicit_activation_checkpointing(layer<C, Whole>, config.recompute)(carry, batch.segments, weights, config);
    total = {total.load + carry.balance.load, total.dropped + carry.balance.dropped};
  }
  const auto last = normalized(carry.x, w.final_norm, config);
  const auto losses =
      linear_cross_entropy<"B/d/e L/s M, V/t M -> B/d/e L/s V/t">(last, gathered<"V/t M">(w.unembed), batch.targets);
  const Loss cross_entropy = sum<"B/d/e L/s +t -> +d +e +s +t">(losses * batch.weights);
  const auto layers = static_cast<double>(w.layers.size());
  return {cross_entropy + carry.loss / static_cast<double>(microbatches),
          {cross_entropy, {total.load / layers, total.dropped / layers}}};
}

}  // namespace moe
