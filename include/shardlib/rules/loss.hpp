// Typing rules of losses.
#pragma once

#include <string_view>

#include "shardlib/rules/einsum.hpp"
#include "shardlib/rules/local.hpp"

namespace shardlib::rules {

namespace detail_ {

/// The losses of logits whose last dim, the vocabulary, may be sharded. An error begins with `call`.
constexpr Verdict losses(std::string_view name, const Text& call, const TensorSpec& logits, const TensorSpec& targets) {
  for (const TensorSpec* x : {&logits, &targets})
    if (const Text why = nonlinear(name, *x); !why.empty()) return {{}, why};
  TensorSpec lead = logits;
  if (lead.rank() > 0) lead.dims.erase(lead.rank() - 1);
  if (logits.rank() == 0 || !(lead == targets)) {
    const Text advice = lead == targets ? Text() : conversion(targets, lead);
    return {{},
            call + ": the targets must have the dims of the logits without the last one (the vocabulary)" +
                (advice.empty() ? "" : "; ") + advice};
  }
  return {pending_sum(logits, lead), {}};
}

}  // namespace detail_

/// cross_entropy(logits, targets): the logits have the targets' dims and then the vocabulary, which may be sharded.
constexpr Verdict cross_entropy(const TensorSpec& logits, const TensorSpec& targets) {
  return detail_::losses("cross_entropy", "cross_entropy of " + quoted(logits) + " and " + quoted(targets), logits,
                         targets);
}

/// linear_cross_entropy<"B/d L M, V/t M -> B/d L V/t">(x, table, targets): cross_entropy of this einsum. It computes
/// whole rows of logits from whole rows of x and of the table.
constexpr Verdict linear_cross_entropy(const ParsedOp& op, const TensorSpec& x, const TensorSpec& table,
                                       const TensorSpec& targets) {
  const OpCall call = call_of("linear_cross_entropy", op, 2);
  if (const Verdict product = detail_::product(call, x, table); !product.ok()) return {{}, product.why};
  const TensorSpec &rows = call.op.in[0], &vocabulary = call.op.in[1], &logits = call.op.out;
  bool whole = logits.rank() > 0 && vocabulary.rank() > 0 &&
               logits.dims[logits.rank() - 1].name == vocabulary.dims[0].name &&
               rows.rank() == logits.rank() + vocabulary.rank() - 2;
  for (int i = 0; whole && i < rows.rank(); ++i) {
    const int summed = i - (logits.rank() - 1);
    whole = rows.dims[i].name == (summed < 0 ? logits.dims[i] : vocabulary.dims[summed + 1]).name;
  }
  if (!whole)
    return call.fail(
        "the logits must be rows over the first dim of the table, made of whole rows of both operands, as `B L M, V M "
        "-> B L V`; `rearrange` an operand (a local copy)");
  if (!logits.partial.empty())
    return call.fail("the logits would be partial over " + Text(logits.partial[0]) +
                     ", and a loss is of their sum; make the operands whole first, with `all_gather` or `all_reduce`, "
                     "or reduce the `einsum_unreduced` and take its `cross_entropy` (all communicate)");
  return detail_::losses("linear_cross_entropy", call.title() + " with targets " + quoted(targets), logits, targets);
}

}  // namespace shardlib::rules
