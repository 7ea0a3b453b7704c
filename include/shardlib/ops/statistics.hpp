// Reductions over unsharded dims that are made of other ops: logsumexp, var, vector_norm, any, all.
#pragma once

#include <string_view>
#include <type_traits>

#include "shardlib/ops/collectives.hpp"
#include "shardlib/ops/elementwise.hpp"
#include "shardlib/ops/layout.hpp"
#include "shardlib/ops/map.hpp"
#include "shardlib/ops/record.hpp"
#include "shardlib/ops/reductions.hpp"
#include "shardlib/ops/result.hpp"
#include "shardlib/rules/all.hpp"
#include "shardlib/support/function.hpp"

namespace shardlib {

namespace detail {

template <OpName Name, OpSpec O, class D, Spec S>
using statistic_t = Tensor<if_float<Name, D>, result_for<D, rules::local_max, Name, O, S>>;

/// Multiplies the cotangent, or its sum where `Over` names axes, by Slope(x, constants..., result), a function of
/// numbers.
template <OpName Name, class Slope, class X, OpSpec Over = "">
struct SlopeVjp {
  OpInfo op;
  template <class Ct, tensor... More>
  auto operator()(const Ct& ct, const X& x, const More&... more) const {
    if constexpr (std::string_view(Over).empty())
      return map_as<Name, X>(op, Slope{}, x, more...) * ct;
    else
      return map_as<Name, X>(op, Slope{}, x, more...) * all_reduce<Over>(ct);
  }
};
/// The value `y` as the result of an op of x, whose derivative by x is Slope(x, y).
template <OpName Name, class Slope, class Out, class X>
Out with_slope(const OpInfo& op, const X& x, const Out& y) {
  return record_unary<Name, Out>(op, y, sizes_of(y.value()), same_bytes,
                                 vjp_of_result(x, save(x), SlopeVjp<Name, Slope, X>{op}));
}

/// exp(x - m) of an element and the maximum. Where that is infinite, so are the elements that count: each is 1.
/// A NaN, which is the maximum then, stays one.
struct ExpAbove {
  template <class T>
  SHARDLIB_FUNCTION T operator()(const T& x, const T& m) const {
    if (m - m == T(0)) return exp(x - m);
    return m > T(0) ? (x == m ? T(1) : T(0)) : m < T(0) ? T(0) : m;
  }
};
struct LogAbove {
  template <class T>
  SHARDLIB_FUNCTION T operator()(const T& total, const T& m) const {
    return log(total) + (m < T(0) && m - m != T(0) ? T(0) : m);
  }
};
/// An element's part of the total, which is 0 where all elements are -inf.
struct SoftmaxShare {
  template <class T>
  SHARDLIB_FUNCTION T operator()(const T& x, const T& m, const T& total) const {
    return total == T(0) ? T(0) : ExpAbove{}(x, m) / total;
  }
};
/// The same by the result. Only where that is infinite does it depend on the total.
struct ShareOfResult {
  template <class T>
  SHARDLIB_FUNCTION T operator()(const T& x, const T& total, const T& y) const {
    if (y - y == T(0)) return exp(x - y);
    return y > T(0) ? (x == y ? T(1) / total : T(0)) : y < T(0) ? T(0) : y;
  }
};
/// The logsumexp of x from the maximum and the total of each row. In the backward pass the cotangents are summed over
/// the axes that `Over` names.
template <OpSpec Over = "", class X, class Out>
Out logsumexp_of_rows(const OpInfo& op, const X& x, const Out& most, const Out& total) {
  const Out y = map_as<"logsumexp", Out>(op, LogAbove{}, total, most);
  const auto record = [&](const auto& vjp) {
    return record_unary<"logsumexp", Out>(op, y, sizes_of(y.value()), same_bytes, vjp);
  };
  if (differentiated_twice(x.value()))
    return record(vjp_of_result(x, save(x, total), SlopeVjp<"logsumexp", ShareOfResult, X, Over>{op}));
  return record(vjp(x, save(x, most, total), SlopeVjp<"logsumexp", SoftmaxShare, X, Over>{op}));
}
struct NormSlope {
  template <class T>
  SHARDLIB_FUNCTION T operator()(const T& x, const T& y) const {
    return y == T(0) ? T(0) : x / y;
  }
};

}  // namespace detail

/// log(sum(exp(x))) over unsharded dims, which does not overflow. It is -inf where all elements are or there is none,
/// and inf where one is. Backward: softmax, of which elements that are inf have equal shares.
/// `logsumexp<"B/d V -> B/d">(logits)`
template <OpSpec O, dtype D, Spec S>
auto logsumexp(const Tensor<D, S>& x, Site site = Site::current())
    -> Tensor<detail::if_float<"logsumexp", D>, detail::op_result_for<D, rules::logsumexp, O, S>> {
  using X = Tensor<D, S>;
  using Out = Tensor<D, detail::op_result_for<D, rules::logsumexp, O, S>>;
  const detail::Calling op{"logsumexp", detail::full_op<"logsumexp", O, S>, site};
  if constexpr (std::is_same_v<D, bf16>) {
    return cast<D>(logsumexp<O>(cast<f32>(x, site), site), site);
  } else {
    const X value(detail::without_gradient(x.value()));
    const Out most = detail::extremum<"max", kernels::detail::MaxOp, O>(value, site, true);
    const Out total = sum<O>(detail::map_as<"logsumexp", X>(op, detail::ExpAbove{}, value, most), site);
    return detail::logsumexp_of_rows(op, x, most, total);
  }
}
SHARDLIB_NEEDS_OP_SPEC(logsumexp)

/// The mean square of the differences from the mean, over unsharded dims. `var<"B/d M -> B/d">(x)`
template <OpSpec O, dtype D, Spec S>
auto var(const Tensor<D, S>& x, Site site = Site::current()) -> detail::statistic_t<"var", O, D, S> {
  const detail::Calling op{"var", detail::full_op<"var", O, S>, site};
  using X = Tensor<D, S>;
  if constexpr (std::is_same_v<D, bf16>) {  // in bf16, the rounding of the mean would be a part of the differences
    return cast<D>(var<O>(cast<f32>(x, site), site), site);
  } else {
    // The derivative by the mean is the sum of the differences, which is 0.
    const X constant(detail::differentiated_twice(x.value()) ? x.value() : detail::without_gradient(x.value()));
    const auto center = mean<O>(constant, site);
    const X differences = detail::subtract(x, center, site);
    return mean<O>(square(differences, site), site);
  }
}
SHARDLIB_NEEDS_OP_SPEC(var)

/// The root of the sum of squares over unsharded dims. Where it is 0, so is its derivative. The squares may overflow.
/// `vector_norm<"B/d M -> B/d">(x)`
template <OpSpec O, dtype D, Spec S>
auto vector_norm(const Tensor<D, S>& x, Site site = Site::current()) -> detail::statistic_t<"vector_norm", O, D, S> {
  using X = Tensor<D, S>;
  using Out = detail::statistic_t<"vector_norm", O, D, S>;
  const detail::Calling op{"vector_norm", detail::full_op<"vector_norm", O, S>, site};
  if constexpr (std::is_same_v<D, bf16>) {
    return cast<D>(vector_norm<O>(cast<f32>(x, site), site), site);
  } else {
    const Out root = sqrt(sum<O>(square(X(detail::without_gradient(x.value())), site), site), site);
    return detail::with_slope<"vector_norm", detail::NormSlope>(op, x, root);
  }
}
SHARDLIB_NEEDS_OP_SPEC(vector_norm)

namespace detail {
template <OpName Name, OpSpec O, class B, Spec S>
using truth_t = Tensor<after_t<is_condition<Name, B>, B>, result_of<rules::local_max, Name, O, S>>;
}
/// True where at least one element over unsharded dims is true, so false of no elements.
/// `any<"B/d V -> B/d">(greater(x, 0.0))`
template <OpSpec O, dtype B, Spec S>
auto any(const Tensor<B, S>& x, Site site = Site::current()) -> detail::truth_t<"any", O, B, S> {
  return greater(detail::extremum<"max", kernels::detail::MaxOp, O>(cast<i32>(x, site), site, true), 0.0, site);
}
SHARDLIB_NEEDS_OP_SPEC(any)
/// True where every element over unsharded dims is true, so true of no elements. `all<"B/d V -> B/d">(greater(x, 0.0))`
template <OpSpec O, dtype B, Spec S>
auto all(const Tensor<B, S>& x, Site site = Site::current()) -> detail::truth_t<"all", O, B, S> {
  return greater(detail::extremum<"min", kernels::detail::MinOp, O>(cast<i32>(x, site), site, true), 0.0, site);
}
SHARDLIB_NEEDS_OP_SPEC(all)

}  // namespace shardlib
