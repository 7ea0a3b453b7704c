// Typing rules of the collectives and layout casts.
#pragma once

#include "shardlib/rules/common.hpp"

#include <string_view>

namespace shardlib::rules {

namespace detail_ {

/// The axes that `longer` has after its prefix `shorter`.
constexpr Axes suffix(const Axes& longer, const Axes& shorter) {
  Axes rest;
  for (int i = shorter.size(); i < longer.size(); ++i) rest.push_back(longer[i]);
  return rest;
}

constexpr Text not_last(const Dim& from, const Dim& to) {
  const Text why = "dim " + quoted(from) + " cannot become " + quoted(to) + ": ";
  if (is_prefix(to.axes, from.axes))
    return why + "this op drops no sharding; take `all_gather` for that (communicates)";
  // The dim that can make this change, if one has all axes of the other.
  const bool gathers = to.axes.size() < from.axes.size();
  const Dim &fewer = gathers ? to : from, &more = gathers ? from : to;
  Dim possible = fewer;
  for (auto axis : more.axes)
    if (!fewer.axes.contains(axis) && !possible.axes.full()) possible.axes.push_back(axis);
  const Text rule = why + "axes come and go at the end of a dim only";
  if (possible.axes.size() != more.axes.size()) return rule + " (`A/x/y` can become `A/x`, not `A/y`)";
  return rule + " (" + quoted(gathers ? possible : from) + " can become " + quoted(gathers ? to : possible) + ")";
}

constexpr Text other_dims(const TensorSpec& in, const TensorSpec& out) {
  return "the dims of the result, " + quoted(out) + ", must be those of the operand, " + quoted(in) +
         ", in the same order";
}

/// Names the op that shards a dim over the axis, given the operand's placement on the axis.
constexpr Text sharding_op(const TensorSpec& in, std::string_view axis) {
  const auto kind = in.placement(axis).kind;
  return "as the operand is " + describe(in, axis) + ", take " +
         (kind == Placement::replicated ? "`shard` (no traffic)"
          : kind == Placement::partial  ? "`reduce_scatter` (communicates)"
                                        : "`all_to_all` (communicates)") +
         " for that";
}

constexpr Verdict gather(const OpCall& call) {
  if (!call.why.empty()) return call.fail();
  const TensorSpec &in = call.op.in[0], &out = call.op.out;
  if (!same_names(in, out)) return call.fail(other_dims(in, out));
  bool gathers = false;
  for (int i = 0; i < in.rank(); ++i) {
    const Dim &from = in.dims[i], &to = out.dims[i];
    if (from.axes == to.axes) continue;
    for (auto axis : to.axes)
      if (!from.axes.contains(axis))
        return call.fail("dim " + quoted(from) + " is not sharded over " + axis + ", and a gather adds no sharding; " +
                         sharding_op(in, axis));
    if (!is_prefix(to.axes, from.axes)) return call.fail(not_last(from, to));
    gathers = true;
  }
  if (!(in.partial == out.partial)) return call.fail(other_sums(in, out));
  if (!gathers) return call.fail("no dim loses an axis, so nothing would be gathered; drop the gather");
  return call.accept();
}
}  // namespace detail_

/// all_gather<"A/t -> A">: S -> R. Removes the last axes of one or several dims.
constexpr Verdict all_gather(const ParsedOp& op, const TensorSpec& x) {
  return detail_::gather(call_of("all_gather", op, x));
}

/// reduce_scatter<"A +t -> A/t">: P -> S. Completes the partial sum and leaves each device its shard.
constexpr Verdict reduce_scatter(const ParsedOp& op, const TensorSpec& x) {
  const OpCall call = call_of("reduce_scatter", op, x);
  if (!call.why.empty()) return call.fail();
  const TensorSpec &in = call.op.in[0], &out = call.op.out;
  if (!same_names(in, out)) return call.fail(detail_::other_dims(in, out));
  Axes rest = in.partial;
  for (int i = 0; i < in.rank(); ++i) {
    const Dim &from = in.dims[i], &to = out.dims[i];
    if (from.axes == to.axes) continue;
    if (!is_prefix(from.axes, to.axes)) return call.fail(detail_::not_last(from, to));
    for (auto axis : detail_::suffix(to.axes, from.axes)) {
      const int at = rest.find(axis);
      if (at < 0)
        return call.fail("the operand " + quoted(in) + " is " + describe(in, axis) + ", not partial" +
                         (in.placement(axis).kind == Placement::replicated
                              ? ": summing it again would multiply it by the size of " + Text(axis) +
                                    "; take `shard` for the shard of each device without a sum (no traffic)"
                              : Text("; take `all_to_all` to move the sharding to another dim (communicates)")));
      rest.erase(at);
    }
  }
  for (auto axis : rest)
    if (!out.partial.contains(axis))
      return call.fail("the sum over " + Text(axis) + " is neither scattered (no dim gains `/" + axis +
                       "`) nor kept (`+" + axis + "`) in the result; take `all_reduce` for it (communicates)");
  if (const Text why = new_sum(rest, out); !why.empty()) return call.fail(why);
  if (rest.size() == in.partial.size())
    return call.fail("no dim gains an axis, so nothing would be scattered; drop the op");
  return call.accept();
}

namespace detail_ {
/// Explains that no op acts over the axes without names.
constexpr Text not_named(const TensorSpec& in, const TensorSpec& out) {
  if (in.partial.contains(unnamed_axes) == out.partial.contains(unnamed_axes)) return {};
  return "this op acts over axes that have names: " + naming_axes();
}
}  // namespace detail_

/// all_reduce<"A +t -> A">: P -> R. Every device gets the sum of all devices' values.
constexpr Verdict all_reduce(const ParsedOp& op, const TensorSpec& x) {
  const OpCall call = call_of("all_reduce", op, x);
  if (!call.why.empty()) return call.fail();
  const TensorSpec &in = call.op.in[0], &out = call.op.out;
  if (!(in.dims == out.dims)) {
    Text advice;
    if (all_gather(op, in).ok()) advice = "; take " + suggestion("all_gather", in, out) + " (communicates)";
    if (reduce_scatter(op, in).ok()) advice = "; take " + suggestion("reduce_scatter", in, out) + " (communicates)";
    return call.fail(detail_::other_dims(in, out) + " and with the same sharding" + advice);
  }
  if (const Text why = detail_::not_named(in, out); !why.empty()) return call.fail(why);
  if (const Text why = new_sum(in.partial, out); !why.empty()) return call.fail(why);
  if (in.partial == out.partial)
    return call.fail("no sum is pending in " + quoted(in) +
                     " that the result lacks, and to reduce a value twice multiplies it by the size of the axis; "
                     "drop the all_reduce");
  return call.accept();
}

/// all_reduce_max<"A V/t -> A">: the local maximum over the dims that the result lacks, then the maximum over the
/// devices along their axes.
constexpr Verdict all_reduce_max(const ParsedOp& op, const TensorSpec& x) {
  const OpCall call = call_of("all_reduce_max", op, x);
  if (!call.why.empty()) return call.fail();
  const TensorSpec &in = call.op.in[0], &out = call.op.out;
  if (!in.partial.empty())
    return call.fail("the operand " + quoted(in) + " is partial over " + in.partial[0] +
                     ", and the maximum of a sum is not that of its parts; " + reduce_first(in));
  if (!out.partial.empty()) return call.fail("a maximum has no pending sum; drop `+" + Text(out.partial[0]) + "`");
  Small<Dim, max_dims> removed;
  if (const Text why = removed_dims(call, removed); !why.empty()) return call.fail(why);
  return call.accept();
}

/// all_to_all<"A/t B -> A B/t">: S -> S. The last axes of one dim become the last axes of another.
constexpr Verdict all_to_all(const ParsedOp& op, const TensorSpec& x) {
  const OpCall call = call_of("all_to_all", op, x);
  if (!call.why.empty()) return call.fail();
  const TensorSpec &in = call.op.in[0], &out = call.op.out;
  if (!same_names(in, out)) return call.fail(detail_::other_dims(in, out));
  if (!(in.partial == out.partial)) return call.fail(other_sums(in, out));
  Small<Axes, max_dims> removed, added;
  for (int i = 0; i < in.rank(); ++i) {
    const Dim &from = in.dims[i], &to = out.dims[i];
    if (from.axes == to.axes) continue;
    if (is_prefix(to.axes, from.axes))
      removed.push_back(detail_::suffix(from.axes, to.axes));
    else if (is_prefix(from.axes, to.axes))
      added.push_back(detail_::suffix(to.axes, from.axes));
    else
      return call.fail(detail_::not_last(from, to));
  }
  for (const Axes& axes : removed)
    if (!added.contains(axes))
      return call.fail(
          "the sharding over " + joined(axes, ", ") +
          " leaves one dim, but no other dim gains it; take `all_gather` to drop a sharding (communicates)");
  for (const Axes& axes : added)
    if (!removed.contains(axes))
      return call.fail("a dim gains the sharding over " + joined(axes, ", ") +
                       " that no other dim gives up; take `shard` to add a sharding (no traffic)");
  if (removed.empty()) return call.fail("no axis moves; drop the all_to_all");
  return call.accept();
}

namespace detail_ {
constexpr Verdict shift(const Text& title, const TensorSpec& spec, std::string_view axis, const TensorSpec& x) {
  if (const Text why = check_operand(x, spec, "the operand", false); !why.empty()) return {spec, title + ": " + why};
  if (spec.placement(axis).kind != Placement::sharded)
    return {x, title + ": the operand " + quoted(x) + " is " + describe(spec, axis) +
                   "; only the shards of a dim that is sharded over " + axis + " can be passed round its ring"};
  return {spec, {}};
}
}  // namespace detail_

/// shift<"A/t", "t">(x, k): S -> S. Device i's shard goes to device (i + k) mod n of axis t.
constexpr Verdict shift(const ParsedOp& spec, std::string_view axis, const TensorSpec& x) {
  const Text title = Text("shift<") + quoted(spec.text) + ", " + quoted(axis) + ">";
  const ParsedTensor parsed = spec.form == ParsedOp::result ? spec.named : parse_tensor(spec.text);
  if (!parsed.error.empty()) return {x, title + ": " + parsed.error};
  if (has_brackets(parsed.spec)) return {x, title + ": " + no_brackets};
  return detail_::shift(title, parsed.spec, axis, x);
}

/// shift<over<"t">>(x, k): only the axis is given.
constexpr Verdict shift_over(const ParsedOp& op, const TensorSpec& x) {
  const auto axis = over_axes(op.text);
  if (axis.empty())
    return {x, title_of("shift", op.text) +
                   ": write the axis whose ring the shards pass round, `shift<over<\"t\">>(x, k)`"};
  return detail_::shift(Text("shift<") + quoted(x) + ", " + quoted(axis) + ">", x, axis, x);
}

/// Reports an InFlight that is declared as a tensor.
constexpr Verdict not_awaited(const TensorSpec& from, const TensorSpec& to, const TensorSpec& declared) {
  return {declared, "an InFlight from " + quoted(from) + " to " + quoted(to) + " is not a tensor " + quoted(declared) +
                        ": its collective may still run; give it to `wait`, as in `wait(std::move(coming))`"};
}

/// shard<"A -> A/t">: R -> S. Each device keeps its shard, without communication.
constexpr Verdict shard(const ParsedOp& op, const TensorSpec& x) {
  const OpCall call = call_of("shard", op, x);
  if (!call.why.empty()) return call.fail();
  const TensorSpec &in = call.op.in[0], &out = call.op.out;
  if (!same_names(in, out)) return call.fail(detail_::other_dims(in, out));
  bool shards = false;
  for (int i = 0; i < in.rank(); ++i) {
    const Dim &from = in.dims[i], &to = out.dims[i];
    if (from.axes == to.axes) continue;
    if (!is_prefix(from.axes, to.axes)) return call.fail(detail_::not_last(from, to));
    for (auto axis : detail_::suffix(to.axes, from.axes))
      if (in.placement(axis).kind != Placement::replicated)
        return call.fail(
            "the operand is " + describe(in, axis) + ", and only a replicated value can be sharded; take " +
            (in.placement(axis).kind == Placement::partial ? "`reduce_scatter`" : "`all_to_all`") + " (communicates)");
    shards = true;
  }
  if (!(in.partial == out.partial)) return call.fail(other_sums(in, out));
  if (!shards) return call.fail("no dim gains an axis; drop the op");
  return call.accept();
}

/// to_partial<"A -> A +t">: R -> P. The first device of the axis keeps the value, the others hold zero.
constexpr Verdict to_partial(const ParsedOp& op, const TensorSpec& x) {
  const OpCall call = call_of("to_partial", op, x);
  if (!call.why.empty()) return call.fail();
  const TensorSpec &in = call.op.in[0], &out = call.op.out;
  if (!(in.dims == out.dims)) return call.fail(detail_::other_dims(in, out) + " and with the same sharding");
  if (const Text why = detail_::not_named(in, out); !why.empty()) return call.fail(why);
  for (auto axis : in.partial)
    if (!out.partial.contains(axis))
      return call.fail("the pending sum over " + Text(axis) +
                       " cannot be dropped; take `all_reduce` for it (communicates)");
  for (auto axis : out.partial)
    if (!in.partial.contains(axis) && in.placement(axis).kind != Placement::replicated)
      return call.fail("the operand is " + describe(in, axis) + ", and only a replicated value can become a summand");
  if (in.partial == out.partial) return call.fail("the result has no new `+axis`; drop the to_partial");
  return call.accept();
}

}  // namespace shardlib::rules
