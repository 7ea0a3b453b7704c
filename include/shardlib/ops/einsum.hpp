// einsum_unreduced: multiplies and sums on each device. A sum over devices stays partial. einsum: completes it.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <span>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "shardlib/ops/collectives.hpp"
#include "shardlib/ops/record.hpp"
#include "shardlib/ops/reductions.hpp"
#include "shardlib/ops/result.hpp"
#include "shardlib/rules/all.hpp"
#include "shardlib/spec/dtype.hpp"

namespace shardlib {

namespace kernels {
struct EinsumPlan;
}
namespace detail {

/// Numbers the names of dims: the dims of the operands and of the result as small integers.
template <OpSpec O>
struct EinsumIds {
  using Ids = Small<int, max_dims>;
  struct All {
    Ids in[2];
    Ids out;
  };
  static constexpr All ids = [] {
    constexpr const OpParts& op = parsed_op<O>.parts;
    Small<std::string_view, 3 * max_dims> names;
    const auto number = [&](std::string_view name) {
      if (!names.contains(name)) names.push_back(name);
      return names.find(name);
    };
    All all;
    for (int k = 0; k < op.in.size(); ++k)
      for (const Dim& dim : op.in[k].dims) all.in[k].push_back(number(dim.name));
    for (const Dim& dim : op.out.dims) all.out.push_back(number(dim.name));
    return all;
  }();
  static constexpr std::span<const int> view(const Ids& ids) {
    return {ids.begin(), static_cast<std::size_t>(ids.size())};
  }
};

/// The roles of the op's dims in a matrix product: batch, row, column or summed.
template <OpSpec O>
const kernels::EinsumPlan& einsum_plan();
/// The product of two operands of dtype D. The result has dtype R.
template <class D, class R>
struct Einsum {
  const kernels::EinsumPlan* plan;
  ValuePtr a, b;
  Buffer operator()(const Value& out) const;
};
/// Sums and transposes one operand of dtype D. The result has dtype R.
template <OpSpec O, class D, class R>
Buffer einsum_of_one(const Value& in, const Value& out);

/// The spec of an operand's cotangent without the dims that both the result and the other operand lack. The op summed
/// over those dims, so the VJP repeats them afterwards.
constexpr TensorSpec reachable(TensorSpec due, const TensorSpec& ct, const TensorSpec& other) {
  for (int i = due.rank(); i-- > 0;)
    if (!ct.has(due.dims[i].name) && !other.has(due.dims[i].name)) due.dims.erase(i);
  return due;
}

/// Records a product without typed VJPs. Where it is differentiated again, its VJPs are made at run time.
template <class Out, class K>
Out record_product(const OpInfo& op, const ValuePtr& x, const ValuePtr& y, const K& kernel);
/// The op of a backward pass, without VJPs that compilers would have to compile.
template <OpSpec O, class R, class X, class Y>
auto multiply_only(const OpInfo& op, const X& x, const Y& y) {
  using Result = Tensor<R, result_of<rules::einsum, O, X::spec, Y::spec>>;
  return record_product<Result>(op, x.value(), y.value(),
                                Einsum<typename X::value_type, R>{&einsum_plan<O>(), x.value(), y.value()});
}
/// Makes the VJPs of this result's op read its cotangent in the operands' dtype, to which it is cast once for all of
/// them: the types of these cotangents still say the result's dtype.
void cast_cotangent(const ValuePtr& result, DType operands);

/// The cotangent of operand X: an einsum of the result's cotangent with the other operand.
template <class X>
inline constexpr auto einsum_vjp = [](const auto& ct, const auto& other, const GlobalSizes& global) {
  using Ct = std::remove_cvref_t<decltype(ct)>;
  using Other = std::remove_cvref_t<decltype(other)>;
  using D = typename X::value_type;
  constexpr Spec axes = axes_of<Ct::spec, Other::spec, X::spec>();
  constexpr Spec due = dual_spec<X::spec, axes>();
  constexpr Spec kept = spec_of(reachable(parsed<due>, parsed<Ct::spec>, parsed<Other::spec>));
  static constexpr OpSpec transpose = op_spec_of(Ct::spec, Other::spec, kept);
  const auto grad =
      multiply_only<transpose, D>(OpInfo{"einsum_unreduced", transpose, {}}, Tensor<D, Ct::spec>(ct.value()), other);
  if constexpr (kept == due)
    return grad;
  else
    return repeat<Tensor<D, due>>(OpInfo{"broadcast", {}, {}}, grad, global);
};

}  // namespace detail

/// Multiplies and sums on each device; a sum over devices stays partial. Accumulates in f32 (f64 for f64) and returns
/// the operands' dtype or `Out`. Backward: two einsums. `einsum_unreduced<"B/d L M/t, M/t H -> B/d L H +t">(x, w)`
template <OpSpec O, class Out = void, dtype D, Spec S, dtype E, Spec T>
auto einsum_unreduced(const Tensor<D, S>& x, const Tensor<E, T>& y, Site site = Site::current()) -> Tensor<
    detail::after_t<detail::one_dtype<"einsum_unreduced", D, E> && detail::einsum_dtypes<D, detail::dtype_or<Out, D>>,
                    detail::dtype_or<Out, D>>,
    detail::op_result_for<D, rules::einsum, O, S, T>> {
  using R = detail::dtype_or<Out, D>;
  using Result = Tensor<R, detail::op_result_for<D, rules::einsum, O, S, T>>;
  const detail::Calling op{"einsum_unreduced", O, site};
  const auto result = detail::record<"einsum_unreduced", Result>(
      op, x.device(), detail::sizes_by_name(op, detail::parsed<Result::spec>, {&x.value(), &y.value()}),
      detail::Einsum<D, R>{&detail::einsum_plan<O>(), x.value(), y.value()},
      detail::vjp(x, detail::save(y), detail::einsum_vjp<Tensor<D, S>>),
      detail::vjp(y, detail::save(x), detail::einsum_vjp<Tensor<E, T>>));
  if constexpr (!std::is_same_v<R, D>) detail::cast_cotangent(result.value(), dtype_v<D>);
  return result;
}

namespace detail {
template <class X>
inline constexpr auto einsum_of_one_vjp = [](const auto& ct, const GlobalSizes& global) {
  using Ct = std::remove_cvref_t<decltype(ct)>;
  using D = typename X::value_type;
  constexpr Spec due = dual_spec<X::spec, axes_of<Ct::spec, X::spec>()>();
  constexpr Spec kept = spec_of(reachable(parsed<due>, parsed<Ct::spec>, {}));
  const auto grad = einsum_unreduced<op_spec_of(Ct::spec, kept), D>(ct);
  if constexpr (kept == due)
    return grad;
  else
    return repeat<Tensor<D, due>>(OpInfo{"broadcast", {}, {}}, grad, global);
};
}  // namespace detail

/// One operand: sums over the dims that the result lacks and orders the others.
/// `einsum_unreduced<"A B/t -> A +t">(x)`
template <OpSpec O, class Out = void, dtype D, Spec S>
auto einsum_unreduced(const Tensor<D, S>& x, Site site = Site::current())
    -> Tensor<detail::after_t<detail::einsum_dtypes<D, detail::dtype_or<Out, D>>, detail::dtype_or<Out, D>>,
              detail::op_result_for<D, rules::einsum1, O, S>> {
  using R = detail::dtype_or<Out, D>;
  using Result = Tensor<R, detail::op_result_for<D, rules::einsum1, O, S>>;
  const detail::Calling op{"einsum_unreduced", O, site};
  return detail::record_unary<"einsum_unreduced", Result>(
      op, x, detail::sizes_by_name(op, detail::parsed<Result::spec>, {&x.value()}), detail::einsum_of_one<O, D, R>,
      detail::vjp(x, detail::einsum_of_one_vjp<Tensor<D, S>>));
}
template <dtype D, Spec S, dtype E, Spec T>
auto einsum_unreduced(const Tensor<D, S>& x, const Tensor<E, T>& y)
    -> detail::needs_op_spec<"einsum_unreduced", D, S, T>;

namespace detail {

/// An order of the products: for each set of operands, as bits, the operands of its first factor.
using EinsumOrder = std::array<unsigned, 16>;
/// The order with the fewest floating-point operations on this device. Throws if a name has two sizes.
EinsumOrder einsum_order(const OpInfo& op, const OpParts& parts, const std::vector<ValuePtr>& x);

/// The product of the operands in `Set`, in the order that was planned. `R` is the dtype of the whole product.
template <OpSpec O, unsigned Set, class R, class... X>
auto product_of(const EinsumOrder& order, const Site& site, const std::tuple<const X&...>& x) {
  static constexpr const OpParts& parts = parsed_op<O>.parts;
  using D = typename std::tuple_element_t<0, std::tuple<X...>>::value_type;
  if constexpr ((Set & (Set - 1)) == 0) {
    return std::get<std::countr_zero(Set)>(x);
  } else {
    static constexpr Spec result = spec_of(rules::product_of(parts, Set));
    using Out = std::conditional_t<Set == (1U << sizeof...(X)) - 1, R, D>;
    Tensor<Out, result> out;
    // Each pair of factors once: the first has the first operand of the set.
    const auto multiply = [&]<unsigned First>(std::integral_constant<unsigned, First>) {
      if constexpr ((First & ~Set) == 0 && First != Set && (First & Set & (0U - Set)) != 0) {
        if (order[Set] != First) return;
        const auto a = product_of<O, First, R>(order, site, x);
        const auto b = product_of<O, Set & ~First, R>(order, site, x);
        constexpr Spec of_a = spec_of(rules::product_of(parts, First)),
                       of_b = spec_of(rules::product_of(parts, Set & ~First));
        out = einsum_unreduced<op_spec_of(of_a, of_b, result), Out>(a, b, site);
      }
    };
    [&]<unsigned... First>(std::integer_sequence<unsigned, First...>) {
      (multiply(std::integral_constant<unsigned, First>()), ...);
    }
    (std::make_integer_sequence<unsigned, Set + 1>());
    return out;
  }
}
template <OpSpec O, class R, class... X>
auto product_of_many(const Site& site, const X&... x) {
  const EinsumOrder order = einsum_order(OpInfo{"einsum_unreduced", O, site}, parsed_op<O>.parts, {x.value()...});
  return product_of<O, (1U << sizeof...(X)) - 1, R>(order, site, std::tuple<const X&...>(x...));
}
template <class D, class Out, class... E>
inline constexpr bool einsum_operands =
    (one_dtype<"einsum_unreduced", D, E> && ...) && einsum_dtypes<D, dtype_or<Out, D>>;

}  // namespace detail

/// As above, of three or four operands: products of two, in the order that needs the fewest operations for these sizes.
/// Intermediate products are rounded to the operands' dtype. Backward: the VJP of each product.
/// `einsum_unreduced<"A R, R S/t, S/t B -> A B +t">(u, s, v)`
template <OpSpec O, class Out = void, dtype D, Spec S, dtype E, Spec T, dtype F, Spec U>
auto einsum_unreduced(const Tensor<D, S>& x, const Tensor<E, T>& y, const Tensor<F, U>& z, Site site = Site::current())
    -> Tensor<detail::after_t<detail::einsum_operands<D, Out, E, F>, detail::dtype_or<Out, D>>,
              detail::op_result_for<D, rules::einsum3, O, S, T, U>> {
  if constexpr (!legal<rules::einsum3, O, S, T, U>)
    return {};
  else
    return detail::product_of_many<O, detail::dtype_or<Out, D>>(site, x, y, z);
}
template <OpSpec O, class Out = void, dtype D, Spec S, dtype E, Spec T, dtype F, Spec U, dtype G, Spec V>
auto einsum_unreduced(const Tensor<D, S>& x, const Tensor<E, T>& y, const Tensor<F, U>& z, const Tensor<G, V>& u,
                      Site site = Site::current())
    -> Tensor<detail::after_t<detail::einsum_operands<D, Out, E, F, G>, detail::dtype_or<Out, D>>,
              detail::op_result_for<D, rules::einsum4, O, S, T, U, V>> {
  if constexpr (!legal<rules::einsum4, O, S, T, U, V>)
    return {};
  else
    return detail::product_of_many<O, detail::dtype_or<Out, D>>(site, x, y, z, u);
}
namespace detail {
/// The result of a product of five operands or more: an error. The condition names an operand's type, as g++ would meet
/// the error in calls with fewer operands, too.
template <bool FiveTensors, OpName Name, OpSpec O>
inline constexpr Spec of_more{""};
template <OpName Name, OpSpec O>
inline constexpr Spec of_more<true, Name, O> = result_of<rules::einsum_of_more, Name, O>;
}  // namespace detail

/// A compile error: a product has at most 4 operands.
template <OpSpec O, class Out = void, tensor X, tensor Y, tensor Z, tensor U, tensor V, tensor... More>
auto einsum_unreduced(const X& x, const Y& y, const Z& z, const U& u, const V& v, const More&... more)
    -> Tensor<typename X::value_type, detail::of_more<tensor<V>, "einsum_unreduced", O>>;
SHARDLIB_FORM(einsum_unreduced, "einsum_unreduced<\"A B, B C -> A C\">(x, y)")
SHARDLIB_SPEC_IN_PARENTHESES(einsum_unreduced)

namespace detail {

/// The products of each device, with the sums over devices that the result of `O` lacks.
template <OpSpec O, class Sum, class... X>
auto einsum_reduced(const Site& site, const X&... x) {
  static constexpr const OpParts& parts = parsed_op<O>.parts;
  static constexpr Spec products = spec_of(rules::unreduced(parts)), result = spec_of(parts.out);
  static constexpr OpSpec sum = op_spec_of(products, result);
  static constexpr OpSpec op = [] {
    OpParts local = parts;
    local.out = parsed<products>;
    return OpSpec(to_string(local).view());
  }();
  const auto local = einsum_unreduced<op>(x..., site);
  if constexpr (rules::all_reduce(sum, parsed<products>).ok())
    return all_reduce<sum, Sum>(local, site);
  else
    return reduce_scatter<sum, Sum>(local, site);
}
template <class D, class Sum, class... E>
inline constexpr bool einsum_summands = (one_dtype<"einsum", D, E> && ...) && is_summed<"einsum", D, Sum>;

}  // namespace detail

/// einsum_unreduced and the one collective that its result needs: reduce_scatter where a dim gains the axis of a
/// pending sum, all_reduce where the result lacks it. `Sum` as for these. `einsum<"B/d M/t, M/t H -> B/d H/t">(x, w)`
template <OpSpec O, class Sum = void, dtype D, Spec S, dtype E, Spec T>
auto einsum(const Tensor<D, S>& x, const Tensor<E, T>& y, Site site = Site::current())
    -> Tensor<detail::after_t<detail::einsum_summands<D, Sum, E>, D>,
              detail::op_result_for<D, rules::einsum_reduced, O, S, T>> {
  if constexpr (!legal<rules::einsum_reduced, O, S, T>)
    return {};
  else
    return detail::einsum_reduced<O, Sum>(site, x, y);
}
/// As above, of three or four operands. `einsum<"A R, R S/t, S/t B -> A B">(u, s, v)`
template <OpSpec O, class Sum = void, dtype D, Spec S, dtype E, Spec T, dtype F, Spec U>
auto einsum(const Tensor<D, S>& x, const Tensor<E, T>& y, const Tensor<F, U>& z, Site site = Site::current())
    -> Tensor<detail::after_t<detail::einsum_summands<D, Sum, E, F>, D>,
              detail::op_result_for<D, rules::einsum_reduced3, O, S, T, U>> {
  if constexpr (!legal<rules::einsum_reduced3, O, S, T, U>)
    return {};
  else
    return detail::einsum_reduced<O, Sum>(site, x, y, z);
}
template <OpSpec O, class Sum = void, dtype D, Spec S, dtype E, Spec T, dtype F, Spec U, dtype G, Spec V>
auto einsum(const Tensor<D, S>& x, const Tensor<E, T>& y, const Tensor<F, U>& z, const Tensor<G, V>& u,
            Site site = Site::current()) -> Tensor<detail::after_t<detail::einsum_summands<D, Sum, E, F, G>, D>,
                                                   detail::op_result_for<D, rules::einsum_reduced4, O, S, T, U, V>> {
  if constexpr (!legal<rules::einsum_reduced4, O, S, T, U, V>)
    return {};
  else
    return detail::einsum_reduced<O, Sum>(site, x, y, z, u);
}
template <OpSpec O, class Sum = void, tensor X, tensor Y, tensor Z, tensor U, tensor V, tensor... More>
auto einsum(const X& x, const Y& y, const Z& z, const U& u, const V& v, const More&... more)
    -> Tensor<typename X::value_type, detail::of_more<tensor<V>, "einsum", O>>;
template <dtype D, Spec S, dtype E, Spec T>
auto einsum(const Tensor<D, S>& x, const Tensor<E, T>& y) -> detail::needs_op_spec<"einsum", D, S, T>;
SHARDLIB_FORM(einsum, "einsum<\"A B/t, B/t C -> A C\">(x, y)")
SHARDLIB_SPEC_IN_PARENTHESES(einsum)

}  // namespace shardlib
