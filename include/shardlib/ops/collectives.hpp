// Collectives and layout casts, each with its transpose.
#pragma once

#include <algorithm>
#include <cstring>
#include <functional>
#include <string_view>
#include <vector>

#include "shardlib/kernels/layout.hpp"
#include "shardlib/kernels/reduce.hpp"
#include "shardlib/shapes.hpp"
#include "shardlib/tape.hpp"

namespace shardlib {
namespace detail {

using AxisList = std::vector<std::string_view>;

/// The axes in the order of the mesh, which fixes the order of a sum over them.
inline AxisList in_mesh_order(const Device& device, const Axes& axes) {
  AxisList ordered;
  for (const auto& axis : device.axes())
    if (axes.contains(axis.name)) ordered.push_back(axis.name);
  return ordered;
}

/// A dim that the group's devices hold in `parts` blocks.
struct Cut {
  int dim;
  std::int64_t parts;
};

/// Copies between a whole block and a row of sub-blocks in rank order (the ranks are row-major over the cuts):
/// `to_rows` cuts, otherwise joins.
inline void regroup(const Exec& exec, std::size_t element, const std::vector<Cut>& cuts, const Extents& whole,
                    const std::byte* from, std::byte* to, bool to_rows) {
  Extents part = whole;
  for (const Cut& cut : cuts) part[cut.dim] /= cut.parts;
  const auto whole_strides = kernels::row_major(view(whole)), in_part = kernels::row_major(view(part));
  std::vector<std::int64_t> extents, in_whole, in_rows;
  std::int64_t row = product(part);
  for (const Cut& cut : cuts) row *= cut.parts;
  for (const Cut& cut : cuts) {
    row /= cut.parts;
    extents.push_back(cut.parts);
    in_rows.push_back(row);
    in_whole.push_back(part[cut.dim] * whole_strides[cut.dim]);
  }
  for (int i = 0; i < whole.size(); ++i) {
    extents.push_back(part[i]);
    in_rows.push_back(in_part[i]);
    in_whole.push_back(whole_strides[i]);
  }
  kernels::copy_strided(exec, element, extents, from, to_rows ? in_whole : in_rows, to, to_rows ? in_rows : in_whole);
}

/// True if the rows in rank order already are the whole: one cut, and nothing to the left of it.
inline bool rows_are_whole(const std::vector<Cut>& cuts, const Extents& whole) {
  if (cuts.size() != 1) return false;
  for (int i = 0; i < cuts[0].dim; ++i)
    if (whole[i] != 1) return false;
  return true;
}

/// The dims on which `more` has axes that `less` lacks: the group's axes in order, and the cuts.
struct Difference {
  AxisList axes;
  std::vector<Cut> cuts;
};
inline Difference resharded(const Device& device, const TensorSpec& less, const TensorSpec& more) {
  Difference d;
  for (int i = 0; i < more.rank(); ++i) {
    std::int64_t parts = 1;
    for (int k = less.dims[i].axes.size(); k < more.dims[i].axes.size(); ++k) {
      d.axes.push_back(more.dims[i].axes[k]);
      parts *= device.size(more.dims[i].axes[k]);
    }
    if (more.dims[i].axes.size() > less.dims[i].axes.size()) d.cuts.push_back({i, parts});
  }
  return d;
}

inline void add_traffic(const Value& shape, std::size_t bytes, const AxisList& axes) {
  State& s = state(shape.device);
  s.counts.find(shape.made_by.name)->second.bytes += static_cast<std::int64_t>(bytes);
  s.work.bytes += static_cast<std::int64_t>(bytes);
  s.work.axes = {};
  for (const auto axis : axes) s.work.axes.push_back(axis);
}

inline Buffer gather(const Value& in, const Value& out) {
  const Difference d = resharded(*out.device, *out.spec, *in.spec);
  auto& group = out.device->group(d.axes);
  if (group.size() == 1) return in.data();
  add_traffic(out, in.bytes() * static_cast<std::size_t>(group.size() - 1), d.axes);
  Buffer rows = allocate(out);
  group.all_gather(in.data(), rows).wait();
  if (rows_are_whole(d.cuts, out.local)) return rows;
  Buffer whole = allocate(out);
  regroup(out.device->exec(), size_of(out.dtype), d.cuts, out.local, rows.data(), whole.data(), false);
  return whole;
}

inline Buffer scatter(const Value& in, const Value& out) {
  const Difference d = resharded(*out.device, *in.spec, *out.spec);
  auto& group = out.device->group(d.axes);
  if (group.size() == 1) return in.data();
  add_traffic(out, out.bytes() * static_cast<std::size_t>(group.size() - 1), d.axes);
  Buffer rows = in.data();
  if (!rows_are_whole(d.cuts, in.local)) {
    rows = allocate(in);
    regroup(out.device->exec(), size_of(in.dtype), d.cuts, in.local, in.data().data(), rows.data(), true);
  }
  Buffer part = allocate(out);
  group.reduce_scatter(rows, part, out.dtype, Reduction::sum).wait();
  return part;
}

inline Buffer reduce(const Value& in, const Value& out, const AxisList& axes, Reduction op) {
  auto& group = out.device->group(axes);
  if (group.size() == 1) return in.data();
  add_traffic(out, 2 * in.bytes() * static_cast<std::size_t>(group.size() - 1) / static_cast<std::size_t>(group.size()),
              axes);
  Buffer all = allocate(out);
  group.all_reduce(in.data(), all, out.dtype, op).wait();
  return all;
}

/// Sums over the axes that are partial in `in` and no longer in `out`.
inline Buffer sum_pending(const Value& in, const Value& out) {
  Axes axes = in.spec->partial;
  for (auto axis : out.spec->partial) axes.erase(axes.find(axis));
  return reduce(in, out, in_mesh_order(*out.device, axes), Reduction::sum);
}

inline Buffer exchange(const Value& in, const Value& out) {
  // Pair the dims that lose axes with those that gain them; ranks are row-major over the pairs.
  AxisList axes;
  std::vector<Cut> lose, gain;
  for (int i = 0; i < in.spec->rank(); ++i) {
    const Axes &before = in.spec->dims[i].axes, &after = out.spec->dims[i].axes;
    if (before.size() <= after.size()) continue;
    std::int64_t parts = 1;
    for (int k = after.size(); k < before.size(); ++k) {
      axes.push_back(before[k]);
      parts *= out.device->size(before[k]);
    }
    lose.push_back({i, parts});
    for (int j = 0; j < in.spec->rank(); ++j)
      if (out.spec->dims[j].axes.contains(before[after.size()])) gain.push_back({j, parts});
  }
  auto& group = out.device->group(axes);
  if (group.size() == 1) return in.data();
  add_traffic(out, in.bytes() * static_cast<std::size_t>(group.size() - 1) / static_cast<std::size_t>(group.size()),
              axes);
  const Exec exec = out.device->exec();
  Buffer send = allocate(in), received = allocate(out), whole = allocate(out);
  regroup(exec, size_of(in.dtype), gain, in.local, in.data().data(), send.data(), true);
  group.all_to_all(send, received).wait();
  regroup(exec, size_of(in.dtype), lose, out.local, received.data(), whole.data(), false);
  return whole;
}

/// The value itself on the first device of the axes that become partial, zeros on the others.
inline Buffer keep_on_first(const Value& in, const Value& out) {
  bool first = true;
  for (auto axis : out.spec->partial)
    if (!in.spec->partial.contains(axis)) first = first && out.device->coordinate(axis) == 0;
  if (first) return in.data();
  Buffer zero = allocate(out);
  out.device->exec().zero(zero.data(), out.bytes());
  return zero;
}

/// Copies this device's block out of a replicated value, or (`embed`) into a zeroed one.
inline Buffer cut_block(const Value& in, const Value& out, bool embed) {
  const Value& whole = embed ? out : in;
  const Value& part = embed ? in : out;
  const auto strides = kernels::row_major(view(whole.local));
  std::int64_t offset = 0;
  for (int i = 0; i < whole.local.size(); ++i) {
    Axes extra;
    for (int k = whole.spec->dims[i].axes.size(); k < part.spec->dims[i].axes.size(); ++k)
      extra.push_back(part.spec->dims[i].axes[k]);
    offset += block_index(*out.device, extra) * part.local[i] * strides[i];
  }
  Buffer result = allocate(out);
  const std::size_t element = size_of(out.dtype);
  const std::size_t shift = static_cast<std::size_t>(offset) * element;
  if (embed) {
    out.device->exec().zero(result.data(), out.bytes());
    kernels::copy_strided(out.device->exec(), element, view(part.local), in.data().data(),
                          kernels::row_major(view(part.local)), result.data() + shift, strides);
  } else {
    kernels::copy_strided(out.device->exec(), element, view(part.local), in.data().data() + shift, strides,
                          result.data(), kernels::row_major(view(part.local)));
  }
  return result;
}

/// The transpose of slice, S -> P: each device's block in zeros. "A/t -> A +t"
template <Op O, dtype D, Spec S>
auto embed(const Tensor<D, S>& x) {
  constexpr OpParts op = parse_op(O);
  using Out = Tensor<D, Spec(to_string(op.out).view())>;
  return record_unary<"embed", Out>(OpInfo{"embed", O, {}}, x, x.value()->global,
                                    [](const Value& in, const Value& out) { return cut_block(in, out, true); });
}

}  // namespace detail

template <Op O, dtype D, Spec S>
auto all_gather(const Tensor<D, S>& x, Site site) -> Tensor<D, detail::result_of<rules::all_gather, O, S>> {
  using Out = Tensor<D, detail::result_of<rules::all_gather, O, S>>;
  const detail::OpInfo op{"all_gather", O, site};
  return detail::record_unary<"all_gather", Out>(op, x, x.value()->global, detail::gather,
                                                 detail::vjp(x, detail::save(), [](const auto& ct) {
                                                   return reduce_scatter<detail::transpose_op<Out, Tensor<D, S>>()>(ct);
                                                 }));
}

template <Op O, dtype D, Spec S>
auto reduce_scatter(const Tensor<D, S>& x, Site site)
    -> Tensor<detail::after_t<detail::is_reduced<"reduce_scatter", D>, D>,
              detail::result_of<rules::reduce_scatter, O, S>> {
  using Out = Tensor<D, detail::result_of<rules::reduce_scatter, O, S>>;
  const detail::OpInfo op{"reduce_scatter", O, site};
  return detail::record_unary<"reduce_scatter", Out>(op, x, x.value()->global, detail::scatter,
                                                     detail::vjp(x, detail::save(), [](const auto& ct) {
                                                       return all_gather<detail::transpose_op<Out, Tensor<D, S>>()>(ct);
                                                     }));
}

template <Op O, dtype D, Spec S>
auto all_reduce(const Tensor<D, S>& x, Site site)
    -> Tensor<detail::after_t<detail::is_reduced<"all_reduce", D>, D>, detail::result_of<rules::all_reduce, O, S>> {
  using Out = Tensor<D, detail::result_of<rules::all_reduce, O, S>>;
  const detail::OpInfo op{"all_reduce", O, site};
  return detail::record_unary<"all_reduce", Out>(op, x, x.value()->global, detail::sum_pending,
                                                 detail::vjp(x, detail::save(), [](const auto& ct) {
                                                   return all_reduce<detail::transpose_op<Out, Tensor<D, S>>()>(ct);
                                                 }));
}

template <Op O, dtype D, Spec S>
auto all_reduce_max(const Tensor<D, S>& x, Site site)
    -> Tensor<detail::after_t<detail::is_reduced<"all_reduce_max", D>, D>,
              detail::result_of<rules::all_reduce_max, O, S>> {
  using Out = Tensor<D, detail::result_of<rules::all_reduce_max, O, S>>;
  const detail::OpInfo op{"all_reduce_max", O, site};
  if (x.value()->slot)
    throw Error(op.describe() +
                ": a maximum over devices has no derivative; take stop_gradient of the operand first (" +
                x.device()->describe() + ")");
  detail::Bindings names(op, x.device());
  names.bind(*x.value());
  const auto kernel = [](const detail::Value& in, const detail::Value& out) {
    detail::Value local = out;
    local.made_by = {};  // scratch: no operand, for whoever observes
    local.storage = std::make_shared<detail::Storage>(detail::Storage{detail::allocate(out), nullptr});
    bool reduced[max_dims] = {};
    Axes axes;
    for (int i = 0; i < in.spec->rank(); ++i) {
      reduced[i] = !out.spec->has(in.spec->dims[i].name);
      if (reduced[i])
        for (auto axis : in.spec->dims[i].axes) axes.push_back(axis);
    }
    kernels::max(out.device->exec(), dtype_c<D>, in.data().data(), detail::view(in.local),
                 std::span(reduced, static_cast<std::size_t>(in.spec->rank())), local.storage->buffer.data(),
                 detail::view(detail::true_extents(in)));
    detail::zero_padding(local, local.storage->buffer);  // of the dims that stay
    return detail::reduce(local, out, detail::in_mesh_order(*out.device, axes), Reduction::max);
  };
  return detail::record_unary<"all_reduce_max", Out>(op, x, names.sizes(detail::parsed<Out::spec>), kernel);
}

template <Op O, dtype D, Spec S>
auto all_to_all(const Tensor<D, S>& x, Site site) -> Tensor<D, detail::result_of<rules::all_to_all, O, S>> {
  using Out = Tensor<D, detail::result_of<rules::all_to_all, O, S>>;
  const detail::OpInfo op{"all_to_all", O, site};
  return detail::record_unary<"all_to_all", Out>(op, x, x.value()->global, detail::exchange,
                                                 detail::vjp(x, detail::save(), [](const auto& ct) {
                                                   return all_to_all<detail::transpose_op<Out, Tensor<D, S>>()>(ct);
                                                 }));
}

template <Op O, Op Axis, dtype D, Spec S>
auto shift(const Tensor<D, S>& x, int by, Site site) -> Tensor<D, detail::result_of<rules::shift, O, Axis, S>> {
  using Out = Tensor<D, S>;
  const detail::OpInfo op{"shift", O, site};
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
    group.send_recv(in.data(), (group.rank() + step) % n, received, (group.rank() - step + n) % n).wait();
    return received;
  };
  return detail::record_unary<"shift", Out>(op, x, x.value()->global, kernel,
                                            detail::vjp(x, detail::save(), [by](const auto& ct) {
                                              constexpr Spec spec = std::remove_cvref_t<decltype(ct)>::spec;
                                              return shift<Op{std::string_view(spec)}, Axis>(ct, -by);
                                            }));
}

