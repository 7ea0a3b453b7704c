// A picture of what a device computes: ops, collectives and the specs of the tensors between them, forward and
// backward.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "shardlib/device/device.hpp"
#include "shardlib/device/mesh_axes.hpp"
#include "shardlib/support/inline.hpp"

namespace shardlib::run {

/// The options of a graph's picture.
struct GraphOptions {
  /// One node for neighboring ops that neither communicate nor multiply matrices; inputs as lines of the ops that read
  /// them; the backward pass below the forward pass; dotted arrows as comments, from which `svg` draws curves.
  bool fold = false;
  /// Also the ops that a step of the trainer runs outside of value_and_grad, in frames of their own: what comes before
  /// the first forward pass, and the update with its sums of gradients and the norm.
  bool whole_step = false;
};

/// The graph of the ops of value_and_grad in `body` on the mesh, in Graphviz' DOT. It has a node for each op that
/// runs with its FLOPs and the bytes that a device sends, forward and backward in a frame each, and a box for each
/// input (weights under their names). Arrows have the spec and the bytes of a device's
/// shard; dotted ones lead from the forward pass, where "kept" tells the bytes, to the backward pass. Collectives have
/// a color for each set of axes. Recomputed ops are dashed. It is a dry run, so the devices of the mesh need not
/// exist. `dot({{"d", 2}}, body, {.fold = true})`
[[nodiscard]] SHARDLIB_INLINE std::string dot(const std::vector<AxisSize>& mesh,
                                              const std::function<void(const DevicePtr&)>& body,
                                              const GraphOptions& options = {});

/// The picture of DOT text as the text of an SVG file, drawn by Graphviz' program `dot`. A browser shows it as wide as
/// its window, bright or dark, moves and enlarges it, and shows what a node says at the pointer. Throws UsageError if
/// `dot` is not installed. `svg(dot(mesh, body))`
[[nodiscard]] SHARDLIB_INLINE std::string svg(const std::string& dot);
/// Writes that file. Throws UsageError as `svg` does, or if `path` cannot be created or is not a regular file. Throws
/// Error if the system cannot write it, as on a full disk.
/// `write_svg(dot(mesh, body), "graph.svg")`
SHARDLIB_INLINE void write_svg(const std::string& dot, const std::string& path);

}  // namespace shardlib::run

#ifndef SHARDLIB_COMPILED
#include "shardlib/run/impl/graph.hpp"
#include "shardlib/run/impl/graph_svg.hpp"
#endif
