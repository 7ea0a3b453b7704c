// Checkpoints of trees of tensors: saved by any mesh, loaded by any mesh, bit for bit. docs/checkpoints.md has the
// layout and what is guaranteed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "shardlib/io/checkpoint/folder.hpp"
#include "shardlib/io/checkpoint/writer.hpp"
#include "shardlib/ops/result.hpp"
#include "shardlib/runtime/tensor.hpp"
#include "shardlib/runtime/value.hpp"
#include "shardlib/support/inline.hpp"
#include "shardlib/types/leaves.hpp"
#include "shardlib/types/tensor.hpp"
#include "shardlib/types/tree.hpp"

namespace shardlib::io {

/// Maps the name of a leaf on this device, "layers.0.w_q", to the name under which it is stored. It is for pipeline
/// stages, whose layer 0 differs between devices, and for trees that have been rearranged. Empty: the same name.
using Rename = std::function<std::string(const std::string&)>;

/// The options of `save`: the checkpoints of the folder that it keeps, and the names that `rename` gives to leaves.
struct SaveOptions {
  int keep = 0;                 ///< how many of the newest stay, this one included; 0: all
  std::int64_t keep_every = 0;  ///< also those of steps that this divides; 0: none
  int keep_best = 0;            ///< how many with the lowest CheckpointMeta::validation_loss stay, too
  /// Refuses a leaf with a value that is not finite, before the checkpoint is complete and older ones are removed.
  bool finite = false;
  Rename rename = {};
  /// The three numbers as one.
  [[nodiscard]] Retention retention() const { return {keep, keep_every, keep_best}; }
};

/// The options of `load`: the checks before it, and the names that `rename` gives to leaves.
struct LoadOptions {
  bool verify = true;         ///< compare all files with the manifest first; each device reads a part of them
  bool ignore_extra = false;  ///< the checkpoint may hold leaves that the tree does not
  Rename rename = {};
};

namespace detail {

/// The leaves with their names, dots for slashes; a lone tensor is called "value".
[[nodiscard]] SHARDLIB_INLINE NamedValues
named_values(const shardlib::detail::UntypedLeaves<const shardlib::detail::ValuePtr>& tree, const Rename& rename);
struct HasNoSums {
  template <class D, Spec S>
  constexpr bool operator()(std::type_identity<Tensor<D, S>> /*leaf*/) const {
    return shardlib::detail::parsed<S>.partial.empty();
  }
};
template <class Tree>
NamedValues named_values(const Tree& tree, const Rename& rename) {
  static_assert(shardlib::detail::checked_tree<"checkpoint", Tree>);
  static_assert(shardlib::detail::all_leaves<Tree>(HasNoSums()),
                "a checkpoint holds values, not sums still to be taken: reduce the `+axis` first");
  return named_values(shardlib::detail::untyped_leaves(tree), rename);
}
/// Gives the leaves new values, in the order of named_values.
template <class Tree>
void assign_leaves(Tree& tree, const std::vector<shardlib::detail::ValuePtr>& values) {
  std::size_t i = 0;
  for (const auto& leaf : shardlib::detail::untyped_leaves(tree, false).leaves) *leaf.pointer = values[i++];
}

/// New values for the leaves, each with the sizes, padding and sharding of the old one. The checkpoint at `path` is
/// opened, unless it is.
[[nodiscard]] std::vector<shardlib::detail::ValuePtr> load_values(const DevicePtr& device, const std::string& path,
                                                                  std::optional<Checkpoint>& checkpoint,
                                                                  const NamedValues& leaves,
                                                                  const LoadOptions& options);

template <Spec A, class Tree>
CheckpointMeta load(const Mesh<A>& mesh, const std::string& path, std::optional<Checkpoint> checkpoint, Tree& tree,
                    const LoadOptions& options) {
  static_assert(!std::is_const_v<Tree>,
                "load: the tree is const, but its leaves are to be replaced; give one that is not const");
  assign_leaves(tree, load_values(mesh.device(), path, checkpoint, named_values(tree, options.rename), options));
  return checkpoint->meta();
}

}  // namespace detail

/// Writes `DIRECTORY/step-00000100`, whole or not at all, and advances LATEST. Collective: on return it is on the disk
/// for every device; if any device fails, all throw the same Error and what was there before is untouched. `save(mesh,
/// "runs/first/checkpoints", step, state)`
template <Spec A, class Tree>
void save(const Mesh<A>& mesh, const std::string& directory, std::int64_t step, const Tree& tree,
          CheckpointMeta meta = {}, const SaveOptions& options = {}) {
  meta.step = step;
  detail::CheckpointWriter writer(mesh.device(), directory, options.retention(), options.finite);
  writer.start(meta, detail::named_values(tree, options.rename), false);
  writer.finish();
}
SHARDLIB_FORM_OF_CALL(save, "save(mesh, directory, step, tree)")

/// Replaces the leaves of `tree`, which must be there with the sizes expected, by those of the checkpoint at `path`.
/// Collective; throws the same on all devices: UsageError, which lists every leaf that is missing, extra or of another
/// shape or order of dims, or Error for a damaged checkpoint. Then the tree is unchanged. `load(mesh,
/// "runs/first/checkpoints/step-00000100", state)`
template <Spec A, class Tree>
CheckpointMeta load(const Mesh<A>& mesh, const std::string& path, Tree& tree, const LoadOptions& options = {}) {
  return detail::load(mesh, path, std::nullopt, tree, options);
}
/// As `load` of a path, of a checkpoint that all devices have opened. `if (newest) load(mesh, *newest, state);` after
/// `const auto newest = open_newest(mesh, directory);`
template <Spec A, class Tree>
CheckpointMeta load(const Mesh<A>& mesh, const Checkpoint& checkpoint, Tree& tree, const LoadOptions& options = {}) {
  return detail::load(mesh, checkpoint.path(), checkpoint, tree, options);
}
SHARDLIB_FORM_OF_CALL(load, "load(mesh, path, tree)`, whose tree is not const and has the sizes that are expected")
/// The same for a call that names the type of the tree and expects the tree as the result.
template <class Tree, class... Args>
auto load(const Args&... args) {
  return shardlib::detail::wrong_call<
      "load", "load(mesh, path, tree)`, whose tree is not const and has the sizes that are expected">(args...);
}

namespace detail {
[[nodiscard]] std::optional<Checkpoint> open_newest(Device& device, const std::string& directory, std::int64_t before,
                                                    bool read_only);
}

/// newest_whole(directory), agreed on and checked by all devices together, and opened; of steps below `before` alone.
/// `load` need not verify it again. The damaged ones passed over are renamed, step-00000100.damaged, so that retention
/// does not count them, unless the folder is `read_only`. `open_newest(mesh, "runs/first/checkpoints")`
template <Spec A>
[[nodiscard]] std::optional<Checkpoint> open_newest(const Mesh<A>& mesh, const std::string& directory,
                                                    std::int64_t before = INT64_MAX, bool read_only = false) {
  return detail::open_newest(*mesh.device(), directory, before, read_only);
}
/// The path of open_newest's checkpoint. `newest_whole(mesh, "runs/first/checkpoints")`
template <Spec A>
[[nodiscard]] std::optional<std::string> newest_whole(const Mesh<A>& mesh, const std::string& directory) {
  const auto newest = detail::open_newest(*mesh.device(), directory, INT64_MAX, false);
  return newest ? std::optional(newest->path()) : std::nullopt;
}

/// Saves during training: `save` returns once it holds the values of this moment, and a thread writes them.
/// At most one checkpoint is under way, so the memory it keeps alive is at most the tree's. Every call is collective,
/// and the next one throws what went wrong, the same on all devices.
class AsyncSaver {
 public:
  template <Spec A>
  AsyncSaver(const Mesh<A>& mesh, const std::string& directory, SaveOptions options = {})
      : writer_(
            std::make_unique<detail::CheckpointWriter>(mesh.device(), directory, options.retention(), options.finite)),
        rename_(std::move(options.rename)) {}

