// Moves a tree between two shardings in memory: between the fully sharded model and the stages of a pipeline, or
// between two factorizations of the same devices.
#pragma once

#include "shardlib/device/device.hpp"
#include "shardlib/io/checkpoint/checkpoint.hpp"
#include "shardlib/io/checkpoint/writer.hpp"
#include "shardlib/ops/result.hpp"
#include "shardlib/runtime/tensor.hpp"
#include "shardlib/support/inline.hpp"
#include "shardlib/types/call_site.hpp"
#include "shardlib/types/leaves.hpp"
#include "shardlib/types/tensor.hpp"
#include "shardlib/types/tree.hpp"

namespace shardlib::io {

/// The names of the leaves of both trees, which `reshard` matches by name: {.rename_to = names_in_model}.
struct ReshardOptions {
  Rename rename_from = {};  ///< names of the tree that is read
  Rename rename_to = {};    ///< names of the tree that is written
};

namespace detail {

/// `places` are the leaves of the tree that is written, whose values are `to`.
void reshard(const DevicePtr& device, const NamedValues& from, NamedValues to,
             const shardlib::detail::UntypedLeaves<shardlib::detail::ValuePtr>& places, const Site& site);

template <class Tree>
NamedValues values_to_reshard(const Tree& tree, const Rename& rename) {
  static_assert(shardlib::detail::checked_tree<"reshard", Tree>);
  static_assert(shardlib::detail::all_leaves<Tree>(HasNoSums()),
                "reshard moves values, not sums still to be taken: reduce the `+axis` first");
  return named_values(shardlib::detail::untyped_leaves(tree), rename);
}

}  // namespace detail

/// Replaces the leaves of `to` by those of `from` with the same names, bit for bit, without the disk: what `save` of
/// `from` and `load` into `to` give. Leaves of `to` must be there: they say sizes, padding and sharding. Leaves of both
/// are on `mesh`, on a submesh of it (stages, `mesh.stage()`) or on a `reinterpret` of it. "M/d N" on a mesh d=4
/// becomes "M/d N" on the stage of p=2,d=2 that names it. Several devices may hold a leaf, in both trees.
///
/// Collective. Each device gets a box from one holder of it, and none that it holds itself. Boxes go through host
/// memory. Besides both trees a device takes memory for one leaf, or for several that have at most 64 MiB together:
/// their new shards, and what it sends and receives. A GPU takes host memory for the shards that it reads, too.
///
/// Throws the same on all devices, with `to` unchanged: UsageError, which lists each leaf that is missing, extra, or of
/// another shape, dtype or order of dims; Error if a leaf is empty, is on another mesh or is differentiated, if two
/// have one name, and in a dry run. If memory runs out on the way, all throw too, and `to` has old and new leaves.
/// `reshard(mesh, model, stage, {.rename_to = names_in_model})`
template <Spec A, class From, class To>
void reshard(const Mesh<A>& mesh, const From& from, To& to, const ReshardOptions& options = {},
             Site site = Site::current()) {
  detail::reshard(mesh.device(), detail::values_to_reshard(from, options.rename_from),
                  detail::values_to_reshard(to, options.rename_to), shardlib::detail::untyped_leaves(to, false), site);
}
SHARDLIB_FORM_OF_CALL(reshard, "reshard(mesh, from, to)")

}  // namespace shardlib::io

#ifndef SHARDLIB_COMPILED
#include "shardlib/io/impl/reshard.hpp"
#endif
