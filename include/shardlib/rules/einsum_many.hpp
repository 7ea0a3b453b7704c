// Typing rules of einsum_unreduced and einsum of three and of four operands: products of two, in any order.
#pragma once

#include "shardlib/rules/einsum.hpp"

#include <string_view>

namespace shardlib::rules {

namespace detail_ {

/// The dims of the product of the operands in `set`, as bits: those of theirs that the result or another operand has.
constexpr Small<Dim, 4 * max_dims> kept_dims(const OpParts& op, unsigned set) {
  const auto has = [](const auto& dims, std::string_view name) {
    for (const Dim& dim : dims)
      if (dim.name == name) return true;
    return false;
  };
  Small<Dim, 4 * max_dims> dims;
  for (int i = 0; i < op.in.size(); ++i)
    for (const Dim& dim : op.in[i].dims) {
      bool kept = op.out.has(dim.name);
      for (int k = 0; k < op.in.size(); ++k) kept = kept || ((set >> k & 1U) == 0 && op.in[k].has(dim.name));
      if ((set >> i & 1U) != 0 && kept && !has(dims, dim.name)) dims.push_back(dim);
    }
  return dims;
}

/// Checks the einsum of many operands, for any op that follows its rules.
constexpr Verdict product_of_many(const OpCall& call, const Operands& x) {
  if (!call.why.empty()) return call.fail();
  for (int i = 0; i < x.size(); ++i)
    if (const Text why = check_operand(x[i], call.op.in[i], operand_number(i)); !why.empty()) return call.fail(why);
  if (const Text why = integer_dims(call.op); !why.empty()) return call.fail(why);
  if (const Text why = einsum(call.op, {.blocks = true}); !why.empty()) return call.fail(why);
  for (unsigned set = 1; set < 1U << x.size(); ++set)
    if (kept_dims(call.op, set).size() > max_dims)
      return call.fail("the product of some of the operands has more than " + number(max_dims) +
                       " dims; multiply two of them first, or `merge` dims (free)");
  return call.accept();
}
constexpr Verdict einsum_of(const ParsedOp& op, const Operands& x) {
  return product_of_many(call_of("einsum_unreduced", op, x.size()), x);
}
constexpr Verdict einsum_reduced_of(const ParsedOp& op, const Operands& x) {
  const OpCall call = call_of("einsum", op, x.size());
  if (!call.why.empty()) return call.fail();
  return reduced(call, [&](const OpCall& products) { return product_of_many(products, x); });
}

}  // namespace detail_

/// The product of the operands of an einsum whose bits are in `set`. The product of all operands is the result.
constexpr TensorSpec product_of(const OpParts& op, unsigned set) {
  if (set == (1U << op.in.size()) - 1) return op.out;
  OpParts part;
  for (int i = 0; i < op.in.size(); ++i)
    if ((set >> i & 1U) != 0) part.in.push_back(op.in[i]);
  if (part.in.size() == 1) return part.in[0];
  for (const Dim& dim : detail_::kept_dims(op, set))
    if (!part.out.dims.full()) part.out.dims.push_back(dim);
  TensorSpec result = unreduced(part), sorted;
  for (auto axis : result.partial) sorted.add_partial(axis);
  result.partial = sorted.partial;
  return result;
}

/// einsum_unreduced<"a b, b c, c d -> a d">, of three and of four operands.
constexpr Verdict einsum3(const ParsedOp& op, const TensorSpec& x, const TensorSpec& y, const TensorSpec& z) {
  return detail_::einsum_of(op, detail_::operands(x, y, z));
}
constexpr Verdict einsum4(const ParsedOp& op, const TensorSpec& x, const TensorSpec& y, const TensorSpec& z,
                          const TensorSpec& u) {
  return detail_::einsum_of(op, detail_::operands(x, y, z, u));
}
/// einsum<"a b, b c/t, c/t d -> a d">, of three and of four operands.
constexpr Verdict einsum_reduced3(const ParsedOp& op, const TensorSpec& x, const TensorSpec& y, const TensorSpec& z) {
  return detail_::einsum_reduced_of(op, detail_::operands(x, y, z));
}
constexpr Verdict einsum_reduced4(const ParsedOp& op, const TensorSpec& x, const TensorSpec& y, const TensorSpec& z,
                                  const TensorSpec& u) {
  return detail_::einsum_reduced_of(op, detail_::operands(x, y, z, u));
}
/// einsum and einsum_unreduced of five operands and more.
constexpr Verdict einsum_of_more(std::string_view name, const ParsedOp& op) {
  return {{}, title_of(name, op.text) + ": a product has at most 4 operands; multiply some of them first"};
}

}  // namespace shardlib::rules
