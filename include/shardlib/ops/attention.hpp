// causal_attention: softmax(q k') v without storing the scores, as one op with all cotangents in one pass.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <optional>
#include <span>
#include <utility>

#include "shardlib/detail/inline.hpp"
#include "shardlib/kernels/attention.hpp"
#include "shardlib/shapes.hpp"
#include "shardlib/tape.hpp"

namespace shardlib {
namespace detail {

/// An attention without the types of its operands.
struct Attention {
  OpInfo op;
  ValuePtr q, k, v;
  ValuePtr segments;  ///< null: all positions are in one
  int length = 0;     ///< the dim of q along which positions count
  int width = 0;      ///< the one over which products are summed
  double scale = 1;

  /// The kernels for the operands' dtype.
  Buffer (*forward)(const Attention& a, const Value& out, const Handle<Value>& sums) = nullptr;
  void (*backward)(const Attention& a, const Value& out, const Value& sums, const Value& ct,
                   std::span<const ValuePtr> grads) = nullptr;
};

/// The loops over the operands' blocks; the log-sum-exps lie as the queries without their width.
[[nodiscard]] SHARDLIB_INLINE kernels::AttentionLoops attention_loops(const Attention& a);

/// Records the op. `sums`: the spec of the log-sum-exps, one number for each query. `due`: those of the cotangents.
[[nodiscard]] SHARDLIB_INLINE ValuePtr record_attention(const Attention& a, const TensorSpec& sums,
                                                        const std::array<const TensorSpec*, 3>& due);

template <dtype D>
struct AttentionKernels {
  using A = accumulator_t<D>;
  static const i32* segments_of(const Attention& a) {
    return a.segments == nullptr ? nullptr : reinterpret_cast<const i32*>(a.segments->data().data());
  }
  static Buffer forward(const Attention& a, const Value& out, const Handle<Value>& sums) {
    Buffer result = allocate(out);
    if (sums != nullptr) sums->storage->buffer = allocate(*sums);
    kernels::causal_attention(out.device->exec(), attention_loops(a), a.q->as<const D>(), a.k->as<const D>(),
                              a.v->as<const D>(), segments_of(a), result.as<D>(),
                              sums != nullptr ? sums->storage->buffer.template as<A>() : nullptr);
    return result;
  }
  static void backward(const Attention& a, const Value& out, const Value& sums, const Value& ct,
                       std::span<const ValuePtr> grads) {
    const auto block = [](const ValuePtr& x) { return x == nullptr ? nullptr : x->storage->buffer.template as<D>(); };
    const D* const result = out.as<const D>();  // before its sums, which a replay computes with it
    kernels::causal_attention_backward(out.device->exec(), attention_loops(a), a.q->as<const D>(), a.k->as<const D>(),
                                       a.v->as<const D>(), segments_of(a), result, sums.as<const A>(), ct.as<const D>(),
                                       block(grads[0]), block(grads[1]), block(grads[2]));
  }
};

constexpr Spec without_dim(Spec s, std::string_view dim) {
  TensorSpec spec = parse_tensor(s).spec;
  spec.dims.erase(spec.find(dim));
  return Spec(to_string(spec).view());
}

template <Op Length, Op Dim, class Out, class Keys>
Out causal_attention_op(const OpInfo& op, const Out& q, const Keys& k, const Keys& v, ValuePtr segments,
                        std::optional<double> scale) {
  using Kernels = AttentionKernels<typename Out::value_type>;
  constexpr Spec axes = axes_of<Out::spec>();  // the other operands have no further ones
  constexpr Spec ct = dual_spec(Out::spec, axes), key_ct = dual_spec(Keys::spec, axes);
  constexpr Spec sums = without_dim(Out::spec, Dim);
  static constexpr Op transpose = make_op(ct, Out::spec, key_ct);
  static constexpr OpParts parts = parse_op(transpose);
  static_assert(rules::detail_::einsum(parts).empty(),
                "the cotangent of the keys is summed over the query heads that share them");
  Attention a{op, q.value(), k.value(), v.value(), std::move(segments)};
  a.length = parsed<Out::spec>.find(Length);
  a.width = parsed<Out::spec>.find(Dim);
  a.scale = scale.value_or(1 / std::sqrt(static_cast<double>(std::max<std::int64_t>(1, a.q->global.logical[a.width]))));
  a.forward = &Kernels::forward;
  a.backward = &Kernels::backward;
  return Out(record_attention(a, parsed<sums>, {&parsed<ct>, &parsed<key_ct>, &parsed<key_ct>}));
}

}  // namespace detail

template <Op Length, Op Dim, dtype D, Spec Q, dtype E, Spec K, dtype F, Spec V>
auto causal_attention(const Tensor<D, Q>& q, const Tensor<E, K>& k, const Tensor<F, V>& v, std::optional<double> scale,
                      Site site) -> Tensor<detail::after_t<detail::attention_dtypes<D, E, F>, D>,
                                           detail::result_of<rules::causal_attention, Length, Dim, Q, K, V>> {
  return detail::causal_attention_op<Length, Dim>(detail::Calling{"causal_attention", Dim, site}, q, k, v, nullptr,
                                                  scale);
}

template <Op Length, Op Dim, dtype D, Spec Q, dtype E, Spec K, dtype F, Spec V, dtype I, Spec S>
auto causal_attention(const Tensor<D, Q>& q, const Tensor<E, K>& k, const Tensor<F, V>& v, const Tensor<I, S>& segments,
                      std::optional<double> scale, Site site)
    -> Tensor<
        detail::after_t<detail::attention_dtypes<D, E, F> && detail::is_index<"causal_attention of segments", I>, D>,
        detail::result_of<rules::causal_attention_in_segments, Length, Dim, Q, K, V, S>> {
  return detail::causal_attention_op<Length, Dim>(detail::Calling{"causal_attention", Dim, site}, q, k, v,
                                                  segments.value(), scale);
}

}  // namespace shardlib

#ifndef SHARDLIB_COMPILED
#include "shardlib/ops/attention_inl.hpp"
#endif
