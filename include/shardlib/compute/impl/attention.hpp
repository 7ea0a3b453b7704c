// Definitions of attention.hpp.
#pragma once

#include "shardlib/compute/attention.hpp"

#include <algorithm>
#include <cmath>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "shardlib/autodiff/accumulator.hpp"
#include "shardlib/comm/reduce_tree.hpp"
#include "shardlib/compute/collectives.hpp"
#include "shardlib/compute/impl/exchange.hpp"
#include "shardlib/kernels/layout.hpp"
#include "shardlib/runtime/bindings.hpp"
#include "shardlib/support/handle.hpp"

namespace shardlib::detail {

/// The loops over the operands' shards. The log-sum-exps have the layout of the queries without the width dim.
inline kernels::AttentionLoops attention_loops(const AttentionKernels& a) {
  kernels::AttentionLoops loops;
  loops.length = a.q->local[a.length];
  loops.width = a.q->local[a.width];
  loops.scale = a.scale;
  Shape rows = a.q->local;
  rows[a.width] = 1;
  const auto row_strides = kernels::row_major(view(rows)), query_strides = kernels::row_major(view(a.q->local));
  const auto stride = [](const ValuePtr& x, std::string_view dim) {
    const int at = x == nullptr ? -1 : x->spec->find(dim);
    return at < 0 ? 0 : kernels::row_major(view(x->local))[at];
  };
  for (int i = 0; i < a.q->local.size(); ++i) {
    const std::string_view dim = a.q->spec->dims[i].name;
    const kernels::AttentionLoops::Strides strides{query_strides[i], stride(a.k, dim),
                                                   i == a.width ? 0 : row_strides[i], stride(a.segments, dim)};
    if (i == a.length)
      loops.along_length = strides;
    else if (i == a.width)
      loops.along_width = strides;
    else
      (a.k->spec->has(dim) ? loops.heads : loops.groups).push(a.q->local[i], strides);
  }
  return loops;
}

/// The blocks of keys and values that a device's queries see: its own shards and, if the length is sharded, those of
/// the devices that hold earlier positions. At step j each device sends its own to the device j places after it, and
/// receives those of the device j places before it, while it computes with the block of the step before. It holds two
/// blocks at most.
///
/// In contiguous order the first device receives nothing, and the last one sends nothing. In a dry run the device goes
/// through all steps and counts half of each, so that it stands for the mean of all devices. In zigzag order all
/// devices send and receive at each step, and see half of the pairs.
class KeyBlocks {
 public:
  struct Block {
    Buffer k, v, segments;
  };

  /// `made` is a value that the op makes.
  KeyBlocks(const AttentionKernels& a, const Value& made)
      : made_(made), for_all_(made.device->is_dry()), order_(a.order), length_(a.q->local[a.length]) {
    own_ = {a.k->data(), a.v->data(), a.segments ? a.segments->data() : Buffer()};
    for (const auto axis : a.q->spec->dims[a.length].axes) axes_.push_back(axis);
    if (axes_.empty()) return;
    group_ = &made.device->group(axes_);
    devices_ = group_->size();
    place_ = group_->rank();
    start(1);
  }

  [[nodiscard]] int steps() const { return devices_; }
  [[nodiscard]] const Block& own() const { return own_; }
  /// The queries of this device and the keys of step j that they see.
  [[nodiscard]] AttendedBlock attended(int step) const { return attended_at(place_, step); }
  /// Whether this device's queries see the keys of step j, and whether those of another device see its keys.
  [[nodiscard]] bool receives(int step) const { return attended(step).queries > 0; }
  [[nodiscard]] bool sends(int step) const { return attended_at(at(step), step).queries > 0; }
  /// The pairs of queries and keys that it sees of other devices' keys, as a part of those of two shards.
  [[nodiscard]] double earlier() const { return of_mean() || for_all_ ? (devices_ - 1) / 2.0 : place_; }

  /// The block of a step, from 1 on in order. The transfer of the next one starts.
  Block take(int step) {
    arriving_->wait();
    Block block = std::exchange(next_, {});
    start(step + 1);
    return block;
  }

  /// Further messages of a step. Their memory is free after the wait for them.
  [[nodiscard]] Exchange exchange() const { return Exchange(made_, *group_, true); }
  /// Sends to the device that many places later, or earlier if that is negative.
  void send(Exchange& exchange, const Buffer& buffer, int places) const {
    exchange.send(buffer, at(places));
    add_traffic(made_, for_all_ && !of_mean() ? buffer.bytes() / 2 : buffer.bytes(), axes_);
  }
  void receive(Exchange& exchange, const Buffer& buffer, int places) const { exchange.receive(buffer, at(places)); }

