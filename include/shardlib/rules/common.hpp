// What every typing rule shares: the verdict, the check of an operand against an op spec, and advice on conversions.
#pragma once

#include "shardlib/dtype.hpp"
#include "shardlib/spec.hpp"

namespace shardlib::rules {

using detail::number;
using detail::quoted;
using detail::Text;

/// The answer of a rule: the canonical spec of the result, or why there is none.
struct Verdict {
  Text result;  ///< with a `why`: what the user meant, empty if that is not known
  Text why;     ///< empty when the operation is legal

  constexpr bool ok() const { return why.empty(); }
};

/// Parsed operands of one op application, with the op's name for its messages.
struct Call {
  Text title;  ///< "all_gather<`A/t -> A`>"
  OpParts op;
  Text why;

  /// The spelled result goes along, so that one mistake makes one error.
  constexpr Verdict fail(const Text& reason) const { return {to_string(op.out), title + ": " + reason}; }
  /// Why the call itself, before any rule of the op, is wrong.
  constexpr Verdict fail() const { return {op.error.empty() ? to_string(op.out) : Text(), why}; }
  constexpr Verdict accept() const { return {to_string(op.out), {}}; }
};

constexpr Text title_of(std::string_view name, std::string_view spec) {
  return Text(name) + "<" + quoted(spec) + ">";
}

constexpr const char* describe(State::Kind kind) {
  return kind == State::replicated ? "replicated" : kind == State::sharded ? "sharded" : "partial";
}

/// "replicated over t", "sharded over t (dim `M/t`)", "partial over t"
constexpr Text describe(const TensorSpec& spec, std::string_view axis) {
  const State s = spec.state(axis);
  Text text = Text(describe(s.kind)) + " over " + axis;
  if (s.kind == State::sharded) text = text + " (dim " + quoted(to_string(spec.dims[s.dim])) + ")";
  return text;
}

/// Every axis that stands in the spec, in order of appearance.
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

constexpr bool is_prefix(const Axes& prefix, const Axes& of) {
  if (prefix.size() > of.size()) return false;
  for (int i = 0; i < prefix.size(); ++i)
    if (prefix[i] != of[i]) return false;
  return true;
}

/// `name<"from -> to">` as a remedy.
constexpr Text suggestion(const char* op, const TensorSpec& from, const TensorSpec& to) {
  return quoted(Text(op) + "<\"" + to_string(from) + " -> " + to_string(to) + "\">");
}

// The ops that advice may name. Their rules stand in other parts of rules.hpp; a part alone is not used, so it need not
// define them.
#if defined(__clang__)
#pragma clang diagnostic push
#pragma clang diagnostic ignored "-Wundefined-inline"
#endif
constexpr Verdict all_gather(std::string_view op, std::string_view x);
constexpr Verdict reduce_scatter(std::string_view op, std::string_view x);
constexpr Verdict all_reduce(std::string_view op, std::string_view x);
constexpr Verdict all_to_all(std::string_view op, std::string_view x);
constexpr Verdict slice(std::string_view op, std::string_view x);
constexpr Verdict to_partial(std::string_view op, std::string_view x);
constexpr Verdict rearrange(std::string_view op, std::string_view x);
constexpr Verdict rename(std::string_view names, std::string_view x);
#if defined(__clang__)
#pragma clang diagnostic pop
#endif

/// Which op turns `from` into `to`, and what it costs; empty when no single op does. Layout casts that need no traffic
/// undo a collective, so they are left out where one is about to follow.
constexpr Text conversion(const TensorSpec& from, const TensorSpec& to, bool casts = true) {
  const Text x = to_string(from), op = x + " -> " + to_string(to);
  if (all_gather(op, x).ok()) return "gather it with " + suggestion("all_gather", from, to) + " (communicates)";
  if (reduce_scatter(op, x).ok()) return "take " + suggestion("reduce_scatter", from, to) + " (communicates)";
  if (all_reduce(op, x).ok()) return "take " + suggestion("all_reduce", from, to) + " (communicates)";
  if (all_to_all(op, x).ok()) return "move the sharding with " + suggestion("all_to_all", from, to) + " (communicates)";
  if (casts && slice(op, x).ok())
    return "take the block of each device with " + suggestion("slice", from, to) + " (no traffic)";
  if (casts && to_partial(op, x).ok()) return "take " + suggestion("to_partial", from, to) + " (no traffic)";
  if (rearrange(op, x).ok()) return "reorder the dims with " + suggestion("rearrange", from, to) + " (a local copy)";
  if (from.rank() != to.rank()) return {};
  Text old_names, new_names;
  for (int i = 0; i < from.rank(); ++i) {
    if (from.dims[i].name == to.dims[i].name) continue;
    old_names = old_names + (old_names.empty() ? "" : " ") + from.dims[i].name;
    new_names = new_names + (new_names.empty() ? "" : " ") + to.dims[i].name;
  }
  const Text names = old_names + " -> " + new_names;
  if (const Verdict renamed = rename(names, x); !renamed.ok() || !(renamed.result == to_string(to))) return {};
  return "if both names mean one size, " + quoted("rename<\"" + names + "\">") + " (free)";
}

/// The first thing in which two specs differ, in words.
constexpr Text difference(const TensorSpec& is, const TensorSpec& wanted) {
  for (int i = 0; i < wanted.rank() || i < is.rank(); ++i) {
    if (i >= is.rank()) return "dim " + quoted(to_string(wanted.dims[i])) + " is missing";
    if (i >= wanted.rank()) return "dim " + quoted(to_string(is.dims[i])) + " is one too many";
    if (!(is.dims[i] == wanted.dims[i]))
      return "dim " + number(i + 1) + " is " + quoted(to_string(is.dims[i])) + ", not " +
             quoted(to_string(wanted.dims[i]));
  }
  for (auto axis : is.partial)
    if (!wanted.partial.contains(axis)) return "a sum over " + Text(axis) + " is still pending in it";
  for (auto axis : wanted.partial)
    if (!is.partial.contains(axis)) return "it has no pending sum over " + Text(axis);
  return {};
}

/// Checks one operand against its place in the op spec.
constexpr Text check_operand(const TensorSpec& is, const TensorSpec& wanted, const char* which, bool casts = true) {
  const Text diff = difference(is, wanted);
  if (diff.empty()) return {};
  Text why = Text(which) + " is " + quoted(to_string(is)) + ", but the op spec expects " + quoted(to_string(wanted)) +
             ": " + diff;
  const Text advice = conversion(is, wanted, casts);
  return why + "; " + advice + (advice.empty() ? "correct the op spec" : ", or correct the op spec");
}

/// Parses an op spec of `operands` operands. Brackets are the business of index_unreduced.
constexpr Call parse_call(std::string_view name, std::string_view op, int operands) {
  Call call{title_of(name, op), parse_op(op), {}};
  if (!call.op.error.empty()) {
    call.why = call.title + ": " + call.op.error;
  } else if (call.op.in.size() != operands) {
    call.why = call.title + ": the op spec has " + number(call.op.in.size()) +
               (call.op.in.size() == 1 ? " operand" : " operands") + ", the call has " + number(operands);
  } else if (name != "index_unreduced" && detail::find(op, "[") != detail::npos) {
    call.why = call.title + ": brackets belong in the op spec of index_unreduced only";
  }
  return call;
}

/// Parses the op spec of an op of one operand and checks the operand against it.
constexpr Call parse_call(std::string_view name, std::string_view op, std::string_view x) {
  Call call = parse_call(name, op, 1);
  if (!call.why.empty()) return call;
  const TensorSpec is = parse_tensor(x).spec, &in = call.op.in[0], &out = call.op.out;
  if (is == in) return call;
  if (is == out) {
    call.why = call.title + ": the operand already is what the result should be, " + quoted(x) + "; drop the op";
  } else if (const Text direct = conversion(is, out); !direct.empty() && same_names(in, out)) {
    call.why = call.title + ": the operand is " + quoted(x) + ", but the op spec expects " + quoted(to_string(in)) +
               ": " + difference(is, in) + "; instead of this op, " + direct + ", or correct the op spec";
  } else {
    call.why = call.title + ": " + check_operand(is, in, "the operand", false);
  }
  return call;
}

/// The grammar of a tensor spec: what Tensor<D, "..."> itself checks.
constexpr Verdict tensor(std::string_view spec) {
  const auto parsed = parse_tensor(spec);
  if (!parsed.error.empty()) return {{}, "tensor spec " + quoted(spec) + ": " + parsed.error};
  for (const Dim& dim : parsed.spec.dims)
    if (dim.bracketed)
      return {{}, "tensor spec " + quoted(spec) + ": brackets belong in the op spec of index_unreduced only"};
  return {to_string(parsed.spec), {}};
}

/// A tensor of one type where another is declared: a return type, a parameter, a variable.
constexpr Verdict assign(DType to_dtype, std::string_view to, DType from_dtype, std::string_view from) {
  if (from == to && from_dtype == to_dtype) return {};
  Text why = "a tensor " + quoted(Text(name(from_dtype)) + "[" + from + "]") + " does not fit the declared type " +
             quoted(Text(name(to_dtype)) + "[" + to + "]");
  if (from != to) {
    const auto a = parse_tensor(from).spec, b = parse_tensor(to).spec;
    why = why + ": " + difference(a, b);
    if (const Text advice = conversion(a, b); !advice.empty()) why = why + "; " + advice;
  }
  if (from_dtype != to_dtype)
    why = why + (from != to ? "; and the dtype is " : ": the dtype is ") + name(from_dtype) + ", so write " +
          quoted(Text("cast<") + name(to_dtype) + ">");
  return {{}, why};
}

/// One dtype in all operands, of a kind that the op computes with: nothing is promoted silently.
constexpr Verdict same_dtype(std::string_view op, DType a, DType b) {
  if (a == b) {
    const bool logical = op.starts_with("logical_"), arithmetic = op.size() == 1;
    if (logical && a != DType::bool_)
      return {{}, Text(op) + ": the operands are " + name(a) + ", not bool_; compare them first, e.g. `not_equal`"};
    if (arithmetic && a == DType::bool_)
      return {{}, Text(op) + ": the operands are bool_, which has no arithmetic; write `cast<f32>` of them first"};
    return {};
  }
  return {{},
          Text(op) + ": the operands are " + name(a) + " and " + name(b) +
              ", and no dtype is promoted silently; write " + quoted(Text("cast<") + name(a) + ">") +
              " of the second or " + quoted(Text("cast<") + name(b) + ">") + " of the first"};
}

/// The dtype of an op that computes with floating numbers only.
constexpr Verdict floating_dtype(std::string_view op, DType x) {
  if (is_floating(x)) return {};
  if (op.starts_with("random_"))
    return {{}, Text(op) + ": random numbers are floating, not " + name(x) + "; draw f32 and `cast` them"};
  return {{}, Text(op) + ": the operand is " + name(x) + ", not floating; write `cast<f32>` of it first"};
}

/// The dtype of an op of a tensor and a number, and of negation.
constexpr Verdict arithmetic_dtype(std::string_view op, DType x) {
  if (x != DType::bool_) return {};
  return {{}, Text(op) + ": the operand is bool_, which has no arithmetic; write `cast<f32>` of it first"};
}

/// The dtype of what is summed, or otherwise reduced, on a device or over devices.
constexpr Verdict reduced_dtype(std::string_view op, DType x) {
  if (x != DType::bool_ && x != DType::u8) return {};
  return {{}, Text(op) + ": the operand is " + name(x) + ", which is not reduced; write `cast<i32>` of it first"};
}

/// The dtype in which reduce_scatter and all_reduce sum over devices: the operand's, but f32 for bf16, which is stated.
constexpr Verdict sum_dtype(std::string_view op, DType x, DType sum) {
  const DType right = x == DType::bf16 ? DType::f32 : x;
  if (sum == right) return {};
  const Text form = Text(op) + "<\"...\", " + name(right) + ">";
  return {{},
          Text(op) + ": " + name(x) + " is not summed in " + name(sum) + "; write `" + form +
              (x == DType::bf16 ? "`: bf16 on the wire, an f32 sum, one rounding" : "`, or leave the dtype out")};
}

/// The dtype of indices into a table.
constexpr Verdict index_dtype(std::string_view op, DType indices) {
  if (indices == DType::i32 || indices == DType::u32) return {};
  return {{}, Text(op) + ": the indices are " + name(indices) + ", not i32 or u32; write `cast<i32>` of them first"};
}

/// The dtype of the condition of where and masked.
constexpr Verdict condition_dtype(std::string_view op, DType condition) {
  if (condition == DType::bool_) return {};
  return {{},
          Text(op) + ": the condition is " + name(condition) + ", not bool_; compare it first, e.g. `greater(x, 0.0)`"};
}

/// The dtypes of an einsum: floating operands; the result is theirs, or bf16 for f32 (in which bf16 is summed too).
constexpr Verdict einsum_dtype(DType operands, DType result) {
  const Text title("einsum_unreduced: ");
  if (!is_floating(operands))
    return {{}, title + "the operands are " + name(operands) + ", not floating; write `cast<f32>` of them first"};
  const bool summed_in_f32 = operands == DType::bf16 || operands == DType::f32;
  if (result == operands || (summed_in_f32 && (result == DType::bf16 || result == DType::f32))) return {};
  return {{},
          title + "the sums of " + name(operands) + " cannot be had as " + name(result) + ", only as " +
              (summed_in_f32 ? "f32 or bf16" : "f64") + "; write " + quoted(Text("cast<") + name(result) + ">") +
              " of the result or of the operands"};
}

/// An op of one operand, or of two, that was called without its op spec.
constexpr Verdict no_op_spec(std::string_view op, std::string_view x) {
  return {{},
          Text(op) + ": the op spec is missing: write what goes in and what comes out, " +
              quoted(Text(op) + "<\"" + x + " -> result\">(x)")};
}
constexpr Verdict no_op_spec2(std::string_view op, std::string_view x, std::string_view y) {
  return {{},
          Text(op) + ": the op spec is missing: write what goes in and what comes out, " +
              quoted(Text(op) + "<\"" + x + ", " + y + " -> result\">(x, y)")};
}


/// Why the pending sums of a result differ from the operand's, in an op that leaves them alone.
constexpr Text other_sums(const TensorSpec& in, const TensorSpec& out) {
  for (auto axis : in.partial)
    if (!out.partial.contains(axis))
      return "the sum over " + Text(axis) + " is still pending in the operand, so the result must keep `+" + axis +
             "`; take `all_reduce` for it before or afterwards (communicates)";
  for (auto axis : out.partial)
    if (!in.partial.contains(axis))
      return "the result has `+" + Text(axis) + "`, but no sum over " + axis + " is pending in the operand; drop `+" +
             axis + "`";
  return {};
}

/// The dims that the result lacks; the kept ones must stand unchanged and in order.
constexpr Text removed_dims(const TensorSpec& in, const TensorSpec& out, Small<Dim, max_dims>& removed) {
  int at = 0;
  for (const Dim& dim : in.dims) {
    if (at < out.rank() && out.dims[at].name == dim.name) {
      if (!(out.dims[at] == dim))
        return "kept dim " + quoted(to_string(dim)) + " must stand unchanged in the result, not as " +
               quoted(to_string(out.dims[at]));
      ++at;
    } else {
      removed.push_back(dim);
    }
  }
  if (at != out.rank())
    return "dim " + quoted(to_string(out.dims[at])) +
           (in.has(out.dims[at].name) ? " of the result stands in another order than in the operand"
                                      : " of the result is not a dim of the operand");
  if (removed.empty()) return "the result has every dim of the operand, so there is nothing to reduce";
  for (const Dim& dim : removed)
    if (dim.is_integer() && out.has(dim.name))
      return "integer dim " + quoted(dim.name) + " stands twice, and which one goes is not said; name one first, " +
             quoted("rename<\"" + Text(dim.name) + " " + dim.name + " -> name1 name2\">");
  return {};
}

/// What is wrong, and what helps, where dim `a` of x is the dim `b` of y, sharded otherwise.
constexpr Text blocks_differ(const TensorSpec& x, const Dim& a, const TensorSpec& y, const Dim& b) {
  if (a.axes.size() > b.axes.size()) return blocks_differ(y, b, x, a);
  const Text why = "dim " + quoted(to_string(a)) + " of " + quoted(to_string(x)) + " is " + quoted(to_string(b)) +
                   " in " + quoted(to_string(y)) + ", so their blocks differ; ";
  if (!is_prefix(a.axes, b.axes)) return why + "`all_gather` one of them and `slice` it like the other (communicates)";
  TensorSpec gathered = y, sliced = x;
  gathered.dims[y.find(b.name)].axes = a.axes;
  sliced.dims[x.find(a.name)].axes = b.axes;
  Text remedy = "take " + suggestion("all_gather", y, gathered) + " (communicates)";
  if (slice(to_string(x) + " -> " + to_string(sliced), to_string(x)).ok())
    remedy = remedy + " or " + suggestion("slice", x, sliced) + " (no traffic)";
  return why + remedy;
}

constexpr TensorSpec without_sums(TensorSpec x) {
  x.partial = {};
  return x;
}

/// "a `reduce_scatter` or `all_reduce<...>` (communicate)"
constexpr Text reduction(const TensorSpec& x) {
  const Text all_reduce = suggestion("all_reduce", x, without_sums(x));
  return x.rank() == 0 ? all_reduce + " (communicates)" : "a `reduce_scatter` or " + all_reduce + " (communicate)";
}

/// The remedy for an op that takes no partial operand.
constexpr Text reduce_first(const TensorSpec& x) {
  return "reduce it first, with " + reduction(x);
}

}  // namespace shardlib::rules
