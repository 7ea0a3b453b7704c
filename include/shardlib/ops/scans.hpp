// Scans along one dim: cumsum, cumprod, cummax and linear_scan. The dim must be unsharded; only linear_scan also takes
// a sharded one.
#pragma once

#include "shardlib/ops/record.hpp"
#include "shardlib/ops/reductions.hpp"
#include "shardlib/ops/result.hpp"
#include "shardlib/rules/all.hpp"
#include "shardlib/types/numbers_in.hpp"

namespace shardlib {

namespace detail {
template <class Op, class D>
struct Cumulate {
  int dim;
  bool reverse = false;
  Buffer operator()(const Value& in, const Value& out) const;
};
template <DimName Dim>
struct CumsumVjp {
  bool reverse;
  template <class Ct>
  auto operator()(const Ct& ct) const {
    return cumsum<Dim>(ct, !reverse);
  }
};
}  // namespace detail

/// Running sums along an unsharded dim, from its end if `reverse`. Backward: the same from the other end.
/// `cumsum<"L">(x)`
template <DimName Dim, dtype D, Spec S>
auto cumsum(const Tensor<D, S>& x, bool reverse = false, Site site = Site::current())
    -> Tensor<detail::after_t<detail::is_reduced<"cumsum", D>, D>,
              detail::named_result_of<rules::linear_along, "cumsum", Dim, S>> {
  constexpr int dim = detail::parsed<S>.find(Dim);
  const detail::Calling op{"cumsum", Dim, site};
  return detail::record_unary<"cumsum", Tensor<D, S>>(op, x, detail::sizes_of(x.value()),
                                                      detail::Cumulate<kernels::detail::SumOp, D>{dim, reverse},
                                                      detail::vjp(x, detail::CumsumVjp<Dim>{reverse}));
}
SHARDLIB_NEEDS_DIM(cumsum, "cumsum<\"L\">(x)`, or from the end `cumsum<\"L\">(x, true)")

namespace detail {
template <class D>
struct CumprodBackward {
  ValuePtr x, result, ct;
  int dim;
  Buffer operator()(const Value& out) const;
};
struct CumprodVjp {
  OpInfo op;
  int dim;
  template <class Ct, class X>
  Ct operator()(const Ct& ct, const X& x, const auto& y) const {
    return record<"cumprod", Ct>(op, ct.device(), sizes_of(ct.value()),
                                 CumprodBackward<typename Ct::value_type>{x.value(), y.value(), ct.value(), dim});
  }
};
template <class D>
struct CummaxBackward {
  ValuePtr x, ct;
  int dim;
  Buffer operator()(const Value& out) const;
};
struct CummaxVjp {
  OpInfo op;
  int dim;
  template <class Ct, class X>
  Ct operator()(const Ct& ct, const X& x) const {
    return record<"cummax", Ct>(op, ct.device(), sizes_of(ct.value()),
                                CummaxBackward<typename Ct::value_type>{x.value(), ct.value(), dim});
  }
};
template <OpName Name, DimName Dim, class D, Spec S>
using scanned_t = Tensor<after_t<is_reduced<Name, D>, D>, result_for<D, rules::along, Name, Dim, S>>;
}  // namespace detail

/// Running products along an unsharded dim. The derivative is right where elements are 0, too. `cumprod<"L">(x)`
template <DimName Dim, dtype D, Spec S>
auto cumprod(const Tensor<D, S>& x, Site site = Site::current()) -> detail::scanned_t<"cumprod", Dim, D, S> {
  constexpr int dim = detail::parsed<S>.find(Dim);
  const detail::Calling op{"cumprod", Dim, site};
  return detail::record_unary<"cumprod", Tensor<D, S>>(
      op, x, detail::sizes_of(x.value()), detail::Cumulate<kernels::detail::ProdOp, D>{dim},
      detail::vjp_of_result(x, detail::save(x), detail::CumprodVjp{op, dim}));
}
SHARDLIB_NEEDS_DIM(cumprod, "cumprod<\"L\">(x)")

/// Running maxima along an unsharded dim. Backward: each cotangent goes to the first of the elements that equal the
/// maximum. `cummax<"L">(x)`
template <DimName Dim, dtype D, Spec S>
auto cummax(const Tensor<D, S>& x, Site site = Site::current()) -> detail::scanned_t<"cummax", Dim, D, S> {
  constexpr int dim = detail::parsed<S>.find(Dim);
  const detail::Calling op{"cummax", Dim, site};
  return detail::record_unary<"cummax", Tensor<D, S>>(op, x, detail::sizes_of(x.value()),
                                                      detail::Cumulate<kernels::detail::MaxOp, D>{dim},
                                                      detail::vjp(x, detail::save(x), detail::CummaxVjp{op, dim}));
}
SHARDLIB_NEEDS_DIM(cummax, "cummax<\"L\">(x)")

namespace detail {
template <class D>
struct LinearScan {
  ValuePtr a, b;
  int dim;
  bool reverse;
  Buffer operator()(const Value& out) const;
};
template <class D>
NumbersIn numbers_in(const LinearScan<D>& kernel) {
  return numbers_in(kernel.reverse);
}
/// Computes the cotangent of `a` if `result` is given, else the cotangent of `b`.
template <class D>
struct LinearScanBackward {
  ValuePtr a, result, ct;
  int dim;
  bool reverse;
  Buffer operator()(const Value& out) const;
};
struct LinearScanVjp {
  OpInfo op;
  int dim;
  bool reverse;
  template <class Ct, class A>
  auto operator()(const Ct& ct, const A& a) const {
    return of<Ct>(ct, a, {});
  }
  template <class Ct, class A, dtype D, Spec S>
  auto operator()(const Ct& ct, const A& a, const Tensor<D, S>& h) const {
    return of<Ct>(ct, a, h.value());
  }

