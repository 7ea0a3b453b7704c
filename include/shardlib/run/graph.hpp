// A picture of what a device computes: ops, collectives and the specs of what flows between them, forward and backward.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "shardlib/device/device.hpp"
#include "shardlib/support/inline.hpp"

namespace shardlib::run {

/// The graph of what value_and_grad computes in `body` on the mesh, in Graphviz' DOT: a node for each op that runs,
/// forward and backward in a frame each, a box for each tensor that comes from elsewhere (weights under their names).
/// Collectives have a colour for each set of axes; what is computed again in the backward pass is dashed. Runs dry: no
/// device of the mesh need be there. `dot({{"d", 2}}, body)`
[[nodiscard]] SHARDLIB_INLINE std::string dot(const std::vector<AxisSize>& mesh,
                                              const std::function<void(const std::shared_ptr<Device>&)>& body);

/// Draws DOT text as an SVG file, with Graphviz' program `dot`. Throws UsageError where it is not installed, or where
/// `path` cannot be made or is there and no file; Error for the system's own reasons, as a full disk.
/// `write_svg(dot(mesh, body), "graph.svg")`
SHARDLIB_INLINE void write_svg(const std::string& dot, const std::string& path);

}  // namespace shardlib::run

#ifndef SHARDLIB_COMPILED
#include "shardlib/run/impl/graph.hpp"
#endif
