// Definitions of collectives.hpp.
#pragma once

#include "shardlib/compute/collectives.hpp"

#include <cstdint>
#include <memory>
#include <utility>

#include "shardlib/compute/impl/regroup.hpp"
#include "shardlib/kernels/layout.hpp"
#include "shardlib/kernels/strided.hpp"
#include "shardlib/runtime/padding.hpp"
#include "shardlib/runtime/pending_collective.hpp"
#include "shardlib/runtime/program_state.hpp"
#include "shardlib/support/handle.hpp"
#include "shardlib/support/stopwatch.hpp"

namespace shardlib::detail {

SHARDLIB_INLINE GroupAxes in_mesh_order(const Device& device, const Axes& axes) {
  GroupAxes ordered;
  for (const auto& axis : device.axes())
    if (axes.contains(axis.name)) ordered.push_back(axis.name);
  return ordered;
}

SHARDLIB_INLINE Request begin(const Value& shape, const std::function<Request()>& start) {
  const Calling op(shape.made_by);
  Stopwatch& stopwatch = program_state(shape.device).stopwatch;
  const Stopwatch::Part outside = stopwatch.change(Stopwatch::communication);
  Request request = start();
  stopwatch.change(outside);
  return request;
}

SHARDLIB_INLINE void complete(const Value& shape, const std::function<Request()>& start) {
  const Calling op(shape.made_by);
  Stopwatch& stopwatch = program_state(shape.device).stopwatch;
  const Stopwatch::Part outside = stopwatch.change(Stopwatch::communication);
  start().wait();
  stopwatch.change(outside);
}

SHARDLIB_INLINE void add_traffic(const Value& shape, std::size_t bytes, const GroupAxes& axes) {
  ProgramState& s = program_state(shape.device);
  s.counts.find(shape.made_by.name)->second.bytes += static_cast<std::int64_t>(bytes);
  s.work.bytes += static_cast<std::int64_t>(bytes);
  s.work.axes = {};
  for (const auto axis : shape.device->original_axes(axes)) s.work.axes.push_back(axis);
}

/// Waits for an asynchronous collective and returns its result.
inline Buffer finish(const Handle<PendingCollective>& pending, const Value& out) {
  std::erase(program_state(out.device).pending, pending);
  complete(out, [&] { return std::move(pending->request); });
  pending->sent = {};
  return std::move(*pending->result);
}

/// Returns the function that starts an all_gather of `in`. `*whole` holds the result once that is complete. Leaves
/// are gathered as views if the group supports it. Other shards are not: a shard that is dropped after its gather
/// would keep its memory until the slowest device drops its view.
inline std::function<Request()> begin_gather(Communicator& group, const Value& in, const Value& out, std::size_t rows,
                                             const std::shared_ptr<Buffer>& whole) {
  const Buffer mine = in.data();
  if (in.is_leaf() && rows == 1 && group.has_views(mine.bytes()))
    return [=, &group] { return group.gather_view(mine, whole); };
  *whole = allocate(out);
  return [=, &group] { return group.all_gather(mine, *whole, rows); };
}

/// A copy of the value with its shards in rank order, as a reduce_scatter reads them.
inline Buffer to_rank_order(const Value& in, const std::vector<DimSplit>& cuts) {
  Buffer shards = allocate(in);
  regroup(in.device->exec(), size_of(in.dtype), cuts, in.local, in.data().data(), shards.data(), true);
  return shards;
}
/// The value of which an all_gather has received the shards in rank order.
inline Buffer from_rank_order(const Value& out, const std::vector<DimSplit>& cuts, const Buffer& shards) {
  Buffer whole = allocate(out);
  regroup(out.device->exec(), size_of(out.dtype), cuts, out.local, shards.data(), whole.data(), false);
  return whole;
}

SHARDLIB_INLINE void gather_ahead(const ValuePtr& in, const ValuePtr& out) {
  ProgramState& s = program_state(out->device);
  if (s.mode != ProgramState::Mode::start) return;
  if (const auto pending = find_pending(*in, *out)) {
    pending->hook = s.hooks;
    return;
  }
  const Difference d = resharded(*out->device, *out->spec, *in->spec);
  auto& group = out->device->group(d.axes);
  if (group.size() == 1) return;
  const auto whole = std::make_shared<Buffer>();
  const std::size_t rows = rows_in_place(group, *out, d.cuts).value_or(1);
  const auto gather = begin_gather(group, *in, *out, rows, whole);
  auto pending = Handle<PendingCollective>::make(begin(*out, gather), whole, s.hooks);
  pending->operand = in;
  pending->gathered = out;
  s.pending.push_back(std::move(pending));
}

SHARDLIB_INLINE Buffer gather(const Value& in, const Value& out) {
  const Difference d = resharded(*out.device, *out.spec, *in.spec);
  auto& group = out.device->group(d.axes);
  if (group.size() == 1) return in.data();
  add_traffic(out, in.bytes() * static_cast<std::size_t>(group.size() - 1), d.axes);
  const auto rows = rows_in_place(group, out, d.cuts);
  auto gathered = std::make_shared<Buffer>();
  if (const auto pending = find_pending(in, out)) {
    note_read(in);
    *gathered = finish(pending, out);
  } else {
    complete(out, begin_gather(group, in, out, rows.value_or(1), gathered));
  }
  return rows ? std::move(*gathered) : from_rank_order(out, d.cuts, *gathered);
}

SHARDLIB_INLINE Buffer scatter(const Value& in, const Value& out) {
  const Difference d = resharded(*out.device, *in.spec, *out.spec);
  auto& group = out.device->group(d.axes);
  if (group.size() == 1) return in.data();
  add_traffic(out, out.bytes() * static_cast<std::size_t>(group.size() - 1), d.axes);
  const auto rows = rows_in_place(group, in, d.cuts);
  const Buffer sent = rows ? in.data() : to_rank_order(in, d.cuts), part = allocate(out);
  complete(out, [&] { return group.reduce_scatter(sent, part, out.dtype, Reduction::sum, rows.value_or(1)); });
  return part;
}

/// The result of a collective of one device.
inline PendingOp passed_on(const Value& in) {
  const Buffer data = in.data();
  return {data, [data](const Value& /*shape*/) { return data; }};
}

/// Starts a collective that sends `sent` and receives `received`, the shard of `out`, whose first read waits for it.
inline PendingOp begin_async(const ValuePtr& in, const ValuePtr& out, const Buffer& sent, const Buffer& received,
                             const std::function<Request()>& start) {
  ProgramState& s = program_state(out->device);
  const auto pending = Handle<PendingCollective>::make(begin(*out, start), std::make_shared<Buffer>(received), s.hooks);
  pending->deferred = out->storage.get();
  pending->sent = sent;
  if (s.keep_shards) pending->operand = in;
  s.pending.push_back(pending);
  return {received, [pending](const Value& shape) { return finish(pending, shape); }};
}

/// Runs a reduce_scatter whose first read waits for it.
inline void scatter_async(const ValuePtr& in, const ValuePtr& out) {
  const Difference d = resharded(*out->device, *in->spec, *out->spec);
  auto& group = out->device->group(d.axes);
  run_async(out, [&] {
    if (group.size() == 1) return passed_on(*in);
    add_traffic(*out, out->bytes() * static_cast<std::size_t>(group.size() - 1), d.axes);
    const auto rows = rows_in_place(group, *in, d.cuts);
    const Buffer sent = rows ? in->data() : to_rank_order(*in, d.cuts), part = allocate(*out);
    return begin_async(in, out, sent, part,
                       [&] { return group.reduce_scatter(sent, part, out->dtype, Reduction::sum, rows.value_or(1)); });
  });
}
/// Runs an all_gather whose first read waits for it.
inline void gather_async(const ValuePtr& in, const ValuePtr& out) {
  const Difference d = resharded(*out->device, *out->spec, *in->spec);
  auto& group = out->device->group(d.axes);
  run_async(out, [&] {
    if (group.size() == 1) return passed_on(*in);
    add_traffic(*out, in->bytes() * static_cast<std::size_t>(group.size() - 1), d.axes);
    const auto rows = rows_in_place(group, *out, d.cuts);
    const Buffer sent = in->data(), gathered = allocate(*out);
    PendingOp begun =
        begin_async(in, out, sent, gathered, [&] { return group.all_gather(sent, gathered, rows.value_or(1)); });
    if (!rows)
      begun.finish = [finish = std::move(begun.finish), cuts = d.cuts](const Value& shape) {
        return from_rank_order(shape, cuts, finish(shape));
      };
    return begun;
  });
}

SHARDLIB_INLINE void scatter_ahead(const ValuePtr& in, const ValuePtr& out) {
  if (program_state(out->device).mode == ProgramState::Mode::start) scatter_async(in, out);
}

/// The result of a collective that starts now, of x and with the spec `to`. Null where it does not start. `async` runs
/// it.
template <class F>
ValuePtr start_async(const OpInfo& op, const ValuePtr& x, const TensorSpec& to, const F& async) {
  ProgramState& s = program_state(x->device);
  if (s.twice || s.transposing != nullptr || s.mode == ProgramState::Mode::start) return nullptr;
  const auto out = make_value(op, x->device, x->dtype, to, x->global);
  if (s.mode == ProgramState::Mode::replay || find_pending(*x, *out)) {
    note_op(s, *out);
    return nullptr;
  }
  async(x, out);
  out->checkpoint = s.checkpoint;
  return out;
}

SHARDLIB_INLINE ValuePtr start_gather(const OpInfo& op, const ValuePtr& x, const TensorSpec& to) {
  return start_async(op, x, to, gather_async);
}
SHARDLIB_INLINE ValuePtr start_scatter(const OpInfo& op, const ValuePtr& x, const TensorSpec& to) {
  return start_async(op, x, to, scatter_async);
}

SHARDLIB_INLINE Buffer Awaited::operator()(const Value& in, const Value& out) const {
  if (!result) return collective(in, out);
  note_read(in);
  return result->data();
}

SHARDLIB_INLINE Buffer reduce(const Value& in, const Value& out, const GroupAxes& axes, Reduction op) {
  auto& group = out.device->group(axes);
  if (group.size() == 1) return in.data();
  add_traffic(out, 2 * in.bytes() * static_cast<std::size_t>(group.size() - 1) / static_cast<std::size_t>(group.size()),
              axes);
  Buffer all = allocate(out);
  const Buffer mine = in.data();
  complete(out, [&] { return group.all_reduce(mine, all, out.dtype, op); });
  return all;
}

SHARDLIB_INLINE Buffer sum_pending(const Value& in, const Value& out) {
  Axes axes = in.spec->partial;
  for (auto axis : out.spec->partial) axes.erase(axes.find(axis));
  return reduce(in, out, in_mesh_order(*out.device, axes), Reduction::sum);
}

SHARDLIB_INLINE Buffer exchange(const Value& in, const Value& out) {
  // Pairs the dims that lose axes with the dims that gain them. Ranks are row-major over the pairs.
  GroupAxes axes;
  std::vector<DimSplit> lose, gain;
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
  const Buffer sent = to_rank_order(in, gain), received = allocate(out);
  complete(out, [&] { return group.all_to_all(sent, received); });
  return from_rank_order(out, lose, received);
}

SHARDLIB_INLINE Buffer keep_on_first(const Value& in, const Value& out) {
  bool first = true;
  for (auto axis : out.spec->partial)
    if (!in.spec->partial.contains(axis)) first = first && out.device->axis_index(axis) == 0;
  // On all devices: in a recomputation this may run the collective that makes the operand.
  const Buffer kept = in.data();
  if (first) return kept;
  Buffer zero = allocate(out);
  out.device->exec().zero(zero.data(), out.bytes());
  return zero;
}

inline Buffer copy_shard(const Value& in, const Value& out, bool embed) {
  const Value& whole = embed ? out : in;
  const Value& part = embed ? in : out;
  const auto strides = kernels::row_major(view(whole.local));
  std::int64_t offset = 0;
  for (int i = 0; i < whole.local.size(); ++i) {
    Axes extra;
    for (int k = whole.spec->dims[i].axes.size(); k < part.spec->dims[i].axes.size(); ++k)
      extra.push_back(part.spec->dims[i].axes[k]);
    offset += shard_index(*out.device, extra) * part.local[i] * strides[i];
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

SHARDLIB_INLINE Buffer cut_shard(const Value& in, const Value& out) {
  return copy_shard(in, out, false);
}
SHARDLIB_INLINE Buffer embed_shard(const Value& in, const Value& out) {
  return copy_shard(in, out, true);
}

SHARDLIB_INLINE Buffer max_of_shards(const Value& in, const Value& out, Buffer shard) {
  Value local = out;
  local.made_by = {};  // scratch memory: observers must not see it as an operand
  local.storage = Handle<Storage>::make(std::move(shard));
  Axes axes;
  for (const Dim& dim : in.spec->dims)
    if (!out.spec->has(dim.name))
      for (auto axis : dim.axes) axes.push_back(axis);
  zero_padding(local, local.storage->buffer);  // padding of the dims that stay
  return reduce(local, out, in_mesh_order(*out.device, axes), Reduction::max);
}

SHARDLIB_INLINE int places_on_ring(const ValuePtr& x, std::string_view axis, std::int64_t by) {
  const int n = x->device->size(axis);
  return static_cast<int>(((by % n) + n) % n);
}

/// Sends a shard along the ring, and posts the receipt of this device's.
inline Request start_shift(const Shift& shift, Device& device, const Buffer& sent, const Buffer& received) {
  return device.group({shift.axis}).shift(sent, received, shift.places);
}

/// The shift of a replay, which happens where something reads the result.
inline Buffer shifted(const Shift& shift, const Value& in, const Value& out) {
  if (shift.places == 0) return in.data();
  add_traffic(out, in.bytes(), {shift.axis});
  const Buffer received = allocate(out), sent = in.data();
  complete(out, [&] { return start_shift(shift, *out.device, sent, received); });
  return received;
}

SHARDLIB_INLINE ValuePtr record_shift_erased(const OpInfo& op, const ValuePtr& x, const Shift& shift,
                                             EdgeSource source) {
  note_operand(*x);
  auto out = make_recorded(op, x->device, x->dtype, *x->spec, x->global, {&source, 1});
  if (program_state(x->device).computes() && shift.places != 0 && !keeps(*out)) {
    run_async(
        out,
        [&] {
          add_traffic(*out, x->bytes(), {shift.axis});
          const Buffer received = allocate(*out), sent = x->data();
          return begin_async(x, out, sent, received, [&] { return start_shift(shift, *x->device, sent, received); });
        },
        numbers_in(shift.by));
  } else {
    evaluate(
        out, [x, shift](const Value& shape) { return shifted(shift, *x, shape); }, {}, numbers_in(shift.by));
  }
  return out;
}

}  // namespace shardlib::detail
