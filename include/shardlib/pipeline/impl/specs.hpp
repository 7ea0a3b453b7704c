// Specs of a stage's mesh and of the whole one.
#pragma once

#include <string_view>

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

}  // namespace shardlib::pipeline::detail
