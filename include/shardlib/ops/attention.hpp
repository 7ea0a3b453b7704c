// causal_attention: softmax(q k') v without storing the scores, as one op with all cotangents in one pass.
#pragma once

#include <array>
#include <optional>
#include <string_view>
#include <utility>

#include "shardlib/ops/record.hpp"
#include "shardlib/ops/result.hpp"
#include "shardlib/rules/all.hpp"

namespace shardlib {

namespace detail {

/// An attention without the specs of its operands.
struct Attention {
  OpInfo op;
  ValuePtr q, k, v;
  ValuePtr segments;  ///< null: all positions are in one
  int length = 0;     ///< the dim of q along which positions count
  int width = 0;      ///< the one over which products are summed
};
/// Records the op. `sums`: the spec of the log-sum-exps, one number for each query. `due`: those of the cotangents.
template <class D>
ValuePtr record_attention(Attention a, std::optional<double> scale, const TensorSpec& sums,
                          const std::array<const TensorSpec*, 3>& due);

constexpr Spec without_dim(Spec s, std::string_view dim) {
  TensorSpec spec = parse_tensor(s).spec;
  spec.dims.erase(spec.find(dim));
  return Spec(to_string(spec).view());
}

template <DimName Length, DimName Dim, class Out, class Keys>
Out causal_attention_op(const OpInfo& op, const Out& q, const Keys& k, const Keys& v, ValuePtr segments,
                        std::optional<double> scale) {
  constexpr Spec axes = axes_of<Out::spec>();  // the other operands have no further ones
  constexpr Spec ct = dual_spec(Out::spec, axes), key_ct = dual_spec(Keys::spec, axes);
  constexpr Spec sums = without_dim(Out::spec, Dim);
  static constexpr OpSpec transpose = make_op(ct, Out::spec, key_ct);
  static constexpr OpParts parts = parse_op(transpose);
  static_assert(rules::detail_::einsum(parts).empty(),
                "the cotangent of the keys is summed over the query heads that share them");
  return Out(record_attention<typename Out::value_type>({op, q.value(), k.value(), v.value(), std::move(segments),
                                                         parsed<Out::spec>.find(Length), parsed<Out::spec>.find(Dim)},
                                                        scale, parsed<sums>,
                                                        {&parsed<ct>, &parsed<key_ct>, &parsed<key_ct>}));
}

}  // namespace detail

/// softmax(scale q k') v along `Length`, each position seeing itself and those before it; `Dim` is the width of a head,
/// and scale 1/sqrt(|Dim|) unless given. Scores are in f32 (f64 for f64) and never stored for all positions; both dims
/// are whole on each device, all others are batch. Keys and values may lack dims of the queries: query heads that share
/// a head of keys. `causal_attention<"L", "D">(q, k, v)` of q "B/d L Q K/t D", k and v "B/d L K/t D"
template <DimName Length, DimName Dim, dtype D, Spec Q, dtype E, Spec K, dtype F, Spec V>
auto causal_attention(const Tensor<D, Q>& q, const Tensor<E, K>& k, const Tensor<F, V>& v,
                      std::optional<double> scale = {}, Site site = Site::current())
    -> Tensor<detail::after_t<detail::attention_dtypes<D, E, F>, D>,
              detail::result_of<rules::causal_attention, Length, Dim, Q, K, V>> {
  return detail::causal_attention_op<Length, Dim>(detail::Calling{"causal_attention", Dim, site}, q, k, v, nullptr,
                                                  scale);
}
/// The same, where a position sees those of its own segment alone. `causal_attention<"L", "D">(q, k, v, segments)` with
/// segments "B/d L"
template <DimName Length, DimName Dim, dtype D, Spec Q, dtype E, Spec K, dtype F, Spec V, dtype I, Spec S>
auto causal_attention(const Tensor<D, Q>& q, const Tensor<E, K>& k, const Tensor<F, V>& v, const Tensor<I, S>& segments,
                      std::optional<double> scale = {}, Site site = Site::current())
    -> Tensor<
        detail::after_t<detail::attention_dtypes<D, E, F> && detail::is_index<"causal_attention of segments", I>, D>,
        detail::result_of<rules::causal_attention_in_segments, Length, Dim, Q, K, V, S>> {
  return detail::causal_attention_op<Length, Dim>(detail::Calling{"causal_attention", Dim, site}, q, k, v,
                                                  segments.value(), scale);
}

}  // namespace shardlib
