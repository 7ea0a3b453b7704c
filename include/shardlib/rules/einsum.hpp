// Typing rules of einsum_unreduced and einsum of one and of two operands, which other ops follow.
#pragma once

#include "shardlib/rules/common.hpp"

#include <initializer_list>
#include <string_view>

namespace shardlib::rules {

namespace detail_ {

using Operands = Small<TensorSpec, 4>;
template <class... S>
constexpr Operands operands(const S&... specs) {
  Operands all;
  (all.push_back(specs), ...);
  return all;
}

constexpr Text integer_dim(const TensorSpec& spec) {
  for (const Dim& dim : spec.dims)
    if (dim.is_integer())
      return "integer dim " + quoted(dim.name) + " is not an index: name it first, " +
             quoted(Text("rename<\"") + dim.name + " -> name\">");
  return {};
}

/// The words with which an op that follows the einsum rules describes itself in messages.
struct Words {
  const char* first = "the first operand";
  const char* second = "the second";
  const char* acting = "contracting";
  bool blocks = false;  ///< whether the op may be taken block by block
};

/// The first of some names that neither operand has.
constexpr std::string_view free_name(const TensorSpec& x, const TensorSpec& y,
                                     std::initializer_list<const char*> names) {
  for (std::string_view name : names)
    if (!x.has(name) && !y.has(name)) return name;
  return *(names.end() - 1);
}
/// The remedy that keeps two lengths sharded: blocks of one travel around the axis.
constexpr Text ring_of_blocks(const TensorSpec& x, int at, const TensorSpec& y, std::string_view axis) {
  const Dim& dim = x.dims[at];
  if (dim.axes.size() != 1) return {};
  return "; or keep both sharded: " +
         quoted(Text("split<\"") + to_string(dim) + " -> " + free_name(x, y, {"R", "P", "Place"}) + "/" + axis + " " +
                free_name(x, y, {"C", "Q", "Position"}) + "\">") +
         " names the block of each device (free), and `shift` moves those of the other operand around " + axis +
         " (communicates)";
}

constexpr const char* operand_number(int i) {
  constexpr const char* names[] = {"the first operand", "the second operand", "the third operand",
                                   "the fourth operand"};
  return names[i];
}

/// The error about two operands whose placements on an axis conflict.
constexpr Text einsum_conflict(const TensorSpec& x, const TensorSpec& y, const TensorSpec& out, std::string_view axis,
                               const Words& words) {
  const Placement a = x.placement(axis), b = y.placement(axis);
  const Text placements =
      Text(words.first) + " is " + describe(x, axis) + " and " + words.second + " " + describe(y, axis);
  if (a.kind == Placement::partial && b.kind == Placement::partial)
    return placements +
           ", and a product of sums is not the sum of the products; take `all_reduce` or `reduce_scatter` " +
           "of one first (communicates)";
  if ((a.kind == Placement::partial && b.kind == Placement::sharded) ||
      (a.kind == Placement::sharded && b.kind == Placement::partial))
    return placements +
           ", so a summand would meet one shard only; take `all_reduce` or `reduce_scatter` of the one, or " +
           "`all_gather` of the other first (all communicate)";
  if (a.kind == Placement::sharded && b.kind == Placement::sharded && x.dims[a.dim].name != y.dims[b.dim].name)
    return placements + ", so only diagonal shards would be computed; `all_gather` one of them (communicates)" +
           (words.blocks && out.has(x.dims[a.dim].name) && out.has(y.dims[b.dim].name)
                ? ring_of_blocks(x, a.dim, y, axis)
                : Text());
  return {};
}

/// The operand because of which each device's products are a summand over the axis, or -1.
constexpr int pending_operand(const OpParts& op, std::string_view axis) {
  for (int i = 0; i < op.in.size(); ++i) {
    const Placement at = op.in[i].placement(axis);
    const bool summed = at.kind == Placement::sharded && !op.out.has(op.in[i].dims[at.dim].name);
    if (summed || at.kind == Placement::partial) return i;
  }
  return -1;
}

/// Checks the result's placement on one axis against the table of einsum_unreduced.
constexpr Text einsum_pending(const OpParts& op, std::string_view axis, const Words& words) {
  const int at = pending_operand(op, axis);
  const bool spelled = op.out.partial.contains(axis);
  if (at >= 0 && !spelled) {
    const TensorSpec& x = op.in[at];
    const int dim = x.placement(axis).dim;
    const Text reason = dim < 0
                            ? Text("a pending sum stays pending")
                            : Text(words.acting) + " " + quoted(x.dims[dim]) + " sees only the shard of this device";
    return "the result is partial over " + Text(axis) + " (" + reason + "), so its spec must say `+" + axis +
           "`; reduce it afterwards with `reduce_scatter` or `all_reduce` (communicate)";
  }
  if (at < 0 && spelled)
    return "the result spec says `+" + Text(axis) + "`, but no operand is partial over " + axis +
           ", and no dim that the result lacks is sharded over it (likely an unsharded contraction); drop `+" + axis +
           "`";
  return {};
}

/// Dims agree by name, a dim has the same ordered list of axes everywhere, and every axis follows the table.
constexpr Text einsum(const OpParts& op, const Words& words = {}) {
  Small<std::string_view, 5 * max_axes> axes;
  for (const TensorSpec& x : op.in) collect_axes(x, axes);
  collect_axes(op.out, axes);
  for (const Dim& dim : op.out.dims) {
    bool found = false;
    for (const TensorSpec& x : op.in) found = found || x.has(dim.name);
    if (!found) return "dim " + quoted(dim.name) + " of the result is in no operand";
  }
  for (int i = 0; i < op.in.size(); ++i)
    for (int k = i + 1; k < op.in.size(); ++k) {
      const TensorSpec &x = op.in[i], &y = op.in[k];
      Words names = words;
      if (op.in.size() > 2) names.first = operand_number(i), names.second = operand_number(k);
      for (auto axis : axes)
        if (const Text why = einsum_conflict(x, y, op.out, axis, names); !why.empty()) return why;
      for (const Dim& a : x.dims)
        if (const int j = y.find(a.name); j >= 0 && !(y.dims[j].axes == a.axes))
          return shards_differ(x, a, y, y.dims[j]);
    }
  for (const Dim& dim : op.out.dims)
    for (const TensorSpec& x : op.in)
      if (const int i = x.find(dim.name); i >= 0 && !(x.dims[i].axes == dim.axes)) {
        Text remedy = x.dims[i].axes.size() > dim.axes.size()
                          ? "keep the sharding, or `all_gather` it first (communicates)"
                          : "`shard` it before or afterwards (no traffic)";
        for (auto axis : dim.axes)
          if (pending_operand(op, axis) >= 0)
            remedy = "leave the sum over " + Text(axis) + " pending, `+" + axis +
                     "`, and take `reduce_scatter` afterwards (communicates)";
        return "dim " + quoted(x.dims[i]) + " cannot become " + quoted(dim) +
               " in the result, as nothing moves between devices; " + remedy;
      }
  for (auto axis : axes)
    if (const Text why = einsum_pending(op, axis, words); !why.empty()) return why;
  return {};
}

constexpr Text integer_dims(const OpParts& op) {
  for (const TensorSpec& x : op.in)
    if (const Text why = integer_dim(x); !why.empty()) return why;
  return integer_dim(op.out);
}

/// Whether the op spec is wrong as dims of two operands are sharded over one axis, which the result would name twice.
constexpr bool names_axis_twice(const OpCall& call) {
  return detail::find(call.op.error.view(), "appears twice: a mesh axis") != detail::npos;
}
/// The dim of x that is sharded over the axis, or null if none is, or the one of this name.
constexpr const Dim* other_dim_over(const TensorSpec& x, std::string_view axis, std::string_view name) {
  const Placement at = x.placement(axis);
  return at.kind == Placement::sharded && x.dims[at.dim].name != name ? &x.dims[at.dim] : nullptr;
}
/// The remedy for two such dims.
constexpr Text gather_one(const Dim& a, const Dim& b, std::string_view axis) {
  return "; `all_gather` one of the operands, whose " + quoted(a) + " and " + quoted(b) + " are both sharded over " +
         axis + " (communicates)";
}

/// Checks the einsum of two operands, for any op that follows its rules.
constexpr Verdict product(const OpCall& call, const TensorSpec& x, const TensorSpec& y) {
  if (names_axis_twice(call))
    for (int i = 0; i < x.rank(); ++i)
      for (auto axis : x.dims[i].axes)
        if (const Dim* const other = other_dim_over(y, axis, x.dims[i].name))
          return {{}, call.why + gather_one(x.dims[i], *other, axis) + ring_of_blocks(x, i, y, axis)};
  if (!call.why.empty()) return call.fail();
  if (!(x == y) && x == call.op.in[1] && y == call.op.in[0])
    return call.fail("the operands are swapped: the first is " + quoted(x) + ", the second " + quoted(y) +
                     "; swap them in the call or in the op spec");
  if (const Text why = check_operand(x, call.op.in[0], "the first operand"); !why.empty()) return call.fail(why);
  if (const Text why = check_operand(y, call.op.in[1], "the second operand"); !why.empty()) return call.fail(why);
  if (const Text why = integer_dims(call.op); !why.empty()) return call.fail(why);
  if (const Text why = einsum(call.op, {.blocks = true}); !why.empty()) return call.fail(why);
  return call.accept();
}

}  // namespace detail_

/// einsum_unreduced<"a b, b c -> a c">: multiplies and sums on each device, never over devices.
constexpr Verdict einsum(const ParsedOp& op, const TensorSpec& x, const TensorSpec& y) {
  return detail_::product(call_of("einsum_unreduced", op, 2), x, y);
}

/// The spec of the products on each device: the result's dims with the operands' shards, and all sums pending.
constexpr TensorSpec unreduced(const OpParts& op) {
  TensorSpec products = op.out;
  products.partial = {};
  Small<std::string_view, 4 * max_axes> axes;
  for (const TensorSpec& x : op.in) {
    collect_axes(x, axes);
    for (Dim& dim : products.dims)
      if (const int i = x.find(dim.name); i >= 0) dim.axes = x.dims[i].axes;
  }
  for (auto axis : axes)
    if (detail_::pending_operand(op, axis) >= 0) products.add_partial(axis);
  return products;
}

namespace detail_ {

/// The verdict on an einsum with its sum over devices, from that on the products.
template <class Products>
constexpr Verdict reduced(OpCall call, const Products& product) {
  const TensorSpec result = call.op.out;
  call.op.out = unreduced(call.op);
  const TensorSpec products = call.op.out;
  if (const Verdict verdict = product(call); !verdict.ok()) return {result, verdict.why};
  call.op.out = result;
  if (products == result)
    return call.fail("no sum over devices is completed in " + quoted(result) +
                     ", so nothing would be communicated; write `einsum_unreduced`");
  const ParsedOp sum(products, result);
  if (reduce_scatter(sum, products).ok() || all_reduce(sum, products).ok()) return call.accept();
  return call.fail("each device's products are " + quoted(products) +
                   ", and no single `reduce_scatter` or `all_reduce` turns that into " + quoted(result) +
                   "; write `einsum_unreduced`, and then each collective");
}

}  // namespace detail_

/// einsum<"a b/t, b/t c -> a c/t">: einsum_unreduced, and the one reduce_scatter or all_reduce that makes the result.
constexpr Verdict einsum_reduced(const ParsedOp& op, const TensorSpec& x, const TensorSpec& y) {
  const OpCall call = call_of("einsum", op, 2);
  if (!call.why.empty()) return detail_::product(call, x, y);
  return detail_::reduced(call, [&](const OpCall& products) { return detail_::product(products, x, y); });
}

/// einsum_unreduced<"a b -> b">: sums and permutes one operand.
constexpr Verdict einsum1(const ParsedOp& op, const TensorSpec& x) {
  const OpCall call = call_of("einsum_unreduced", op, x);
  if (!call.why.empty()) return call.fail();
  if (const Text why = detail_::integer_dims(call.op); !why.empty()) return call.fail(why);
  if (const Text why = detail_::einsum(call.op); !why.empty()) return call.fail(why);
  return call.accept();
}

}  // namespace shardlib::rules
