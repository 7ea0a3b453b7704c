// Code that all typing rules share: the verdict, the check of an operand against an op spec, and advice on
// conversions.
#pragma once

#include <cstddef>
#include <string_view>

#include "shardlib/spec/dtype.hpp"
#include "shardlib/spec/op.hpp"
#include "shardlib/spec/spec.hpp"

namespace shardlib::rules {

using detail::joined;
using detail::number;
using detail::over_axes;
using detail::quoted;
using detail::Small;
using detail::Text;

/// The result of a rule: the canonical spec of the op's result, or the reason for an error.
struct Verdict {
  TensorSpec result;  ///< after an error: the spec that the user meant, or empty if unknown
  Text why;           ///< the reason for the error; empty if the operation is legal

  constexpr bool ok() const { return why.empty(); }
};

constexpr Text title_of(std::string_view name, std::string_view spec) {
  return Text(name) + "<" + quoted(spec) + ">";
}

/// One op call: its operands and its result, with the op's name and op spec for messages.
struct OpCall {
  std::string_view name;
  const ParsedOp* spec;  ///< lives as long as the call
  OpParts op;            ///< the op spec, completed if the call gives the result or the axes alone
  Text why;

  /// "all_gather<`A/t -> A`>"
  constexpr Text title() const {
    const bool completed = spec->form == ParsedOp::whole ? spec->text.empty() : op.error.empty();
    return title_of(name, completed ? to_string(op) : Text(spec->text));
  }
  /// The verdict also carries the result that the user wrote, so that one mistake gives one error.
  constexpr Verdict fail(const Text& reason) const { return {op.out, title() + ": " + reason}; }
  /// The error in the call itself, before the op's own rules.
  constexpr Verdict fail() const { return {op.error.empty() ? op.out : TensorSpec(), why}; }
  constexpr Verdict accept() const { return {op.out, {}}; }
};

constexpr const char* describe(Placement::Kind kind) {
  return kind == Placement::replicated ? "replicated" : kind == Placement::sharded ? "sharded" : "partial";
}

/// "replicated over t", "sharded over t (dim `M/t`)", "partial over t"
constexpr Text describe(const TensorSpec& spec, std::string_view axis) {
  const Placement s = spec.placement(axis);
  Text text = Text(describe(s.kind)) + " over " + axis;
  if (s.kind == Placement::sharded) text = text + " (dim " + quoted(spec.dims[s.dim]) + ")";
  return text;
}

/// Collects the axes of the spec, in order of appearance.
template <int N>
constexpr void collect_axes(const TensorSpec& spec, Small<std::string_view, N>& axes) {
  for (const Dim& dim : spec.dims)
    for (auto axis : dim.axes)
      if (!axes.contains(axis)) axes.push_back(axis);
  for (auto axis : spec.partial)
    if (!axes.contains(axis)) axes.push_back(axis);
}

constexpr bool same_names(const TensorSpec& a, const TensorSpec& b) {
  if (a.rank() != b.rank()) return false;
  for (int i = 0; i < a.rank(); ++i)
    if (a.dims[i].name != b.dims[i].name) return false;
  return true;
}

/// Whether the spec is made of names alone, without axes, sums, integers and brackets.
constexpr bool are_names(const TensorSpec& spec) {
  for (const Dim& dim : spec.dims)
    if (dim.is_integer() || dim.bracketed || !dim.axes.empty()) return false;
  return spec.rank() > 0 && spec.partial.empty();
}

constexpr bool is_prefix(const Axes& prefix, const Axes& of) {
  if (prefix.size() > of.size()) return false;
  for (int i = 0; i < prefix.size(); ++i)
    if (prefix[i] != of[i]) return false;
  return true;
}

/// A call `name<"from -> to">` that a message recommends.
constexpr Text suggestion(const char* op, const TensorSpec& from, const TensorSpec& to) {
  return quoted(Text(op) + "<\"" + to_string(from) + " -> " + to_string(to) + "\">");
}

// Declarations of the ops that advice may name. Their rules are in other headers of rules/. No program includes one
// of these headers alone, so this header need not define them.
#if defined(__clang__)
#pragma clang diagnostic push
#pragma clang diagnostic ignored "-Wundefined-inline"
#endif
constexpr Verdict all_gather(const ParsedOp& op, const TensorSpec& x);
constexpr Verdict reduce_scatter(const ParsedOp& op, const TensorSpec& x);
constexpr Verdict all_reduce(const ParsedOp& op, const TensorSpec& x);
constexpr Verdict all_to_all(const ParsedOp& op, const TensorSpec& x);
constexpr Verdict shard(const ParsedOp& op, const TensorSpec& x);
constexpr Verdict to_partial(const ParsedOp& op, const TensorSpec& x);
constexpr Verdict rearrange(const ParsedOp& op, const TensorSpec& x);
constexpr Verdict rename(const ParsedOp& names, const TensorSpec& x);
#if defined(__clang__)
#pragma clang diagnostic pop
#endif

/// Names the op that turns `from` into `to`, and its cost. Empty if no single op does. `casts` allows layout casts
/// without communication. Before a collective they are left out, because they would undo it.
constexpr Text conversion(const TensorSpec& from, const TensorSpec& to, bool casts = true) {
  const ParsedOp op(from, to);
  if (all_gather(op, from).ok()) return "gather it with " + suggestion("all_gather", from, to) + " (communicates)";
  if (reduce_scatter(op, from).ok()) return "take " + suggestion("reduce_scatter", from, to) + " (communicates)";
  if (all_reduce(op, from).ok()) return "take " + suggestion("all_reduce", from, to) + " (communicates)";
  if (all_to_all(op, from).ok())
    return "move the sharding with " + suggestion("all_to_all", from, to) + " (communicates)";
  if (casts && shard(op, from).ok())
    return "take the shard of each device with " + suggestion("shard", from, to) + " (no traffic)";
  if (casts && to_partial(op, from).ok()) return "take " + suggestion("to_partial", from, to) + " (no traffic)";
  if (rearrange(op, from).ok()) return "reorder the dims with " + suggestion("rearrange", from, to) + " (a local copy)";
  if (from.rank() != to.rank()) return {};
  Text old_names, new_names;
  for (int i = 0; i < from.rank(); ++i) {
    if (from.dims[i].name == to.dims[i].name) continue;
    old_names = old_names + (old_names.empty() ? "" : " ") + from.dims[i].name;
    new_names = new_names + (new_names.empty() ? "" : " ") + to.dims[i].name;
  }
  const Text names = old_names + " -> " + new_names;
  if (const Verdict renamed = rename(names, from); !renamed.ok() || !(renamed.result == to)) return {};
  return "if both names mean one size, " + quoted("rename<\"" + names + "\">") + " (free)";
}

/// A cotangent is a pending sum over each axis that does not shard the value. Where the types of an op outside the
/// library do not name all axes of the mesh, the cotangent that its VJP gets says so with this one: `B/d M +unnamed`.
inline constexpr std::string_view unnamed_axes = "unnamed";
constexpr Text naming_axes() {
  return "`+unnamed` stands for the axes of the mesh that no type of the op names, and `custom::vjp(mesh, x, f)` names "
         "them";
}

/// Describes the first difference between two specs.
constexpr Text difference(const TensorSpec& is, const TensorSpec& wanted) {
  for (int i = 0; i < wanted.rank() || i < is.rank(); ++i) {
    if (i >= is.rank()) return "dim " + quoted(wanted.dims[i]) + " is missing";
    if (i >= wanted.rank()) return "dim " + quoted(is.dims[i]) + " is one too many";
    if (!(is.dims[i] == wanted.dims[i]))
      return "dim " + number(i + 1) + " is " + quoted(is.dims[i]) + ", not " + quoted(wanted.dims[i]);
  }
  for (auto axis : is.partial)
    if (!wanted.partial.contains(axis))
      return "a sum over " + Text(axis) + " is still pending in it" +
             (axis == unnamed_axes ? ", and " + naming_axes() : "");
  for (auto axis : wanted.partial)
    if (!is.partial.contains(axis)) return "it has no pending sum over " + Text(axis);
  return {};
}

/// Checks one operand against its spec in the op spec.
constexpr Text check_operand(const TensorSpec& is, const TensorSpec& wanted, const char* which, bool casts = true) {
  const Text diff = difference(is, wanted);
  if (diff.empty()) return {};
  Text why = Text(which) + " is " + quoted(is) + ", but the op spec expects " + quoted(wanted) + ": " + diff;
  const Text advice = conversion(is, wanted, casts);
  return why + "; " + advice + (advice.empty() ? "correct the op spec" : ", or correct the op spec");
}

inline constexpr const char* no_brackets = "brackets belong in the op spec of index_unreduced and scatter_add only";
constexpr bool has_brackets(const TensorSpec& spec) {
  for (const Dim& dim : spec.dims)
    if (dim.bracketed) return true;
  return false;
}
constexpr bool has_brackets(const OpParts& op) {
  bool any = has_brackets(op.out);
  for (const TensorSpec& x : op.in) any = any || has_brackets(x);
  return any;
}
/// The call of an op of `operands` operands. Only index_unreduced and scatter_add handle brackets.
constexpr OpCall call_of(std::string_view name, const ParsedOp& op, int operands) {
  OpCall call{name, &op, op.parts, {}};
  if (!call.op.error.empty()) {
    call.why = call.title() + ": " + call.op.error;
  } else if (call.op.in.size() != operands) {
    call.why = call.title() + ": the op spec has " + number(call.op.in.size()) +
               (call.op.in.size() == 1 ? " operand" : " operands") + ", the call has " + number(operands) +
               "; pass one tensor for each operand, or correct the op spec";
  } else if (name != "index_unreduced" && name != "scatter_add" && has_brackets(call.op)) {
    call.why = call.title() + ": " + no_brackets;
  }
  return call;
}

/// The op spec of an op of one operand, completed from its result alone, "M F/t", or from the axes alone, "over<d>".
/// A full op spec stays unchanged. `why` is the error where the axes do not determine the result for this operand.
struct Completed {
  OpParts op;
  Text why;
};
constexpr Completed complete(std::string_view name, const ParsedOp& op, const TensorSpec& x) {
  if (op.form == ParsedOp::whole) return {op.parts, {}};
  const TensorSpec &in = x, &axes = op.named.spec;
  Completed result;
  result.op.in.push_back(in);
  if (op.form == ParsedOp::result) {
    result.op.out = op.named.spec;
    result.op.error = op.named.error;
    return result;
  }
  const auto fail = [&](const Text& why) {
    result.op.error = why;
    result.why = Text(name) + "<" + op.text + "> of " + quoted(x) + ": " + why;
    return result;
  };
  TensorSpec out = in;
  const bool gathers = name == "all_gather" || name == "gathering";
  if (!op.named.error.empty() || !are_names(axes))
    return fail("write the names of axes, separated by spaces: `over<\"d t\">`");
  for (const Dim& axis : axes.dims) {
    const Placement placement = in.placement(axis.name);
    const Text is = "the operand is " + describe(in, axis.name);
    if (gathers && placement.kind != Placement::sharded)
      return fail(is + ", so there is nothing to gather over it" +
                  (placement.kind == Placement::partial ? "; take `all_reduce` for a pending sum (communicates)"
                                                        : "; drop the gather"));
    if (name == "all_reduce" && placement.kind != Placement::partial)
      return fail(is +
                  ": no sum over it is pending, and to reduce a value twice multiplies it by the size of the axis; "
                  "drop the all_reduce");
    if (name == "to_partial" && placement.kind != Placement::replicated)
      return fail(is + ", and only a replicated value can become a summand");
    if (name == "all_reduce") out.partial.erase(out.partial.find(axis.name));
    if (name == "to_partial") out.add_partial(axis.name);
  }
  if (!gathers && name != "all_reduce" && name != "to_partial")
    return fail("the axis does not say which dims the result has; write the result, " +
                quoted(Text(name) + "<\"...\">(x)"));
  // A gather removes the last axes of a dim.
  for (int i = 0; gathers && i < out.rank(); ++i) {
    Dim& dim = out.dims[i];
    while (!dim.axes.empty() && axes.has(dim.axes[dim.axes.size() - 1])) dim.axes.erase(dim.axes.size() - 1);
    for (auto axis : dim.axes)
      if (axes.has(axis))
        return fail("dim " + quoted(in.dims[i]) + " is sharded over " + dim.axes[dim.axes.size() - 1] +
                    " last, and a gather takes the last axes of a dim; gather that axis too, or first");
  }
  result.op.out = out;
  return result;
}
/// The completed op spec as a text.
constexpr Text completed(std::string_view name, const ParsedOp& op, const TensorSpec& x) {
  const Completed full = complete(name, op, x);
  return full.op.error.empty() ? to_string(full.op) : Text(op.text);
}

/// The call of an op of one operand, which is checked against the op spec.
constexpr OpCall call_of(std::string_view name, const ParsedOp& op, const TensorSpec& x) {
  OpCall call{name, &op, {}, {}};
  if (op.form == ParsedOp::whole) {
    call = call_of(name, op, 1);
  } else {
    const Completed full = complete(name, op, x);
    call.op = full.op;
    call.why = full.why;
    if (call.why.empty() && !full.op.error.empty())
      call.why = call.title() + ": " + full.op.error;
    else if (call.why.empty() && has_brackets(call.op))
      call.why = call.title() + ": " + no_brackets;
  }
  if (!call.why.empty()) return call;
  const TensorSpec &is = x, &in = call.op.in[0], &out = call.op.out;
  if (is == in) return call;
  if (is == out) {
    call.why = call.title() + ": the operand already is what the result should be, " + quoted(x) + "; drop the op";
  } else if (const Text direct = conversion(is, out); !direct.empty() && same_names(in, out)) {
    call.why = call.title() + ": the operand is " + quoted(x) + ", but the op spec expects " + quoted(in) + ": " +
               difference(is, in) + "; instead of this op, " + direct + ", or correct the op spec";
  } else {
    call.why = call.title() + ": " + check_operand(is, in, "the operand", false);
  }
  return call;
}

/// Checks the grammar of a tensor spec, for Tensor<D, "...">.
constexpr Verdict tensor(std::string_view spec) {
  const auto parsed = parse_tensor(spec);
  if (!parsed.error.empty()) return {{}, "tensor spec " + quoted(spec) + ": " + parsed.error};
  if (has_brackets(parsed.spec)) return {{}, "tensor spec " + quoted(spec) + ": " + no_brackets};
  return {parsed.spec, {}};
}

/// Reports a call of an op with one or two operands without its op spec.
constexpr Verdict no_op_spec(std::string_view op, const TensorSpec& x) {
  return {{},
          Text(op) + ": the op spec is missing: write what goes in and what comes out, " +
              quoted(Text(op) + "<\"" + x + " -> result\">(x)")};
}
constexpr Verdict no_op_spec2(std::string_view op, const TensorSpec& x, const TensorSpec& y) {
  return {{},
          Text(op) + ": the op spec is missing: write what goes in and what comes out, " +
              quoted(Text(op) + "<\"" + x + ", " + y + " -> result\">(x, y)")};
}

/// A call whose arguments fit none of an op's forms. Their number lets the call depend on its template arguments. The
/// form is code; after a backquote it may continue with words, "iota<\"L\">(mesh, 128)`, whose dtype is i32".
constexpr Verdict wrong_call(std::string_view op, std::string_view form, std::size_t arguments) {
  bool in_code = true;
  for (const char c : form) in_code ^= c == '`';
  return {{},
          Text(op) + ": it does not take " + (arguments == 1 ? "this argument" : "these arguments") + "; write `" +
              form + (in_code ? "`" : "")};
}

/// Explains that the result has a sum pending that is none of those that may be.
constexpr Text new_sum(const Axes& pending, const TensorSpec& out) {
  for (auto axis : out.partial)
    if (!pending.contains(axis))
      return "the result has `+" + Text(axis) + "`, but no sum over " + axis + " is pending in the operand; drop `+" +
             axis + "`";
  return {};
}

/// Explains why the partial axes of the result differ from those of the operand, for an op that may not change them.
constexpr Text other_sums(const TensorSpec& in, const TensorSpec& out) {
  for (auto axis : in.partial)
    if (!out.partial.contains(axis))
      return "the sum over " + Text(axis) + " is still pending in the operand, so the result must keep `+" + axis +
             "`; take `all_reduce` for it before or afterwards (communicates)";
  return new_sum(in.partial, out);
}

/// Collects the dims of the operand that the result lacks. The kept dims must be unchanged and in order.
constexpr Text removed_dims(const OpCall& call, Small<Dim, max_dims>& removed) {
  const TensorSpec &in = call.op.in[0], &out = call.op.out;
  const Text note =
      call.spec->form == ParsedOp::result ? "; the spec names the dims of the result, not those to reduce over" : "";
  int at = 0;
  for (const Dim& dim : in.dims) {
    if (at < out.rank() && out.dims[at].name == dim.name) {
      if (!(out.dims[at] == dim))
        return "kept dim " + quoted(dim) + " must be unchanged in the result, not " + quoted(out.dims[at]) + note;
      ++at;
    } else {
      removed.push_back(dim);
    }
  }
  if (at != out.rank())
    return "dim " + quoted(out.dims[at]) + " of the result is " +
           (in.has(out.dims[at].name) ? "in another order than in the operand" : "not a dim of the operand") + note;
  if (removed.empty()) return "the result has every dim of the operand, so there is nothing to reduce" + note;
  for (const Dim& dim : removed)
    if (dim.is_integer() && out.has(dim.name))
      return "integer dim " + quoted(dim.name) +
             " appears twice, and the op spec does not say which one to reduce; name one first, " +
             quoted("rename<\"" + Text(dim.name) + " " + dim.name + " -> name1 name2\">");
  return {};
}

/// The error, and its remedy, if dim `a` of x and dim `b` of y are the same dim with different shardings.
constexpr Text shards_differ(const TensorSpec& x, const Dim& a, const TensorSpec& y, const Dim& b) {
  if (a.axes.size() > b.axes.size()) return shards_differ(y, b, x, a);
  const Text why =
      "dim " + quoted(a) + " of " + quoted(x) + " is " + quoted(b) + " in " + quoted(y) + ", so their shards differ; ";
  if (!is_prefix(a.axes, b.axes)) return why + "`all_gather` one of them and `shard` it like the other (communicates)";
  TensorSpec gathered = y, sharded = x;
  gathered.dims[y.find(b.name)].axes = a.axes;
  sharded.dims[x.find(a.name)].axes = b.axes;
  Text remedy = "take " + suggestion("all_gather", y, gathered) + " (communicates)";
  if (shard({x, sharded}, x).ok()) remedy = remedy + " or " + suggestion("shard", x, sharded) + " (no traffic)";
  return why + remedy;
}

constexpr TensorSpec without_sums(TensorSpec x) {
  x.partial = {};
  return x;
}

/// "a `reduce_scatter` or `all_reduce<...>` (communicate)"
constexpr Text reduction(const TensorSpec& x) {
  if (x.partial.contains(unnamed_axes)) return "an `all_reduce` over axes that have names: " + naming_axes();
  const Text all_reduce = suggestion("all_reduce", x, without_sums(x));
  return x.rank() == 0 ? all_reduce + " (communicates)" : "a `reduce_scatter` or " + all_reduce + " (communicate)";
}

/// The remedy for an op that accepts no partial operand.
constexpr Text reduce_first(const TensorSpec& x) {
  return "reduce it first, with " + reduction(x);
}

}  // namespace shardlib::rules
