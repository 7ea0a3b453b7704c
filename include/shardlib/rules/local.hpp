// Typing rules of ops without communication: elementwise ops, reductions, ops along a dim.
#pragma once

#include "shardlib/rules/einsum.hpp"
#include "shardlib/rules/sharded_dims.hpp"

#include <string_view>

namespace shardlib::rules {

namespace detail_ {

constexpr Text nonlinear(std::string_view name, const TensorSpec& x) {
  if (x.partial.empty()) return {};
  return Text(name) + ": the operand " + quoted(x) + " is partial over " + x.partial[0] + ", and " + name +
         " is not linear, so it has to see the sum, not the summand of one device; " + reduce_first(x);
}

/// "+ of `A` and `B`"
constexpr Text of(std::string_view name, const Operands& in) {
  Text text(name);
  for (int i = 0; i < in.size(); ++i)
    text = text + (i == 0 ? " of " : i + 1 < in.size() ? ", " : " and ") + quoted(in[i]);
  return text;
}

/// The dims of a broadcast's result: those of the first operand, or of one that has all of these and more, then the
/// dims that the others add. Shared dims must be in the same order.
constexpr Text broadcast(const Operands& in, TensorSpec& out) {
  int widest = 0;
  for (int i = 1; i < in.size(); ++i) {
    bool contains = true;
    for (const Dim& dim : in[widest].dims) contains = contains && in[i].has(dim.name);
    if (contains && in[i].rank() > in[widest].rank()) widest = i;
  }
  out.dims = in[widest].dims;
  Small<std::string_view, 4 * max_axes> axes;
  for (const TensorSpec& x : in) {
    collect_axes(x, axes);
    if (same_names(x, out)) continue;
    int last = -1;
    for (const Dim& dim : x.dims) {
      if (dim.is_integer())
        return "integer dim " + quoted(dim.name) + " of " + quoted(x) + " cannot be matched by name; name it first, " +
               quoted(Text("rename<\"") + dim.name + " -> name\">") + " (free)";
      int at = out.find(dim.name);
      if (at < 0) {
        if (out.dims.full()) return "the result has more than " + number(max_dims) + " dims";
        out.dims.push_back(dim);
        at = out.rank() - 1;
      }
      if (at < last)
        return "the dims of the result, " + quoted(out) + ", are in another order in " + quoted(x) +
               "; `rearrange` one of the operands (a local copy)";
      last = at;
    }
  }
  if (axes.size() > max_axes) return "the operands name more than " + number(max_axes) + " axes";
  return {};
}

/// The op that takes the sums of x which do not fit beside `other`: those over axes where that has this placement. Its
/// result has the sharding of `other`.
constexpr Text sum_beside(const TensorSpec& x, const TensorSpec& other, Placement::Kind kind) {
  TensorSpec sum = x;
  sum.partial = {};
  bool lacks_dims = false;
  for (auto axis : x.partial)
    if (other.placement(axis).kind != kind) sum.add_partial(axis);
  for (Dim& dim : sum.dims) {
    const int at = other.find(dim.name);
    lacks_dims = lacks_dims || at < 0;
    if (at >= 0) dim.axes = other.dims[at].axes;
  }
  if (kind == Placement::replicated && lacks_dims) return reduction(x);  // a dim that `other` lacks may be scattered
  const ParsedOp op(x, sum);
  if (reduce_scatter(op, x).ok()) return suggestion("reduce_scatter", x, sum) + " (communicates)";
  if (all_reduce(op, x).ok()) return suggestion("all_reduce", x, sum) + " (communicates)";
  return reduction(x);
}

/// If an axis shards a dim in one operand, every other operand has that dim with the same sharding, or lacks it and
/// is replicated on the axis.
constexpr Text align(const Operands& in) {
  for (const TensorSpec& x : in)
    for (const Dim& dim : x.dims)
      for (auto axis : dim.axes)
        for (const TensorSpec& y : in) {
          const Placement s = y.placement(axis);
          if (s.kind == Placement::partial)
            return quoted(y) + " is partial over " + axis + ", but " + quoted(x) + " is " + describe(x, axis) +
                   "; the former first needs its sum, with " + sum_beside(y, x, Placement::sharded);
          if (s.kind == Placement::sharded && y.dims[s.dim].name != dim.name)
            return quoted(x) + " is " + describe(x, axis) + ", but " + quoted(y) + " is " + describe(y, axis) +
                   ", so only diagonal shards would meet; `all_gather` one of them (communicates)";
        }
  for (const TensorSpec& x : in)
    for (const TensorSpec& y : in)
      for (const Dim& dim : x.dims)
        if (const int at = y.find(dim.name); at >= 0 && !(y.dims[at].axes == dim.axes))
          return shards_differ(x, dim, y, y.dims[at]);
  return {};
}

/// On each axis, all operands are partial or none is.
constexpr Text alike(const Operands& in) {
  for (const TensorSpec& x : in)
    for (auto axis : x.partial)
      for (const TensorSpec& y : in)
        if (const Placement s = y.placement(axis); s.kind == Placement::replicated) {
          TensorSpec summand = y;
          for (auto pending : x.partial)
            if (summand.placement(pending).kind == Placement::replicated && !summand.partial.full())
              summand.add_partial(pending);
          return quoted(x) + " is partial over " + axis + ", but " + quoted(y) + " is replicated over " + axis +
                 ", so the pending sum would count the latter once per device; " +
                 "first take the sum of the former, with " + sum_beside(x, y, Placement::replicated) +
                 (summand.partial.contains(unnamed_axes)
                      ? Text()
                      : ", or take " + suggestion("to_partial", y, summand) + " of the latter (no traffic)");
        }
  return {};
}

constexpr Verdict sum_like(const char* name, const ParsedOp& op, const TensorSpec& x) {
  const OpCall call = call_of(name, op, x);
  if (!call.why.empty()) return call.fail();
  Small<Dim, max_dims> removed;
  if (const Text why = removed_dims(call, removed); !why.empty()) return call.fail(why);
  if (const Text why = einsum(call.op, {"the operand", "", "summing over"}); !why.empty()) return call.fail(why);
  return call.accept();
}

constexpr Text unsharded(const TensorSpec& x, std::string_view dim) {
  const int at = x.find(dim);
  if (at < 0) {
    if (detail::find(dim, "->") != detail::npos || detail::find(dim, " ") != detail::npos)
      return "this op takes the name of one dim of the operand " + quoted(x) + ", not an op spec";
    if (const auto slash = detail::find(dim, "/"); slash != detail::npos)
      return "name the dim only, without axes: " + quoted(dim.substr(0, slash));
    return "the operand " + quoted(x) + " has no dim " + quoted(dim);
  }
  for (int i = at + 1; i < x.rank(); ++i)
    if (x.dims[i].name == dim) return "integer dim " + quoted(dim) + " appears twice; `rename` it first (free)";
  if (x.dims[at].axes.empty()) return {};
  TensorSpec gathered = x;
  gathered.dims[at].axes = {};
  return "dim " + quoted(x.dims[at]) + " is sharded, so each device sees only its shard of it; gather it first with " +
         suggestion("all_gather", x, gathered) + " (communicates)";
}

}  // namespace detail_

/// +, -, and where's branches: on each axis, all operands are partial or none is.
constexpr Verdict add(std::string_view name, const TensorSpec& a, const TensorSpec& b) {
  const auto in = detail_::operands(a, b);
  const auto fail = [&](const Text& why) { return Verdict{{}, detail_::of(name, in) + ": " + why}; };
  TensorSpec out;
  if (const Text why = detail_::broadcast(in, out); !why.empty()) return fail(why);
  if (const Text why = detail_::align(in); !why.empty()) return fail(why);
  if (const Text why = detail_::alike(in); !why.empty()) return fail(why);
  out.partial = in[0].partial;
  return {out, {}};
}

/// *: on each axis, at most one operand is partial and the other is replicated.
constexpr Verdict multiply(const TensorSpec& a, const TensorSpec& b) {
  const auto in = detail_::operands(a, b);
  const auto fail = [&](const Text& why) { return Verdict{{}, detail_::of("*", in) + ": " + why}; };
  TensorSpec out;
  if (const Text why = detail_::broadcast(in, out); !why.empty()) return fail(why);
  for (auto axis : in[0].partial)
    if (in[1].placement(axis).kind == Placement::partial)
      return fail("both are partial over " + Text(axis) +
                  ", and a product of sums is not the sum of the products; take `all_reduce` or `reduce_scatter` of "
                  "one first (communicates)");
  if (const Text why = detail_::align(in); !why.empty()) return fail(why);
  for (const TensorSpec& x : in)
    for (auto axis : x.partial) out.add_partial(axis);
  return {out, {}};
}

/// /: only the numerator may be partial.
constexpr Verdict divide(const TensorSpec& a, const TensorSpec& b) {
  const auto in = detail_::operands(a, b);
  const auto fail = [&](const Text& why) { return Verdict{{}, detail_::of("/", in) + ": " + why}; };
  if (!in[1].partial.empty())
    return fail("the divisor is partial over " + Text(in[1].partial[0]) +
                ", and a quotient by a sum is not the sum of the quotients; " + reduce_first(in[1]));
  TensorSpec out;
  if (const Text why = detail_::broadcast(in, out); !why.empty()) return fail(why);
  if (const Text why = detail_::align(in); !why.empty()) return fail(why);
  out.partial = in[0].partial;
  return {out, {}};
}

namespace detail_ {
constexpr Text drops_remainders(const TensorSpec& x) {
  return "the dividend is partial over " + Text(x.partial[0]) +
         ", and the integer quotient of each summand drops a remainder of its own; " + reduce_first(x);
}
}  // namespace detail_
/// / of integers: nothing may be partial.
constexpr Verdict divide_integers(const TensorSpec& a, const TensorSpec& b) {
  if (!a.partial.empty()) return {{}, detail_::of("/", detail_::operands(a, b)) + ": " + detail_::drops_remainders(a)};
  return divide(a, b);
}
constexpr Verdict divide_by_number(bool floats, const TensorSpec& a) {
  if (!floats && !a.partial.empty())
    return {{}, "/ of " + quoted(a) + " and a number: " + detail_::drops_remainders(a)};
  return {a, {}};
}

/// Any nonlinear op of one or more operands: none may be partial.
constexpr Verdict map(std::string_view name, const detail_::Operands& in) {
  for (const TensorSpec& x : in)
    if (const Text why = detail_::nonlinear(name, x); !why.empty()) return {{}, why};
  TensorSpec out;
  if (const Text why = detail_::broadcast(in, out); !why.empty()) return {{}, detail_::of(name, in) + ": " + why};
  if (const Text why = detail_::align(in); !why.empty()) return {{}, detail_::of(name, in) + ": " + why};
  return {out, {}};
}
constexpr Verdict map1(std::string_view name, const TensorSpec& a) {
  return map(name, detail_::operands(a));
}
constexpr Verdict map2(std::string_view name, const TensorSpec& a, const TensorSpec& b) {
  Verdict verdict = map(name, detail_::operands(a, b));
  if (name == "where" && !a.partial.empty())
    verdict.why =
        verdict.why + "; where the constant is 0, `masked(c, x)`, which keeps x where c holds, takes a partial x";
  return verdict;
}
template <class... T>
constexpr Verdict map_of(std::string_view name, const T&... operands) {
  return rules::map(name, detail_::operands(operands...));
}

/// where(c, a, b): c is never partial, and a and b follow the rule of +. masked(c, a) is where(c, a, a).
constexpr Verdict where(const TensorSpec& c, const TensorSpec& a, const TensorSpec& b) {
  if (const Text why = detail_::nonlinear("where", c); !why.empty()) return {{}, why};
  const Verdict branches = add("where", a, b);
  if (!branches.ok()) return branches;
  const auto in = detail_::operands(branches.result, c);
  TensorSpec out;
  if (const Text why = detail_::broadcast(in, out); !why.empty()) return {{}, detail_::of("where", in) + ": " + why};
  if (const Text why = detail_::align(in); !why.empty()) return {{}, detail_::of("where", in) + ": " + why};
  out.partial = in[0].partial;
  return {out, {}};
}

/// where(c, number, number)
constexpr Verdict where_of_numbers(const TensorSpec& c) {
  return {
      {},
      "where of " + quoted(c) +
          " and two numbers: they give the result no dtype; write `cast<f32>(c)`, which is 1 where c holds, else 0, "
          "or `where(c, full<...>, 0.0)` with a tensor"};
}

/// x + constant, and pad with a number other than 0.
constexpr Verdict add_constant(std::string_view name, const TensorSpec& a) {
  if (!a.partial.empty())
    return {{},
            Text(name) + " of " + quoted(a) + " and a constant: the operand is partial over " + a.partial[0] +
                ", and each device would count the constant again; " + reduce_first(a)};
  return {a, {}};
}

/// A linear op of one operand: negation, scaling, float casts, stop_gradient.
constexpr Verdict linear(const TensorSpec& x) {
  return {x, {}};
}

constexpr Verdict cast(bool to_float, bool from_float, const TensorSpec& x) {
  if (to_float && from_float) return linear(x);
  return map1("a cast to or from integers", x);
}

/// sum<"A/t B -> B +t">: a sum over a sharded dim stays partial over its axes, and the op spec says so.
constexpr Verdict sum(const ParsedOp& op, const TensorSpec& x) {
  return detail_::sum_like("sum", op, x);
}
/// mean<"A/t B -> B +t">: the sum divided by the global size.
constexpr Verdict mean(const ParsedOp& op, const TensorSpec& x) {
  return detail_::sum_like("mean", op, x);
}

/// max<"A B -> A">, min, prod and the like, and argmax for one dim: the removed dims must be unsharded, and nothing may
/// be partial.
constexpr Verdict local_max(std::string_view name, const ParsedOp& op, const TensorSpec& x) {
  const OpCall call = call_of(name, op, x);
  if (!call.why.empty()) return call.fail();
  Small<Dim, max_dims> removed;
  if (const Text why = detail_::nonlinear(name, call.op.in[0]); !why.empty()) return {call.op.out, why};
  if (const Text why = removed_dims(call, removed); !why.empty()) return call.fail(why);
  if (name == "argmax" && removed.size() != 1) return call.fail("an index is one along one dim: leave out exactly one");
  for (const Dim& dim : removed)
    if (const Text why = detail_::unsharded(call.op.in[0], dim.name); !why.empty())
      return call.fail(why + (name == "max" ? ", or take `all_reduce_max`, which sends the maxima only" : ""));
  if (!call.op.out.partial.empty())
    return call.fail((name == "max" || name == "argmax" ? Text("a maximum") : Text("the result of ") + name) +
                     " has no pending sum; drop `+" + Text(call.op.out.partial[0]) + "`");
  return call.accept();
}

/// cumsum along one named dim: the dim must be unsharded. The op is linear, so the operand may be partial.
constexpr Verdict linear_along(std::string_view name, std::string_view dim, const TensorSpec& x) {
  const Text why = detail_::unsharded(x, dim);
  if (why.empty()) return {x, {}};
  const int at = name == "cumsum" ? x.find(dim) : -1;
  if (at < 0 || x.dims[at].axes.empty() || !x.partial.empty()) return {x, title_of(name, dim) + ": " + why};
  return {x, title_of(name, dim) + ": " + why + ", or write " + form_over("linear_scan", dim, x.dims[at].axes) +
                 " with factors of 1, which gathers the last sums only (communicates)"};
}
/// softmax, rms_norm, layer_norm along one named dim: the dim must be unsharded, and nothing may be partial.
constexpr Verdict along(std::string_view name, std::string_view dim, const TensorSpec& x) {
  if (const Text why = detail_::nonlinear(name, x); !why.empty()) return {x, why};
  return linear_along(name, dim, x);
}

namespace detail_ {
/// A scale or bias of a norm along `dim`: that dim alone.
constexpr Text along_alone(const char* what, std::string_view name, std::string_view dim, const TensorSpec& x,
                           const TensorSpec& scale) {
  TensorSpec alone;
  alone.dims.push_back(x.dims[x.find(dim)]);
  if (scale == alone) return {};
  const Text advice = conversion(scale, alone);
  const Text why = title_of(name, dim) + ": the " + what + " is " + quoted(scale) + ", not " + quoted(alone);
  if (!advice.empty()) return why + "; " + advice;
  if (same_names(scale, alone)) return why + "; take its sum and gather it first (communicates)";
  const char* const spelled = name == "rms_norm" ? "\">(x) * scale" : "\">(x) * scale + bias";
  return why + "; along other dims write " + quoted(Text(name) + "<\"" + dim + spelled);
}
}  // namespace detail_
/// rms_norm with a scale, and layer_norm with a bias as well, which have the normalized dim alone.
constexpr Verdict scaled_norm(std::string_view name, std::string_view dim, const TensorSpec& x,
                              const TensorSpec& scale) {
  Verdict verdict = along(name, dim, x);
  if (verdict.ok()) verdict.why = detail_::along_alone("scale", name, dim, x, scale);
  return verdict;
}
constexpr Verdict affine_norm(std::string_view name, std::string_view dim, const TensorSpec& x, const TensorSpec& scale,
                              const TensorSpec& bias) {
  Verdict verdict = scaled_norm(name, dim, x, scale);
  if (verdict.ok()) verdict.why = detail_::along_alone("bias", name, dim, x, bias);
  return verdict;
}

/// An op along a dim that is called without its name. `more` is further names, with commas.
constexpr Verdict no_dim(std::string_view name, std::string_view more, const TensorSpec& x) {
  return {x,
          Text(name) + " of " + quoted(x) + ": write the name of the dim along which it acts, " +
              quoted(Text(name) + "<\"" + (x.rank() == 0 ? "M" : x.dims[x.rank() - 1].name) + "\"" + more + ">(...)")};
}

/// rope<"L", "D">: a rotation along D, which must be unsharded. L may be sharded, because the global index is known.
/// The op is linear, so the operand may be partial.
constexpr Verdict rope(std::string_view length, std::string_view dim, const TensorSpec& x) {
  const Text title = Text("rope<") + quoted(length) + ", " + quoted(dim) + ">: ";
  if (!x.has(length))
    return {x, title + "the operand " + quoted(x) + " has no dim " + quoted(length) + " to take positions from"};
  if (length == dim) return {x, title + "positions come from another dim than the one that is rotated"};
  if (const Text why = detail_::unsharded(x, dim); !why.empty()) return {x, title + why};
  return {x, {}};
}

}  // namespace shardlib::rules
