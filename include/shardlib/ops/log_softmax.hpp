// log_softmax, and softmax, log_softmax and logsumexp along sharded dims.
#pragma once

#include <type_traits>

#include "shardlib/ops/arithmetic.hpp"
#include "shardlib/ops/collectives.hpp"
#include "shardlib/ops/elementwise.hpp"
#include "shardlib/ops/map.hpp"
#include "shardlib/ops/norms.hpp"
#include "shardlib/ops/record.hpp"
#include "shardlib/ops/reductions.hpp"
#include "shardlib/ops/result.hpp"
#include "shardlib/ops/statistics.hpp"
#include "shardlib/rules/all.hpp"
#include "shardlib/support/function.hpp"
#include "shardlib/types/spec_functions.hpp"

namespace shardlib {

namespace detail {

/// The log of an element's part of the total.
struct LogShare {
  template <class T>
  SHARDLIB_FUNCTION T operator()(const T& x, const T& m, const T& total) const {
    return m - m == T(0) ? x - m - log(total) : log(SoftmaxShare{}(x, m, total));
  }
};

/// The sum over the dims that `To` lacks, on every device that has a shard of them.
template <Spec To, dtype D, Spec S>
auto sum_everywhere(const Tensor<D, S>& x, const Site& site = Site::current()) {
  static constexpr Spec part = spec_of(rules::pending_sum(parsed<S>, parsed<To>));
  const auto mine = sum<op_spec_of(S, part)>(x, site);
  if constexpr (part == To)
    return mine;
  else
    return all_reduce<op_spec_of(part, To)>(mine, site);
}

/// The maxima of the rows of x, which is untracked, and the sums of exp(x - maximum).
template <OpName Name, Spec Lead, class X>
struct RowTotals {
  Tensor<typename X::value_type, Lead> most, total;
  RowTotals(const OpInfo& op, const X& x)
      : most(all_reduce_max<op_spec_of(X::spec, Lead)>(x, op.site)),
        total(sum_everywhere<Lead>(map_as<Name, X>(op, ExpAbove{}, x, most), op.site)) {}
};

template <DimName Dim>
struct SoftmaxOverVjp {
  template <dtype D, Spec C, class Y>
  auto operator()(const Tensor<D, C>& ct, const Y& y) const {
    return y * (ct - sum_everywhere<without_dim<C, Dim>>(ct * y));
  }
};
template <DimName Dim>
struct LogSoftmaxVjp {
  template <dtype D, Spec C, class Y>
  auto operator()(const Tensor<D, C>& ct, const Y& y) const {
    return ct - exp(y) * sum_everywhere<without_dim<C, Dim>>(ct);
  }
};
/// F(element, maximum of its row, total of its row) of each element. The VJP is Pullback(cotangent, result).
template <OpName Name, DimName Dim, class F, class Pullback, dtype D, Spec S>
Tensor<D, S> of_rows(const OpInfo& op, const Tensor<D, S>& x) {
  using X = Tensor<D, S>;
  if constexpr (std::is_same_v<D, bf16>) {
    return cast<D>(of_rows<Name, Dim, F, Pullback>(op, cast<f32>(x, op.site)), op.site);
  } else {
    const X value(without_gradient(x.value()));
    const RowTotals<Name, without_dim<S, Dim>, X> row(op, value);
    const X y = map_as<Name, X>(op, F{}, value, row.most, row.total);
    return record_unary<Name, X>(op, y, sizes_of(y.value()), same_bytes, vjp_of_result(x, save(), Pullback{}));
  }
}
}  // namespace detail

/// The log of softmax along an unsharded dim, x - log(sum(exp(x))): finite where softmax rounds to 0. Backward: the
/// cotangent minus its sum times softmax. `log_softmax<"V">(logits)`
template <DimName Dim, dtype D, Spec S>
auto log_softmax(const Tensor<D, S>& x, Site site = Site::current())
    -> Tensor<detail::if_float<"log_softmax", D>, detail::named_result_for<D, rules::softmax, "log_softmax", Dim, S>> {
  const detail::Calling op{"log_softmax", Dim, site};
  return detail::of_rows<"log_softmax", Dim, detail::LogShare, detail::LogSoftmaxVjp<Dim>>(op, x);
}
/// As above, along a dim that is sharded over these axes. Each device sends a maximum and a sum for each row. Backward:
/// a sum for each row. `log_softmax<"V", over<"t">>(logits)` of "B/d L V/t"
template <DimName Dim, OpSpec Over, dtype D, Spec S>
auto log_softmax(const Tensor<D, S>& x, Site site = Site::current())
    -> Tensor<detail::if_float<"log_softmax", D>,
              detail::named_result_for<D, rules::softmax_over, "log_softmax", Dim, Over, S>> {
  const detail::Calling op{"log_softmax", Dim, site};
  return detail::of_rows<"log_softmax", Dim, detail::LogShare, detail::LogSoftmaxVjp<Dim>>(op, x);
}
SHARDLIB_NEEDS_DIM(log_softmax, "log_softmax<\"V\">(x)")

/// As softmax, along a dim that is sharded over these axes. Each device sends a maximum and a sum for each row.
/// Backward: a sum for each row. `softmax<"V", over<"t">>(logits)` of "B/d L V/t"
template <DimName Dim, OpSpec Over, dtype D, Spec S>
auto softmax(const Tensor<D, S>& x, Site site = Site::current())
    -> Tensor<detail::if_float<"softmax", D>,
              detail::named_result_for<D, rules::softmax_over, "softmax", Dim, Over, S>> {
  const detail::Calling op{"softmax", Dim, site};
  return detail::of_rows<"softmax", Dim, detail::SoftmaxShare, detail::SoftmaxOverVjp<Dim>>(op, x);
}

/// As logsumexp, over dims that are sharded over these axes. Each device sends a maximum and a sum for each row, and
/// the result is on all of them. Backward: a sum for each row. `logsumexp<"B/d L V/t -> B/d L", over<"t">>(logits)`
template <OpSpec O, OpSpec Over, dtype D, Spec S>
auto logsumexp(const Tensor<D, S>& x, Site site = Site::current())
    -> Tensor<detail::if_float<"logsumexp", D>, detail::result_for<D, rules::logsumexp_over, O, Over, S>> {
  using X = Tensor<D, S>;
  using Out = Tensor<D, detail::result_for<D, rules::logsumexp_over, O, Over, S>>;
  if constexpr (std::is_same_v<D, bf16>) {
    return cast<D>(logsumexp<O, Over>(cast<f32>(x, site), site), site);
  } else {
    const detail::Calling op{"logsumexp", detail::full_op<"logsumexp", O, S>, site};
    const X value(detail::without_gradient(x.value()));
    const detail::RowTotals<"logsumexp", Out::spec, X> row(op, value);
    return detail::logsumexp_of_rows<Over>(op, x, row.most, row.total);
  }
}

}  // namespace shardlib
