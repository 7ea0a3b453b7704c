// Collectives and layout casts, each with its transpose.
//
// An op of one operand takes one of three op specs: the full one, the result alone, `all_gather<"M F/t">(w)`, or the
// axes that it acts over, `all_gather<over<"d">>(w)`. The operand's type gives the rest. `Sum` is the dtype in which
// the op adds the values of different devices. For bf16 it is f32: the values travel as bf16 and the op rounds the
// sum once. For other dtypes it is the operand's dtype. A sum of bf16 has to state `Sum`.
#pragma once

#include <cstdint>
#include <string_view>
#include <type_traits>

#include "shardlib/ops/record.hpp"
#include "shardlib/ops/result.hpp"
#include "shardlib/rules/all.hpp"

namespace shardlib {

namespace detail {
Buffer gather(const Value& in, const Value& out);
/// Inside prefetch: starts the transfer that `gather` later completes. Elsewhere it does nothing.
void gather_ahead(const ValuePtr& in, const ValuePtr& out);
template <class Out, class X>
inline constexpr auto all_gather_vjp = [](const auto& ct) {
  const AsyncSum<std::remove_cvref_t<decltype(ct)>> asynchronous(ct.device());
  return reduce_scatter<transpose_op<Out, X>(), sum_of<typename X::value_type>>(ct);
};
}  // namespace detail

/// Concatenates the shards over the last axes of one or several dims. Backward: reduce_scatter. `backward_sum` states
/// the dtype of that sum: `all_gather<"M/t/d H -> M/t H", backward_sum<f32>>(w)`. `all_gather<"M/t/d H -> M/t H">(w)`
template <OpSpec O, class Sum = void, dtype D, Spec S>
auto all_gather(const Tensor<D, S>& x, Site site = Site::current())
    -> Tensor<detail::after_t<detail::backward_sums_in<D, Sum>, D>, detail::op_result_for<D, rules::all_gather, O, S>> {
  using Out = Tensor<D, detail::op_result_for<D, rules::all_gather, O, S>>;
  const detail::Calling op{"all_gather", detail::full_op<"all_gather", O, S>, site};
  const Out out = detail::record_unary<"all_gather", Out>(op, x, detail::sizes_of(x.value()), detail::gather,
                                                          detail::vjp(x, detail::all_gather_vjp<Out, Tensor<D, S>>));
  detail::gather_ahead(x.value(), out.value());
  return out;
}
SHARDLIB_NEEDS_OP_SPEC(all_gather)
SHARDLIB_FORM(all_gather, "all_gather<\"M/d F -> M F\">(x)`, or by the axis `all_gather<over<\"d\">>(x)")
SHARDLIB_SPEC_IN_PARENTHESES(all_gather)

namespace detail {
Buffer scatter(const Value& in, const Value& out);
/// Starts the sum of a gradient if it is asynchronous. The first read of `out` waits for it.
void scatter_ahead(const ValuePtr& in, const ValuePtr& out);
template <class Out, class X>
inline constexpr auto reduce_scatter_vjp = [](const auto& ct) { return all_gather<transpose_op<Out, X>()>(ct); };
}  // namespace detail

/// Completes the partial sum and leaves each device its shard. Backward: all_gather.
/// `reduce_scatter<"B/d L M +t -> B/d L M/t", f32>(y)`; an operand of f32 needs no dtype.
template <OpSpec O, class Sum = void, dtype D, Spec S>
auto reduce_scatter(const Tensor<D, S>& x, Site site = Site::current())
    -> Tensor<detail::after_t<detail::is_summed<"reduce_scatter", D, Sum>, D>,
              detail::op_result_for<D, rules::reduce_scatter, O, S>> {
  using Out = Tensor<D, detail::op_result_for<D, rules::reduce_scatter, O, S>>;
  const detail::Calling op{"reduce_scatter", detail::full_op<"reduce_scatter", O, S>, site};
  const Out out =
      detail::record_unary<"reduce_scatter", Out>(op, x, detail::sizes_of(x.value()), detail::scatter,
                                                  detail::vjp(x, detail::reduce_scatter_vjp<Out, Tensor<D, S>>));
  detail::scatter_ahead(x.value(), out.value());
  return out;
}
SHARDLIB_NEEDS_OP_SPEC(reduce_scatter)
SHARDLIB_FORM(reduce_scatter, "reduce_scatter<\"M +t -> M/t\">(x)")
SHARDLIB_SPEC_IN_PARENTHESES(reduce_scatter)

namespace detail {
/// Sums over the axes that are partial in `in` and no longer in `out`.
Buffer sum_pending(const Value& in, const Value& out);
template <class Out, class X>
inline constexpr auto all_reduce_vjp =
    [](const auto& ct) { return all_reduce<transpose_op<Out, X>(), sum_of<typename X::value_type>>(ct); };
}  // namespace detail

/// Completes the partial sum on every device. Backward: all_reduce. `all_reduce<"+d +t -> ">(loss)`
template <OpSpec O, class Sum = void, dtype D, Spec S>
auto all_reduce(const Tensor<D, S>& x, Site site = Site::current())
    -> Tensor<detail::after_t<detail::is_summed<"all_reduce", D, Sum>, D>,
              detail::op_result_for<D, rules::all_reduce, O, S>> {
  using Out = Tensor<D, detail::op_result_for<D, rules::all_reduce, O, S>>;
  const detail::Calling op{"all_reduce", detail::full_op<"all_reduce", O, S>, site};
  return detail::record_unary<"all_reduce", Out>(op, x, detail::sizes_of(x.value()), detail::sum_pending,
                                                 detail::vjp(x, detail::all_reduce_vjp<Out, Tensor<D, S>>));
}
SHARDLIB_NEEDS_OP_SPEC(all_reduce)
SHARDLIB_FORM(all_reduce, "all_reduce<\"M +t -> M\">(x)`, or by the axis `all_reduce<over<\"t\">>(x)")
SHARDLIB_SPEC_IN_PARENTHESES(all_reduce)

namespace detail {
/// The maximum over the dims that `out` lacks: first of this device's shard, then over devices.
template <class D>
Buffer max_over_devices(const Value& in, const Value& out);
}  // namespace detail

/// The maximum over the dims that the result lacks, across all devices that share them. It has no derivative: pass it
/// `stop_gradient(x)`. `all_reduce_max<"B/d L V/t -> B/d L">(logits)`
template <OpSpec O, dtype D, Spec S>
auto all_reduce_max(const Tensor<D, S>& x, Site site = Site::current())
    -> Tensor<detail::after_t<detail::is_reduced<"all_reduce_max", D>, D>,
              detail::op_result_for<D, rules::all_reduce_max, O, S>> {
  using Out = Tensor<D, detail::op_result_for<D, rules::all_reduce_max, O, S>>;
  const detail::Calling op{"all_reduce_max", detail::full_op<"all_reduce_max", O, S>, site};
  detail::require_no_gradient(op, x.value(), "a maximum over devices has no derivative");
  return detail::record_unary<"all_reduce_max", Out>(
      op, x, detail::chosen_sizes(op, x.value(), detail::parsed<Out::spec>), detail::max_over_devices<D>);
}
SHARDLIB_NEEDS_OP_SPEC(all_reduce_max)

namespace detail {
Buffer exchange(const Value& in, const Value& out);
template <class Out, class X>
inline constexpr auto all_to_all_vjp = [](const auto& ct) { return all_to_all<transpose_op<Out, X>()>(ct); };
}  // namespace detail

/// Moves the last axes of one dim to another dim. Backward: the inverse all_to_all. `all_to_all<"A/t B -> A B/t">(x)`
template <OpSpec O, dtype D, Spec S>
auto all_to_all(const Tensor<D, S>& x, Site site = Site::current())
    -> Tensor<D, detail::op_result_for<D, rules::all_to_all, O, S>> {
  using Out = Tensor<D, detail::op_result_for<D, rules::all_to_all, O, S>>;
  const detail::Calling op{"all_to_all", detail::full_op<"all_to_all", O, S>, site};
  return detail::record_unary<"all_to_all", Out>(op, x, detail::sizes_of(x.value()), detail::exchange,
                                                 detail::vjp(x, detail::all_to_all_vjp<Out, Tensor<D, S>>));
}
SHARDLIB_NEEDS_OP_SPEC(all_to_all)
SHARDLIB_FORM(all_to_all, "all_to_all<\"A/t B -> A B/t\">(x)")
SHARDLIB_SPEC_IN_PARENTHESES(all_to_all)

namespace detail {
/// Sends the shard to the device `places` places further along the ring of an axis.
struct Shift {
  std::string_view axis;
  std::int64_t by;  ///< as the call gave it, which a second run must repeat
  int places;       ///< from 0 to the size of the axis - 1
};
/// The places along the ring of the axis for a shift by any number.
int places_on_ring(const ValuePtr& x, std::string_view axis, std::int64_t by);
/// Starts the shift. The first read of its result waits for that.
template <class Out, class X, class V>
Out record_shift(const OpInfo& op, const X& x, const Shift& shift, const V& vjp);
/// `shift` where the rule is known to allow it.
template <OpSpec O, AxisName Axis, dtype D, Spec S>
Tensor<D, S> shift_by(const Tensor<D, S>& x, std::int64_t by, Site site);
template <AxisName Axis>
struct ShiftVjp {
  int places;
  template <class Ct>
  auto operator()(const Ct& ct) const {
    return shift_by<OpSpec{std::string_view(Ct::spec)}, Axis>(ct, -places, Site::current());
  }
};
template <OpSpec O, AxisName Axis, dtype D, Spec S>
Tensor<D, S> shift_by(const Tensor<D, S>& x, std::int64_t by, Site site) {
  const Calling op{"shift", O, site};
  for (int i = 0; i < parsed<S>.rank(); ++i)
    if (parsed<S>.dims[i].axes.contains(std::string_view(Axis)))
      require_unpadded(op, x.value(), i,
                       "a shift would bring its padding between the shards; choose a size that needs none");
  const int places = places_on_ring(x.value(), Axis, by);
  return record_shift<Tensor<D, S>>(op, x, {Axis, by, places}, vjp(x, ShiftVjp<Axis>{places}));
}
}  // namespace detail

/// Sends shards along the ring of an axis: device i's shard goes to device (i + by) mod n. The transfer runs during the
/// ops that follow, and the first one that reads the result waits for it. If the axis shards a dim, that dim may not be
/// padded. Backward: shift by -by. `shift<"A/t", "t">(x, 1)`
template <OpSpec O, AxisName Axis, dtype D, Spec S>
auto shift(const Tensor<D, S>& x, WholeNumber by, Site site = Site::current())
    -> Tensor<D, detail::result_for<D, rules::shift, O, Axis, S>> {
  return detail::shift_by<O, Axis>(x, by, site);
}
/// As above, of an operand that the axis shards along one dim. `shift<over<"t">>(x, 1)`
template <OpSpec O, dtype D, Spec S>
auto shift(const Tensor<D, S>& x, WholeNumber by, Site site = Site::current())
    -> Tensor<D, detail::op_result_for<D, rules::shift_over, O, S>> {
  return shift<OpSpec{std::string_view(S)}, AxisName{rules::over_axes(O)}>(x, by, site);
}
SHARDLIB_FORM(shift, "shift<over<\"t\">>(x, 1)")

namespace detail {
/// Copies this device's shard out of a replicated value.
Buffer cut_shard(const Value& in, const Value& out);
/// Puts this device's shard into an array of zeros.
Buffer embed_shard(const Value& in, const Value& out);
/// The transpose of shard, S -> P. "A/t -> A +t"
template <class Out, class X>
inline constexpr auto shard_vjp = [](const auto& ct) {
  using Ct = std::remove_cvref_t<decltype(ct)>;
  static constexpr OpSpec O = transpose_op<Out, X>();
  static constexpr Spec whole = spec_of(parsed_op<O>.parts.out);
  return record_linear<Tensor<typename Ct::value_type, whole>>(OpInfo{"shard_backward", O, {}}, ct,
                                                               sizes_of(ct.value()), embed_shard, cut_shard);
};
}  // namespace detail

/// Each device keeps its shard of a replicated value, without communication. Backward: zeros elsewhere.
/// `shard<"A -> A/t">(x)`
template <OpSpec O, dtype D, Spec S>
auto shard(const Tensor<D, S>& x, Site site = Site::current())
    -> Tensor<D, detail::op_result_for<D, rules::shard, O, S>> {
  using Out = Tensor<D, detail::op_result_for<D, rules::shard, O, S>>;
  const detail::Calling op{"shard", detail::full_op<"shard", O, S>, site};
  return detail::record_unary<"shard", Out>(op, x, detail::sizes_of(x.value()), detail::cut_shard,
                                            detail::vjp(x, detail::shard_vjp<Out, Tensor<D, S>>));
}
SHARDLIB_NEEDS_OP_SPEC(shard)
SHARDLIB_FORM(shard, "shard<\"M -> M/t\">(x)")

namespace detail {
/// The value on the first device of the axes that become partial, and zeros on the others.
Buffer keep_on_first(const Value& in, const Value& out);
template <class Out, class X>
inline constexpr auto to_partial_vjp = [](const auto& ct) { return to_partial<transpose_op<Out, X>()>(ct); };
}  // namespace detail

/// Turns a replicated value into a partial sum: the first device of the axis keeps it, the others hold zero.
/// Backward: to_partial. `to_partial<"A -> A +t">(b)`
template <OpSpec O, dtype D, Spec S>
auto to_partial(const Tensor<D, S>& x, Site site = Site::current())
    -> Tensor<D, detail::op_result_for<D, rules::to_partial, O, S>> {
  using Out = Tensor<D, detail::op_result_for<D, rules::to_partial, O, S>>;
  const detail::Calling op{"to_partial", detail::full_op<"to_partial", O, S>, site};
  return detail::record_unary<"to_partial", Out>(op, x, detail::sizes_of(x.value()), detail::keep_on_first,
                                                 detail::vjp(x, detail::to_partial_vjp<Out, Tensor<D, S>>));
}
SHARDLIB_NEEDS_OP_SPEC(to_partial)

}  // namespace shardlib
