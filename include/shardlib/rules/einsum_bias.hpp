// Typing rules of einsum_bias and einsum_bias_gelu: a product with a bias, and a function of both.
#pragma once

#include "shardlib/rules/local.hpp"

#include <string_view>

namespace shardlib::rules {

namespace detail_ {

/// Why a bias of this spec cannot be added to a product of the dims of `out`.
constexpr Text bias(const TensorSpec& out, const TensorSpec& b) {
  if (!b.partial.empty()) return "the bias " + quoted(b) + " is partial over " + b.partial[0] + "; " + reduce_first(b);
  for (const Dim& dim : b.dims)
    if (!out.has(dim.name))
      return "dim " + quoted(dim) + " of the bias " + quoted(b) + " is not in the result " + quoted(out) +
             "; `+` after `einsum_unreduced` broadcasts the product along it";
  TensorSpec like = b;
  for (Dim& dim : like.dims) dim.axes = out.dims[out.find(dim.name)].axes;
  if (!(like == b)) {
    const Text advice = conversion(b, like);
    return "the bias " + quoted(b) + " is " + quoted(like) + " in the result, so their shards differ; " +
           (advice.empty() ? Text("`all_gather` it and `shard` it like the result (communicates)") : advice);
  }
  TensorSpec sum;
  return broadcast(operands(out, b), sum);
}

}  // namespace detail_

/// einsum_bias<"a b, b c -> a c">: the einsum of two operands with a bias, whose dims are some of the result's. The
/// product must be whole on each device.
constexpr Verdict einsum_bias(std::string_view name, const ParsedOp& op, const TensorSpec& x, const TensorSpec& y,
                              const TensorSpec& bias) {
  OpCall call = call_of(name, op, 2);
  if (!call.why.empty()) return detail_::product(call, x, y);
  const TensorSpec result = call.op.out;
  for (auto axis : unreduced(call.op).partial)
    if (!call.op.out.partial.contains(axis) && call.op.out.placement(axis).kind == Placement::replicated)
      call.op.out.add_partial(axis);
  const TensorSpec product = call.op.out;
  if (const Verdict verdict = detail_::product(call, x, y); !verdict.ok()) return {result, verdict.why};
  call.op.out = result;
  if (!product.partial.empty())
    return call.fail(
        "each device's products are " + quoted(product) + ", a summand over " + product.partial[0] +
        ": the sum would count the bias once per device" + (name == "einsum_bias" ? "" : ", and gelu is not linear") +
        "; write `einsum_unreduced`, take its sum with " + reduction(product) + ", and then add the bias with `+`");
  if (const Text why = detail_::bias(result, bias); !why.empty()) return call.fail(why);
  return call.accept();
}

}  // namespace shardlib::rules
