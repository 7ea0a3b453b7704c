// Typing rules of ops by the positions of elements along dims: one_hot, tril, triu, diagonal.
#pragma once

#include "shardlib/rules/local.hpp"

#include <string_view>

namespace shardlib::rules {

/// one_hot<"V/t">(indices): a new dim, which may be sharded, the last of the result.
constexpr Verdict one_hot(const TensorSpec& dim, const TensorSpec& x) {
  const Text title = "one_hot<" + quoted(dim) + ">: ";
  const TensorSpec &fresh = dim, &indices = x;
  if (fresh.rank() != 1 || !fresh.partial.empty() || fresh.dims[0].is_integer() || fresh.dims[0].bracketed)
    return {x, title + "write the new dim, with the axes that shard it, as in `V/t`"};
  if (const Text why = detail_::nonlinear("one_hot", indices); !why.empty()) return {x, why};
  const Dim& added = fresh.dims[0];
  if (indices.has(added.name))
    return {x, title + "the indices " + quoted(x) + " already have a dim " + quoted(added.name) +
                   ", and a name has one size; write another name for the new one"};
  for (auto axis : added.axes)
    if (indices.placement(axis).kind != Placement::replicated)
      return {x, title + "the indices " + quoted(x) + " are " + describe(indices, axis) + ", so " + quoted(added) +
                     " cannot be sharded over " + axis + " as well; take another axis or none"};
  if (indices.dims.full()) return {x, title + "the result has more than " + number(max_dims) + " dims"};
  TensorSpec out = indices;
  out.dims.push_back(added);
  return {out, {}};
}

/// tril<"L", "K">(x), triu: both dims may be sharded, because the global index is known. The op is linear, so the
/// operand may be partial.
constexpr Verdict triangle(std::string_view name, std::string_view rows, std::string_view columns,
                           const TensorSpec& x) {
  const Text title = Text(name) + "<" + quoted(rows) + ", " + quoted(columns) + ">: ";
  for (auto dim : {rows, columns}) {
    const int at = x.find(dim);
    if (at < 0) return {x, title + "the operand " + quoted(x) + " has no dim " + quoted(dim)};
    if (x.dims[at].is_integer())
      return {x, title + "integer dim " + quoted(dim) + " has no name; `rename` it first (free)"};
  }
  if (rows == columns) return {x, title + "a triangle has two dims; write that of the rows, then that of the columns"};
  return {x, {}};
}

/// diagonal<"X", "Y">(x): X stays, and may be sharded; each device needs all of Y. The op is linear, so the operand may
/// be partial.
constexpr Verdict diagonal(std::string_view kept, std::string_view dropped, const TensorSpec& x) {
  const Text title = Text("diagonal<") + quoted(kept) + ", " + quoted(dropped) + ">: ";
  const auto fail = [&](const Text& why) { return Verdict{x, title + why}; };
  for (auto dim : {kept, dropped})
    if (!x.has(dim)) return fail("the operand " + quoted(x) + " has no dim " + quoted(dim));
  if (const Text why = detail_::integer_dim(x); !why.empty()) return fail(why);
  if (kept == dropped) return fail("a diagonal is of two dims; write the one that stays, then the one that goes");
  if (Text why = detail_::unsharded(x, dropped); !why.empty()) {
    if (x.dims[x.find(kept)].axes.empty())
      why = why + ", or let it stay: " + quoted(Text("diagonal<\"") + dropped + "\", \"" + kept + "\">") +
            " (no traffic)";
    return fail(why);
  }
  TensorSpec out = x;
  out.dims.erase(out.find(dropped));
  return {out, {}};
}

}  // namespace shardlib::rules