 private:
  template <class Ct, class A>
  Ct of(const Ct& ct, const A& a, const ValuePtr& result) const {
    return record<"linear_scan", Ct>(
        op, ct.device(), sizes_of(ct.value()),
        LinearScanBackward<typename Ct::value_type>{a.value(), result, ct.value(), dim, reverse});
  }
};
template <class X>
X linear_scan(const OpInfo& op, const X& a, const X& b, int dim, bool reverse) {
  return record<"linear_scan", X>(op, a.device(), sizes_by_name(op, parsed<X::spec>, {&a.value(), &b.value()}),
                                  LinearScan<typename X::value_type>{a.value(), b.value(), dim, reverse},
                                  vjp_of_result(a, save(a), LinearScanVjp{op, dim, reverse}),
                                  vjp(b, save(a), LinearScanVjp{op, dim, reverse}));
}
template <dtype D, dtype E>
inline constexpr bool linear_scan_dtypes = is_float<"linear_scan", D>&& one_dtype<"linear_scan", D, E>;
}  // namespace detail

/// The linear recurrence h_t = a_t * h_(t-1) + b_t along an unsharded dim, from h_(-1) = 0. If `reverse`, it begins at
/// the last element: h_t = a_t * h_(t+1) + b_t. Both operands have one spec. Backward: the recurrence from the other
/// end. `linear_scan<"L">(decay, x)`
template <DimName Dim, dtype D, Spec S, dtype E, Spec T>
auto linear_scan(const Tensor<D, S>& a, const Tensor<E, T>& b, bool reverse = false, Site site = Site::current())
    -> Tensor<detail::after_t<detail::linear_scan_dtypes<D, E>, D>,
              detail::result_for<D, rules::linear_scan, Dim, S, T>> {
  constexpr int dim = detail::parsed<S>.find(Dim);
  return detail::linear_scan(detail::Calling{"linear_scan", Dim, site}, a, b, dim, reverse);
}

/// As above, along a dim that is sharded over these axes. Each shard is reduced to its last state and the product of
/// its factors, which all shards gather; then each is scanned from the state before it. Backward: the same from the
/// other end. `linear_scan<"L", over<"s">>(decay, x)` of "B L/s M"
template <DimName Dim, OpSpec Over, dtype D, Spec S, dtype E, Spec T>
auto linear_scan(const Tensor<D, S>& a, const Tensor<E, T>& b, bool reverse = false, Site site = Site::current())
    -> Tensor<detail::after_t<detail::linear_scan_dtypes<D, E>, D>,
              detail::result_for<D, rules::linear_scan_over, Dim, Over, S, T>> {
  constexpr int dim = detail::parsed<S>.find(Dim);
  return detail::linear_scan(detail::Calling{"linear_scan", Dim, site}, a, b, dim, reverse);
}
/// A compile error for a call without the dim, with a number in place of a tensor, or with a first state.
template <DimName... Dim, class... Args>
requires(tensor<Args> || ...) auto linear_scan(const Args&... args) {
  if constexpr (sizeof...(Dim) == 0 && detail::tensor_first<Args...>)
    return detail::needs_dim<"linear_scan">(args...);
  else
    return detail::wrong_call<"linear_scan", "linear_scan<\"L\">(decay, x)` with a tensor `decay">(args...);
}

}  // namespace shardlib
