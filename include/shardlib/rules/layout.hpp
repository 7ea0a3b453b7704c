// Typing rules of ops that move or rename elements without computing: rename, rearrange, merge, split, stack_shards,
// broadcast, concat, stack, unstack.
#pragma once

#include "shardlib/rules/local.hpp"

#include <cstdint>
#include <string_view>

namespace shardlib::rules {

namespace detail_ {
/// Checks an operand's concat dim, which must be named and unsharded.
constexpr Text concat_dim(const TensorSpec& x, std::string_view dim) {
  if (const Text why = unsharded(x, dim); !why.empty()) return why;
  if (x.dims[x.find(dim)].is_integer())
    return "an integer dim has one exact size; name it first, " + quoted("rename<\"" + Text(dim) + " -> name\">");
  return {};
}
/// Whether the text is the name of one dim, without axes.
constexpr bool is_name(const ParsedTensor& text) {
  return text.error.empty() && text.spec.rank() == 1 && are_names(text.spec);
}
}  // namespace detail_

/// concat<"L1, L2 -> L">(a, b): a linear op. The dim is unsharded and the other dims are equal. All three specs use
/// different names for the dim, because a name has one size.
constexpr Verdict concat(const ParsedOp& op, const TensorSpec& a, const TensorSpec& b) {
  const Text form = "write the dim's name in each operand and in the result, `concat<\"L1, L2 -> L\">(a, b)`";
  if (op.form != ParsedOp::whole) return {{}, title_of("concat", op.text) + ": " + form};
  const OpCall call = call_of("concat", op, 2);
  if (!call.why.empty()) return {{}, call.why};
  const auto fail = [&](const Text& why) { return Verdict{{}, call.title() + ": " + why}; };
  for (const TensorSpec* side : {&call.op.in[0], &call.op.in[1], &call.op.out})
    if (side->rank() != 1 || !side->partial.empty() || !side->dims[0].axes.empty())
      return fail(form + ", without axes");
  TensorSpec in[2] = {a, b};
  const std::string_view to = call.op.out.dims[0].name;
  for (int i = 0; i < 2; ++i) {
    const std::string_view from = call.op.in[i].dims[0].name;
    if (const Text why = detail_::concat_dim(in[i], from); !why.empty()) return fail(why);
    if (from == to)
      return fail(
          "the result's dim is longer than those of the operands, and a name has one size; give it another name than " +
          quoted(to));
    if (in[i].has(to)) return fail("the operand " + quoted(i == 0 ? a : b) + " already has a dim " + quoted(to));
    Dim& dim = in[i].dims[in[i].find(from)];
    dim.name = to;
    dim.integer = -1;
  }
  if (call.op.out.dims[0].is_integer())
    return fail("the result's dim gets its size from the operands'; give it a name");
  if (!(in[0] == in[1])) {
    TensorSpec wanted = in[0];
    wanted.dims[wanted.find(to)] = call.op.in[1].dims[0];
    const bool twice = in[0].has(call.op.in[1].dims[0].name);  // then no spec has these dims
    const Text advice = twice ? Text() : conversion(b, wanted);
    return fail("the second operand, " + quoted(b) + ", must have the other dims of the first, " + quoted(a) + ": " +
                difference(in[1], in[0]) + (advice.empty() ? "" : "; ") + advice);
  }
  return {in[0], {}};
}

/// narrow<"L -> N">(x, begin, size), pad<"L -> N">(x, before, after): linear ops along an unsharded dim. The result's
/// dim has another name, because a name has one size.
constexpr Verdict resize(std::string_view name, const ParsedOp& op, const TensorSpec& x) {
  const Text form = "write the dim's name in the operand and in the result, " + quoted(Text(name) + "<\"L -> N\">");
  if (op.form != ParsedOp::whole) return {{}, title_of(name, op.text) + ": " + form};
  const OpCall call = call_of(name, op, 1);
  if (!call.why.empty()) return {{}, call.why};
  const auto fail = [&](const Text& why) { return Verdict{{}, call.title() + ": " + why}; };
  for (const TensorSpec* side : {&call.op.in[0], &call.op.out})
    if (side->rank() != 1 || !side->partial.empty() || !side->dims[0].axes.empty())
      return fail(form + ", without axes");
  const std::string_view from = call.op.in[0].dims[0].name, to = call.op.out.dims[0].name;
  TensorSpec out = x;
  if (const Text why = detail_::unsharded(out, from); !why.empty()) return fail(why);
  if (from == to)
    return fail("the result's dim has another size, and a name has one size; give it another name than " + quoted(to));
  if (call.op.out.dims[0].is_integer())
    return fail("the size of the result's dim is a number in the call; name the dim");
  if (out.has(to)) return fail("the operand " + quoted(x) + " already has a dim " + quoted(to));
  out.dims[out.find(from)] = call.op.out.dims[0];
  return {out, {}};
}
/// pad with a number other than 0: as adding a constant, not of a partial operand.
constexpr Verdict pad_with(const ParsedOp& op, const TensorSpec& x) {
  const Verdict verdict = add_constant("pad", x);
  return verdict.ok() ? resize("pad", op, x) : verdict;
}

/// transpose(x) reverses the order of the dims. transpose<"A", "B">(x) exchanges two dims.
constexpr Verdict transpose(const TensorSpec& x) {
  TensorSpec out = x;
  for (int i = 0; i < x.rank(); ++i) out.dims[i] = x.dims[x.rank() - 1 - i];
  if (x.rank() < 2) return {x, "transpose: " + quoted(x) + " has fewer than two dims; drop the op"};
  return {out, {}};
}
constexpr Verdict transpose2(std::string_view a, std::string_view b, const TensorSpec& x) {
  const Text title = Text("transpose<") + quoted(a) + ", " + quoted(b) + ">: ";
  TensorSpec out = x;
  for (auto name : {a, b})
    if (!x.has(name)) return {x, title + "the operand " + quoted(x) + " has no dim " + quoted(name)};
  if (a == b) return {x, title + "write two dims"};
  out.dims[x.find(a)] = x.dims[x.find(b)];
  out.dims[x.find(b)] = x.dims[x.find(a)];
  return {out, {}};
}
/// Reports a transpose to an order of the dims.
constexpr Verdict transpose_to(const ParsedOp& op, const TensorSpec& x) {
  return {x, title_of("transpose", op.text) +
                 ": it reverses all dims, or exchanges two; take `rearrange` with this op spec"};
}

/// top_k<"V", "K">(x, k): along an unsharded dim V. K stands in its place.
constexpr Verdict top_k(std::string_view dim, std::string_view into, const TensorSpec& x) {
  const Text title = Text("top_k<") + quoted(dim) + ", " + quoted(into) + ">: ";
  if (const Text why = detail_::nonlinear("top_k", x); !why.empty()) return {x, why};
  if (const Text why = detail_::unsharded(x, dim); !why.empty()) return {x, title + why};
  const ParsedTensor name = parse_tensor(into);
  if (!detail_::is_name(name)) return {x, title + "write the name of the result's dim, without axes"};
  if (x.has(into))
    return {x, title + "the operand " + quoted(x) + " already has a dim " + quoted(into) +
                   ", and a name has one size; write another name for the result's dim"};
  TensorSpec out = x;
  out.dims[x.find(dim)] = name.spec.dims[0];
  return {out, {}};
}

/// stack<"S">(a, b): operands of one spec along a new dim, which is the first of the result.
constexpr Verdict stack(std::string_view dim, const TensorSpec& a, const TensorSpec& b) {
  const Text title = title_of("stack", dim) + ": ";
  const ParsedTensor name = parse_tensor(dim);
  if (!detail_::is_name(name)) return {{}, title + "write the name of the new dim, without axes"};
  if (!(a == b)) {
    const Text advice = conversion(b, a);
    return {{},
            title + "the operands are stacked as they are, but " + quoted(b) + " is not " + quoted(a) + ": " +
                difference(b, a) + (advice.empty() ? "" : "; ") + advice};
  }
  if (a.has(dim)) return {{}, title + "the operand " + quoted(a) + " already has a dim " + quoted(dim)};
  if (a.dims.full()) return {{}, title + "the result has more than " + number(max_dims) + " dims"};
  TensorSpec out;
  out.dims.push_back(name.spec.dims[0]);
  for (const Dim& each : a.dims) out.dims.push_back(each);
  out.partial = a.partial;
  return {out, {}};
}

/// unstack<"S">(x): the parts along the first dim, which is unsharded. The inverse of stack. `what` is an operand, or a
/// leaf of a stacked tree.
constexpr Verdict unstack(std::string_view op, std::string_view what, std::string_view dim, const TensorSpec& x) {
  const Text title = title_of(op, dim) + ": the " + what + " " + quoted(x);
  const auto fail = [&](const Text& why) { return Verdict{{}, title + why}; };
  if (!detail_::is_name(parse_tensor(dim)))
    return {{}, title_of(op, dim) + ": write the name of the stacked dim, without axes"};
  const int at = x.find(dim);
  if (at < 0)
    return fail(
        " has no dim " + quoted(dim) +
        (what == "leaf" ? "; `stack` the tensors of all layers along it, or pass this one as an argument" : Text()));
  if (!x.dims[at].axes.empty())
    return fail(" is sharded along " + quoted(dim) + ", so no device has all parts; gather that dim first, or " +
                "shard another one");
  TensorSpec first, out = x;
  out.dims.erase(at);
  first.dims.push_back(x.dims[at]);
  for (const Dim& dim_of_part : out.dims) first.dims.push_back(dim_of_part);
  first.partial = x.partial;
  if (at > 0) return fail(" has other dims before " + quoted(dim) + "; " + conversion(x, first));
  return {out, {}};
}

/// rename<"L -> Klen">, rename<"A B -> C D">: copies nothing.
constexpr Verdict rename(const ParsedOp& names, const TensorSpec& x) {
  const OpCall call = call_of("rename", names, 1);
  if (!call.why.empty()) return {{}, call.why};
  const auto fail = [&](const Text& why) { return Verdict{{}, call.title() + ": " + why}; };
  const TensorSpec &from = call.op.in[0], &to = call.op.out;
  if (from.rank() != to.rank()) return fail("write as many names on the right as on the left");
  for (const TensorSpec* side : {&from, &to}) {
    if (!side->partial.empty()) return fail("write names of dims only; a pending sum stays pending");
    for (const Dim& dim : side->dims)
      if (!dim.axes.empty())
        return fail("write names of dims only, without axes; " + quoted(dim.name) + " keeps its sharding");
  }
  TensorSpec out = x;
  for (int i = 0; i < from.rank(); ++i) {
    const std::string_view name = from.dims[i].name;
    int skip = 0, there = 0, at = -1;
    for (int j = 0; j < i; ++j) skip += from.dims[j].name == name;
    for (int j = 0; j < x.rank(); ++j)
      if (x.dims[j].name == name && there++ == skip) at = j;
    if (at < 0) return fail("the operand " + quoted(x) + " has no dim " + quoted(name));
    for (int j = i + 1; j < from.rank(); ++j) skip += from.dims[j].name == name;
    if (there != skip + 1)
      return fail("integer dim " + quoted(name) + " appears more than once in " + quoted(x) + "; rename all of them");
    if (to.dims[i].is_integer()) return fail("a dim cannot be renamed to an integer");
    out.dims[at].name = to.dims[i].name;
    out.dims[at].integer = -1;
  }
  for (int i = 0; i < out.rank(); ++i)
    if (out.find(out.dims[i].name) != i && !out.dims[i].is_integer())
      return fail("the operand " + quoted(x) + " already has a dim " + quoted(out.dims[i].name));
  return {out, {}};
}

/// rearrange<"A B/t -> B/t A">: the same dims in another order (a local copy).
constexpr Verdict rearrange(const ParsedOp& op, const TensorSpec& x) {
  const OpCall call = call_of("rearrange", op, x);
  if (!call.why.empty()) return call.fail();
  const TensorSpec &in = call.op.in[0], &out = call.op.out;
  if (in.rank() != out.rank()) return call.fail("the result must have exactly the dims of the operand");
  for (int i = 0; i < in.rank(); ++i)
    if (in.find(in.dims[i].name) != i)
      return call.fail("integer dim " + quoted(in.dims[i].name) +
                       " appears twice; `rename` one of the two first (free)");
  for (const Dim& dim : out.dims) {
    const int at = in.find(dim.name);
    if (at < 0) return call.fail("dim " + quoted(dim.name) + " is not in the operand");
    if (!(in.dims[at] == dim))
      return call.fail("dim " + quoted(in.dims[at]) + " cannot become " + quoted(dim) +
                       ": a rearrange only reorders; change the sharding before or afterwards");
  }
  if (!(in.partial == out.partial)) return call.fail(other_sums(in, out));
  return call.accept();
}

namespace detail_ {
/// Replaces the adjacent dims `from` with `to`. Only the major dim may be sharded.
constexpr Verdict regroup(const char* op_name, const ParsedOp& op, const TensorSpec& x) {
  const OpCall call = call_of(op_name, op, 1);
  if (!call.why.empty()) return {{}, call.why};
  const auto fail = [&](const Text& why) { return Verdict{{}, call.title() + ": " + why}; };
  const TensorSpec &from = call.op.in[0], &to = call.op.out;
  const bool merging = std::string_view(op_name) == "merge";
  const TensorSpec &many = merging ? from : to, &one = merging ? to : from;
  if (one.rank() != 1 || many.rank() < 2)
    return fail(merging ? "write the adjacent dims to merge, and one name: `H/t D -> E/t`"
                        : "write the dim to split, and its parts: `E/t -> H/t D`");
  if (!from.partial.empty() || !to.partial.empty()) return fail("write dims only; a pending sum stays pending");
  for (int i = 1; i < many.rank(); ++i)
    if (!many.dims[i].axes.empty())
      return fail("dim " + quoted(many.dims[i]) + " is sharded, but axes may be on the major part " +
                  quoted(many.dims[0].name) + " only" + (merging ? "; `all_gather` it first (communicates)" : ""));
  for (const Dim& dim : many.dims)
    if (!dim.is_integer() && dim.name == one.dims[0].name)
      return fail("dim " + quoted(dim.name) +
                  " is on both sides, with two sizes, and a name has one size; write another name for the " +
                  (merging ? "result" : "part"));
  if (!(many.dims[0].axes == one.dims[0].axes))
    return fail(quoted(one.dims[0]) + " must have the axes of the major part " + quoted(many.dims[0]));
  if (one.dims[0].is_integer()) {
    constexpr std::int64_t large = 2'000'000'000;  // larger than any integer dim
    std::int64_t product = 1;
    bool named = false;
    for (const Dim& dim : many.dims) {
      named = named || !dim.is_integer();
      product = product * dim.integer < large ? product * dim.integer : large;
    }
    if (merging && named) return fail("the size of the result is not known here; write a name for it");
    if (!named && product != one.dims[0].integer)
      return fail("the product of the sizes " + quoted(many) + " is not " + one.dims[0].name);
  }
  int at = -1;
  for (int i = 0; i + from.rank() <= x.rank() && at < 0; ++i) {
    bool here = true;
    for (int j = 0; j < from.rank(); ++j) here = here && x.dims[i + j] == from.dims[j];
    if (here) at = i;
  }
  if (at < 0) return fail("the operand " + quoted(x) + " has no " + quoted(from) + (merging ? " side by side" : ""));
  TensorSpec out;
  out.partial = x.partial;
  for (int i = 0; i < x.rank() - from.rank() + to.rank(); ++i) {
    if (out.dims.full()) return fail("the result has more than " + number(max_dims) + " dims");
    out.dims.push_back(i < at ? x.dims[i] : i < at + to.rank() ? to.dims[i - at] : x.dims[i - to.rank() + from.rank()]);
  }
  // A name may stand twice now.
  if (const auto parsed = parse_tensor(to_string(out)); !parsed.error.empty()) return fail(parsed.error);
  return {out, {}};
}
}  // namespace detail_

/// merge<"H/t D -> E/t">: merges adjacent dims into one.
constexpr Verdict merge(const ParsedOp& op, const TensorSpec& x) {
  return detail_::regroup("merge", op, x);
}
/// split<"E/t -> H/t D">: the inverse of merge. The sizes of the new dims are known at run time.
constexpr Verdict split(const ParsedOp& op, const TensorSpec& x) {
  return detail_::regroup("split", op, x);
}

namespace detail_ {
/// stack_shards from `apart` to `stacked`, or unstack_shards back: dims give all their axes to a new first dim.
constexpr Verdict shards(const OpCall& call, const TensorSpec& apart, const TensorSpec& stacked) {
  if (stacked.rank() != apart.rank() + 1)
    return call.fail("the stack has one dim more, the first, with an element for each device: `B/d L/s -> P/d/s U W`");
  const Dim& first = stacked.dims[0];
  const Text stack = "the first dim of the stack, " + quoted(first) + ",";
  const auto reused = [&](const Dim& dim) {
    return call.fail("dim " + quoted(dim.name) + " would have two sizes; write another name in the stack");
  };
  if (!first.is_integer() && apart.has(first.name)) return reused(first);
  Axes given;
  for (int i = 0; i < apart.rank(); ++i) {
    const Dim &whole = apart.dims[i], &shard = stacked.dims[i + 1];
    if (whole == shard) continue;
    const Text is = "dim " + quoted(whole), one = quoted(shard);
    if (whole.axes.empty())
      return call.fail(is + " is not sharded, so it stays in the stack; write " + quoted(whole) + " there, not " + one);
    if (!shard.axes.empty())
      return call.fail(is + " cannot be " + one +
                       " in the stack; leave it as it is, or give all its axes to the first");
    if (shard.is_integer()) return call.fail(is + " cannot be " + one + "; write a name, which takes any size");
    if (apart.has(shard.name)) return reused(shard);
    for (auto axis : whole.axes) {
      given.push_back(axis);
      if (!first.axes.contains(axis))
        return call.fail(stack + " lacks the axis " + axis + " of " + is + "; write it there");
    }
  }
  for (auto axis : first.axes)
    if (!given.contains(axis))
      return call.fail(stack + " has the axis " + axis + ", which it gets from no dim; leave it out there");
  if (given.empty())
    return call.fail("no dim gives its axes to the first, so there are no shards to stack; drop the op");
  if (!(call.op.in[0].partial == call.op.out.partial)) return call.fail(other_sums(call.op.in[0], call.op.out));
  return call.accept();
}
}  // namespace detail_

/// stack_shards<"B/d/e L/s M -> P/s/d/e U W M">: the shards of B and L along a new first dim.
constexpr Verdict stack_shards(const ParsedOp& op, const TensorSpec& x) {
  const OpCall call = call_of("stack_shards", op, x);
  return call.why.empty() ? detail_::shards(call, call.op.in[0], call.op.out) : call.fail();
}
/// unstack_shards<"P/s/d/e U W M -> B/d/e L/s M">: the inverse.
constexpr Verdict unstack_shards(const ParsedOp& op, const TensorSpec& x) {
  const OpCall call = call_of("unstack_shards", op, x);
  return call.why.empty() ? detail_::shards(call, call.op.out, call.op.in[0]) : call.fail();
}

/// broadcast<"M -> B/d M">: repeats a replicated value along new dims.
constexpr Verdict broadcast(const ParsedOp& op, const TensorSpec& x) {
  const OpCall call = call_of("broadcast", op, x);
  if (!call.why.empty()) return call.fail();
  const TensorSpec &in = call.op.in[0], &out = call.op.out;
  int last = -1;
  for (const Dim& dim : in.dims) {
    const int at = out.find(dim.name);
    if (at < 0) return call.fail("the result lacks dim " + quoted(dim) + " of the operand");
    if (!(out.dims[at] == dim))
      return call.fail("dim " + quoted(dim) + " must be unchanged in the result, not " + quoted(out.dims[at]));
    if (at < last) return call.fail("the dims of the operand must be in the same order in the result");
    last = at;
  }
  for (int i = 0; i < out.rank(); ++i)
    if (out.find(out.dims[i].name) != i)
      return call.fail("integer dim " + quoted(out.dims[i].name) + " appears twice; give the new one a name");
  if (!(in.partial == out.partial)) return call.fail(other_sums(in, out));
  if (in.rank() == out.rank()) return call.fail("the result has no new dim; drop the broadcast");
  return call.accept();
}

}  // namespace shardlib::rules
