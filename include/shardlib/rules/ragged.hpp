// Typing rules of the ops on rows that are counted at run time: ragged_all_to_all and grouped_einsum.
#pragma once

#include "shardlib/rules/collectives.hpp"
#include "shardlib/rules/common.hpp"
#include "shardlib/rules/einsum.hpp"

#include <string_view>

namespace shardlib::rules {

namespace detail_ {

/// The axes of all dims, in order.
constexpr Axes axes_of_dims(const TensorSpec& spec) {
  Axes axes;
  for (const Dim& dim : spec.dims)
    for (auto axis : dim.axes) axes.push_back(axis);
  return axes;
}

/// Counts are a matrix of places and groups, `P/d/e X`, that has a shard for each shard of the rows.
constexpr Text counts(const TensorSpec& counts, const char* which, const TensorSpec& rows) {
  const Text is = Text(which) + " are " + quoted(counts);
  if (counts.rank() != 2)
    return is + ", but must have two dims: places, and the groups of their rows, as `P/d/e X` has";
  if (!counts.partial.empty())
    return is + ", partial over " + counts.partial[0] + ", and a summand counts no rows; " + reduce_first(counts);
  const Axes of_counts = axes_of_dims(counts), &of_rows = rows.dims[0].axes;
  bool same = of_counts.size() == of_rows.size();
  for (auto axis : of_counts) same = same && of_rows.contains(axis);
  if (!same)
    return is + ", but the rows are " + quoted(rows.dims[0]) +
           ": a device has the counts of its own rows only if both are sharded over the same axes; change the sharding "
           "of one of them";
  return {};
}

}  // namespace detail_

/// ragged_all_to_all<"R/d/e M -> S/d/e M">(rows, sent, received): S -> S. Rows move as their counts do from `P/d/e X`
/// to `P/d X/e`, or back.
constexpr Verdict ragged_all_to_all(const ParsedOp& op, const TensorSpec& rows, const TensorSpec& sent,
                                    const TensorSpec& received) {
  const OpCall call = call_of("ragged_all_to_all", op, rows);
  if (!call.why.empty()) return call.fail();
  const TensorSpec &in = call.op.in[0], &out = call.op.out;
  if (in.rank() == 0) return call.fail("the operand has no dim of rows");
  bool others_stay = in.rank() == out.rank();
  for (int i = 1; others_stay && i < in.rank(); ++i) others_stay = in.dims[i] == out.dims[i];
  if (!others_stay || in.dims[0].name == out.dims[0].name)
    return call.fail(
        "the result, " + quoted(out) + ", must have the dims of the operand, " + quoted(in) +
        ", except the first: the rows that a device may get are another number, so that dim has another name");
  if (!(in.dims[0].axes == out.dims[0].axes))
    return call.fail("dim " + quoted(in.dims[0]) + " cannot become " + quoted(out.dims[0]) +
                     ": the rows stay sharded over the same axes, in the same order");
  if (!(in.partial == out.partial)) return call.fail(other_sums(in, out));
  if (const Text why = detail_::counts(sent, "the counts of the rows sent", in); !why.empty()) return call.fail(why);
  if (const Text why = detail_::counts(received, "the counts of the rows received", in); !why.empty())
    return call.fail(why);
  int losing = 0;
  for (int i = 0; i < 2; ++i) losing += sent.dims[i].axes.size() > received.dims[i].axes.size() ? 1 : 0;
  if (losing != 1 || !all_to_all({sent, received}, sent).ok())
    return call.fail("the counts of the rows sent are " + quoted(sent) + ", those of the rows received " +
                     quoted(received) +
                     ": the second must be an `all_to_all` of the first, in which one dim gives its last axes to the "
                     "other, as from `P/d/e X` to `P/d X/e`");
  return call.accept();
}

/// grouped_einsum<"S/d/e M, X/e M F -> S/d/e F">(rows, weights, counts): the einsum of each row with the weights of its
/// group, the first dim of the weights.
constexpr Verdict grouped_einsum(const ParsedOp& op, const TensorSpec& rows, const TensorSpec& weights,
                                 const TensorSpec& counts) {
  const OpCall call = call_of("grouped_einsum", op, 2);
  if (!call.why.empty()) return call.fail();
  OpParts parts = call.op;
  if (const Text why = check_operand(rows, parts.in[0], "the tensor of rows"); !why.empty()) return call.fail(why);
  if (const Text why = check_operand(weights, parts.in[1], "the tensor of weights"); !why.empty())
    return call.fail(why);
  if (const Text why = detail_::integer_dims(parts); !why.empty()) return call.fail(why);
  if (rows.rank() == 0 || weights.rank() == 0)
    return call.fail("the rows and the weights have one dim at least: that of the rows, and that of the groups");
  const Dim row = rows.dims[0], group = weights.dims[0];
  if (parts.out.rank() == 0 || !(parts.out.dims[0] == row))
    return call.fail("the dim of the rows, " + quoted(row) +
                     ", must be the first of the result, with the same sharding");
  if (weights.has(row.name))
    return call.fail("the dim of the rows, " + quoted(row.name) + ", is also a dim of the weights");
  if (rows.has(group.name) || parts.out.has(group.name))
    return call.fail("the first dim of the weights, " + quoted(group.name) +
                     ", counts groups of rows, so neither the rows nor the result have it");
  if (const Text why = detail_::counts(counts, "the counts", rows); !why.empty()) return call.fail(why);
  if (!(counts.dims[1] == group))
    return call.fail("the counts are " + quoted(counts) + ": their second dim must be " + quoted(group) +
                     ", the first of the weights, with the same sharding");
  for (int k = 0; k < 2; ++k)
    for (int i = 1; i < parts.in[k].rank(); ++i)
      if (const Dim& dim = parts.in[k].dims[i]; !parts.in[1 - k].has(dim.name) && !parts.out.has(dim.name))
        return call.fail("dim " + quoted(dim) + (k == 0 ? " of the rows" : " of the weights") +
                         " is neither in the other operand nor in the result; `sum` over it first");
  parts.in[1].dims.erase(0);
  if (const Text why = detail_::einsum(parts, {"the tensor of rows", "that of weights", "contracting"}); !why.empty())
    return call.fail(why);
  return call.accept();
}

}  // namespace shardlib::rules
