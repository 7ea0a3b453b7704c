// Definitions of map.hpp: type-erased maps.
#pragma once

#include "shardlib/compute/map.hpp"

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <utility>
#include <vector>

#include "shardlib/runtime/bindings.hpp"
#include "shardlib/runtime/observe.hpp"
#include "shardlib/runtime/padding.hpp"
#include "shardlib/runtime/program_state.hpp"

namespace shardlib::detail {

SHARDLIB_INLINE Shape broadcast_strides(const Value& x, const TensorSpec& result) {
  Shape strides;
  for (int i = 0; i < result.rank(); ++i) {
    // Operands with integer dims never broadcast. Their dims match by position.
    const int at = x.spec->dims == result.dims ? i : x.spec->find(result.dims[i].name);
    std::int64_t stride = at < 0 ? 0 : 1;
    for (int k = at + 1; at >= 0 && k < x.local.size(); ++k) stride *= x.local[k];
    strides.push_back(stride);
  }
  return strides;
}

/// The arrays that one loop of a map reads and writes.
class MapArrays {
 public:
  explicit MapArrays(const Value& shape)
      : shape_(shape), whole_(strides_of(kernels::row_major(view(shape.local)).span())) {}
  /// Adds an operand, broadcast to the loop's shape.
  void read(const Value& x) {
    add(x.data().data(), x.dtype, false, strides_of(view(broadcast_strides(x, *shape_.spec))));
  }
  /// Adds an array of the loop's shape.
  void read_whole(const Value& x) { add(x.data().data(), x.dtype, false, whole_); }
  void write(std::byte* data, DType dtype) { add(data, dtype, true, whole_); }
  void run(MapFunction::Loop loop, const void* f) {
    for (std::size_t i = 0; i < count_; ++i) arrays_[i].strides = &strides_[i];
    kernels::detail::apply_erased(shape_.device->exec(), view(shape_.local), std::span(arrays_.data(), count_), loop,
                                  f);
  }

 private:
  static kernels::detail::Strides strides_of(std::span<const std::int64_t> s) { return kernels::detail::padded(s); }
  void add(const std::byte* data, DType dtype, bool output, const kernels::detail::Strides& strides) {
    arrays_[count_] = {const_cast<std::byte*>(data), size_of(dtype), output, nullptr};
    strides_[count_++] = strides;
  }
  static constexpr std::size_t most = 2 * most_mapped + 1;
  static_assert(most <= kernels::detail::max_operands);
  const Value& shape_;
  kernels::detail::Strides whole_;
  std::array<kernels::detail::ErasedOperand, most> arrays_;
  std::array<kernels::detail::Strides, most> strides_;
  std::size_t count_ = 0;
};

using MapOperands = std::vector<ValuePtr>;

SHARDLIB_INLINE Buffer map_forward(const MapFunction& function, const MapOperands& x, const Value& out) {
  Buffer result = allocate(out);
  MapArrays arrays(out);
  for (const ValuePtr& operand : x) arrays.read(*operand);
  arrays.write(result.data(), out.dtype);
  arrays.run(function.forward, function.f);
  return result;
}

/// A cotangent of the result's shape, with its own memory.
inline Handle<Value> cotangent_like(const Value& like, DType dtype) {
  auto value = detached(like);
  value->made_by = {"map_backward", {}, {}};
  value->dtype = dtype;
  value->storage = Handle<Storage>::make(allocate(*value));
  return value;
}

SHARDLIB_INLINE ValuePtr map_pull(const MapFunction& function, std::size_t i, const Value& ct, const MapOperands& x) {
  auto grad = cotangent_like(ct, x[i]->dtype);
  const Buffer& shard = grad->storage->buffer;
  observed(*grad, [&] {
    MapArrays arrays(ct);
    arrays.read_whole(ct);
    for (const ValuePtr& operand : x) arrays.read(*operand);
    arrays.write(shard.data(), grad->dtype);
    arrays.run(function.vjp[i], function.f);
    zero_padding(*grad, shard);
    return shard;
  });
  return grad;
}

SHARDLIB_INLINE MapOperands map_pull_all(const MapFunction& function, const Value& ct, const MapOperands& x) {
  MapOperands grads;
  for (const ValuePtr& operand : x) grads.push_back(cotangent_like(ct, operand->dtype));
  observed(*grads[0], [&] {
    MapArrays arrays(ct);
    arrays.read_whole(ct);
    for (const ValuePtr& operand : x) arrays.read(*operand);
    for (const ValuePtr& grad : grads) arrays.write(grad->storage->buffer.data(), grad->dtype);
    arrays.run(function.vjp_all, function.f);
    for (const ValuePtr& grad : grads) zero_padding(*grad, grad->storage->buffer);
    return grads[0]->storage->buffer;
  });
  for (std::size_t k = 1; k < grads.size() && program_state(ct.device).note_reads; ++k)
    observed(*grads[k], [&] {
      note_read(*grads[0]);
      return grads[k]->storage->buffer;
    });
  return grads;
}

SHARDLIB_INLINE ValuePtr record_map(const OpInfo& op, const TensorSpec& spec, const TensorSpec& ct_spec,
                                    const Handle<const MapFunction>& function,
                                    const std::array<ValuePtr, most_mapped>& operands,
                                    const std::array<UnbroadcastFn, most_mapped>& sums) {
  MapOperands x(operands.begin(), operands.begin() + static_cast<std::ptrdiff_t>(function->operands));
  Bindings names(op, x[0]->device);
  for (const ValuePtr& operand : x) names.bind(*operand);
  auto out = make_value(op, x[0]->device, function->result, spec, names.sizes(spec));
  if (is_floating(function->result)) {
    std::vector<Node::Edge> edges(x.size());
    MapOperands saved;
    for (const ValuePtr& operand : x) saved.push_back(detached(*operand));
    bool all = function->vjp_all != nullptr;
    for (std::size_t i = 0; i < x.size(); ++i) {
      all = all && x[i]->slot;
      if (function->vjp[i] == nullptr) continue;
      edges[i].input = x[i]->slot;
      if (!x[i]->slot) continue;
      edges[i].saved.values = saved;
      edges[i].vjp = [function, i, &ct_spec, sum = sums[i]](const ValuePtr& ct, const Residuals& residuals) {
        return sum(map_pull(*function, i, *with_spec(ct, ct_spec), residuals.values));
      };
    }
    std::function<MapOperands(const MapOperands&)> fused_vjp;
    if (all)
      fused_vjp = [function, saved, &ct_spec, sums](const MapOperands& cts) {
        auto grads = map_pull_all(*function, *with_spec(cts[0], ct_spec), saved);
        for (std::size_t i = 0; i < grads.size(); ++i) grads[i] = sums[i](grads[i]);
        return grads;
      };
    attach(out, std::move(edges), std::move(fused_vjp));
  }
  evaluate(out, [function, x = std::move(x)](const Value& shape) { return map_forward(*function, x, shape); });
  return out;
}

}  // namespace shardlib::detail