 private:
  /// Whether each device does as much as the mean of all.
  [[nodiscard]] bool of_mean() const { return order_ == SequenceOrder::zigzag; }
  [[nodiscard]] AttendedBlock attended_at(int place, int step) const {
    // For all devices, in contiguous order, each step is as on the last one.
    return attended_block(order_, for_all_ && !of_mean() ? devices_ - 1 : place, step, length_);
  }
  [[nodiscard]] int at(int places) const { return (place_ + places + devices_) % devices_; }
  void start(int step) {
    if (step >= devices_) return;
    arriving_.emplace(made_, *group_);
    for (const auto part : {&Block::k, &Block::v, &Block::segments}) {
      const Buffer& mine = own_.*part;
      if (!mine) continue;
      if (sends(step)) send(*arriving_, mine, step);
      if (!receives(step)) continue;
      next_.*part = made_.device->pool()->allocate(mine.bytes());
      receive(*arriving_, next_.*part, -step);
    }
    arriving_->begin();
  }

  const Value& made_;
  bool for_all_;  ///< a dry run, whose device stands for all of them
  SequenceOrder order_;
  std::int64_t length_;  ///< of a shard
  GroupAxes axes_;
  Communicator* group_ = nullptr;
  int devices_ = 1, place_ = 0;
  Block own_, next_;
  std::optional<Exchange> arriving_;
};

inline AttentionArrays arrays(const AttentionKernels& a, const KeyBlocks& blocks, const KeyBlocks::Block& block,
                              const AttendedBlock& attended = {}) {
  return {a.q->data().data(),   block.k.data(),
          block.v.data(),       {blocks.own().segments.as<const i32>(), block.segments.as<const i32>()},
          attended.first_query, attended.first_key};
}
/// The loops over a part of the queries and of the keys of another device.
inline kernels::AttentionLoops loops_of_block(kernels::AttentionLoops loops, const AttendedBlock& attended) {
  loops.length = attended.queries;
  loops.earlier = true;
  loops.earlier_keys = attended.keys;
  return loops;
}

/// Counts the floating-point operations of `products` matrix products over all pairs of positions that see each
/// other.
inline void count_attention_flops(const Attention& a, const KeyBlocks& blocks, const Value& made, double products) {
  const auto length = static_cast<double>(a.q->local[a.length]);
  add_flops(made, products * static_cast<double>(a.q->count()) * (length + 1 + 2 * length * blocks.earlier()));
}

/// Computes the result, and the log-sum-exps if `sums` is not null.
inline Buffer attend(const AttentionKernels& a, const Value& out, const Handle<Value>& sums) {
  const auto& pool = out.device->pool();
  const Exec exec = out.device->exec();
  Buffer result = allocate(out), totals;
  if (sums != nullptr) totals = sums->storage->buffer = allocate(*sums);
  KeyBlocks blocks(a, out);
  count_attention_flops(a, blocks, out, 2);
  const bool several = blocks.steps() > 1, wide = several && out.dtype == DType::bf16;
  const std::size_t accumulator = size_of(dtype_of_sum(out.dtype));
  const Buffer whole = wide ? pool->allocate(static_cast<std::size_t>(out.count()) * accumulator) : result;
  if (several && !totals) {  // the next block of keys needs them
    Shape rows = out.local;
    rows[a.width] = 1;
    totals = pool->allocate(static_cast<std::size_t>(product(rows)) * accumulator);
  }
  const auto loops = attention_loops(a);
  a.forward(exec, loops, arrays(a, blocks, blocks.own()), wide, whole.data(), totals.data());
  for (int step = 1; step < blocks.steps(); ++step) {
    const KeyBlocks::Block block = blocks.take(step);
    const AttendedBlock attended = blocks.attended(step);
    if (attended.queries > 0)
      a.forward(exec, loops_of_block(loops, attended), arrays(a, blocks, block, attended), wide, whole.data(),
                totals.data());
  }
  if (wide) convert_numbers(exec, out.count(), DType::f32, whole, DType::bf16, result);
  return result;
}

/// Sets the cotangents of the keys of a block to zero that no query here sees: those after the first ones.
inline void clear_other_keys(const Exec& exec, const Attention& a, const AttendedBlock& attended, std::size_t element,
                             const Buffer& cotangents) {
  const int dim = a.k->spec->find(a.q->spec->dims[a.length].name);
  Shape box = a.k->local;
  box[dim] -= attended.keys;
  const auto strides = kernels::row_major(view(a.k->local));
  if (product(box) > 0)
    kernels::zero_strided(exec, element, view(box),
                          cotangents.data() + static_cast<std::size_t>(attended.keys * strides[dim]) * element,
                          strides);
}

/// Writes the cotangents of q, k and v that are not null.
inline void attend_backward(const AttentionKernels& a, const Value& out, const Value& sums, const Value& ct,
                            const Value& made, std::span<const ValuePtr> grads) {
  const auto& pool = made.device->pool();
  const Exec exec = made.device->exec();
  const std::byte* const result = out.data().data();  // first, because in a replay this also computes the sums
  KeyBlocks blocks(a, made);
  count_attention_flops(a, blocks, made, 5);
  const bool wide = blocks.steps() > 1 && out.dtype == DType::bf16;
  const auto bytes = [&](const Value& x) { return static_cast<std::size_t>(x.count()) * size_of(sums.dtype); };
  std::array<Buffer, 3> totals;
  for (std::size_t i = 0; i < totals.size(); ++i)
    if (grads[i]) totals[i] = wide ? pool->allocate(bytes(*grads[i])) : grads[i]->storage->buffer;
  const auto loops = attention_loops(a);
  const auto run = [&](const kernels::AttentionLoops& of, const AttentionArrays& in, const Buffer& dk,
                       const Buffer& dv) {
    a.backward(exec, of, in, wide,
               {result, sums.data().data(), ct.data().data(), totals[0].data(), dk.data(), dv.data()});
  };
  run(loops, arrays(a, blocks, blocks.own()), totals[1], totals[2]);
  for (int step = 1; step < blocks.steps(); ++step) {
    const KeyBlocks::Block block = blocks.take(step);
    // The cotangents of this device's keys, from the queries that saw them in this step, and those of the block's keys.
    std::array<Buffer, 3> arriving, leaving;
    Exchange exchange = blocks.exchange();
    const AttendedBlock attended = blocks.attended(step);
    for (std::size_t i = 1; i < totals.size(); ++i) {
      if (!totals[i]) continue;
      if (blocks.sends(step)) {
        arriving[i] = pool->allocate(bytes(*grads[i]));
        blocks.receive(exchange, arriving[i], step);
      }
      if (!blocks.receives(step)) continue;
      leaving[i] = pool->allocate(bytes(*grads[i]));
      clear_other_keys(exec, a, attended, size_of(sums.dtype), leaving[i]);
    }
    if (blocks.receives(step))
      run(loops_of_block(loops, attended), arrays(a, blocks, block, attended), leaving[1], leaving[2]);
    for (const Buffer& cotangent : leaving)
      if (cotangent) blocks.send(exchange, std::as_const(cotangent), -step);
    if (totals[1] || totals[2]) exchange.begin();
    exchange.wait();
    for (std::size_t i = 1; i < totals.size(); ++i)
      if (arriving[i]) add_numbers(exec, grads[i]->count(), sums.dtype, arriving[i], totals[i]);
  }
  for (std::size_t i = 0; wide && i < totals.size(); ++i)
    if (grads[i])
      convert_numbers(exec, grads[i]->count(), DType::f32, totals[i], DType::bf16, grads[i]->storage->buffer);
}

SHARDLIB_INLINE ValuePtr record_attention_erased(AttentionKernels a, std::optional<double> scale,
                                                 const TensorSpec& sums_spec,
                                                 const std::array<const TensorSpec*, 3>& due) {
  a.scale = scale.value_or(1 / std::sqrt(static_cast<double>(std::max<std::int64_t>(1, a.q->global.logical[a.width]))));
  const auto& device = a.q->device;
  require_order(a.op, a.q, a.length, a.order);
  Bindings names(a.op, device);
  for (const ValuePtr& operand : {a.q, a.k, a.v, a.segments})
    if (operand) names.bind(*operand);
  auto out = make_value(a.op, device, a.q->dtype, *a.q->spec, a.q->global);

  const std::array<ValuePtr, 3> inputs{a.q, a.k, a.v};
  std::vector<Node::Edge> edges(inputs.size());
  std::array<bool, 3> wanted{};
  bool any = false;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    edges[i].input = inputs[i]->slot;
    wanted[i] = bool(inputs[i]->slot);
    any = any || wanted[i];
  }
  // The log-sum-exps are a second result for the backward pass only.
  Handle<Value> sums;
  AttentionKernels plain = a;
  for (ValuePtr* operand : {&plain.q, &plain.k, &plain.v, &plain.segments})
    if (*operand) *operand = detached(**operand);
  if (any || keeps(*out)) {
    sums = make_value({"causal_attention", "log-sum-exp", a.op.site}, device, dtype_of_sum(a.q->dtype), sums_spec,
                      names.sizes(sums_spec));
    const ValuePtr result = detached(*out);
    edges[0].saved.values = {plain.q, plain.k, plain.v, result, sums};
    if (plain.segments) edges[0].saved.values.push_back(plain.segments);
    attach(out, std::move(edges), [plain, wanted, due, result, sums](const std::vector<ValuePtr>& cts) {
      const std::array operands{plain.q, plain.k, plain.v};
      return fused_cotangents({"causal_attention_backward", plain.op.spec, {}}, operands, wanted, due,
                              [&](const Value& first, std::span<const ValuePtr> grads) {
                                attend_backward(plain, *result, *sums, *cts[0], first, grads);
                              });
    });
  }
  const ValuePtr extra = sums;
  const std::array numbers{a.scale, static_cast<double>(a.order)};
  evaluate(
      out, [plain, sums](const Value& shape) { return attend(plain, shape, sums); }, std::span(&extra, sums ? 1 : 0),
      numbers_in(numbers));
  return out;
}

}  // namespace shardlib::detail
