// Specs of a stage's mesh and of the whole one.
#pragma once

#include <string_view>

#include "shardlib/rules/pipeline.hpp"
#include "shardlib/types/spec_functions.hpp"
#include "shardlib/types/tensor.hpp"

namespace shardlib::pipeline::detail {

namespace core = shardlib::detail;

/// "d t" of "p d t".
constexpr Spec axes_without(std::string_view axes, std::string_view axis) {
  core::Text rest;
  for (const auto name : rules::mesh_axes(axes))
    if (name != axis) rest = rest + (rest.empty() ? "" : " ") + name;
  return Spec(rest.view());
}

/// The spec with one more sum pending; as it is where there is no axis.
template <Spec S, Spec Axis>
inline constexpr Spec with_partial = std::string_view(Axis).empty()
                                         ? S
                                         : core::spec_of(core::spec_with_sum(core::parsed<S>, Axis, true));

/// The spec without that sum; a compile error where it is not pending.
template <Spec S, Spec Axis>
inline constexpr Spec without_partial = core::result_of<rules::sum_over, core::Literal{std::string_view(Axis)}, S>;

}  // namespace shardlib::pipeline::detail
