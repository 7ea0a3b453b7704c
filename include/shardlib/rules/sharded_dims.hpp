// Sums over sharded dims, and calls that name the axes of their dims.
#pragma once

#include "shardlib/rules/common.hpp"

#include <string_view>

namespace shardlib::rules {

/// The axes of the dims of `from` that `to` lacks.
constexpr Axes axes_removed(const TensorSpec& from, const TensorSpec& to) {
  Axes axes;
  for (const Dim& dim : from.dims)
    if (!to.has(dim.name))
      for (auto axis : dim.axes) axes.push_back(axis);
  return axes;
}
/// The spec of a sum over the dims of `from` that `to` lacks: `to`, partial over their axes.
constexpr TensorSpec pending_sum(const TensorSpec& from, TensorSpec to) {
  for (auto axis : axes_removed(from, to)) to.add_partial(axis);
  return to;
}

/// The call of an op on whole dims.
constexpr Text form_of(std::string_view name, std::string_view what) {
  return quoted(Text(name) + "<\"" + what + "\">");
}
/// The call of an op on dims that these axes shard.
constexpr Text form_over(std::string_view name, std::string_view what, const Axes& axes) {
  return quoted(Text(name) + "<\"" + what + "\", over<\"" + joined(axes, " ") + "\">>");
}

/// A call names by `over` exactly the axes that shard its dims, in their order. `subject` are these dims, with "is" or
/// "are"; `why` is a reason. `whole` and `sharded` are the right calls where no axis shards the dims, and where some
/// do.
constexpr Text over_exactly(const ParsedOp& over, const Axes& axes, const Text& subject, std::string_view why,
                            const Text& whole, const Text& sharded) {
  if (axes.empty()) return subject + " not sharded, so nothing would be communicated; write " + whole;
  const Text names = joined(axes, " ");
  if (names.view() == over_axes(over.text)) return {};
  return subject + " sharded over " + names + ", and " + why + "; write " + sharded;
}
/// The subject of one dim.
constexpr Text dim_is(const Dim& dim) {
  return "dim " + quoted(dim) + " is";
}

}  // namespace shardlib::rules
