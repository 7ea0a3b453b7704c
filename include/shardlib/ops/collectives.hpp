// Collectives and layout casts, each with its transpose.
#pragma once

#include <algorithm>
#include <functional>
#include <memory>
#include <string_view>
#include <vector>

#include "shardlib/detail/inline.hpp"
#include "shardlib/kernels/layout.hpp"
#include "shardlib/ops/reductions.hpp"
#include "shardlib/overlap.hpp"
#include "shardlib/padding.hpp"
#include "shardlib/shapes.hpp"
#include "shardlib/tape.hpp"

namespace shardlib {
namespace detail {

using AxisList = std::vector<std::string_view>;

/// The axes in the order of the mesh, which fixes the order of a sum over them.
SHARDLIB_INLINE AxisList in_mesh_order(const Device& device, const Axes& axes);

/// Starts an operation of a communicator. The device's stopwatch counts it as communication.
SHARDLIB_INLINE Request begin(const Value& shape, const std::function<Request()>& start);

/// Starts and completes an operation; waiting for the others is communication too.
SHARDLIB_INLINE void complete(const Value& shape, const std::function<Request()>& start);

SHARDLIB_INLINE void add_traffic(const Value& shape, std::size_t bytes, const AxisList& axes);

/// Bytes of a device's piece of a row, from which on rows are read and written where they stand: to move many shorter
/// pieces takes longer than to put all in rank order. Tests lower it.
inline std::size_t shortest_piece = 64;

SHARDLIB_INLINE Buffer gather(const Value& in, const Value& out);

SHARDLIB_INLINE Buffer scatter(const Value& in, const Value& out);

/// In State::Mode::start: begins what `gather` will complete.
[[gnu::cold]] SHARDLIB_INLINE void gather_ahead(const ValuePtr& in, const ValuePtr& out);

/// In State::Mode::start: begins the reduce_scatter, and leaves waiting for it to who asks for `out`.
[[gnu::cold]] SHARDLIB_INLINE void scatter_ahead(const ValuePtr& in, const ValuePtr& out);

SHARDLIB_INLINE Buffer reduce(const Value& in, const Value& out, const AxisList& axes, Reduction op);

/// Sums over the axes that are partial in `in` and no longer in `out`.
SHARDLIB_INLINE Buffer sum_pending(const Value& in, const Value& out);

SHARDLIB_INLINE Buffer exchange(const Value& in, const Value& out);

/// The value itself on the first device of the axes that become partial, zeros on the others.
SHARDLIB_INLINE Buffer keep_on_first(const Value& in, const Value& out);

/// Copies this device's block out of a replicated value, or (`embed`) into a zeroed one.
SHARDLIB_INLINE Buffer cut_block(const Value& in, const Value& out, bool embed);

/// The transpose of slice, S -> P: each device's block in zeros. "A/t -> A +t"
template <Op O, dtype D, Spec S>
auto embed(const Tensor<D, S>& x) {
  constexpr OpParts op = parse_op(O);
  using Out = Tensor<D, Spec(to_string(op.out).view())>;
  return record_unary<"embed", Out>(OpInfo{"embed", O, {}}, x, x.value()->global,
                                    [](const Value& in, const Value& out) { return cut_block(in, out, true); });
}

}  // namespace detail

template <Op O, class Sum, dtype D, Spec S>
auto all_gather(const Tensor<D, S>& x, Site site)
    -> Tensor<detail::after_t<detail::backward_sums_in<D, Sum>, D>, detail::result_of<rules::all_gather, O, S>> {
  using Out = Tensor<D, detail::result_of<rules::all_gather, O, S>>;
  const detail::Calling op{"all_gather", detail::full_op<"all_gather", O, S>, site};
  const Out out = detail::record_unary<"all_gather", Out>(
      op, x, x.value()->global, detail::gather, detail::vjp(x, detail::save(), [](const auto& ct) {
        const detail::SumBeside beside(ct.device());
        return reduce_scatter<detail::transpose_op<Out, Tensor<D, S>>(), detail::sum_of<D>>(ct);
      }));
  detail::gather_ahead(x.value(), out.value());
  return out;
}

template <Op O, class Sum, dtype D, Spec S>
auto reduce_scatter(const Tensor<D, S>& x, Site site)
    -> Tensor<detail::after_t<detail::is_summed<"reduce_scatter", D, Sum>, D>,
              detail::result_of<rules::reduce_scatter, O, S>> {
  using Out = Tensor<D, detail::result_of<rules::reduce_scatter, O, S>>;
  const detail::Calling op{"reduce_scatter", detail::full_op<"reduce_scatter", O, S>, site};
  const Out out = detail::record_unary<"reduce_scatter", Out>(
      op, x, x.value()->global, detail::scatter, detail::vjp(x, detail::save(), [](const auto& ct) {
        return all_gather<detail::transpose_op<Out, Tensor<D, S>>()>(ct);
      }));
  detail::scatter_ahead(x.value(), out.value());
  return out;
}

template <Op O, class Sum, dtype D, Spec S>
auto all_reduce(const Tensor<D, S>& x, Site site)
    -> Tensor<detail::after_t<detail::is_summed<"all_reduce", D, Sum>, D>, detail::result_of<rules::all_reduce, O, S>> {
  using Out = Tensor<D, detail::result_of<rules::all_reduce, O, S>>;
  const detail::Calling op{"all_reduce", detail::full_op<"all_reduce", O, S>, site};
  return detail::record_unary<"all_reduce", Out>(
      op, x, x.value()->global, detail::sum_pending, detail::vjp(x, detail::save(), [](const auto& ct) {
        return all_reduce<detail::transpose_op<Out, Tensor<D, S>>(), detail::sum_of<D>>(ct);
      }));
}

template <Op O, dtype D, Spec S>
auto all_reduce_max(const Tensor<D, S>& x, Site site)
    -> Tensor<detail::after_t<detail::is_reduced<"all_reduce_max", D>, D>,
              detail::result_of<rules::all_reduce_max, O, S>> {
  using Out = Tensor<D, detail::result_of<rules::all_reduce_max, O, S>>;
  const detail::Calling op{"all_reduce_max", detail::full_op<"all_reduce_max", O, S>, site};
  if (x.value()->slot)
    throw Error(op.describe() +
                ": a maximum over devices has no derivative; take stop_gradient of the operand first (" +
                x.device()->describe() + ")");
  detail::Bindings names(op, x.device());
  names.bind(*x.value());
  const auto kernel = [](const detail::Value& in, const detail::Value& out) {
    detail::Value local = out;
    local.made_by = {};  // scratch: no operand, for whoever observes
    local.storage = std::make_shared<detail::Storage>(detail::Storage{detail::max_kernel<D>(in, out), nullptr});
    Axes axes;
    for (const Dim& dim : in.spec->dims)
      if (!out.spec->has(dim.name))
        for (auto axis : dim.axes) axes.push_back(axis);
    detail::zero_padding(local, local.storage->buffer);  // of the dims that stay
    return detail::reduce(local, out, detail::in_mesh_order(*out.device, axes), Reduction::max);
  };
  return detail::record_unary<"all_reduce_max", Out>(op, x, names.sizes(detail::parsed<Out::spec>), kernel);
}

template <Op O, dtype D, Spec S>
auto all_to_all(const Tensor<D, S>& x, Site site) -> Tensor<D, detail::result_of<rules::all_to_all, O, S>> {
  using Out = Tensor<D, detail::result_of<rules::all_to_all, O, S>>;
  const detail::Calling op{"all_to_all", detail::full_op<"all_to_all", O, S>, site};
  return detail::record_unary<"all_to_all", Out>(op, x, x.value()->global, detail::exchange,
                                                 detail::vjp(x, detail::save(), [](const auto& ct) {
                                                   return all_to_all<detail::transpose_op<Out, Tensor<D, S>>()>(ct);
                                                 }));
}

template <Op O, Op Axis, dtype D, Spec S>
auto shift(const Tensor<D, S>& x, int by, Site site) -> Tensor<D, detail::result_of<rules::shift, O, Axis, S>> {
  using Out = Tensor<D, S>;
  const detail::Calling op{"shift", O, site};
  for (int i = 0; i < detail::parsed<S>.rank(); ++i)
    if (detail::parsed<S>.dims[i].axes.contains(std::string_view(Axis)) && x.value()->global[i].is_padded())
      detail::fail_padded(op, *x.device(), detail::parsed<S>.dims[i].name, x.value()->global[i],
                          "a shift would bring its padding between the blocks; choose a size that needs none");
  const auto kernel = [by](const detail::Value& in, const detail::Value& out) {
    auto& group = out.device->group({std::string_view(Axis)});
    const int n = group.size();
    const int step = ((by % n) + n) % n;
    if (step == 0) return in.data();
    detail::add_traffic(out, in.bytes(), {std::string_view(Axis)});
    Buffer received = detail::allocate(out);
    const Buffer mine = in.data();
    const int to = (group.rank() + step) % n, from = (group.rank() - step + n) % n;
    detail::complete(out, [&] { return group.send_recv(mine, to, received, from); });
    return received;
  };
  return detail::record_unary<"shift", Out>(op, x, x.value()->global, kernel,
                                            detail::vjp(x, detail::save(), [by](const auto& ct) {
                                              constexpr Spec spec = std::remove_cvref_t<decltype(ct)>::spec;
                                              return shift<Op{std::string_view(spec)}, Axis>(ct, -by);
                                            }));
}

template <Op O, dtype D, Spec S>
auto shift(const Tensor<D, S>& x, int by, Site site) -> Tensor<D, detail::result_of<rules::shift_over, O, S>> {
  return shift<Op{std::string_view(S)}, Op{rules::over_axes(O)}>(x, by, site);
}

template <Op O, dtype D, Spec S>
auto slice(const Tensor<D, S>& x, Site site) -> Tensor<D, detail::result_of<rules::slice, O, S>> {
  using Out = Tensor<D, detail::result_of<rules::slice, O, S>>;
  const detail::Calling op{"slice", detail::full_op<"slice", O, S>, site};
  return detail::record_unary<"slice", Out>(
      op, x, x.value()->global,
      [](const detail::Value& in, const detail::Value& out) { return detail::cut_block(in, out, false); },
      detail::vjp(x, detail::save(),
                  [](const auto& ct) { return detail::embed<detail::transpose_op<Out, Tensor<D, S>>()>(ct); }));
}

template <Op O, dtype D, Spec S>
auto to_partial(const Tensor<D, S>& x, Site site) -> Tensor<D, detail::result_of<rules::to_partial, O, S>> {
  using Out = Tensor<D, detail::result_of<rules::to_partial, O, S>>;
  const detail::Calling op{"to_partial", detail::full_op<"to_partial", O, S>, site};
  return detail::record_unary<"to_partial", Out>(op, x, x.value()->global, detail::keep_on_first,
                                                 detail::vjp(x, detail::save(), [](const auto& ct) {
                                                   return to_partial<detail::transpose_op<Out, Tensor<D, S>>()>(ct);
                                                 }));
}

}  // namespace shardlib

#ifndef SHARDLIB_COMPILED
#include "shardlib/ops/collectives_inl.hpp"
#endif
