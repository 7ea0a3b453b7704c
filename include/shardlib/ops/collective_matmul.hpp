// Collective matmul: einsums that compute with the shards of an operand as they arrive, or that send the shards of the
// result as soon as they are computed.
#pragma once

#include <array>
#include <string_view>
#include <type_traits>
#include <utility>

#include "shardlib/ops/einsum.hpp"
#include "shardlib/ops/record.hpp"
#include "shardlib/ops/result.hpp"
#include "shardlib/rules/all.hpp"
#include "shardlib/spec/dtype.hpp"

namespace shardlib {

/// A tensor of type Tensor<D, To> whose shards, of type Tensor<D, From>, are still on the other devices. Only
/// `einsum_unreduced` and `einsum` accept it, as one of two operands. `value_type` is the dtype, `from` the spec of a
/// shard, and `to` the spec of the whole.
template <dtype D, Spec From, Spec To>
class Gathering : public detail::Unfinished<Gathering<D, From, To>> {
 public:
  using value_type = D;
  static constexpr Spec from = From, to = To;

  explicit Gathering(Tensor<D, From> shard) : shard_(std::move(shard)) {}

  /// The shard that this device holds.
  [[nodiscard]] const Tensor<D, From>& shard() const { return shard_; }

  /// A compile error that says what to do.
  template <class E, Spec S>
  operator Tensor<E, S>() const {  // NOLINT(google-explicit-constructor): meant to catch implicit conversions
    static_assert(detail::checked<rules::not_gathered, From, To, S>::ok);
    return {};
  }

