// Typing rules of windows and of conv_unreduced. A convolution has the rule of the einsum of the weights with the
// elements under each window.
#pragma once

#include "shardlib/rules/einsum.hpp"
#include "shardlib/rules/local.hpp"

#include <string_view>

namespace shardlib::rules {

/// The operand with the elements under each window: the lengths `to` in place of `from`, and behind the last of
/// them the dims of the window. "B L C" with `L, K -> N` is "B N K C".
constexpr TensorSpec under_windows(const TensorSpec& x, const TensorSpec& from, const TensorSpec& window,
                                   const TensorSpec& to) {
  TensorSpec seen;
  seen.partial = x.partial;
  int last = 0;
  for (const Dim& dim : from.dims) last = x.find(dim.name) > last ? x.find(dim.name) : last;
  for (int i = 0; i < x.rank(); ++i) {
    const int at = from.find(x.dims[i].name);
    seen.dims.push_back(at < 0 ? x.dims[i] : to.dims[at]);
    for (int k = 0; i == last && k < window.rank(); ++k) seen.dims.push_back(window.dims[k]);
  }
  return seen;
}

namespace detail_ {

/// Whether "L, K -> N" names as many lengths of the operand as dims of the window and lengths of the result.
constexpr bool are_lengths(const OpParts& lengths) {
  if (!lengths.error.empty() || lengths.in.size() != 2) return false;
  for (const TensorSpec* names : {&lengths.in[0], &lengths.in[1], &lengths.out})
    if (!are_names(*names) || names->rank() != lengths.out.rank()) return false;
  return true;
}
constexpr Text lengths_form(const ParsedOp& of) {
  return "windows move as " + quoted(of.text) +
         " says, which must name as many lengths of the operand as dims of the window and lengths of the result, "
         "without axes: `L, K -> N`, or `H W, P Q -> Y X`";
}
constexpr Text too_many_dims() {
  return "the operand has more than " + number(max_dims) + " dims with those of the window; `merge` some";
}

/// Checks one length of a convolution: dim `l` of the operand, `k` of the weights, and `n` of the result.
constexpr Text conv_length(const OpParts& op, std::string_view l, std::string_view k, std::string_view n) {
  const TensorSpec &x = op.in[0], &w = op.in[1];
  if (const Text why = unsharded(x, l); !why.empty()) return why;
  if (const Text why = unsharded(w, k); !why.empty()) return why;
  if (x.has(k) || op.out.has(k))
    return "the weights have dim " + quoted(k) + " for the elements of a window, which the " +
           (x.has(k) ? "operand" : "result") + " cannot have too; give it another name";
  for (auto length : {l, n})
    if (w.has(length))
      return "the weights have dim " + quoted(length) + ", along which windows move; `rename` it (free)";
  if (!op.out.has(n)) return "the result " + quoted(op.out) + " has no dim " + quoted(n);
  if (l != n && (x.has(n) || op.out.has(l)))
    return "the operand has the length " + quoted(l) + " and the result " + quoted(n) +
           ", and a name has one size; write each in one of them only";
  return {};
}

/// A dim that only one of the tensors has would be summed over, or repeated.
constexpr Text conv_lone_dim(const OpParts& op, const OpParts& lengths) {
  for (int k = 0; k < 2; ++k)
    for (const Dim& dim : op.in[k].dims)
      if (!lengths.in[k].has(dim.name) && !op.in[1 - k].has(dim.name) && !op.out.has(dim.name))
        return "dim " + quoted(dim) + (k == 0 ? " of the operand" : " of the weights") +
               " is neither in the other operand nor in the result; `sum` over it first";
  return {};
}

}  // namespace detail_

/// conv_unreduced<"B L C, K C F -> B N F", "L, K -> N">: the einsum "B N K C, K C F -> B N F" of the elements under
/// each window. The lengths and the window are unsharded.
constexpr Verdict conv(const ParsedOp& op, const ParsedOp& of, const TensorSpec& x, const TensorSpec& w) {
  const OpCall call = call_of("conv_unreduced", op, 2);
  if (!call.why.empty()) return call.fail();
  const OpParts& lengths = of.parts;
  if (!detail_::are_lengths(lengths)) return call.fail(detail_::lengths_form(of));
  if (const Text why = check_operand(x, call.op.in[0], "the operand"); !why.empty()) return call.fail(why);
  if (const Text why = check_operand(w, call.op.in[1], "the tensor of weights"); !why.empty()) return call.fail(why);
  if (const Text why = detail_::integer_dims(call.op); !why.empty()) return call.fail(why);
  for (int i = 0; i < lengths.out.rank(); ++i)
    if (const Text why = detail_::conv_length(call.op, lengths.in[0].dims[i].name, lengths.in[1].dims[i].name,
                                              lengths.out.dims[i].name);
        !why.empty())
      return call.fail(why);
  if (const Text why = detail_::conv_lone_dim(call.op, lengths); !why.empty()) return call.fail(why);
  const int rank = x.rank() > call.op.out.rank() ? x.rank() : call.op.out.rank();
  if (rank + lengths.out.rank() > max_dims) return call.fail(detail_::too_many_dims());
  OpParts parts = call.op;
  parts.in[0] = under_windows(x, lengths.in[0], lengths.in[1], lengths.out);
  if (const Text why = detail_::einsum(parts, {"the operand", "the tensor of weights", "contracting"}); !why.empty())
    return call.fail(why);
  return call.accept();
}

/// windows<"L, K -> N">: "B L C" becomes "B N K C". The lengths are unsharded.
constexpr Verdict windows(const ParsedOp& of, const TensorSpec& x) {
  const auto fail = [&](const Text& why) { return Verdict{{}, title_of("windows", of.text) + ": " + why}; };
  const OpParts& lengths = of.parts;
  if (!detail_::are_lengths(lengths)) return fail(detail_::lengths_form(of));
  for (int i = 0; i < lengths.out.rank(); ++i) {
    const auto l = lengths.in[0].dims[i].name, k = lengths.in[1].dims[i].name, n = lengths.out.dims[i].name;
    if (const Text why = detail_::unsharded(x, l); !why.empty()) return fail(why);
    for (auto name : {k, n})
      if (x.has(name) && (name != l || name == k))
        return fail("the operand " + quoted(x) + " already has a dim " + quoted(name) +
                    ", and a name has one size; give it another name");
    if (lengths.out.has(k))
      return fail("dim " + quoted(k) +
                  " cannot be both the elements of a window and the windows; give one another name");
  }
  if (x.rank() + lengths.out.rank() > max_dims) return fail(detail_::too_many_dims());
  return {under_windows(x, lengths.in[0], lengths.in[1], lengths.out), {}};
}

}  // namespace shardlib::rules
