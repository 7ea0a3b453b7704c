// Compares replicated values across devices, bit by bit.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "shardlib/device/device.hpp"
#include "shardlib/io/checkpoint/checkpoint.hpp"
#include "shardlib/ops/result.hpp"
#include "shardlib/support/inline.hpp"
#include "shardlib/types/tensor.hpp"

namespace shardlib::run {

/// Numbers of a program that are the same on all devices, by names for messages: {{"step", 7}}.
using ReplicatedNumbers = std::vector<std::pair<std::string, std::uint64_t>>;

namespace detail {
void check_replicas(Device& device, const io::detail::NamedValues& leaves, const ReplicatedNumbers& numbers,
                    const std::string& when);
}

/// Throws Error, the same on all devices, unless each leaf has the same bits on all devices that hold the same shard:
/// those along the axes of the mesh that its spec does not name (`"L/d M"` on `Mesh<"d t">`: along t). The error names
/// the leaf, the axes and the devices, and ends with `when`. Collective: a checksum of each leaf goes to all. Leaves
/// with the same name after `rename` are copies of one array. A dry run compares nothing.
/// `check_replicas(mesh, weights, "after step 7", {{"step", 7}})`
template <Spec A, class Tree>
void check_replicas(const Mesh<A>& mesh, const Tree& tree, const std::string& when,
                    const ReplicatedNumbers& numbers = {}, const io::Rename& rename = {}) {
  detail::check_replicas(*mesh.device(), io::detail::named_values(tree, rename), numbers, when);
}
SHARDLIB_FORM_OF_CALL(check_replicas, "check_replicas(mesh, weights, \"after step 7\")")

}  // namespace shardlib::run

#ifndef SHARDLIB_COMPILED
#include "shardlib/run/impl/check_replicas.hpp"
#endif
