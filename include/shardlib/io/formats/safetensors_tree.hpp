// Trees of sharded tensors from safetensors files and folders, and these from checkpoints, by a table from the leaves'
// names to the file's names and layout.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "shardlib/io/checkpoint/checkpoint.hpp"
#include "shardlib/io/formats/safetensors.hpp"
#include "shardlib/io/formats/safetensors_files.hpp"
#include "shardlib/support/inline.hpp"

namespace shardlib::io {

/// The place of a leaf in a file: the leaf's dims, put in `order`, then merged as `merge` says, are the stored tensor,
/// or one of several equal parts of it, side by side. A * in the name stands for the index of the leaf's first dim:
/// each index has a stored tensor of its own, and `order` and `merge` describe the other dims, which they number from
/// 0. GPT-2's query weights, "M H D": {"h.0.attn.c_attn.weight", {}, {1, 2}, 1, 0, 3}; Llama's, which are stored
/// transposed:
/// {"model.layers.0.self_attn.q_proj.weight", {1, 2, 0}, {2, 1}}; the experts of Mixtral, "X M F":
/// {"model.layers.0.block_sparse_moe.experts.*.w1.weight", {1, 0}}.
struct StoredLeaf {
  std::string name = {};        ///< empty: the leaf is not in the file
  std::vector<int> order = {};  ///< the leaf's dims as the file has them, outermost first; empty: the same order
  std::vector<int> merge = {};  ///< how many of these make up each stored dim, {1, 2} for [M, H * D]; empty: one each
  int along = 0;                ///< the stored dim along which the parts are
  int part = 0, parts = 1;      ///< which of the equal parts the leaf is, and how many there are
};
/// Maps a leaf's name, "layers.0.w_q", to its place in the file.
using StoredTable = std::function<StoredLeaf(const std::string& leaf)>;
/// The table of these leaves. * stands for a number, which the first * of a stored name repeats: "layers.*.w_q" is
/// "h.*.attn.c_attn.weight". Leaves of a checkpoint's member `weights`, "weights.embed", are also found. Other leaves
/// have no place. `table_of({{"embed", {"wte.weight"}}})`
[[nodiscard]] StoredTable table_of(std::map<std::string, StoredLeaf> leaves);

/// The mismatches that `load_safetensors` accepts.
struct SafetensorsOptions {
  /// True for tensors of the file that the tree may do without (a tied output layer, a stored mask).
  std::function<bool(const std::string&)> may_be_left = {};
};

namespace detail {
[[nodiscard]] std::vector<shardlib::detail::ValuePtr> load_stored(const DevicePtr& device, const std::string& path,
                                                                  const NamedValues& leaves, const StoredTable& table,
                                                                  const SafetensorsOptions& options);
}

/// Replaces the leaves of `tree`, which must be there with the sizes expected, by those of the file, or of a folder's
/// files (SafetensorsFiles); each device reads its own shards. F32, F16 and BF16 become f32; other leaves need their
/// own dtype. Leaves whose stored name is empty stay. Collective; throws the same UsageError on all devices, listing
/// all that does not fit, or Error for a damaged file. `load_safetensors(mesh, "model.safetensors", weights, table)`
template <Spec A, class Tree>
void load_safetensors(const Mesh<A>& mesh, const std::string& path, Tree& tree, const StoredTable& table,
                      const SafetensorsOptions& options = {}) {
  detail::assign_leaves(tree, detail::load_stored(mesh.device(), path, detail::named_values(tree, {}), table, options));
}

/// The metadata of a safetensors file that is made from a checkpoint. `safetensors_metadata(checkpoint.meta())`
[[nodiscard]] std::map<std::string, std::string> safetensors_metadata(const CheckpointMeta& meta);
/// Writes a checkpoint's arrays as a safetensors file, without arrays whose stored name is empty. Not collective.
/// `export_safetensors(checkpoint, "model.safetensors", table)`
void export_safetensors(const Checkpoint& checkpoint, const std::string& path, const StoredTable& table);
/// Writes them as a folder: one file, or above `most_bytes` several with an index. Not collective.
/// `export_safetensors_folder(checkpoint, "exported", table)`
void export_safetensors_folder(const Checkpoint& checkpoint, const std::string& folder, const StoredTable& table,
                               std::uint64_t most_bytes = safetensors_shard_bytes);

/// Makes a checkpoint of all tensors of a file, names and shapes as they are; F16 becomes f32. Not collective. Throws
/// UsageError for dtypes that a checkpoint does not have. `import_safetensors(file, "checkpoints", 0)`
void import_safetensors(const SafetensorsFile& file, const std::string& directory, std::int64_t step);

}  // namespace shardlib::io

#ifndef SHARDLIB_COMPILED
#include "shardlib/io/formats/impl/safetensors_tree.hpp"
#endif
