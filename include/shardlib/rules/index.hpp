// Typing rules of index_unreduced and scatter_add: an index stands for a one-hot row over the dim in brackets along
// which it counts, so both ops follow the einsum rules. take_along has its rule here, too.
#pragma once

#include "shardlib/rules/einsum_many.hpp"
#include "shardlib/rules/local.hpp"

#include <string_view>

namespace shardlib::rules {

namespace detail_ {

/// The dims of x in brackets. x loses the brackets.
constexpr Small<Dim, max_dims> take_brackets(TensorSpec& x) {
  Small<Dim, max_dims> dims;
  for (Dim& dim : x.dims)
    if (dim.bracketed) {
      dim.bracketed = false;
      dims.push_back(dim);
    }
  return dims;
}
/// The error if the number of dims in brackets is not that of the index tensors.
constexpr Text count_brackets(int dims, int indices, const char* example) {
  if (dims == indices) return {};
  return "the number of dims in brackets is " + number(dims) + ", and that of index tensors " + number(indices) +
         "; each dim in brackets has an index tensor, in the same order: " + quoted(example);
}
constexpr const char* index_tensor(int i, int of) {
  constexpr const char* names[] = {"the first index tensor", "the second index tensor", "the third index tensor"};
  return of == 1 ? "the index tensor" : names[i];
}
/// Checks the index tensors, operands 1 and up, against the specs of the call.
constexpr Text check_indices(const OpParts& op, const Operands& indices) {
  for (int i = 0; i < indices.size(); ++i)
    if (const Text why = check_operand(indices[i], op.in[i + 1], index_tensor(i, indices.size())); !why.empty())
      return why;
  if (const Text why = integer_dims(op); !why.empty()) return why;
  for (const TensorSpec& spec : indices)
    if (!spec.partial.empty())
      return "the indices " + quoted(spec) + " are partial over " + spec.partial[0] +
             ", and a summand is not an index; " + reduce_first(spec);
  return {};
}
/// The words in which errors name a dim in brackets and the other operands, and say what would happen if one axis
/// sharded both.
struct BracketWords {
  std::string_view dim, operand, is, harm;
};
/// Checks that no operand has a dim in brackets, or is sharded over its axes.
constexpr Text check_apart(const Small<Dim, max_dims>& brackets, const Operands& operands, const BracketWords& words) {
  for (const Dim& v : brackets)
    for (const TensorSpec& spec : operands) {
      if (spec.has(v.name))
        return Text("the ") + words.dim + " " + quoted(v.name) + " is also a dim of " + words.operand;
      for (auto axis : v.axes)
        if (spec.placement(axis).kind != Placement::replicated)
          return Text(words.operand) + " " + words.is + " " + describe(spec, axis) + ", over which the " + words.dim +
                 " " + quoted(v) + " is sharded too: each device would " + words.harm + " (communicates)";
    }
  return {};
}
/// Checks that `spec`, the `whole`, has the dims of the indices.
constexpr Text check_has_dims(const TensorSpec& spec, const Operands& indices, std::string_view whole) {
  for (const TensorSpec& index : indices)
    for (const Dim& dim : index.dims)
      if (!spec.has(dim.name)) return "dim " + quoted(dim.name) + " of the indices is missing in the " + whole;
  return {};
}
/// Checks the einsum with a one-hot row over its dim in brackets for each index.
constexpr Text one_hot_einsum(OpParts op, const Small<Dim, max_dims>& brackets, const Words& words) {
  for (int i = 0; i < brackets.size(); ++i) {
    if (op.in[i + 1].dims.full()) return "the indices have too many dims";
    op.in[i + 1].dims.push_back(brackets[i]);
  }
  return einsum(op, words);
}

constexpr Verdict look_up(const ParsedOp& op, const TensorSpec& table, const Operands& indices) {
  const OpCall call = call_of("index_unreduced", op, indices.size() + 1);
  if (names_axis_twice(call))  // the result would be sharded over the axis of the indices, and partial over it
    for (const Dim& dim : table.dims)
      for (auto axis : dim.axes)
        for (const TensorSpec& spec : indices)
          if (const Dim* const other = other_dim_over(spec, axis, dim.name))
            return {{}, call.why + gather_one(dim, *other, axis)};
  if (!call.why.empty()) return call.fail();
  OpParts parts = call.op;
  const auto brackets = take_brackets(parts.in[0]);
  for (int i = 0; i <= indices.size(); ++i)
    for (const Dim& dim : i == 0 ? parts.out.dims : parts.in[i].dims)
      if (dim.bracketed) return {{}, call.title() + ": brackets belong to the table, the first operand"};
  if (brackets.empty()) return call.fail("no dim of the table is in brackets: write `[V/t] M` for a lookup along V");
  if (const Text why = count_brackets(brackets.size(), indices.size(), "[V] [W] M, B, B -> B M"); !why.empty())
    return call.fail(why);
  if (const Text why = check_operand(table, parts.in[0], "the table"); !why.empty()) return call.fail(why);
  if (const Text why = check_indices(parts, indices); !why.empty()) return call.fail(why);
  constexpr BracketWords words{"looked-up dim", "the indices", "are",
                               "look up only its own indices in its own rows; `all_gather` one of them"};
  if (const Text why = check_apart(brackets, indices, words); !why.empty()) return call.fail(why);
  for (const Dim& v : brackets)
    if (parts.out.has(v.name)) return call.fail("the looked-up dim " + quoted(v.name) + " must not be in the result");
  for (const Dim& dim : call.op.in[0].dims)
    if (!dim.bracketed && !parts.out.has(dim.name))
      return call.fail("dim " + quoted(dim.name) + " of the table is missing in the result");
  if (const Text why = check_has_dims(parts.out, indices, "result"); !why.empty()) return call.fail(why);
  for (const TensorSpec& spec : indices)
    for (const Dim& dim : parts.in[0].dims)
      if (const int at = spec.find(dim.name); at >= 0 && !(spec.dims[at].axes == dim.axes))
        return call.fail(shards_differ(parts.in[0], dim, spec, spec.dims[at]));
  if (const Text why = one_hot_einsum(parts, brackets, {"the table", "the indices", "looking up in"}); !why.empty())
    return call.fail(why);
  return call.accept();
}

constexpr Verdict add_rows(const ParsedOp& op, const TensorSpec& rows, const Operands& indices) {
  const OpCall call = call_of("scatter_add", op, indices.size() + 1);
  if (!call.why.empty()) return call.fail();
  OpParts parts = call.op;
  const auto brackets = take_brackets(parts.out);
  for (const TensorSpec& spec : parts.in)
    for (const Dim& dim : spec.dims)
      if (dim.bracketed) return {{}, call.title() + ": brackets belong to the result"};
  if (brackets.empty()) return call.fail("no dim of the result is in brackets: write `[V] M` to add rows along V");
  if (const Text why = count_brackets(brackets.size(), indices.size(), "B M, B, B -> [V] [W] M"); !why.empty())
    return call.fail(why);
  if (const Text why = check_operand(rows, parts.in[0], "the tensor of rows"); !why.empty()) return call.fail(why);
  if (const Text why = check_indices(parts, indices); !why.empty()) return call.fail(why);
  constexpr BracketWords words{"dim in brackets", "an operand", "is",
                               "add only its own rows to its own shard; change the sharding of one of them"};
  if (const Text why = check_apart(brackets, parts.in, words); !why.empty()) return call.fail(why);
  if (const Text why = check_has_dims(parts.in[0], indices, "rows"); !why.empty()) return call.fail(why);
  if (const Text why = one_hot_einsum(parts, brackets, {"the rows", "the indices", "adding"}); !why.empty())
    return call.fail(why);
  return {parts.out, {}};
}

}  // namespace detail_

/// index_unreduced<"[V/t] M, B/d L -> B/d L M +t">: looks up rows of the table. Rows in other devices' shards are 0.
constexpr Verdict index(const ParsedOp& op, const TensorSpec& table, const TensorSpec& indices) {
  return detail_::look_up(op, table, detail_::operands(indices));
}
/// index_unreduced<"[V/t] [W] M, B, B L -> B L M +t">: along two and along three dims.
constexpr Verdict index2(const ParsedOp& op, const TensorSpec& table, const TensorSpec& i, const TensorSpec& j) {
  return detail_::look_up(op, table, detail_::operands(i, j));
}
constexpr Verdict index3(const ParsedOp& op, const TensorSpec& table, const TensorSpec& i, const TensorSpec& j,
                         const TensorSpec& k) {
  return detail_::look_up(op, table, detail_::operands(i, j, k));
}

/// scatter_add<"B/d L M, B/d L -> [V] M +d">: adds rows along V by index, the transpose of index_unreduced.
constexpr Verdict scatter_add(const ParsedOp& op, const TensorSpec& rows, const TensorSpec& indices) {
  return detail_::add_rows(op, rows, detail_::operands(indices));
}
/// scatter_add<"B/d M, B/d, B/d -> [V] [W] M +d">: along two and along three dims.
constexpr Verdict scatter_add2(const ParsedOp& op, const TensorSpec& rows, const TensorSpec& i, const TensorSpec& j) {
  return detail_::add_rows(op, rows, detail_::operands(i, j));
}
constexpr Verdict scatter_add3(const ParsedOp& op, const TensorSpec& rows, const TensorSpec& i, const TensorSpec& j,
                               const TensorSpec& k) {
  return detail_::add_rows(op, rows, detail_::operands(i, j, k));
}

/// take_along<"V">(x, indices): along an unsharded dim V. The indices have V or another dim in its place. The op is
/// linear, so the operand may be partial.
constexpr Verdict take_along(std::string_view dim, const TensorSpec& x, const TensorSpec& indices) {
  const auto fail = [&](const Text& why) { return Verdict{indices, title_of("take_along", dim) + ": " + why}; };
  const int at = x.find(dim);
  if (Text why = detail_::unsharded(x, dim); !why.empty())
    return fail(at >= 0 && x.dims[at].axes.size() > 0
                    ? why + ", or write `index_unreduced`, whose rows of other shards are 0"
                    : why);
  if (!indices.partial.empty())
    return fail("the indices " + quoted(indices) + " are partial over " + indices.partial[0] +
                ", and a summand is not an index; " + reduce_first(indices));
  TensorSpec wanted = x;
  wanted.partial = {};
  TensorSpec row = wanted;
  row.dims.erase(at);
  if (row == indices && row.rank() > 0) {
    TensorSpec table = x;
    table.dims[at].bracketed = true;
    row.partial = x.partial;
    return fail("the indices " + quoted(indices) + " have no dim in the place of " + quoted(dim) +
                "; for one element of each row write " +
                quoted(Text("index_unreduced<\"") + table + ", " + indices + " -> " + row + "\">(x, ids)"));
  }
  if (at < indices.rank()) wanted.dims[at] = indices.dims[at];
  if (const Text diff = difference(indices, wanted); !diff.empty()) {
    const Text advice = conversion(indices, wanted);
    return fail("the indices " + quoted(indices) + " must have the dims of the operand " + quoted(x) + " except " +
                quoted(dim) + ": " + diff + (advice.empty() ? "" : "; ") + advice);
  }
  for (auto axis : indices.dims[at].axes)
    if (x.placement(axis).kind != Placement::replicated)
      return fail("the operand is " + describe(x, axis) + " and the indices " + describe(indices, axis) +
                  ", so a device would take only its own summands; " + reduce_first(x));
  TensorSpec out = indices;
  out.partial = x.partial;
  return {out, {}};
}

}  // namespace shardlib::rules
