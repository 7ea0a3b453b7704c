// Sums, means and maxima over named dims.
#pragma once

#include <algorithm>
#include <array>
#include <span>

#include "shardlib/detail/inline.hpp"
#include "shardlib/kernels/layout.hpp"
#include "shardlib/kernels/reduce.hpp"
#include "shardlib/shapes.hpp"
#include "shardlib/tape.hpp"

namespace shardlib {
namespace detail {

/// Which dims of `in` the result lacks.
SHARDLIB_INLINE std::array<bool, max_dims> removed_dims(const TensorSpec& in, const TensorSpec& out);

SHARDLIB_INLINE GlobalSizes kept_sizes(const Value& x, const TensorSpec& out);

/// A block seen along one dim, which is not sharded: `outer` x `n` x `inner`; the last `padding` of the n are padding.
struct Along {
  std::int64_t outer = 1, n = 1, inner = 1, padding = 0;
};
inline Along along(const Value& x, int dim) {
  Along a;
  a.padding = x.global.padded[dim] - x.global.logical[dim];
  for (int i = 0; i < x.local.size(); ++i) (i < dim ? a.outer : i == dim ? a.n : a.inner) *= x.local[i];
  return a;
}

/// The maxima over the dims that `out` lacks, of this device's block.
template <dtype D>
Buffer max_kernel(const Value& in, const Value& out) {
  const auto removed = removed_dims(*in.spec, *out.spec);
  Buffer result = allocate(out);
  kernels::max(out.device->exec(), dtype_c<D>, in.data().data(), view(in.local),
               std::span(removed.data(), static_cast<std::size_t>(in.spec->rank())), result.data(),
               view(true_extents(in)));
  return result;
}

template <dtype D>
Buffer sum_kernel(const Value& in, const Value& out) {
  const auto removed = removed_dims(*in.spec, *out.spec);
  Buffer result = allocate(out);
  kernels::sum(out.device->exec(), dtype_c<D>, in.data().data(), view(in.local),
               std::span(removed.data(), static_cast<std::size_t>(in.spec->rank())), result.data());
  return result;
}

SHARDLIB_INLINE Buffer repeat_kernel(const Value& in, const Value& out);

/// Repeats a value along the dims that it lacks (sizes known): R -> S or R. The transpose of sum.
template <class Out, class X>
Out repeat(const OpInfo& op, const X& x, const GlobalSizes& global) {
  return record_unary<"broadcast", Out>(op, x, global, repeat_kernel,
                                        vjp(x, save(), [](const auto& ct) { return sum<transpose_op<Out, X>()>(ct); }));
}

}  // namespace detail

template <Op O, dtype D, Spec S>
auto sum(const Tensor<D, S>& x, Site site)
    -> Tensor<detail::after_t<detail::is_reduced<"sum", D>, D>, detail::result_of<rules::sum, O, S>> {
  using Out = Tensor<D, detail::result_of<rules::sum, O, S>>;
  const detail::Calling op{"sum", detail::full_op<"sum", O, S>, site};
  return detail::record_unary<"sum", Out>(
      op, x, detail::kept_sizes(*x.value(), detail::parsed<Out::spec>), detail::sum_kernel<D>,
      detail::vjp(x, detail::save(), [](const auto& ct, const detail::GlobalSizes& global) {
        using Ct = std::remove_cvref_t<decltype(ct)>;
        using Due = Dual<Tensor<D, S>, detail::axes_of<S, Out::spec>()>;
        static constexpr Op repeat = detail::make_op(Ct::spec, Due::spec);
        return detail::repeat<Due>(detail::OpInfo{"broadcast", repeat, {}}, ct, global);
      }));
}

template <dtype D, Spec S>
auto sum(const Tensor<D, S>& x, Site site)
    -> Tensor<detail::after_t<detail::is_reduced<"sum", D>, D>, detail::sum_all_result<S>()> {
  if constexpr (detail::parsed<S>.rank() == 0)
    return x;
  else
    return sum<detail::make_op(S, detail::sum_all_result<S>())>(x, site);
}

template <Op O, dtype D, Spec S>
auto mean(const Tensor<D, S>& x, Site site)
    -> Tensor<detail::after_t<detail::is_float<"mean", D>, D>, detail::result_of<rules::mean, O, S>> {
  using Out = Tensor<D, detail::result_of<rules::mean, O, S>>;
  const auto removed = detail::removed_dims(detail::parsed<S>, detail::parsed<Out::spec>);
  std::int64_t n = 1;
  for (int i = 0; i < x.value()->global.size(); ++i)
    if (removed[static_cast<std::size_t>(i)]) n *= x.value()->global.logical[i];
  return sum<O>(x, site) / detail::LocatedNumber(static_cast<double>(n), site);
}

template <Op O, dtype D, Spec S>
auto max(const Tensor<D, S>& x, Site site)
    -> Tensor<detail::after_t<detail::is_reduced<"max", D>, D>, detail::result_of<rules::local_max, Op("max"), O, S>> {
  using Out = Tensor<D, detail::result_of<rules::local_max, Op("max"), O, S>>;
  const detail::Calling op{"max", detail::full_op<"max", O, S>, site};
  if (x.value()->slot)
    throw Error(op.describe() + ": a maximum has no derivative here; take stop_gradient of the operand first (" +
                x.device()->describe() + ")");
  return detail::record_unary<"max", Out>(op, x, detail::kept_sizes(*x.value(), detail::parsed<Out::spec>),
                                          detail::max_kernel<D>);
}

template <Op O, dtype D, Spec S>
auto argmax(const Tensor<D, S>& x, Site site) -> Tensor<i32, detail::result_of<rules::local_max, Op("argmax"), O, S>> {
  using Out = Tensor<i32, detail::result_of<rules::local_max, Op("argmax"), O, S>>;
  const detail::Calling op{"argmax", detail::full_op<"argmax", O, S>, site};
  const auto kernel = [](const detail::Value& in, const detail::Value& out) {
    const auto removed = detail::removed_dims(*in.spec, *out.spec);  // exactly one, by the rule
    const auto dim = std::ranges::find(removed, true) - removed.begin();
    const detail::Along a = detail::along(in, static_cast<int>(dim));
    Buffer result = detail::allocate(out);
    kernels::argmax(out.device->exec(), dtype_c<D>, in.data().data(), a.outer, a.n, a.inner, result.as<i32>(),
                    a.padding);
    return result;
  };
  return detail::record_unary<"argmax", Out>(op, x, detail::kept_sizes(*x.value(), detail::parsed<Out::spec>), kernel);
}

template <Op O, dtype D, Spec S>
auto broadcast(const Tensor<D, S>& x, Sizes sizes, Site site) -> Tensor<D, detail::result_of<rules::broadcast, O, S>> {
  using Out = Tensor<D, detail::result_of<rules::broadcast, O, S>>;
  const detail::Calling op{"broadcast", detail::full_op<"broadcast", O, S>, site};
  detail::Bindings names(op, x.device());
  names.bind(*x.value());
  for (const NamedSize& given : sizes) names.bind(given);
  return detail::repeat<Out>(op, x, names.sizes(detail::parsed<Out::spec>));
}

}  // namespace shardlib

#ifndef SHARDLIB_COMPILED
#include "shardlib/ops/reductions_inl.hpp"
#endif
