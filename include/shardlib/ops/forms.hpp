// Compile errors for calls of an op that fit none of its forms. Each gives a form that fits.
#pragma once

#include <concepts>

#include "shardlib/ops/result.hpp"
#include "shardlib/spec/dtype.hpp"
#include "shardlib/types/tensor.hpp"

namespace shardlib {

namespace detail {
template <class X>
inline constexpr bool is_mesh = false;
template <Spec Axes>
inline constexpr bool is_mesh<Mesh<Axes>> = true;
/// The first argument of such a call: a tensor, or what other libraries have there: a mesh, a spec, a size.
template <class X>
concept first_argument = tensor<X> || is_mesh<X> || std::integral<X> || std::convertible_to<const X&, const char*>;
}  // namespace detail

// Overload resolution takes an ellipsis last: a call that fits a form, if only by conversions, never comes here.
#define SHARDLIB_FORM(op, form)                      \
  template <OpSpec... O, detail::first_argument X>   \
  auto op(const X& x, ...) {                         \
    return detail::wrong_call<#op, form>(x, "more"); \
  }
SHARDLIB_FORM(all_gather, "all_gather<\"M/d F -> M F\">(x)`, or by the axis `all_gather<over<\"d\">>(x)")
SHARDLIB_FORM(all_reduce, "all_reduce<\"M +t -> M\">(x)`, or by the axis `all_reduce<over<\"t\">>(x)")
SHARDLIB_FORM(all_to_all, "all_to_all<\"A/t B -> A B/t\">(x)")
SHARDLIB_FORM(broadcast, "broadcast<\"M -> B M\">(x, {{\"B\", 8}})")
SHARDLIB_FORM(cast, "cast<bf16>(x)")
SHARDLIB_FORM(causal_attention,
              "causal_attention<\"L\", \"D\">(q, k, v)`, where L is the dim of positions and D the width of a head, or "
              "with segments and a scale `causal_attention<\"L\", \"D\">(q, k, v, segments, 0.125)")
SHARDLIB_FORM(causal_mask, "causal_mask<\"Qlen Klen\">(mesh, 128, 128)")
SHARDLIB_FORM(concat, "concat<\"Past, L -> Klen\">(a, b)")
SHARDLIB_FORM(conv_unreduced, "conv_unreduced<\"B L C, K C F -> B N F\", \"L, K -> N\">(x, w, {.stride = 2})")
SHARDLIB_FORM(cross_entropy, "cross_entropy(logits, targets)`, whose last dim of the logits is the vocabulary")
SHARDLIB_FORM(diagonal, "diagonal<\"X\", \"Y\">(x)")
SHARDLIB_FORM(einsum, "einsum<\"A B/t, B/t C -> A C\">(x, y)")
SHARDLIB_FORM(einsum_unreduced, "einsum_unreduced<\"A B, B C -> A C\">(x, y)")
SHARDLIB_FORM(gelu, "gelu(x)")
SHARDLIB_FORM(grouped_einsum, "grouped_einsum<\"S M, X M F -> S F\">(rows, weights, counts)")
SHARDLIB_FORM(index_unreduced, "index_unreduced<\"[V] M, B -> B M\">(table, ids)")
SHARDLIB_FORM(iota, "iota<\"L\">(mesh, 128)`, whose dtype is i32")
SHARDLIB_FORM(linear_cross_entropy, "linear_cross_entropy<\"B M, V M -> B V\">(x, table, targets)")
SHARDLIB_FORM(masked, "masked(c, x)`, or with another number than 0 where c is false `where(c, x, -1e30)")
SHARDLIB_FORM(max, "max<\"A B -> A\">(x)`, or for the larger of two elements `maximum(x, 0.0)")
SHARDLIB_FORM(mean, "mean<\"A B -> A\">(x)")
SHARDLIB_FORM(min, "min<\"A B -> A\">(x)`, or for the smaller of two elements `minimum(x, 0.0)")
SHARDLIB_FORM(narrow, "narrow<\"L -> N\">(x, 0, 4)")
SHARDLIB_FORM(one_hot, "one_hot<\"V\">(ids, 8)")
SHARDLIB_FORM(pad, "pad<\"L -> N\">(x, 1, 1)")
SHARDLIB_FORM(ragged_all_to_all, "ragged_all_to_all<\"R/e M -> S/e M\">(rows, sent, received, {{\"S\", 64}})")
SHARDLIB_FORM(rearrange, "rearrange<\"A B -> B A\">(x)")
SHARDLIB_FORM(reduce_scatter, "reduce_scatter<\"M +t -> M/t\">(x)")
SHARDLIB_FORM(rename, "rename<\"L -> Klen\">(x)")
SHARDLIB_FORM(roll, "roll<\"L\">(x, 1)")
SHARDLIB_FORM(rope,
              "rope<\"L\", \"D\">(x, {.base = 10000})`, where L is the dim of positions and D the width of a head")
SHARDLIB_FORM(scatter_add, "scatter_add<\"B M, B -> [V] M\">(rows, ids, {{\"V\", 8}})")
SHARDLIB_FORM(sequence_positions, "sequence_positions<\"L/s\">(mesh, 128, SequenceOrder::zigzag)")
SHARDLIB_FORM(shard, "shard<\"M -> M/t\">(x)")
SHARDLIB_FORM(shift, "shift<over<\"t\">>(x, 1)")
SHARDLIB_FORM(split, "split<\"E -> H D\">(x, {{\"D\", 64}})")
SHARDLIB_FORM(stack, "stack<\"layer\">(a, b)`, or of more tensors `stack<\"layer\">(std::vector{a, b, c})")
SHARDLIB_FORM(sum, "sum<\"A B -> A\">(x)")
SHARDLIB_FORM(top_k, "top_k<\"V\", \"K\">(x, 4)")
SHARDLIB_FORM(transpose, "transpose<\"A\", \"B\">(x)")
SHARDLIB_FORM(tril, "tril<\"Qlen\", \"Klen\">(x)")
SHARDLIB_FORM(triu, "triu<\"Qlen\", \"Klen\">(x)")
SHARDLIB_FORM(ulysses_attention, "ulysses_attention<\"L/s H -> L H/s\", \"D\">(q, k, v)")
SHARDLIB_FORM(windows, "windows<\"L, K -> N\">(x, {{\"K\", 3}})")
#undef SHARDLIB_FORM
/// A compile error for a dtype, which zeros and full take.
template <dtype D, Spec S, class... Args>
auto iota(const Args&... args) {
  return detail::wrong_call<"iota", "iota<\"L\">(mesh, 128)`, or of another dtype `cast<f32>(iota<\"L\">(mesh, 128))">(
      args..., S);
}
/// A compile error for another dtype than those of a tensor.
template <class To, tensor X>
requires(!dtype<To>) auto cast(const X& x) {
  return detail::wrong_call<"cast", "cast<f32>(x)`, where f32 is one of f32, bf16, f64, i32, u32, u8 and bool_">(x);
}

}  // namespace shardlib
