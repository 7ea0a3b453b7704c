// Rows by index, along one dim or several, which may be sharded: index_unreduced looks rows up, scatter_add adds to
// rows. Elements by index, along an unsharded dim: take_along.
#pragma once

#include <cstddef>

#include "shardlib/ops/record.hpp"
#include "shardlib/ops/result.hpp"
#include "shardlib/rules/all.hpp"

namespace shardlib {
namespace detail {

/// The positions of the bracketed dims.
using Brackets = Small<int, 3>;
constexpr Brackets bracketed_dims(const TensorSpec& x) {
  Brackets dims;
  for (int i = 0; i < x.rank(); ++i)
    if (x.dims[i].bracketed && !dims.full()) dims.push_back(i);
  return dims;
}
/// An index tensor, and the dim of the table along which it counts.
struct IndexAlong {
  int dim = -1;
  ValuePtr ids;
};
using Indices = Small<IndexAlong, 3>;
template <class... I>
Indices indices_along(const Brackets& dims, const I&... ids) {
  Indices all;
  (all.push_back({dims[all.size()], ids.value()}), ...);
  return all;
}

template <class D>
struct Lookup {
  ValuePtr table;
  Indices indices;
  Buffer operator()(const Value& out) const;
};
/// Adds rows of the result's cotangent to rows of the table's cotangent, where all other rows are zero. `ct_spec` is
/// the spec of the result's cotangent.
template <class D>
struct ScatterAdd {
  ValuePtr ct;
  Indices indices;
  const TensorSpec* ct_spec;
  Buffer operator()(const Value& out) const;
};
template <class D>
struct ScatterAddTo : ScatterAdd<D> {
  void operator()(const Value& out, std::byte* sum) const;
};

/// Records the sum of rows, or the look-up, of a backward pass: each is the VJP of the other, where it is
/// differentiated again. An `addend`, which is zero except in a few rows, is added to a sum without materializing it.
template <class D>
ValuePtr record_scatter(const OpInfo& op, const ScatterAdd<D>& add, const TensorSpec& spec, const GlobalSizes& global,
                        bool addend);
template <class D>
ValuePtr record_lookup(const OpInfo& op, const Lookup<D>& rows, const TensorSpec& spec, const GlobalSizes& global);

/// The equivalent einsum: the result's cotangent times one-hot rows gives the table's cotangent.
template <OpSpec O, Spec Ct, Spec Due, Spec... Indices>
constexpr OpSpec scatter_op() {
  const OpParts& op = parsed_op<O>.parts;
  const Brackets dims = bracketed_dims(op.in[0]);
  OpParts scatter;
  scatter.in.push_back(parsed<Ct>);
  for (TensorSpec one_hot : {parsed<Indices>...}) {
    one_hot.dims.push_back(op.in[0].dims[dims[scatter.in.size() - 1]]);
    one_hot.dims[one_hot.rank() - 1].bracketed = false;
    scatter.in.push_back(one_hot);
  }
  scatter.out = parsed<Due>;
  return OpSpec(to_string(scatter).view());
}

template <OpSpec O, class Table, class Out, class... I>
struct LookupVjp {
  template <class Ct>
  auto operator()(const Ct& ct, const I&... ids, const GlobalSizes& global) const {
    using D = typename Table::value_type;
    using Due = Dual<Table, axes_of<Table::spec, I::spec..., Out::spec>()>;
    static constexpr OpSpec scatter = scatter_op<O, Ct::spec, Due::spec, I::spec...>();
    static constexpr const OpParts& parts = parsed_op<scatter>.parts;
    static_assert(rules::detail_::einsum(parts).empty(),
                  "the transpose of index_unreduced is the einsum with one-hot rows");
    // If the table is also an operand of an einsum, its cotangent is dense already: add the rows to that.
    constexpr Brackets dims = bracketed_dims(parsed_op<O>.parts.in[0]);
    const ScatterAdd<D> add{ct.value(), indices_along(dims, ids...), &parsed<Out::spec>};
    return Due(record_scatter(OpInfo{"scatter_add", scatter, {}}, add, parsed<Due::spec>, global, true));
  }
};

/// The op, recorded under the name of the op that the user called.
template <OpSpec O, class Out, class Table, class... I>
Out lookup(const OpInfo& op, const Table& table, const I&... ids) {
  using D = typename Table::value_type;
  constexpr Brackets dims = bracketed_dims(parsed_op<O>.parts.in[0]);
  const Lookup<D> kernel{table.value(), indices_along(dims, ids...)};
  const GlobalSizes sizes = sizes_by_name(op, parsed<Out::spec>, {&table.value(), &ids.value()...});
  if constexpr (floating<D>)
    return record<"index_unreduced", Out>(op, table.device(), sizes, kernel,
                                          vjp(table, save(ids...), LookupVjp<O, Table, Out, I...>{}));
  else
    return record<"index_unreduced", Out>(op, table.device(), sizes, kernel);
}
template <OpName Name, class... I>
inline constexpr bool are_indices = (is_index<Name, I> && ...);

}  // namespace detail

/// Looks up rows of the table by index along the bracketed dim. A row that lies on another device is 0, so the result
/// is partial. Indices are global. Throws on an index outside the dim. Backward: adds the rows of the cotangent.
/// `index_unreduced<"[V/t] M, B/d L -> B/d L M +t">(table, ids)`
template <OpSpec O, dtype D, Spec S, dtype I, Spec T>
auto index_unreduced(const Tensor<D, S>& table, const Tensor<I, T>& indices, Site site = Site::current())
    -> Tensor<detail::after_t<detail::is_index<"index_unreduced", I>, D>,
              detail::op_result_for<detail::summed_in<D, T>, rules::index, O, S, T>> {
  return detail::lookup<O, Tensor<D, detail::op_result_for<detail::summed_in<D, T>, rules::index, O, S, T>>>(
      detail::Calling{"index_unreduced", O, site}, table, indices);
}
/// As above, along two or three dims at once: each dim in brackets has an index tensor, in the same order. The index
/// tensors may have different dims. `index_unreduced<"[V/t] [W/d] M, B, B L -> B L M +d +t">(table, v, w)`
template <OpSpec O, dtype D, Spec S, dtype I, Spec T, dtype J, Spec U>
auto index_unreduced(const Tensor<D, S>& table, const Tensor<I, T>& i, const Tensor<J, U>& j,
                     Site site = Site::current())
    -> Tensor<detail::after_t<detail::are_indices<"index_unreduced", I, J>, D>,
              detail::op_result_for<detail::summed_in<D, T, U>, rules::index2, O, S, T, U>> {
  return detail::lookup<O, Tensor<D, detail::op_result_for<detail::summed_in<D, T, U>, rules::index2, O, S, T, U>>>(
      detail::Calling{"index_unreduced", O, site}, table, i, j);
}
template <OpSpec O, dtype D, Spec S, dtype I, Spec T, dtype J, Spec U, dtype K, Spec V>
auto index_unreduced(const Tensor<D, S>& table, const Tensor<I, T>& i, const Tensor<J, U>& j, const Tensor<K, V>& k,
                     Site site = Site::current())
    -> Tensor<detail::after_t<detail::are_indices<"index_unreduced", I, J, K>, D>,
              detail::op_result_for<detail::summed_in<D, T, U, V>, rules::index3, O, S, T, U, V>> {
  return detail::lookup<O,
                        Tensor<D, detail::op_result_for<detail::summed_in<D, T, U, V>, rules::index3, O, S, T, U, V>>>(
      detail::Calling{"index_unreduced", O, site}, table, i, j, k);
}
template <dtype D, Spec S, dtype E, Spec T>
auto index_unreduced(const Tensor<D, S>& table, const Tensor<E, T>& indices)
    -> detail::needs_op_spec<"index_unreduced", D, S, T>;
SHARDLIB_FORM(index_unreduced, "index_unreduced<\"[V] M, B -> B M\">(table, ids)")

namespace detail {
/// Looks up the row of the cotangent that each row of the operand was added to.
template <class Due, class... I>
struct ScatterAddVjp {
  Brackets dims;
  template <class Ct>
  auto operator()(const Ct& ct, const I&... ids, const GlobalSizes& global) const {
    return Due(record_lookup(OpInfo{"index_unreduced", Due::spec, {}},
                             Lookup<typename Ct::value_type>{ct.value(), indices_along(dims, ids...)},
                             parsed<Due::spec>, global));
  }
};
template <OpSpec O, class Out, class Rows, class... I>
Out scatter_rows(const OpInfo& op, const Sizes& sizes, const Rows& rows, const I&... ids) {
  using Due = Dual<Rows, axes_of<Rows::spec, I::spec..., Out::spec>()>;
  constexpr Brackets dims = bracketed_dims(parsed_op<O>.parts.out);
  static_cast<void>(sizes_by_name(op, parsed<Rows::spec>, {&rows.value(), &ids.value()...}));
  return record<"scatter_add", Out>(
      op, rows.device(), sizes_by_name(op, parsed<Out::spec>, rows.value(), sizes),
      ScatterAdd<typename Rows::value_type>{rows.value(), indices_along(dims, ids...), &parsed<Rows::spec>},
      vjp(rows, save(ids...), ScatterAddVjp<Due, I...>{dims}));
}
template <class D, class... I>
inline constexpr bool are_scattered = is_float<"scatter_add", D>&& are_indices<"scatter_add", I...>;
}  // namespace detail

/// Adds rows by index along the bracketed dim of the result, whose size is given; where no row is added it is 0. The
/// transpose of index_unreduced. Indices are global. Throws on an index outside the dim. Backward: index_unreduced.
/// `scatter_add<"B/d L M, B/d L -> [V] M +d">(rows, ids, {{"V", 8}})`
template <OpSpec O, dtype D, Spec S, dtype I, Spec T>
auto scatter_add(const Tensor<D, S>& rows, const Tensor<I, T>& indices, Sizes sizes, Site site = Site::current())
    -> Tensor<detail::after_t<detail::are_scattered<D, I>, D>,
              detail::op_result_for<detail::summed_in<D, T>, rules::scatter_add, O, S, T>> {
  return detail::scatter_rows<O,
                              Tensor<D, detail::op_result_for<detail::summed_in<D, T>, rules::scatter_add, O, S, T>>>(
      detail::Calling{"scatter_add", O, site}, sizes, rows, indices);
}
/// As above, along two or three dims at once: each dim in brackets has an index tensor, in the same order.
/// `scatter_add<"B/d M, B/d, B/d -> [V] [W] M +d">(rows, v, w, {{"V", 8}, {"W", 4}})`
template <OpSpec O, dtype D, Spec S, dtype I, Spec T, dtype J, Spec U>
auto scatter_add(const Tensor<D, S>& rows, const Tensor<I, T>& i, const Tensor<J, U>& j, Sizes sizes,
                 Site site = Site::current())
    -> Tensor<detail::after_t<detail::are_scattered<D, I, J>, D>,
              detail::op_result_for<detail::summed_in<D, T, U>, rules::scatter_add2, O, S, T, U>> {
  return detail::scatter_rows<
      O, Tensor<D, detail::op_result_for<detail::summed_in<D, T, U>, rules::scatter_add2, O, S, T, U>>>(
      detail::Calling{"scatter_add", O, site}, sizes, rows, i, j);
}
template <OpSpec O, dtype D, Spec S, dtype I, Spec T, dtype J, Spec U, dtype K, Spec V>
auto scatter_add(const Tensor<D, S>& rows, const Tensor<I, T>& i, const Tensor<J, U>& j, const Tensor<K, V>& k,
                 Sizes sizes, Site site = Site::current())
    -> Tensor<detail::after_t<detail::are_scattered<D, I, J, K>, D>,
              detail::op_result_for<detail::summed_in<D, T, U, V>, rules::scatter_add3, O, S, T, U, V>> {
  return detail::scatter_rows<
      O, Tensor<D, detail::op_result_for<detail::summed_in<D, T, U, V>, rules::scatter_add3, O, S, T, U, V>>>(
      detail::Calling{"scatter_add", O, site}, sizes, rows, i, j, k);
}
SHARDLIB_FORM(scatter_add, "scatter_add<\"B M, B -> [V] M\">(rows, ids, {{\"V\", 8}})")

namespace detail {
/// Adds the cotangent of each result to the cotangent of the element that it has picked.
template <class X, Spec Indices>
struct PickVjp {
  int dim;
  template <class Ct, class I>
  auto operator()(const Ct& ct, const I& indices, const GlobalSizes& global) const {
    using Due = Dual<X, axes_of<X::spec, Indices>()>;
    const ScatterAdd<typename X::value_type> add{ct.value(), {{{dim, indices.value()}}, 1}, &parsed<Ct::spec>};
    return Due(record_scatter(OpInfo{"scatter_add", Ct::spec, {}}, add, parsed<Due::spec>, global, false));
  }
};
/// The elements of `x` at the indices along dim number `dim`.
template <OpName Name, class Out, class X, class I>
Out pick(const OpInfo& op, const X& x, const I& indices, int dim) {
  using D = typename X::value_type;
  const Lookup<D> kernel{x.value(), {{{dim, indices.value()}}, 1}};
  const GlobalSizes sizes = sizes_by_name(op, parsed<I::spec>, {&x.value(), &indices.value()});
  if constexpr (floating<D>)
    return record<Name, Out>(op, x.device(), sizes, kernel, vjp(x, save(indices), PickVjp<X, I::spec>{dim}));
  else
    return record<Name, Out>(op, x.device(), sizes, kernel);
}
}  // namespace detail

/// The elements at the indices along an unsharded dim, as numpy's take_along_axis: the indices have the other dims of
/// the operand, and in the dim's place the same one or another. Throws on an index outside the dim. Backward: each
/// cotangent is added to that of its element. `take_along<"V">(x, ids)` of "B/d V" and "B/d K" is "B/d K"
template <DimName Dim, dtype D, Spec S, dtype I, Spec T>
auto take_along(const Tensor<D, S>& x, const Tensor<I, T>& indices, Site site = Site::current())
    -> Tensor<detail::after_t<detail::is_index<"take_along", I>, D>, detail::result_of<rules::take_along, Dim, S, T>> {
  using Out = Tensor<D, detail::result_of<rules::take_along, Dim, S, T>>;
  constexpr int dim = detail::parsed<S>.find(Dim);
  return detail::pick<"take_along", Out>(detail::Calling{"take_along", Dim, site}, x, indices, dim);
}
SHARDLIB_NEEDS_DIM(take_along, "take_along<\"V\">(x, ids)")

}  // namespace shardlib
