// Ops that order the elements along one unsharded dim: argsort, sort, top_k. NaN is greater than all numbers.
#pragma once

#include "shardlib/ops/index.hpp"
#include "shardlib/ops/record.hpp"
#include "shardlib/ops/result.hpp"
#include "shardlib/rules/all.hpp"

namespace shardlib {

namespace detail {
template <class D>
struct Argsort {
  int dim;
  bool descending;
  Buffer operator()(const Value& in, const Value& out) const;
};
}  // namespace detail

/// The indices that sort the elements along an unsharded dim. The lower index of equal elements comes first.
/// `argsort<"V">(x)`
template <DimName Dim, dtype D, Spec S>
auto argsort(const Tensor<D, S>& x, bool descending = false, Site site = Site::current())
    -> Tensor<detail::after_t<detail::is_reduced<"argsort", D>, i32>,
              detail::named_result_for<D, rules::along, "argsort", Dim, S>> {
  constexpr int dim = detail::parsed<S>.find(Dim);
  const detail::Calling op{"argsort", Dim, site};
  return detail::record_unary<"argsort", Tensor<i32, S>>(op, x, detail::sizes_of(x.value()),
                                                         detail::Argsort<D>{dim, descending});
}
SHARDLIB_NEEDS_DIM(argsort, "argsort<\"V\">(x)`, or with the largest first `argsort<\"V\">(x, true)")

/// The elements along an unsharded dim in ascending or descending order. Backward: each cotangent goes to its
/// element. `sort<"V">(x)`
template <DimName Dim, dtype D, Spec S>
auto sort(const Tensor<D, S>& x, bool descending = false, Site site = Site::current())
    -> Tensor<detail::after_t<detail::is_reduced<"sort", D>, D>,
              detail::named_result_for<D, rules::along, "sort", Dim, S>> {
  constexpr int dim = detail::parsed<S>.find(Dim);
  return detail::pick<"sort", Tensor<D, S>>(detail::Calling{"sort", Dim, site}, x, argsort<Dim>(x, descending, site),
                                            dim);
}
SHARDLIB_NEEDS_DIM(sort, "sort<\"V\">(x)`, or with the largest first `sort<\"V\">(x, true)")

/// The values and indices of the k largest elements. `const auto [values, indices] = top_k<"V", "K">(x, 4)`
template <dtype D, Spec S>
struct TopK {
  Tensor<D, S> values;
  Tensor<i32, S> indices;
};
namespace detail {
/// The sizes of `out`, whose dim number `dim` has size k. Throws if `x` has fewer elements there.
GlobalSizes top_k_sizes(const OpInfo& op, const TensorSpec& out, const ValuePtr& x, int dim, DimSize k);
}  // namespace detail
/// The k largest elements along an unsharded dim, in descending order, as dim K in its place. The lower
/// index of equal elements comes first. Throws if k is not in [1, size]. Backward: each cotangent goes to its element.
/// `top_k<"V", "K">(x, 4)` of "B/d V" is "B/d K"
template <DimName Dim, DimName K, dtype D, Spec S>
auto top_k(const Tensor<D, S>& x, DimSize k, Site site = Site::current())
    -> TopK<detail::after_t<detail::is_reduced<"top_k", D>, D>, detail::result_for<D, rules::top_k, Dim, K, S>> {
  constexpr Spec out = detail::result_for<D, rules::top_k, Dim, K, S>;
  constexpr int dim = detail::parsed<S>.find(Dim);
  const detail::Calling op{"top_k", Dim, site};
  const auto indices = detail::record_unary<"top_k", Tensor<i32, out>>(
      op, x, detail::top_k_sizes(op, detail::parsed<out>, x.value(), dim, k), detail::Argsort<D>{dim, true});
  return {detail::pick<"top_k", Tensor<D, out>>(op, x, indices, dim), indices};
}
template <class... Args>
requires detail::tensor_first<Args...>
auto top_k(const Args&... args) {
  return detail::needs_dim<"top_k", ", \"K\"">(args...);
}
SHARDLIB_FORM(top_k, "top_k<\"V\", \"K\">(x, 4)")

}  // namespace shardlib
