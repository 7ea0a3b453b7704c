// Sums, means, products, maxima and minima over named dims, and broadcast, the transpose of sum.
#pragma once

#include <cstdint>
#include <type_traits>

#include "shardlib/ops/record.hpp"
#include "shardlib/ops/result.hpp"
#include "shardlib/rules/all.hpp"

namespace shardlib {

namespace kernels::detail {
struct SumOp;
struct ProdOp;
struct MaxOp;
struct MinOp;
}  // namespace kernels::detail

namespace detail {
/// The sizes of the dims that `out` keeps.
GlobalSizes kept_sizes(const ValuePtr& x, const TensorSpec& out);
/// The global number of elements whose mean is one element of `out`. Throws Error if it is 0.
std::int64_t count_averaged(const OpInfo& op, const ValuePtr& x, const TensorSpec& out);
/// Reduces the dims that `out` lacks, within this device's shard.
template <class Op, class D>
Buffer reduce_kernel(const Value& in, const Value& out);
template <class D>
Buffer argmax_kernel(const Value& in, const Value& out);
Buffer repeat_kernel(const Value& in, const Value& out);

template <class Out, class X>
inline constexpr auto repeat_vjp = [](const auto& ct) { return sum<transpose_op<Out, X>()>(ct); };
/// Repeats a value along the dims that it lacks (their sizes are known): R -> S or R. The transpose of sum.
template <class Out, class X>
Out repeat(const OpInfo& op, const X& x, const GlobalSizes& global) {
  return record_unary<"broadcast", Out>(op, x, global, repeat_kernel, vjp(x, repeat_vjp<Out, X>));
}
template <class Out, class X>
inline constexpr auto sum_vjp = [](const auto& ct, const GlobalSizes& global) {
  using Ct = std::remove_cvref_t<decltype(ct)>;
  using Due = Dual<X, axes_of<X::spec, Out::spec>()>;
  static constexpr OpSpec repeated = op_spec_of(Ct::spec, Due::spec);
  return repeat<Due>(OpInfo{"broadcast", repeated, {}}, ct, global);
};
/// The spec of the sum of all elements.
template <Spec S>
constexpr Spec sum_all_result() {
  TensorSpec out;
  out.partial = parsed<S>.partial;
  return spec_of(rules::pending_sum(parsed<S>, out));
}
}  // namespace detail

/// Sums over the dims that the result lacks. A sum over a sharded dim stays partial. Backward: broadcast.
/// `sum<"B/d L -> L +d">(x)`
template <OpSpec O, dtype D, Spec S>
auto sum(const Tensor<D, S>& x, Site site = Site::current())
    -> Tensor<detail::after_t<detail::is_reduced<"sum", D>, D>, detail::op_result_for<D, rules::sum, O, S>> {
  using Out = Tensor<D, detail::op_result_for<D, rules::sum, O, S>>;
  const detail::Calling op{"sum", detail::full_op<"sum", O, S>, site};
  return detail::record_unary<"sum", Out>(op, x, detail::kept_sizes(x.value(), detail::parsed<Out::spec>),
                                          detail::reduce_kernel<kernels::detail::SumOp, D>,
                                          detail::vjp(x, detail::sum_vjp<Out, Tensor<D, S>>));
}
/// The sum of all elements, partial over every axis that shards a dim. `sum(square(g))` of "M/t/d" is "+d +t"
template <dtype D, Spec S>
auto sum(const Tensor<D, S>& x, Site site = Site::current())
    -> Tensor<detail::after_t<detail::is_reduced<"sum", D>, D>, detail::sum_all_result<S>()> {
  if constexpr (detail::parsed<S>.rank() == 0)
    return x;
  else
    return sum<detail::op_spec_of(S, detail::sum_all_result<S>())>(x, site);
}
/// A compile error for a dim's number in place of an op spec.
template <dtype D, Spec S>
auto sum(const Tensor<D, S>& /*x*/, int /*axis*/) {
  return detail::needs_op_spec<"sum", D, S>();
}
SHARDLIB_FORM(sum, "sum<\"A B -> A\">(x)")

/// The sum divided by the global number of summed elements. Padding does not count. Throws Error if there are none.
/// `mean<"B/d L -> L +d">(x)`
template <OpSpec O, dtype D, Spec S>
auto mean(const Tensor<D, S>& x, Site site = Site::current())
    -> Tensor<detail::if_float<"mean", D>, detail::op_result_for<D, rules::mean, O, S>> {
  using Out = Tensor<D, detail::op_result_for<D, rules::mean, O, S>>;
  const detail::OpInfo op{"mean", detail::full_op<"mean", O, S>, site};
  const auto n = static_cast<double>(detail::count_averaged(op, x.value(), detail::parsed<Out::spec>));
  return sum<O>(x, site) / detail::LocatedNumber(n, site);
}
SHARDLIB_NEEDS_OP_SPEC(mean)
SHARDLIB_FORM(mean, "mean<\"A B -> A\">(x)")

namespace detail {
/// A `ct` that is null stands for a cotangent of ones.
template <class D>
struct ExtremumBackward {
  ValuePtr x, extrema, ct;
  Buffer operator()(const Value& out) const;
};
/// Gives each cotangent to the first element that equals the extremum.
template <OpName Name, class X>
struct ExtremumVjp {
  OpInfo op;
  bool twice;  ///< whether the VJP is differentiated, too
  template <class Ct, class Out>
  auto operator()(const Ct& ct, const X& x, const Out& extrema) const {
    using Due = Dual<X, axes_of<X::spec, Out::spec>()>;
    using Backward = ExtremumBackward<typename X::value_type>;
    if (twice) {
      // Which element is the first extremum has no derivative.
      const Backward ones{without_gradient(x.value()), without_gradient(extrema.value()), nullptr};
      return Due(record<Name, X>(op, ct.device(), sizes_of(x.value()), ones) * ct);
    }
    return record<Name, Due>(op, ct.device(), sizes_of(x.value()), Backward{x.value(), extrema.value(), ct.value()});
  }
};
template <OpName Name, OpSpec O, class D, Spec S>
using local_reduction_t = Tensor<after_t<is_reduced<Name, D>, D>, result_for<D, rules::local_max, Name, O, S>>;
/// The maximum or minimum. If there are no elements, that is an error, or with `of_none` the least or greatest number.
template <OpName Name, class Op, OpSpec O, class D, Spec S>
auto extremum(const Tensor<D, S>& x, const Site& site, bool of_none = false) -> local_reduction_t<Name, O, D, S> {
  using Out = local_reduction_t<Name, O, D, S>;
  const Calling op{Name.text, full_op<Name, O, S>, site};
  const GlobalSizes sizes =
      of_none ? kept_sizes(x.value(), parsed<Out::spec>) : chosen_sizes(op, x.value(), parsed<Out::spec>);
  const ExtremumVjp<Name, Tensor<D, S>> backward{op, differentiated_twice(x.value())};
  return record_unary<Name, Out>(op, x, sizes, reduce_kernel<Op, D>, vjp_of_result(x, save(x), backward));
}
}  // namespace detail

/// The maximum over unsharded dims. Throws if there is no element. Backward: the cotangent goes to the first of the
/// elements that are equal to the maximum. `max<"B/d V -> B/d">(x)`
template <OpSpec O, dtype D, Spec S>
auto max(const Tensor<D, S>& x, Site site = Site::current()) -> detail::local_reduction_t<"max", O, D, S> {
  return detail::extremum<"max", kernels::detail::MaxOp, O>(x, site);
}
template <dtype D, Spec S>
auto max(const Tensor<D, S>& /*x*/) {
  return detail::needs_op_spec<"max", D, S>();
}
SHARDLIB_FORM(max, "max<\"A B -> A\">(x)`, or for the larger of two elements `maximum(x, 0.0)")

/// The minimum over unsharded dims. Throws if there is no element. Backward: the cotangent goes to the first of the
/// elements that are equal to the minimum. `min<"B/d V -> B/d">(x)`
template <OpSpec O, dtype D, Spec S>
auto min(const Tensor<D, S>& x, Site site = Site::current()) -> detail::local_reduction_t<"min", O, D, S> {
  return detail::extremum<"min", kernels::detail::MinOp, O>(x, site);
}
template <dtype D, Spec S>
auto min(const Tensor<D, S>& /*x*/) {
  return detail::needs_op_spec<"min", D, S>();
}
SHARDLIB_FORM(min, "min<\"A B -> A\">(x)`, or for the smaller of two elements `minimum(x, 0.0)")

namespace detail {
template <class D>
struct ProdBackward {
  ValuePtr x, ct;
  Buffer operator()(const Value& out) const;
};
template <class Out>
struct ProdVjp {
  OpInfo op;
  template <class Ct, class X>
  auto operator()(const Ct& ct, const X& x) const {
    return record<"prod", Dual<X, axes_of<X::spec, Out::spec>()>>(
        op, ct.device(), sizes_of(x.value()), ProdBackward<typename X::value_type>{x.value(), ct.value()});
  }
};
}  // namespace detail

/// The product over unsharded dims. Backward: the products of the other elements. `prod<"B/d V -> B/d">(x)`
template <OpSpec O, dtype D, Spec S>
auto prod(const Tensor<D, S>& x, Site site = Site::current()) -> detail::local_reduction_t<"prod", O, D, S> {
  using Out = decltype(prod<O>(x, site));  // nvcc 13 loses the "prod" of an alias
  const detail::Calling op{"prod", detail::full_op<"prod", O, S>, site};
  return detail::record_unary<"prod", Out>(op, x, detail::kept_sizes(x.value(), detail::parsed<Out::spec>),
                                           detail::reduce_kernel<kernels::detail::ProdOp, D>,
                                           detail::vjp(x, detail::save(x), detail::ProdVjp<Out>{op}));
}
SHARDLIB_NEEDS_OP_SPEC(prod)

/// The index of the first maximum along one unsharded dim. `argmax<"B/d V -> B/d">(x)`
template <OpSpec O, dtype D, Spec S>
auto argmax(const Tensor<D, S>& x, Site site = Site::current())
    -> Tensor<i32, detail::named_result_for<D, rules::local_max, "argmax", O, S>> {
  using Out = Tensor<i32, detail::named_result_for<D, rules::local_max, "argmax", O, S>>;
  const detail::Calling op{"argmax", detail::full_op<"argmax", O, S>, site};
  return detail::record_unary<"argmax", Out>(op, x, detail::chosen_sizes(op, x.value(), detail::parsed<Out::spec>),
                                             detail::argmax_kernel<D>);
}
SHARDLIB_NEEDS_OP_SPEC(argmax)

/// Repeats the value along new dims of the given sizes. Backward: sum. `broadcast<"M -> B/d M">(x, {{"B", 8}})`
template <OpSpec O, dtype D, Spec S>
auto broadcast(const Tensor<D, S>& x, Sizes sizes, Site site = Site::current())
    -> Tensor<D, detail::op_result_for<D, rules::broadcast, O, S>> {
  using Out = Tensor<D, detail::op_result_for<D, rules::broadcast, O, S>>;
  const detail::Calling op{"broadcast", detail::full_op<"broadcast", O, S>, site};
  return detail::repeat<Out>(op, x, detail::sizes_by_name(op, detail::parsed<Out::spec>, x.value(), sizes));
}
SHARDLIB_FORM_WITH_SIZES(broadcast, "broadcast<\"M -> B M\">(x, {{\"B\", 8}})")

}  // namespace shardlib
