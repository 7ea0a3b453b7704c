// Definitions of attention.hpp.
#pragma once

#include "shardlib/compute/attention.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "shardlib/runtime/bindings.hpp"

namespace shardlib::detail {

SHARDLIB_INLINE kernels::AttentionLoops attention_loops(const AttentionKernels& a) {
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

/// Counts the floating-point operations of `products` matrix products over all pairs of positions that see each
/// other.
inline void count_attention_flops(const Attention& a, const Value& made, double products) {
  const auto length = static_cast<double>(a.q->local[a.length]);
  add_flops(made, products * static_cast<double>(a.q->count()) * (length + 1));
}

SHARDLIB_INLINE ValuePtr record_attention_erased(AttentionKernels a, std::optional<double> scale,
                                                 const TensorSpec& sums_spec,
                                                 const std::array<const TensorSpec*, 3>& due) {
  a.scale = scale.value_or(1 / std::sqrt(static_cast<double>(std::max<std::int64_t>(1, a.q->global.logical[a.width]))));
  const auto& device = a.q->device;
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
    sums = make_value({"causal_attention", "log-sum-exp", a.op.site}, device,
                      a.q->dtype == DType::f64 ? DType::f64 : DType::f32, sums_spec, names.sizes(sums_spec));
    const ValuePtr result = detached(*out);
    edges[0].saved.values = {plain.q, plain.k, plain.v, result, sums};
    if (plain.segments) edges[0].saved.values.push_back(plain.segments);
    attach(out, std::move(edges), [plain, wanted, due, result, sums](const std::vector<ValuePtr>& cts) {
      const std::array operands{plain.q, plain.k, plain.v};
      return fused_cotangents({"causal_attention_backward", plain.op.spec, {}}, operands, wanted, due,
                              [&](const Value& first, std::span<const ValuePtr> grads) {
                                count_attention_flops(plain, first, 5);
                                plain.backward(plain, *result, *sums, *cts[0], grads);
                              });
    });
  }
  const ValuePtr beside = sums;
  evaluate(
      out,
      [plain, sums](const Value& shape) {
        count_attention_flops(plain, shape, 2);
        return plain.forward(plain, shape, sums);
      },
      std::span(&beside, sums ? 1 : 0));
  return out;
}

}  // namespace shardlib::detail
