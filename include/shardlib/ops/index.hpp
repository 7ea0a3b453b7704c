// Rows by index, along a dim that may be sharded: index_unreduced looks them up, scatter_add adds to them. Elements by
// index, along an unsharded dim: take_along.
#pragma once

#include <cstddef>
#include <type_traits>

#include "shardlib/ops/record.hpp"
#include "shardlib/ops/result.hpp"
#include "shardlib/rules/all.hpp"

namespace shardlib {
namespace detail {

constexpr int bracketed_dim(const TensorSpec& x) {
  for (int i = 0; i < x.rank(); ++i)
    if (x.dims[i].bracketed) return i;
  return -1;
}
/// The position of the bracketed dim among the table's dims.
template <OpSpec O>
constexpr int looked_up_dim() {
  return bracketed_dim(parse_op(O).in[0]);
}

template <class D>
struct Lookup {
  ValuePtr table, indices;
  int row;  ///< the looked-up dim
  Buffer operator()(const Value& out) const;
};
/// Adds rows of the result's cotangent to rows of the table's cotangent, where all other rows are zero. `ct_spec` is
/// the spec of the result's cotangent.
template <class D>
struct ScatterAdd {
  ValuePtr ct, indices;
  int row;
  const TensorSpec* ct_spec;
  Buffer operator()(const Value& out) const;
};
template <class D>
struct ScatterAddTo : ScatterAdd<D> {
  void operator()(const Value& out, std::byte* sum) const;
};

/// The equivalent einsum: the result's cotangent times one-hot rows gives the table's cotangent.
template <OpSpec O, Spec Ct, Spec Indices, Spec Due>
constexpr OpSpec scatter_op() {
  const OpParts op = parse_op(O);
  Dim row = op.in[0].dims[looked_up_dim<O>()];
  row.bracketed = false;
  TensorSpec one_hot = parse_tensor(Indices).spec;
  one_hot.dims.push_back(row);
  return op_spec_of(Ct, to_string(one_hot), Due);
}

template <OpSpec O, class Table, class Indices, class Out>
inline constexpr auto lookup_vjp = [](const auto& ct, const auto& ids, const GlobalSizes& global) {
  using Ct = std::remove_cvref_t<decltype(ct)>;
  using D = typename Table::value_type;
  using Due = Dual<Table, axes_of<Table::spec, Indices::spec, Out::spec>()>;
  static constexpr OpSpec scatter = scatter_op<O, Ct::spec, Indices::spec, Due::spec>();
  static constexpr OpParts parts = parse_op(scatter);
  static_assert(rules::detail_::einsum(parts).empty(),
                "the transpose of index_unreduced is the einsum with one-hot rows");
  // If the table is also an operand of an einsum, its cotangent is dense already: add the rows to that.
  const ScatterAdd<D> add{ct.value(), ids.value(), looked_up_dim<O>(), &parsed<Out::spec>};
  return record_addend<Due>(OpInfo{"scatter_add", scatter, {}}, ct.device(), global, add, ScatterAddTo<D>{add});
};

/// The op, recorded under the name of the op that the user called.
template <OpSpec O, dtype D, Spec S, dtype I, Spec T>
auto lookup(const OpInfo& op, const Tensor<D, S>& table, const Tensor<I, T>& indices) {
  using Out = Tensor<D, result_of<rules::index, O, S, T>>;
  const Lookup<D> kernel{table.value(), indices.value(), looked_up_dim<O>()};
  const GlobalSizes sizes = sizes_by_name(op, parsed<Out::spec>, table.value(), indices.value());
  if constexpr (floating<D>)
    return record<"index_unreduced", Out>(op, table.device(), sizes, kernel,
                                          vjp(table, save(indices), lookup_vjp<O, Tensor<D, S>, Tensor<I, T>, Out>));
  else
    return record<"index_unreduced", Out>(op, table.device(), sizes, kernel);
}

}  // namespace detail

/// Looks up rows of the table by index along the bracketed dim. A row that lies on another device is 0, so the result
/// is partial. Indices are global. *Throws* on an index outside the dim. Backward: adds the rows of the cotangent.
/// `index_unreduced<"[V/t] M, B/d L -> B/d L M +t">(table, ids)`
template <OpSpec O, dtype D, Spec S, dtype I, Spec T>
auto index_unreduced(const Tensor<D, S>& table, const Tensor<I, T>& indices, Site site = Site::current())
    -> Tensor<detail::after_t<detail::is_index<"index_unreduced", I>, D>, detail::result_of<rules::index, O, S, T>> {
  return detail::lookup<O>(detail::Calling{"index_unreduced", O, site}, table, indices);
}
template <dtype D, Spec S, dtype E, Spec T>
auto index_unreduced(const Tensor<D, S>& table, const Tensor<E, T>& indices)
    -> detail::needs_op_spec<"index_unreduced", D, S, T>;

namespace detail {
/// Looks up the row of the cotangent that each row of the operand was added to.
template <class Due>
struct ScatterAddVjp {
  int row;
  template <class Ct, class I>
  auto operator()(const Ct& ct, const I& indices, const GlobalSizes& global) const {
    return record<"index_unreduced", Due>(OpInfo{"index_unreduced", Due::spec, {}}, ct.device(), global,
                                          Lookup<typename Ct::value_type>{ct.value(), indices.value(), row});
  }
};
}  // namespace detail

/// Adds rows by index along the bracketed dim of the result, whose size is given; where no row is added it is 0. The
/// transpose of index_unreduced. Indices are global. *Throws* on an index outside the dim. Backward: index_unreduced.
/// `scatter_add<"B/d L M, B/d L -> [V] M +d">(rows, ids, {{"V", 8}})`
template <OpSpec O, dtype D, Spec S, dtype I, Spec T>
auto scatter_add(const Tensor<D, S>& rows, const Tensor<I, T>& indices, Sizes sizes, Site site = Site::current())
    -> Tensor<detail::after_t<detail::is_float<"scatter_add", D> && detail::is_index<"scatter_add", I>, D>,
              detail::result_of<rules::scatter_add, O, S, T>> {
  using Out = Tensor<D, detail::result_of<rules::scatter_add, O, S, T>>;
  using Due = Dual<Tensor<D, S>, detail::axes_of<S, T, Out::spec>()>;
  constexpr int row = detail::bracketed_dim(parse_op(O).out);
  const detail::Calling op{"scatter_add", O, site};
  static_cast<void>(detail::sizes_by_name(op, detail::parsed<S>, rows.value(), indices.value()));
  return detail::record<"scatter_add", Out>(
      op, rows.device(), detail::sizes_by_name(op, detail::parsed<Out::spec>, rows.value(), sizes),
      detail::ScatterAdd<D>{rows.value(), indices.value(), row, &detail::parsed<S>},
      detail::vjp(rows, detail::save(indices), detail::ScatterAddVjp<Due>{row}));
}

namespace detail {
/// Adds the cotangent of each result to the cotangent of the element that it has picked.
template <class X, Spec Indices>
struct PickVjp {
  int dim;
  template <class Ct, class I>
  auto operator()(const Ct& ct, const I& indices, const GlobalSizes& global) const {
    return record<"scatter_add", Dual<X, axes_of<X::spec, Indices>()>>(
        OpInfo{"scatter_add", Ct::spec, {}}, ct.device(), global,
        ScatterAdd<typename X::value_type>{ct.value(), indices.value(), dim, &parsed<Ct::spec>});
  }
};
/// The elements of `x` at the indices along dim number `dim`.
template <OpName Name, class Out, class X, class I>
Out pick(const OpInfo& op, const X& x, const I& indices, int dim) {
  using D = typename X::value_type;
  const Lookup<D> kernel{x.value(), indices.value(), dim};
  const GlobalSizes sizes = sizes_by_name(op, parsed<I::spec>, x.value(), indices.value());
  if constexpr (floating<D>)
    return record<Name, Out>(op, x.device(), sizes, kernel, vjp(x, save(indices), PickVjp<X, I::spec>{dim}));
  else
    return record<Name, Out>(op, x.device(), sizes, kernel);
}
}  // namespace detail

/// The elements at the indices along an unsharded dim, as numpy's take_along_axis: the indices have the other dims of
/// the operand, and in the dim's place the same one or another. *Throws* on an index outside the dim. Backward: each
/// cotangent is added to that of its element. `take_along<"V">(x, ids)` of "B/d V" and "B/d K" is "B/d K"
template <DimName Dim, dtype D, Spec S, dtype I, Spec T>
auto take_along(const Tensor<D, S>& x, const Tensor<I, T>& indices, Site site = Site::current())
    -> Tensor<detail::after_t<detail::is_index<"take_along", I>, D>, detail::result_of<rules::take_along, Dim, S, T>> {
  using Out = Tensor<D, detail::result_of<rules::take_along, Dim, S, T>>;
  constexpr int dim = detail::parsed<S>.find(Dim);
  return detail::pick<"take_along", Out>(detail::Calling{"take_along", Dim, site}, x, indices, dim);
}

}  // namespace shardlib