 private:
  Tensor<D, From> shard_;
};

/// Announces an all_gather along one dim and axis to the einsum that takes the result. Nothing moves before.
/// `einsum_unreduced<"B/d L M, M F/t -> B/d L F/t">(gathering<"B/d L/t M -> B/d L M">(x), w)`
template <OpSpec O, dtype D, Spec S>
auto gathering(const Tensor<D, S>& x) -> Gathering<D, S, detail::op_result_for<D, rules::gathering, O, S>> {
  return Gathering<D, S, detail::op_result_for<D, rules::gathering, O, S>>(x);
}
SHARDLIB_NEEDS_OP_SPEC(gathering)

namespace detail {

/// The product of two operands. One is in shards along `dim`, sharded over `axis`. All shards visit each device.
struct GatheringEinsum {
  const kernels::EinsumPlan* plan;
  ValuePtr a, b;
  bool first;  ///< whether `a` is the operand in shards, not `b`
  std::string_view dim, axis;
  Buffer operator()(const Value& out) const;
};
/// The product of two operands. Each device gets the sum of one shard along `dim`, sharded over `axis`.
struct ScatteringEinsum {
  const kernels::EinsumPlan* plan;
  ValuePtr a, b;
  std::string_view dim, axis;
  Buffer operator()(const Value& out) const;
};
/// Records an einsum_scatter. The backward pass computes both cotangents, of the specs `due`, while the shards of the
/// result's cotangent visit the devices once.
ValuePtr record_einsum_scatter(const OpInfo& op, const ScatteringEinsum& product, const TensorSpec& out,
                               const GlobalSizes& global, const std::array<const kernels::EinsumPlan*, 2>& backward,
                               const std::array<const TensorSpec*, 2>& due);

/// The cotangent of the gathering operand X: an einsum_scatter of the result's cotangent with the other operand.
template <class X, Spec Whole>
inline constexpr auto gathering_vjp = [](const auto& ct, const auto& other, const GlobalSizes& global) {
  using Ct = std::remove_cvref_t<decltype(ct)>;
  using Other = std::remove_cvref_t<decltype(other)>;
  using D = typename X::value_type;
  static constexpr Spec due = dual_spec<X::spec, axes_of<Ct::spec, Other::spec, X::spec>()>();
  static constexpr OpSpec transpose = op_spec_of(Ct::spec, Other::spec, due);
  static constexpr rules::Traveling shards = rules::traveling(parsed<Whole>, parsed<X::spec>);
  return record<"einsum_scatter", Tensor<D, due>>(
      OpInfo{"einsum_scatter", transpose, {}}, ct.device(), global,
      ScatteringEinsum{&einsum_plan<transpose>(), ct.value(), other.value(), shards.dim, shards.axis});
};
/// The cotangent of the other operand Y: the gathering einsum of the result's cotangent with X, whose shards travel
/// again.
template <class Y, Spec Whole>
inline constexpr auto beside_gathering_vjp = [](const auto& ct, const auto& x, const GlobalSizes& global) {
  using Ct = std::remove_cvref_t<decltype(ct)>;
  using X = std::remove_cvref_t<decltype(x)>;
  using D = typename Y::value_type;
  static constexpr Spec due = dual_spec<Y::spec, axes_of<Ct::spec, X::spec, Y::spec>()>();
  static constexpr OpSpec transpose = op_spec_of(Ct::spec, Whole, due);
  static constexpr rules::Traveling shards = rules::traveling(parsed<Whole>, parsed<X::spec>);
  return record<"einsum_unreduced", Tensor<D, due>>(
      OpInfo{"einsum_unreduced", transpose, {}}, ct.device(), global,
      GatheringEinsum{&einsum_plan<transpose>(), ct.value(), x.value(), false, shards.dim, shards.axis});
};

template <OpSpec O, class Result, bool First, Spec Whole, class X, class Y>
Result einsum_gathering(const Site& site, const X& x, const Y& other) {
  static constexpr rules::Traveling shards = rules::traveling(parsed<Whole>, parsed<X::spec>);
  const Calling op{"einsum_unreduced", O, site};
  const ValuePtr &a = First ? x.value() : other.value(), &b = First ? other.value() : x.value();
  const auto result = record<"einsum_unreduced", Result>(
      op, x.device(), sizes_by_name(op, parsed<Result::spec>, {&a, &b}),
      GatheringEinsum{&einsum_plan<O>(), a, b, First, shards.dim, shards.axis},
      vjp(x, save(other), gathering_vjp<X, Whole>), vjp(other, save(x), beside_gathering_vjp<Y, Whole>));
  using D = typename X::value_type;
  if constexpr (!std::is_same_v<typename Result::value_type, D>) cast_cotangent(result.value(), dtype_v<D>);
  return result;
}

template <class X>
inline constexpr bool is_gathering = false;
template <dtype D, Spec From, Spec To>
inline constexpr bool is_gathering<Gathering<D, From, To>> = true;
/// `void` if one operand is gathering, the first or the second. One overload takes both, because each overload costs
/// compile time in every call. It is used as a default argument, because clang 19 checks a constraint only after the
/// type of the result.
template <class X, class Y>
using if_one_gathers = std::enable_if_t<(is_gathering<X> && is_tensor<Y>) || (is_tensor<X> && is_gathering<Y>)>;

/// The rule's verdict for two operands, one of which is gathering.
template <auto Rule, OpSpec O, class X, class Y>
struct ProductOfGathering {
  using Gathers = std::conditional_t<is_gathering<X>, X, Y>;
  using Other = std::conditional_t<is_gathering<X>, Y, X>;
  static constexpr Spec result = result_of<Rule, O, Gathers::from, Gathers::to, Other::spec, is_gathering<X>>;
  static constexpr bool ok = legal<Rule, O, Gathers::from, Gathers::to, Other::spec, is_gathering<X>>;
};
template <OpSpec O, class X, class Y>
using GatheringProduct = ProductOfGathering<rules::einsum_gathering, O, X, Y>;
template <OpSpec O, class X, class Y>
using ReducedGatheringProduct = ProductOfGathering<rules::einsum_reduced_gathering, O, X, Y>;

}  // namespace detail

/// The einsum_unreduced of an operand that is still gathering. At each step a device multiplies the shard at hand,
/// passes it on along the axis, and receives the next one. A gathered dim that is summed is added in that order, in f32
/// (f64 for f64). The other operand must be sharded over the axis. Backward: an einsum_scatter for the gathering
/// operand; for the other one, the shards travel again.
/// `einsum_unreduced<"B/d L M, M F/t -> B/d L F/t">(gathering<over<"t">>(x), w)`
template <OpSpec O, class Out = void, class X, class Y, class = detail::if_one_gathers<X, Y>>
auto einsum_unreduced(const X& x, const Y& y, Site site = Site::current())
    -> Tensor<detail::after_t<detail::einsum_operands<typename X::value_type, Out, typename Y::value_type>,
                              detail::dtype_or<Out, typename X::value_type>>,
              detail::GatheringProduct<O, X, Y>::result> {
  using Product = detail::GatheringProduct<O, X, Y>;
  using Result = Tensor<detail::dtype_or<Out, typename X::value_type>, Product::result>;
  if constexpr (!Product::ok)
    return {};
  else if constexpr (detail::is_gathering<X>)
    return detail::einsum_gathering<O, Result, true, X::to>(site, x.shard(), y);
  else
    return detail::einsum_gathering<O, Result, false, Y::to>(site, y.shard(), x);
}

/// The einsum of an operand that is still gathering, with the collective over other axes that its result needs.
/// `einsum<"B/d L M/t, M/t F -> B/d L F/t">(x, gathering<"M/t/d F -> M/t F">(w))`
template <OpSpec O, class Sum = void, class X, class Y, class = detail::if_one_gathers<X, Y>>
auto einsum(const X& x, const Y& y, Site site = Site::current())
    -> Tensor<detail::after_t<detail::einsum_summands<typename X::value_type, Sum, typename Y::value_type>,
                              typename X::value_type>,
              detail::ReducedGatheringProduct<O, X, Y>::result> {
  if constexpr (!detail::ReducedGatheringProduct<O, X, Y>::ok)
    return {};
  else
    return detail::einsum_reduced<O, Sum>(site, x, y);
}

/// An einsum with a reduce_scatter along one dim and axis, whose shards are sent as soon as they are computed. A device
/// computes the shard of the next device along the axis first, and its own last. It adds what it receives in that
/// order, the previous device's first and its own last, where reduce_scatter adds in a tree: the results are equal but
/// for rounding. bf16 is sent as bf16, added in f32 and rounded once. Backward: one einsum for both operands, of the
/// result's cotangent, whose shards visit the devices once.
/// `einsum_scatter<"B/d L F/t, F/t M -> B/d L/t M">(x, w)`
template <OpSpec O, class Sum = void, dtype D, Spec S, dtype E, Spec T>
auto einsum_scatter(const Tensor<D, S>& x, const Tensor<E, T>& y, Site site = Site::current())
    -> Tensor<detail::after_t<detail::one_dtype<"einsum_scatter", D, E> && detail::einsum_dtypes<D, D> &&
                                  detail::is_summed<"einsum_scatter", D, Sum>,
                              D>,
              detail::op_result_for<D, rules::einsum_scatter, O, S, T>> {
  if constexpr (!legal<rules::einsum_scatter, O, S, T>) {
    return {};
  } else {
    using Result = Tensor<D, detail::op_result_for<D, rules::einsum_scatter, O, S, T>>;
    static constexpr Spec axes = detail::axes_of<S, T, Result::spec>();
    static constexpr Spec ct = detail::dual_spec<Result::spec, axes>(), x_due = detail::dual_spec<S, axes>(),
                          y_due = detail::dual_spec<T, axes>();
    static constexpr OpSpec to_x = detail::op_spec_of(ct, T, x_due), to_y = detail::op_spec_of(ct, S, y_due);
    static constexpr Spec products = detail::spec_of(rules::unreduced(detail::parsed_op<O>.parts));
    static constexpr rules::Traveling shards = rules::traveling(detail::parsed<products>, detail::parsed<Result::spec>);
    const detail::Calling op{"einsum_scatter", O, site};
    return Result(detail::record_einsum_scatter(
        op, {&detail::einsum_plan<O>(), x.value(), y.value(), shards.dim, shards.axis}, detail::parsed<Result::spec>,
        detail::sizes_by_name(op, detail::parsed<Result::spec>, {&x.value(), &y.value()}),
        {&detail::einsum_plan<to_x>(), &detail::einsum_plan<to_y>()},
        {&detail::parsed<x_due>, &detail::parsed<y_due>}));
  }
}
template <dtype D, Spec S, dtype E, Spec T>
auto einsum_scatter(const Tensor<D, S>& x, const Tensor<E, T>& y) -> detail::needs_op_spec<"einsum_scatter", D, S, T>;

}  // namespace shardlib
