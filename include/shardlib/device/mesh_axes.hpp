// The axes of a mesh and their sizes, as text and parsed: "d=4,t=2".
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "shardlib/support/inline.hpp"

namespace shardlib {

/// The name of a mesh axis and the number of devices along it, its size.
struct AxisSize {
  std::string name;
  int size = 1;
  friend bool operator==(const AxisSize&, const AxisSize&) = default;
};

/// A mesh as a text: "d=4,t=2"; "" for the mesh without axes.
SHARDLIB_INLINE std::string to_string(std::span<const AxisSize> mesh);

/// The number of devices of a mesh. Throws UsageError unless names are valid and distinct and sizes at least 1.
SHARDLIB_INLINE int device_count(std::span<const AxisSize> mesh);

/// The number of devices along an axis; 1 if the mesh lacks it. `axis_size(parse_mesh("d=4,t=2"), "t")` is 2
SHARDLIB_INLINE int axis_size(std::span<const AxisSize> mesh, std::string_view axis);

/// Reads "d=4,t=2"; "" is the mesh without axes, which has one device.
SHARDLIB_INLINE std::vector<AxisSize> parse_mesh(std::string_view text);

}  // namespace shardlib

#ifndef SHARDLIB_COMPILED
#include "shardlib/device/impl/mesh_axes.hpp"
#endif
