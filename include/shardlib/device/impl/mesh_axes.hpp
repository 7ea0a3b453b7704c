// Definitions of mesh_axes.hpp.
#pragma once

#include "shardlib/device/mesh_axes.hpp"

#include <algorithm>
#include <cstddef>
#include <limits>

#include "shardlib/spec/spec.hpp"
#include "shardlib/support/error.hpp"
#include "shardlib/support/text.hpp"

namespace shardlib {

namespace detail {

[[noreturn]] inline void fail_mesh(std::string_view mesh, std::size_t entry, const std::string& why) {
  throw UsageError("mesh \"" + std::string(mesh) + "\", entry " + std::to_string(entry + 1) + ": " + why);
}

}  // namespace detail

SHARDLIB_INLINE std::string to_string(std::span<const AxisSize> mesh) {
  std::string text;
  for (const auto& [name, size] : mesh) text += (text.empty() ? "" : ",") + name + "=" + std::to_string(size);
  return text;
}

SHARDLIB_INLINE int device_count(std::span<const AxisSize> mesh) {
  int count = 1;
  for (std::size_t i = 0; i < mesh.size(); ++i) {
    const auto& [name, size] = mesh[i];
    const auto fail = [&](const std::string& why) { detail::fail_mesh(to_string(mesh), i, why); };
    if (!detail::is_name(name)) {
      fail("'" + name + "' is not an axis name: use letters, digits and _, not starting with a digit");
    }
    if (std::ranges::count(mesh.first(i), name, &AxisSize::name) != 0) {
      fail("axis '" + name + "' is given twice: name each axis once");
    }
    if (size < 1) fail("axis '" + name + "' has size " + std::to_string(size) + ": give it at least 1");
    if (count > std::numeric_limits<int>::max() / size) fail("too many devices: choose smaller sizes");
    count *= size;
  }
  return count;
}

SHARDLIB_INLINE int axis_size(std::span<const AxisSize> mesh, std::string_view axis) {
  const auto at = std::ranges::find(mesh, axis, &AxisSize::name);
  return at == mesh.end() ? 1 : at->size;
}

SHARDLIB_INLINE std::vector<AxisSize> parse_mesh(std::string_view text) {
  std::vector<AxisSize> mesh;
  for (std::size_t begin = 0; !text.empty() && begin <= text.size();) {
    const std::size_t end = std::min(text.find(',', begin), text.size());
    const std::string_view entry = text.substr(begin, end - begin);
    const std::size_t equals = entry.find('=');
    if (equals == std::string_view::npos) {
      detail::fail_mesh(text, mesh.size(), "'" + std::string(entry) + "' has no '=': write name=size, as in d=4,t=2");
    }
    const std::string_view digits = entry.substr(equals + 1);
    int size = 0;
    if (!detail::parse_number(digits, size)) {
      detail::fail_mesh(text, mesh.size(),
                        "'" + std::string(digits) + "' is not a size: write a whole number, as in d=4,t=2");
    }
    mesh.push_back({std::string(entry.substr(0, equals)), size});
    begin = end + 1;
  }
  device_count(mesh);
  return mesh;
}

}  // namespace shardlib
