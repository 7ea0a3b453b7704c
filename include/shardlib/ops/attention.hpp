// causal_attention: softmax(q k') v as one op, which does not store the scores and computes all cotangents in one
// pass. ulysses_attention: the same between two all_to_all, of a sharded length.
#pragma once

#include <array>
#include <optional>
#include <type_traits>
#include <utility>

#include "shardlib/ops/collectives.hpp"
#include "shardlib/ops/record.hpp"
#include "shardlib/ops/result.hpp"
#include "shardlib/ops/sequences.hpp"
#include "shardlib/rules/all.hpp"
#include "shardlib/types/spec_functions.hpp"

namespace shardlib {

namespace detail {

/// The scale of scores, or none. No integer converts to it: 1 / 8 is 0, and other libraries have the width of a head or
/// the bool `causal` there.
struct AttentionScale : std::optional<double> {
  AttentionScale() = default;
  template <class N>
  requires(!std::is_integral_v<N> && std::is_convertible_v<const N&, std::optional<double>>)
      AttentionScale(const N& scale)  // NOLINT(google-explicit-constructor): it is the scale
      : std::optional<double>(scale) {}
};
/// The arguments of an attention, without the specs of the operands.
struct Attention {
  OpInfo op;
  ValuePtr q, k, v;
  ValuePtr segments;  ///< null: all positions belong to one segment
  int length = 0;     ///< the dim of q that holds the positions; if it is sharded, keys travel between the devices
  int width = 0;      ///< the dim of q that the products q k' sum over
  SequenceOrder order = SequenceOrder::contiguous;
};
/// Records the op. `sums` is the spec of the log-sum-exps, one number for each query. `due` holds the specs of the
/// cotangents.
template <class D>
ValuePtr record_attention(Attention a, std::optional<double> scale, const TensorSpec& sums,
                          const std::array<const TensorSpec*, 3>& due);

template <dtype D, dtype E, dtype F, dtype I>
inline constexpr bool segmented_attention_dtypes =
    attention_dtypes<"causal_attention", D, E, F>&& is_index<"causal_attention of segments", I>;

template <DimName Length, DimName Dim, class Out, class Keys>
Out causal_attention_op(const OpInfo& op, const Out& q, const Keys& k, const Keys& v, ValuePtr segments,
                        std::optional<double> scale, SequenceOrder order = SequenceOrder::contiguous) {
  constexpr Spec axes = axes_of<Out::spec>();  // the other operands have no axes beyond these
  constexpr Spec ct = dual_spec<Out::spec, axes>(), key_ct = dual_spec<Keys::spec, axes>();
  constexpr Spec sums = spec_of(spec_without_dim(parsed<Out::spec>, Dim));
  static constexpr OpSpec transpose = op_spec_of(ct, Out::spec, key_ct);
  static constexpr const OpParts& parts = parsed_op<transpose>.parts;
  static_assert(rules::detail_::einsum(parts).empty(),
                "the cotangent of the keys is summed over the query heads that share them");
  return Out(
      record_attention<typename Out::value_type>({op, q.value(), k.value(), v.value(), std::move(segments),
                                                  parsed<Out::spec>.find(Length), parsed<Out::spec>.find(Dim), order},
                                                 scale, parsed<sums>, {&parsed<ct>, &parsed<key_ct>, &parsed<key_ct>}));
}

}  // namespace detail

/// Computes softmax(scale q k') v along `Length`, where each position sees itself and those before it. `Dim` is the
/// width of a head. The default of `scale` is 1/sqrt(|Dim|). Scores are in f32 (f64 for f64), and the op never stores
/// the scores of all positions. Each device must hold both dims whole; all other dims are batch dims. Keys and values
/// may lack dims of the queries: the query heads along such a dim share one head of keys.
/// `causal_attention<"L", "D">(q, k, v)` of q "B/d L Q K/t D", k and v "B/d L K/t D"
template <DimName Length, DimName Dim, dtype D, Spec Q, dtype E, Spec K, dtype F, Spec V>
auto causal_attention(const Tensor<D, Q>& q, const Tensor<E, K>& k, const Tensor<F, V>& v,
                      detail::AttentionScale scale = {}, Site site = Site::current())
    -> Tensor<detail::after_t<detail::attention_dtypes<"causal_attention", D, E, F>, D>,
              detail::result_for<D, rules::causal_attention, Length, Dim, Q, K, V>> {
  return detail::causal_attention_op<Length, Dim>(detail::Calling{"causal_attention", Dim, site}, q, k, v, nullptr,
                                                  scale);
}
/// As above, but a position sees only positions of its own segment. `causal_attention<"L", "D">(q, k, v, segments)`
/// with segments "B/d L"
template <DimName Length, DimName Dim, dtype D, Spec Q, dtype E, Spec K, dtype F, Spec V, dtype I, Spec S>
auto causal_attention(const Tensor<D, Q>& q, const Tensor<E, K>& k, const Tensor<F, V>& v, const Tensor<I, S>& segments,
                      detail::AttentionScale scale = {}, Site site = Site::current())
    -> Tensor<
        detail::after_t<detail::segmented_attention_dtypes<D, E, F, I>, D>,
        detail::result_for<detail::summed_in<D, S>, rules::causal_attention_in_segments, Length, Dim, Q, K, V, S>> {
  return detail::causal_attention_op<Length, Dim>(detail::Calling{"causal_attention", Dim, site}, q, k, v,
                                                  segments.value(), scale);
}

/// As above, along a length that is sharded over these axes. Each device sends its keys and values to the devices that
/// hold later positions, one device after the other. They join the blocks by an online softmax in f32 (f64 for f64)
/// and skip what no query sees. In zigzag order all devices compute the same. Backward: keys and values go the same
/// way, and their cotangents come back. `causal_attention<"L", "D", over<"s">>(q, k, v)` of q "B/d L/s Q K/t D", k and
/// v "B/d L/s K/t D"
template <DimName Length, DimName Dim, OpSpec Over, dtype D, Spec Q, dtype E, Spec K, dtype F, Spec V>
auto causal_attention(const Tensor<D, Q>& q, const Tensor<E, K>& k, const Tensor<F, V>& v,
                      detail::AttentionScale scale = {}, SequenceOrder order = SequenceOrder::contiguous,
                      Site site = Site::current())
    -> Tensor<detail::after_t<detail::attention_dtypes<"causal_attention", D, E, F>, D>,
              detail::result_for<D, rules::causal_attention_over, Length, Dim, Over, Q, K, V>> {
  return detail::causal_attention_op<Length, Dim>(detail::Calling{"causal_attention", Dim, site}, q, k, v, nullptr,
                                                  scale, order);
}
/// As above, but a position sees only positions of its own segment.
/// `causal_attention<"L", "D", over<"s">>(q, k, v, segments)` with segments "B/d L/s",
/// `causal_attention<"L", "D", over<"s">>(q, k, v, segments, {}, SequenceOrder::zigzag)`
template <DimName Length, DimName Dim, OpSpec Over, dtype D, Spec Q, dtype E, Spec K, dtype F, Spec V, dtype I, Spec S>
auto causal_attention(const Tensor<D, Q>& q, const Tensor<E, K>& k, const Tensor<F, V>& v, const Tensor<I, S>& segments,
                      detail::AttentionScale scale = {}, SequenceOrder order = SequenceOrder::contiguous,
                      Site site = Site::current())
    -> Tensor<detail::after_t<detail::segmented_attention_dtypes<D, E, F, I>, D>,
              detail::result_for<detail::summed_in<D, S>, rules::causal_attention_over_in_segments, Length, Dim, Over,
                                 Q, K, V, S>> {
  return detail::causal_attention_op<Length, Dim>(detail::Calling{"causal_attention", Dim, site}, q, k, v,
                                                  segments.value(), scale, order);
}
SHARDLIB_FORM(causal_attention,
              "causal_attention<\"L\", \"D\">(q, k, v)`, where L is the dim of positions and D the width of a head, or "
              "with segments and a scale, a floating-point number, `causal_attention<\"L\", \"D\">(q, k, v, segments, "
              "0.125)")

namespace detail {

/// The all_to_all of an operand with these dims and others, forth or back.
template <OpSpec Exchange, Spec S>
constexpr OpSpec exchange_of(bool back) {
  const Spec there = spec_of(rules::detail_::exchanged("the operand", parsed_op<Exchange>.parts, parsed<S>).spec);
  return back ? op_spec_of(there, S) : op_spec_of(S, there);
}
template <OpSpec Exchange, class X>
auto exchanged(const X& x, const Site& site) {
  return all_to_all<exchange_of<Exchange, X::spec>(false)>(x, site);
}
template <OpSpec Exchange>
constexpr DimName exchanged_length() {
  return DimName{parsed_op<Exchange>.parts.in[0].dims[0].name};
}
template <dtype D, dtype E, dtype F, dtype I>
inline constexpr bool segmented_ulysses_dtypes =
    attention_dtypes<"ulysses_attention", D, E, F>&& is_index<"ulysses_attention of segments", I>;

}  // namespace detail

/// Causal attention along a sharded length, after Ulysses (Jacobs et al., 2023): an all_to_all moves the axes of the
/// length, the first dim of the exchange, to the heads, each device attends with some of the heads along the whole
/// length, and an all_to_all moves the axes back. Positions lie in the contiguous order. Backward: the same way.
/// `ulysses_attention<"L/s H -> L H/s", "D">(q, k, v)` of q, k and v "B/d L/s H D"
template <OpSpec Exchange, DimName Dim, dtype D, Spec Q, dtype E, Spec K, dtype F, Spec V>
auto ulysses_attention(const Tensor<D, Q>& q, const Tensor<E, K>& k, const Tensor<F, V>& v,
                       detail::AttentionScale scale = {}, Site site = Site::current())
    -> Tensor<detail::after_t<detail::attention_dtypes<"ulysses_attention", D, E, F>, D>,
              detail::result_for<D, rules::ulysses_attention, Exchange, Dim, Q, K, V>> {
  const auto y = causal_attention<detail::exchanged_length<Exchange>(), Dim>(
      detail::exchanged<Exchange>(q, site), detail::exchanged<Exchange>(k, site), detail::exchanged<Exchange>(v, site),
      scale, site);
  return all_to_all<detail::exchange_of<Exchange, Q>(true)>(y, site);
}
/// As above, but a position sees only positions of its own segment. Each device gathers all segments.
/// `ulysses_attention<"L/s H -> L H/s", "D">(q, k, v, segments)` with segments "B/d L/s"
template <OpSpec Exchange, DimName Dim, dtype D, Spec Q, dtype E, Spec K, dtype F, Spec V, dtype I, Spec S>
auto ulysses_attention(const Tensor<D, Q>& q, const Tensor<E, K>& k, const Tensor<F, V>& v,
                       const Tensor<I, S>& segments, detail::AttentionScale scale = {}, Site site = Site::current())
    -> Tensor<
        detail::after_t<detail::segmented_ulysses_dtypes<D, E, F, I>, D>,
        detail::result_for<detail::summed_in<D, S>, rules::ulysses_attention_in_segments, Exchange, Dim, Q, K, V, S>> {
  constexpr DimName length = detail::exchanged_length<Exchange>();
  constexpr Spec whole = detail::spec_of(rules::detail_::whole_length(detail::parsed<S>, length));
  const auto y = causal_attention<length, Dim>(
      detail::exchanged<Exchange>(q, site), detail::exchanged<Exchange>(k, site), detail::exchanged<Exchange>(v, site),
      all_gather<detail::op_spec_of(S, whole)>(segments, site), scale, site);
  return all_to_all<detail::exchange_of<Exchange, Q>(true)>(y, site);
}
SHARDLIB_FORM(ulysses_attention,
              "ulysses_attention<\"L/s H -> L H/s\", \"D\">(q, k, v)`, or with a scale, a floating-point number, "
              "`ulysses_attention<\"L/s H -> L H/s\", \"D\">(q, k, v, 0.125)")

}  // namespace shardlib
