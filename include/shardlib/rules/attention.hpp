// Typing rules of causal_attention, along an unsharded and along a sharded length, and of ulysses_attention.
#pragma once

#include "shardlib/rules/collectives.hpp"
#include "shardlib/rules/scans.hpp"

#include <string_view>

namespace shardlib::rules {

namespace detail_ {

/// Checks an operand of attention against the queries: it has L and only dims of the queries, with the same sharding.
constexpr Text beside_queries(std::string_view what, const TensorSpec& x, const TensorSpec& q,
                              std::string_view length) {
  for (const Dim& dim : x.dims)
    if (!q.has(dim.name))
      return Text(what) + " " + quoted(x) + " have the dim " + quoted(dim.name) + ", but the queries " + quoted(q) +
             " do not; " + what + " may only lack dims of the queries (`rename` is free)";
  if (!x.has(length))
    return Text(what) + " " + quoted(x) + " have no dim " + quoted(length) + ", along which positions count";
  return align(operands(q, x));
}

constexpr Text attention_title(std::string_view length, std::string_view width, const ParsedOp& over) {
  return Text("causal_attention<") + quoted(length) + ", " + quoted(width) + (over.text.empty() ? "" : ", ") +
         over.text + ">: ";
}

/// The call along this length, sharded or not.
constexpr Text attention_along(const Dim& length, std::string_view width) {
  const Text over = length.axes.empty() ? Text() : Text(", over<\"") + joined(length.axes, " ") + "\">";
  return quoted(Text("causal_attention<\"") + length.name + "\", \"" + width + "\"" + over + ">");
}

/// Whether the length is sharded as the call says: over the axes of `over`, or over none if that is empty.
constexpr Text attended_length(std::string_view length, std::string_view width, const ParsedOp& over,
                               const TensorSpec& q) {
  const Text whole = unsharded(q, length);
  const int at = q.find(length);
  if (at < 0 || (over.text.empty() && whole.empty())) return whole;
  const Dim& dim = q.dims[at];
  if (over.text.empty())
    return dim.axes.empty() ? whole
                            : whole + ", or write " + attention_along(dim, width) +
                                  ", which sends keys and values from shard to shard (communicates)";
  const Text call = attention_along(dim, width);
  return over_exactly(over, dim.axes, dim_is(dim), "the keys of all its shards are seen", call, call);
}

/// The remedy for values that differ from the keys in the width alone, as in multi-head latent attention.
constexpr Text of_other_width(const TensorSpec& values, const TensorSpec& keys, std::string_view width) {
  const int at = keys.find(width);
  if (values.rank() != keys.rank() || !values.dims[at].axes.empty()) return {};
  TensorSpec padded = values;
  padded.dims[at] = keys.dims[at];
  if (!(padded == keys)) return {};
  const auto change = [](const char* op, std::string_view from, std::string_view to) {
    return quoted(Text(op) + "<\"" + from + " -> " + to + "\">");
  };
  return "; pad narrower values with " + change("pad", values.dims[at].name, width) +
         ", and the result has them after " + change("narrow", width, values.dims[at].name) + " (local copies)";
}

constexpr Verdict attention(std::string_view length, std::string_view width, const ParsedOp& over,
                            const TensorSpec& queries, const TensorSpec& keys, const TensorSpec& values) {
  const TensorSpec &q = queries, &k = keys;
  const auto fail = [&](const Text& why) { return Verdict{queries, attention_title(length, width, over) + why}; };
  for (const TensorSpec* x : {&queries, &keys, &values})
    if (const Text why = nonlinear("causal_attention", *x); !why.empty()) return {queries, why};
  if (length == width) return fail("positions count along another dim than the one that products are summed over");
  if (const Text why = attended_length(length, width, over, q); !why.empty()) return fail(why);
  if (const Text why = unsharded(q, width); !why.empty()) return fail(why);
  for (int i = 0; i < q.rank(); ++i)
    for (int j = 0; j < i; ++j)
      if (q.dims[i].name == q.dims[j].name)
        return fail("integer dim " + quoted(q.dims[i].name) + " appears twice; `rename` it first (free)");
  if (const Text why = beside_queries("the keys", k, q, length); !why.empty()) return fail(why);
  if (!k.has(width))
    return fail("the keys " + quoted(keys) + " have no dim " + quoted(width) + ", over which products are summed");
  if (!(values == k))
    return fail("the values " + quoted(values) + " must have the spec of the keys " + quoted(keys) +
                of_other_width(values, k, width));
  return {queries, {}};
}

constexpr Verdict attention_in_segments(std::string_view length, std::string_view width, const ParsedOp& over,
                                        const TensorSpec& queries, const TensorSpec& keys, const TensorSpec& values,
                                        const TensorSpec& segments) {
  Verdict verdict = attention(length, width, over, queries, keys, values);
  if (!verdict.ok()) return verdict;
  if (Text why = nonlinear("causal_attention", segments); !why.empty()) return {queries, why};
  Text why = beside_queries("the segments", segments, queries, length);
  if (why.empty() && segments.has(width))
    why = "the segments " + quoted(segments) + " have the dim " + quoted(width) + "; all of a head is in one segment";
  if (!why.empty()) verdict.why = attention_title(length, width, over) + why;
  return verdict;
}

}  // namespace detail_

/// causal_attention<"L", "D">(q, k, v): L (the positions) and D (the width of a head) are unsharded. All other dims
/// are batch dims. k and v have the dims of q, but may lack dims of query heads that share a head of keys.
constexpr Verdict causal_attention(std::string_view length, std::string_view width, const TensorSpec& queries,
                                   const TensorSpec& keys, const TensorSpec& values) {
  return detail_::attention(length, width, {}, queries, keys, values);
}
/// As above, with the segments of the positions. A query sees only its own segment.
constexpr Verdict causal_attention_in_segments(std::string_view length, std::string_view width,
                                               const TensorSpec& queries, const TensorSpec& keys,
                                               const TensorSpec& values, const TensorSpec& segments) {
  return detail_::attention_in_segments(length, width, {}, queries, keys, values, segments);
}

/// causal_attention<"L", "D", over<"s">>(q, k, v): L is sharded over exactly these axes, in all operands.
constexpr Verdict causal_attention_over(std::string_view length, std::string_view width, const ParsedOp& over,
                                        const TensorSpec& queries, const TensorSpec& keys, const TensorSpec& values) {
  return detail_::attention(length, width, over, queries, keys, values);
}
constexpr Verdict causal_attention_over_in_segments(std::string_view length, std::string_view width,
                                                    const ParsedOp& over, const TensorSpec& queries,
                                                    const TensorSpec& keys, const TensorSpec& values,
                                                    const TensorSpec& segments) {
  return detail_::attention_in_segments(length, width, over, queries, keys, values, segments);
}

namespace detail_ {

/// The spec with this dim unsharded.
constexpr TensorSpec whole_length(TensorSpec x, std::string_view length) {
  if (const int at = x.find(length); at >= 0) x.dims[at].axes = {};
  return x;
}

/// An operand after the exchange: its length is whole, and its heads have the length's axes too.
struct Exchanged {
  TensorSpec spec;
  Text why;
};
constexpr Exchanged exchanged(const char* what, const OpParts& exchange, const TensorSpec& x) {
  TensorSpec out = x;
  for (int i = 0; i < 2; ++i) {
    const Dim& from = exchange.in[0].dims[i];
    const int at = x.find(from.name);
    if (at < 0)
      return {x, Text(what) + " " + quoted(x) + " have no dim " + quoted(from.name) + ", which the exchange names"};
    if (!(x.dims[at] == from))
      return {x, Text(what) + " " + quoted(x) + " have " + quoted(x.dims[at]) + ", but the exchange begins with " +
                     quoted(from)};
    out.dims[at] = exchange.out.dims[i];
  }
  return {out, {}};
}

constexpr Verdict ulysses(const ParsedOp& exchange, std::string_view width, const TensorSpec& queries,
                          const TensorSpec& keys, const TensorSpec& values, const TensorSpec* segments) {
  const Text title = Text("ulysses_attention<") + quoted(exchange.text) + ", " + quoted(width) + ">: ";
  const auto fail = [&](const Text& why) { return Verdict{queries, title + why}; };
  const OpParts& parts = exchange.parts;
  if (!parts.error.empty()) return fail(parts.error);
  if (parts.in.size() != 1 || parts.in[0].rank() != 2 || !parts.in[0].partial.empty())
    return fail("write the length and the heads before and after the exchange, as in `L/s H -> L H/s`");
  if (const Verdict moved = all_to_all(exchange, parts.in[0]); !moved.ok())
    return fail("the exchange is an " + moved.why);
  const Dim &length = parts.in[0].dims[0], &heads = parts.in[0].dims[1];
  if (!parts.out.dims[0].axes.empty())
    return fail("the length, which is the first dim, is still sharded after the exchange: " +
                quoted(parts.out.dims[0]) + "; all of its axes move to the heads");
  if (width == heads.name) return fail("the products are summed over another dim than the heads");
  const Exchanged q = exchanged("the queries", parts, queries), k = exchanged("the keys", parts, keys),
                  v = exchanged("the values", parts, values);
  for (const Exchanged* x : {&q, &k, &v})
    if (!x->why.empty()) return fail(x->why);
  Verdict whole = attention(length.name, width, {}, q.spec, k.spec, v.spec);
  if (whole.ok() && segments != nullptr) {
    if (segments->has(heads.name))
      return fail("the segments " + quoted(*segments) + " have the dim " + quoted(heads.name) +
                  ", but all heads of a position are in one segment");
    const int at = segments->find(length.name);
    if (at >= 0 && !(segments->dims[at] == length))
      return fail("the segments " + quoted(*segments) + " have " + quoted(segments->dims[at]) +
                  ", but the exchange begins with " + quoted(length));
    whole = attention_in_segments(length.name, width, {}, q.spec, k.spec, v.spec, whole_length(*segments, length.name));
  }
  return whole.ok() ? Verdict{queries, {}} : fail("after the exchange, " + whole.why);
}

}  // namespace detail_

/// ulysses_attention<"L/s H -> L H/s", "D">(q, k, v): all operands have the length and the heads that the exchange
/// names. After it, the rule is that of causal_attention along a whole length.
constexpr Verdict ulysses_attention(const ParsedOp& exchange, std::string_view width, const TensorSpec& queries,
                                    const TensorSpec& keys, const TensorSpec& values) {
  return detail_::ulysses(exchange, width, queries, keys, values, nullptr);
}
/// As above, with the segments of the positions, which have the length too, but not the heads.
constexpr Verdict ulysses_attention_in_segments(const ParsedOp& exchange, std::string_view width,
                                                const TensorSpec& queries, const TensorSpec& keys,
                                                const TensorSpec& values, const TensorSpec& segments) {
  return detail_::ulysses(exchange, width, queries, keys, values, &segments);
}

}  // namespace shardlib::rules
