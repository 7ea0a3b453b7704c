// Histograms of a tree's leaves, whose shards are on the devices of a mesh.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "shardlib/device/device.hpp"
#include "shardlib/io/checkpoint/checkpoint.hpp"
#include "shardlib/run/histogram.hpp"
#include "shardlib/runtime/value.hpp"
#include "shardlib/support/inline.hpp"
#include "shardlib/types/tensor.hpp"

namespace shardlib::run {

namespace detail {

/// A leaf on this device, under its name in the whole tree; `scale` multiplies its values.
struct ScaledLeaf {
  std::string name;
  shardlib::detail::ValuePtr value;
  double scale = 1;
};
[[nodiscard]] std::map<std::string, Histogram> leaf_histograms(Device& device, const std::vector<ScaledLeaf>& leaves);

}  // namespace detail

/// The histogram of each leaf, on all devices: of the whole array without padding, in which each element counts once on
/// any mesh. Only the last bits of `sum` and `sum_squares` depend on the mesh, because they are sums of the shards'
/// sums. Names are those of io::save: "layers.0.w_q". Leaves with the same name after `rename` are copies of one array.
/// Collective: the devices exchange names, and reduce twice, for all leaves together. A dry run gets none. Throws Error
/// for an empty leaf. `leaf_histograms(mesh, weights).at("embed")`
template <Spec A, class Tree>
[[nodiscard]] std::map<std::string, Histogram> leaf_histograms(const Mesh<A>& mesh, const Tree& tree,
                                                               const io::Rename& rename = {}) {
  std::vector<detail::ScaledLeaf> leaves;
  for (auto& [name, value] : io::detail::named_values(tree, rename)) leaves.push_back({name, value});
  return detail::leaf_histograms(*mesh.device(), leaves);
}

}  // namespace shardlib::run

#ifndef SHARDLIB_COMPILED
#include "shardlib/run/impl/leaf_histograms.hpp"
#endif
