// einsum_unreduced: multiply and sum on one device, as batched GEMM.
#pragma once

#include <array>

#include "shardlib/kernels/einsum.hpp"
#include "shardlib/ops/elementwise.hpp"
#include "shardlib/ops/reductions.hpp"
#include "shardlib/shapes.hpp"
#include "shardlib/tape.hpp"

namespace shardlib {
namespace detail {

/// The dims of the operands and the result as small numbers, one per name.
template <Op O>
struct EinsumIds {
  static constexpr OpParts op = parse_op(O);
  using Ids = Small<int, max_dims>;
  struct All {
    Ids in[2];
    Ids out;
  };
  static constexpr All ids = [] {
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

/// Multiply-adds of an einsum, two operations each.
inline double einsum_flops(const Value& x, const Value& y) {
  double flops = 2.0 * static_cast<double>(x.count());
  for (int i = 0; i < y.spec->rank(); ++i)
    if (!x.spec->has(y.spec->dims[i].name)) flops *= static_cast<double>(y.local[i]);
  return flops;
}

/// The kernel of an einsum of D with result R; the plan is of static storage.
template <dtype D, dtype R>
struct EinsumKernel {
  const kernels::EinsumPlan* plan;
  ValuePtr a, b;
  Buffer operator()(const Value& out) const {
    Buffer result = allocate(out);
    add_flops(out, einsum_flops(*a, *b));
    kernels::einsum(out.device->exec(), *plan, dtype_c<D>, dtype_c<R>, a->data().data(), view(a->local),
                    b->data().data(), view(b->local), result.data());
    return result;
  }
};

/// The spec of an operand's cotangent without the dims that neither the result nor the other operand has: they were
/// summed away, and are repeated again afterwards.
constexpr Spec reachable(Spec due, Spec ct, Spec other) {
  TensorSpec spec = parse_tensor(due).spec;
  const TensorSpec a = parse_tensor(ct).spec, b = parse_tensor(other).spec;
  for (int i = spec.rank(); i-- > 0;)
    if (!a.has(spec.dims[i].name) && !b.has(spec.dims[i].name)) spec.dims.erase(i);
  return Spec(to_string(spec).view());
}

template <bool with_vjps, Op O, dtype R, dtype D, Spec S, dtype E, Spec T>
auto einsum_op(const OpInfo& op, const Tensor<D, S>& x, const Tensor<E, T>& y)
    -> Tensor<R, result_of<rules::einsum, O, S, T>>;

/// The cotangent of operand X: an einsum of the result's cotangent with the other operand.
template <class X, class Ct, class Other>
[[gnu::cold]] auto einsum_vjp(const Ct& ct, const Other& other, const GlobalSizes& global) {
  using D = typename X::value_type;
  constexpr Spec axes = axes_of<Ct::spec, Other::spec, X::spec>();
  constexpr Spec due = dual_spec(X::spec, axes);
  constexpr Spec kept = reachable(due, Ct::spec, Other::spec);
  const auto narrow = [&] {
    if constexpr (std::is_same_v<typename Ct::value_type, D>)
      return ct;
    else
      return cast<D>(ct);
  }();
  static constexpr Op transpose = make_op(Ct::spec, Other::spec, kept);
  const auto grad = einsum_op<false, transpose, D>(OpInfo{"einsum_unreduced", transpose, {}}, narrow, other);
  if constexpr (kept == due)
    return grad;
  else
    return repeat<Tensor<D, due>>(OpInfo{"broadcast", {}, {}}, grad, global);
}

}  // namespace detail

namespace detail {

/// The op; a backward pass is not differentiated again, and needs no VJPs.
template <bool with_vjps, Op O, dtype R, dtype D, Spec S, dtype E, Spec T>
[[gnu::cold]] auto einsum_op(const OpInfo& op, const Tensor<D, S>& x, const Tensor<E, T>& y)
    -> Tensor<R, result_of<rules::einsum, O, S, T>> {
  using Result = Tensor<R, result_of<rules::einsum, O, S, T>>;
  using Ids = EinsumIds<O>;
  static constexpr auto plan =
      kernels::plan_einsum(Ids::view(Ids::ids.in[0]), Ids::view(Ids::ids.in[1]), Ids::view(Ids::ids.out));
  const EinsumKernel<D, R> kernel{&plan, x.value(), y.value()};
  const GlobalSizes sizes = broadcast_sizes(op, x.value(), y.value(), parsed<Result::spec>);
  if constexpr (with_vjps)
    return record<"einsum_unreduced", Result>(
        op, x.device(), sizes, kernel,
        vjp(x, save(y),
            [](const auto& ct, const auto& other, const GlobalSizes& global) {
              return einsum_vjp<Tensor<D, S>>(ct, other, global);
            }),
        vjp(y, save(x), [](const auto& ct, const auto& other, const GlobalSizes& global) {
          return einsum_vjp<Tensor<E, T>>(ct, other, global);
        }));
  else
    return record<"einsum_unreduced", Result>(op, x.device(), sizes, kernel);
}

}  // namespace detail

template <Op O, class Out, dtype D, Spec S, dtype E, Spec T>
auto einsum_unreduced(const Tensor<D, S>& x, const Tensor<E, T>& y, Site site) -> Tensor<
    detail::after_t<detail::one_dtype<"einsum_unreduced", D, E> && detail::einsum_dtypes<D, detail::dtype_or<Out, D>>,
                    detail::dtype_or<Out, D>>,
    detail::result_of<rules::einsum, O, S, T>> {
  return detail::einsum_op<true, O, detail::dtype_or<Out, D>>(detail::Calling{"einsum_unreduced", O, site}, x, y);
}

template <Op O, class Out, dtype D, Spec S>
auto einsum_unreduced(const Tensor<D, S>& x, Site site)
    -> Tensor<detail::after_t<detail::einsum_dtypes<D, detail::dtype_or<Out, D>>, detail::dtype_or<Out, D>>,
              detail::result_of<rules::einsum1, O, S>> {
  using R = detail::dtype_or<Out, D>;
  using Result = Tensor<R, detail::result_of<rules::einsum1, O, S>>;
  using Ids = detail::EinsumIds<O>;
  const detail::Calling op{"einsum_unreduced", O, site};
  detail::Bindings names(op, x.device());
  names.bind(*x.value());
  return detail::record_unary<"einsum_unreduced", Result>(
      op, x, names.sizes(detail::parsed<Result::spec>),
      [](const detail::Value& in, const detail::Value& out) {
        Buffer result = detail::allocate(out);
        kernels::einsum1(out.device->exec(), dtype_c<D>, dtype_c<R>, Ids::view(Ids::ids.in[0]), detail::view(in.local),
                         Ids::view(Ids::ids.out), in.data().data(), result.data());
        return result;
      },
      detail::vjp(x, detail::save(), [](const auto& ct, const detail::GlobalSizes& global) {
        using Ct = std::remove_cvref_t<decltype(ct)>;
        constexpr Spec due = detail::dual_spec(S, detail::axes_of<Ct::spec, S>());
        constexpr Spec kept = detail::reachable(due, Ct::spec, "");
        const auto grad = einsum_unreduced<detail::make_op(Ct::spec, kept), D>(ct);
        if constexpr (kept == due)
          return grad;
        else
          return detail::repeat<Tensor<D, due>>(detail::OpInfo{"broadcast", {}, {}}, grad, global);
      }));
}

}  // namespace shardlib
