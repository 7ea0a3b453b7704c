// Typing rules of einsums whose operand is still gathering, or whose result is still scattering.
#pragma once

#include "shardlib/rules/collectives.hpp"
#include "shardlib/rules/common.hpp"
#include "shardlib/rules/einsum.hpp"

#include <string_view>

namespace shardlib::rules {

/// The dim whose shards travel, and the axis that they travel along.
struct Traveling {
  std::string_view dim, axis;
  Text others;  ///< why there is more than one
};

/// The one dim and axis that `sharded` has in addition to `whole`.
constexpr Traveling traveling(const TensorSpec& whole, const TensorSpec& sharded) {
  Traveling found;
  int axes = 0;
  for (int i = 0; i < sharded.rank(); ++i)
    for (auto axis : detail_::suffix(sharded.dims[i].axes, whole.dims[i].axes)) {
      if (axes++ > 0) {
        found.others =
            quoted(found.dim) + " over " + found.axis + " and " + quoted(sharded.dims[i].name) + " over " + axis;
        return found;
      }
      found.dim = sharded.dims[i].name;
      found.axis = axis;
    }
  return found;
}

/// gathering<"A/t B -> A B">: the rule of all_gather, for one dim and one axis.
constexpr Verdict gathering(const ParsedOp& op, const TensorSpec& x) {
  const OpCall call = call_of("gathering", op, x);
  if (const Verdict verdict = detail_::gather(call); !verdict.ok()) return verdict;
  const Traveling shards = traveling(call.op.out, call.op.in[0]);
  if (!shards.others.empty())
    return call.fail("a product takes the shards of one dim over one axis, not those of " + shards.others +
                     "; take `all_gather` for all but one of them before (communicates)");
  return call.accept();
}

/// Reports a Gathering that is declared as a tensor.
constexpr Verdict not_gathered(const TensorSpec& shard, const TensorSpec& whole, const TensorSpec& declared) {
  return {declared, "a Gathering of " + quoted(shard) + " is not a tensor " + quoted(declared) +
                        ": only an einsum takes its shards as they arrive; give it to `einsum_unreduced` or `einsum`, "
                        "or gather all of it with " +
                        suggestion("all_gather", shard, whole) + " (communicates)"};
}

namespace detail_ {

constexpr const char* operand_of_two(bool first) {
  return first ? "the first operand" : "the second operand";
}

/// A dim that one operand alone has and that is summed.
constexpr Text summed_alone(const OpParts& op) {
  for (int i = 0; i < 2; ++i)
    for (const Dim& dim : op.in[i].dims)
      if (!op.out.has(dim.name) && !op.in[1 - i].has(dim.name))
        return "dim " + quoted(dim) + " is in " + operand_of_two(i == 0) +
               " alone and summed, so every shard would be summed along it again; take `sum` along it before";
  return {};
}

/// The conditions of a gathering operand. `verdict` is the einsum's rule for the gathered operand.
constexpr Verdict gathering_operand(const OpCall& call, const Verdict& verdict, const TensorSpec& shard, bool first) {
  if (!verdict.ok()) return verdict;
  const TensorSpec& other = call.op.in[first ? 1 : 0];
  const Traveling shards = traveling(call.op.in[first ? 0 : 1], shard);
  if (other.placement(shards.axis).kind != Placement::sharded)
    return call.fail(Text(operand_of_two(!first)) + " " + quoted(other) + " is " + describe(other, shards.axis) +
                     ", so all devices along " + shards.axis +
                     " would multiply the same shards, each in an order of its own; shard a dim of it over " +
                     shards.axis + ", or take `all_gather` in place of `gathering` (both communicate)");
  if (const Text why = summed_alone(call.op); !why.empty()) return call.fail(why);
  return call.accept();
}

}  // namespace detail_

/// einsum_unreduced<"A B, B C/t -> A C/t"> where `whole`, the first or the second operand, is gathered from `shard`.
constexpr Verdict einsum_gathering(const ParsedOp& op, const TensorSpec& shard, const TensorSpec& whole,
                                   const TensorSpec& other, bool first) {
  return detail_::gathering_operand(call_of("einsum_unreduced", op, 2),
                                    first ? einsum(op, whole, other) : einsum(op, other, whole), shard, first);
}
/// The same of `einsum`, which completes a sum over other axes.
constexpr Verdict einsum_reduced_gathering(const ParsedOp& op, const TensorSpec& shard, const TensorSpec& whole,
                                           const TensorSpec& other, bool first) {
  return detail_::gathering_operand(call_of("einsum", op, 2),
                                    first ? einsum_reduced(op, whole, other) : einsum_reduced(op, other, whole), shard,
                                    first);
}

/// einsum_scatter<"A B/t, B/t C -> A C/t">: the products of each device, summed over the axis that one dim gains.
constexpr Verdict einsum_scatter(const ParsedOp& op, const TensorSpec& x, const TensorSpec& y) {
  OpCall call = call_of("einsum_scatter", op, 2);
  if (!call.why.empty()) return detail_::product(call, x, y);
  const TensorSpec result = call.op.out, products = unreduced(call.op);
  call.op.out = products;
  if (const Verdict verdict = detail_::product(call, x, y); !verdict.ok()) return {result, verdict.why};
  call.op.out = result;
  if (!reduce_scatter({products, result}, products).ok())
    return call.fail("each device's products are " + quoted(products) + ", and no `reduce_scatter` turns that into " +
                     quoted(result) + "; write `einsum_unreduced`, and then each collective");
  const Traveling shards = traveling(products, result);
  if (!shards.others.empty())
    return call.fail("the products of one dim are scattered over one axis, not those of " + shards.others +
                     "; take `einsum`, or scatter one of them afterwards (both communicate)");
  for (int i = 0; i < 2; ++i)
    if (call.op.in[i].partial.contains(shards.axis))
      return call.fail(Text(detail_::operand_of_two(i == 0)) + " is partial over " + shards.axis +
                       ", and its cotangent, which is one value on all of them, would be added in another order on "
                       "each; take `einsum`, or `reduce_scatter` of the operand before (both communicate)");
  if (const Text why = detail_::summed_alone(call.op); !why.empty()) return call.fail(why);
  return call.accept();
}

}  // namespace shardlib::rules