  /// Waits for the one under way, if any.
  template <class Tree>
  void save(std::int64_t step, const Tree& tree, CheckpointMeta meta = {}) {
    meta.step = step;
    writer_->start(meta, detail::named_values(tree, rename_), true);
  }
  /// Call once a step: commits the checkpoint under way once every device has written its part. Costs one small
  /// collective while one is under way, nothing otherwise.
  void poll() { writer_->poll(); }
  /// Waits for the checkpoint under way and commits it. Call it at the end: a destructor cannot agree with others.
  void flush() { writer_->finish(); }
  [[nodiscard]] bool in_flight() const { return writer_->in_flight(); }  ///< whether one is under way

 private:
  std::unique_ptr<detail::CheckpointWriter> writer_;
  Rename rename_;
};

// ---- without a mesh, for programs that convert or combine -----------------------------------------------------------

/// A leaf for `save_arrays`: `about` describes it, and `fill` fills its bytes, row-major.
struct ArrayToSave {
  CheckpointArray about;
  std::function<void(std::span<std::byte> out)> fill;
};

/// Writes `DIRECTORY/step-00000100`, whole or not at all, and advances LATEST, as `save` does on one device. Not
/// collective; holds all leaves in memory. Throws UsageError if a leaf has more dims than a tensor can have.
/// `save_arrays("averaged", meta, arrays)`
void save_arrays(const std::string& directory, const CheckpointMeta& meta, const std::vector<ArrayToSave>& arrays);

}  // namespace shardlib::io

#ifndef SHARDLIB_COMPILED
#include "shardlib/io/checkpoint/impl/checkpoint.hpp"
#endif
