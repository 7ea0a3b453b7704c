// Ops on rows that are counted at run time: ragged_all_to_all and grouped_einsum. The counts are a tensor `P/d/e X`:
// how many rows each place has for each group, such as an expert. A device's rows are ordered by group, and within a
// group by place. The rows after the counted ones are padding.
#pragma once

#include "shardlib/ops/einsum.hpp"
#include "shardlib/ops/record.hpp"
#include "shardlib/ops/result.hpp"
#include "shardlib/rules/all.hpp"

namespace shardlib {

namespace detail {
/// The end of a message about padded rows.
inline constexpr const char* counted_rows = "rows are counted on each device; choose a size that needs none";

/// Sends this device's rows where `received` counts them.
struct RaggedExchange {
  ValuePtr rows, sent, received;
  Buffer operator()(const Value& out) const;
};
/// The rows go back.
template <class Due>
struct RaggedVjp {
  template <class Ct, class F, class T>
  Due operator()(const Ct& ct, const F& sent, const T& received, const GlobalSizes& global) const {
    using Back = Dual<Ct, axes_of<Ct::spec, F::spec, T::spec, Due::spec>()>;
    return record<"ragged_all_to_all", Due>(OpInfo{"ragged_all_to_all", Due::spec, {}}, ct.device(), global,
                                            RaggedExchange{ct.value(), received.value(), sent.value()},
                                            vjp(ct, save(received, sent), RaggedVjp<Back>{}));
  }
};
}  // namespace detail

/// Rows move to the device that counts them in `received`, which is `all_to_all` of `sent`; swapped counts move them
/// back. Only counted rows travel. The size of the result's first dim bounds what a device gets; further rows are 0.
/// Throws where a device has or gets more rows. Backward: the rows of the cotangent move back.
/// `ragged_all_to_all<"R/d/e M -> S/d/e M">(rows, sent, received, {{"S", 64}})`; `sent` is "P/d/e X", `received` "P/d
/// X/e"
template <OpSpec O, dtype D, Spec S, dtype I, Spec From, dtype J, Spec To>
auto ragged_all_to_all(const Tensor<D, S>& rows, const Tensor<I, From>& sent, const Tensor<J, To>& received,
                       Sizes sizes, Site site = Site::current())
    -> Tensor<detail::after_t<detail::is_index<"ragged_all_to_all", I> && detail::is_index<"ragged_all_to_all", J>, D>,
              detail::op_result_for<detail::summed_in<D, From, To>, rules::ragged_all_to_all, O, S, From, To>> {
  using Out =
      Tensor<D, detail::op_result_for<detail::summed_in<D, From, To>, rules::ragged_all_to_all, O, S, From, To>>;
  using Due = Dual<Tensor<D, S>, detail::axes_of<S, From, To, Out::spec>()>;
  const detail::Calling op{"ragged_all_to_all", detail::full_op<"ragged_all_to_all", O, S>, site};
  detail::require_unpadded(op, rows.value(), 0, detail::counted_rows);
  static_cast<void>(detail::sizes_by_name(op, detail::parsed<To>, {&sent.value(), &received.value(), &rows.value()}));
  return detail::record<"ragged_all_to_all", Out>(
      op, rows.device(), detail::sizes_by_name(op, detail::parsed<Out::spec>, rows.value(), sizes),
      detail::RaggedExchange{rows.value(), sent.value(), received.value()},
      detail::vjp(rows, detail::save(sent, received), detail::RaggedVjp<Due>{}));
}
SHARDLIB_FORM(ragged_all_to_all, "ragged_all_to_all<\"R/e M -> S/e M\">(rows, sent, received, {{\"S\", 64}})")

namespace detail {

/// The op spec of one group: without the first dim of `weights`, which is operand or result number `at`.
template <Spec A, Spec B, Spec Out, int At>
constexpr OpSpec of_one_group() {
  const auto without_first = [](TensorSpec spec) {
    spec.dims.erase(0);
    return spec_of(spec);
  };
  return op_spec_of(A, At == 1 ? without_first(parsed<B>) : B, At == 2 ? without_first(parsed<Out>) : Out);
}
/// The rows of each group times its weights. Also the cotangent of the rows.
template <class D>
struct GroupedProduct {
  const kernels::EinsumPlan* plan;
  ValuePtr rows, weights, counts;
  Buffer operator()(const Value& out) const;
};
/// The cotangent of the weights: of each group the product of its rows of two tensors.
template <class D>
struct GroupedOuter {
  const kernels::EinsumPlan* plan;
  ValuePtr a, b, counts;
  Buffer operator()(const Value& out) const;
};
template <class Due>
struct GroupedWeightsVjp;
/// The VJP of grouped_einsum by the rows. GroupedFactorVjp calls it, too.
template <class Due>
struct GroupedRowsVjp {
  template <class Ct, class W, class I>
  Due operator()(const Ct& ct, const W& weights, const I& counts, const GlobalSizes& global) const {
    static constexpr OpSpec transpose = op_spec_of(Ct::spec, W::spec, Due::spec);
    static constexpr Spec axes = axes_of<Ct::spec, W::spec, I::spec, Due::spec>();
    return record<"grouped_einsum", Due>(
        OpInfo{"grouped_einsum", transpose, {}}, ct.device(), global,
        GroupedProduct<typename Ct::value_type>{&einsum_plan<of_one_group<Ct::spec, W::spec, Due::spec, 1>()>(),
                                                ct.value(), weights.value(), counts.value()},
        vjp(ct, save(weights, counts), GroupedRowsVjp<Dual<Ct, axes>>{}),
        vjp(weights, save(ct, counts), GroupedWeightsVjp<Dual<W, axes>>{}));
  }
};
/// The VJP of GroupedWeightsVjp by its cotangent or by its rows, where it is differentiated again.
template <class Due>
struct GroupedFactorVjp {
  template <class Ct, class X, class I>
  Due operator()(const Ct& ct, const X& other, const I& counts, const GlobalSizes& global) const {
    return GroupedRowsVjp<Due>{}(other, ct, counts, global);
  }
};
template <class Due>
struct GroupedWeightsVjp {
  template <class Ct, class X, class I>
  Due operator()(const Ct& ct, const X& rows, const I& counts, const GlobalSizes& global) const {
    static constexpr OpSpec transpose = op_spec_of(Ct::spec, X::spec, Due::spec);
    static constexpr Spec axes = axes_of<Ct::spec, X::spec, I::spec, Due::spec>();
    return record<"grouped_einsum", Due>(
        OpInfo{"grouped_einsum", transpose, {}}, ct.device(), global,
        GroupedOuter<typename Ct::value_type>{&einsum_plan<of_one_group<Ct::spec, X::spec, Due::spec, 2>()>(),
                                              ct.value(), rows.value(), counts.value()},
        vjp(ct, save(rows, counts), GroupedFactorVjp<Dual<Ct, axes>>{}),
        vjp(rows, save(ct, counts), GroupedFactorVjp<Dual<X, axes>>{}));
  }
};
}  // namespace detail

/// The einsum of each row with the weights of its group. The first dim of the weights numbers the groups. Each
/// device's rows are ordered by group; rows behind those that are counted are 0. Backward: two grouped products.
/// Throws where the counts exceed the rows.
/// `grouped_einsum<"S/d/e M, X/e M F -> S/d/e F">(rows, weights, counts)`; `counts` is "P/d X/e"
template <OpSpec O, dtype D, Spec S, dtype E, Spec W, dtype I, Spec C>
auto grouped_einsum(const Tensor<D, S>& rows, const Tensor<E, W>& weights, const Tensor<I, C>& counts,
                    Site site = Site::current())
    -> Tensor<detail::after_t<detail::is_float<"grouped_einsum", D> && detail::one_dtype<"grouped_einsum", D, E> &&
                                  detail::is_index<"grouped_einsum", I>,
                              D>,
              detail::op_result_for<detail::summed_in<D, C>, rules::grouped_einsum, O, S, W, C>> {
  using Out = Tensor<D, detail::op_result_for<detail::summed_in<D, C>, rules::grouped_einsum, O, S, W, C>>;
  static constexpr Spec axes = detail::axes_of<S, W, C, Out::spec>();
  const detail::Calling op{"grouped_einsum", O, site};
  detail::require_unpadded(op, rows.value(), 0, detail::counted_rows);
  static_cast<void>(detail::sizes_by_name(op, detail::parsed<C>, {&weights.value(), &counts.value()}));
  return detail::record<"grouped_einsum", Out>(
      op, rows.device(), detail::sizes_by_name(op, detail::parsed<Out::spec>, {&rows.value(), &weights.value()}),
      detail::GroupedProduct<D>{&detail::einsum_plan<detail::of_one_group<S, W, Out::spec, 1>()>(), rows.value(),
                                weights.value(), counts.value()},
      detail::vjp(rows, detail::save(weights, counts), detail::GroupedRowsVjp<Dual<Tensor<D, S>, axes>>{}),
      detail::vjp(weights, detail::save(rows, counts), detail::GroupedWeightsVjp<Dual<Tensor<E, W>, axes>>{}));
}
SHARDLIB_FORM(grouped_einsum, "grouped_einsum<\"S M, X M F -> S F\">(rows, weights, counts)")

}  // namespace shardlib
