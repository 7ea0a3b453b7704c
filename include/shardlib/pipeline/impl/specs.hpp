// Specs of a stage's mesh and of the whole one.
#pragma once

#include <string_view>

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
constexpr Spec with_partial(std::string_view spec, std::string_view axis) {
  TensorSpec result = parse_tensor(spec).spec;
  if (!axis.empty()) result.add_partial(axis);
  return Spec(to_string(result).view());
}

}  // namespace shardlib::pipeline::detail