template <Op O, dtype D, Spec S>
auto slice(const Tensor<D, S>& x, Site site) -> Tensor<D, detail::result_of<rules::slice, O, S>> {
  using Out = Tensor<D, detail::result_of<rules::slice, O, S>>;
  const detail::OpInfo op{"slice", O, site};
  return detail::record_unary<"slice", Out>(
      op, x, x.value()->global,
      [](const detail::Value& in, const detail::Value& out) { return detail::cut_block(in, out, false); },
      detail::vjp(x, detail::save(),
                  [](const auto& ct) { return detail::embed<detail::transpose_op<Out, Tensor<D, S>>()>(ct); }));
}

template <Op O, dtype D, Spec S>
auto to_partial(const Tensor<D, S>& x, Site site) -> Tensor<D, detail::result_of<rules::to_partial, O, S>> {
  using Out = Tensor<D, detail::result_of<rules::to_partial, O, S>>;
  const detail::OpInfo op{"to_partial", O, site};
  return detail::record_unary<"to_partial", Out>(op, x, x.value()->global, detail::keep_on_first,
                                                 detail::vjp(x, detail::save(), [](const auto& ct) {
                                                   return to_partial<detail::transpose_op<Out, Tensor<D, S>>()>(ct);
                                                 }));
}

}  // namespace shardlib
