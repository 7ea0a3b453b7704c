// Checkpoints as folders, without a mesh: their content, whether they are whole, and which one is the newest. The
// layout is specified in docs/checkpoints.md.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "shardlib/io/box.hpp"
#include "shardlib/io/file.hpp"
#include "shardlib/spec/dtype.hpp"
#include "shardlib/support/error.hpp"
#include "shardlib/support/inline.hpp"

namespace shardlib::io {

/// Information about the run that a checkpoint stores besides its leaves: the step, and more.
struct CheckpointMeta {
  std::int64_t step = 0;
  std::string data_hash = {};                    ///< hash of the data's configuration; a resumed run compares it
  std::map<std::string, std::string> user = {};  ///< anything else, UTF-8
  std::optional<double> validation_loss = {};    ///< validation loss of its weights
  friend bool operator==(const CheckpointMeta&, const CheckpointMeta&) = default;
};

/// A leaf of a checkpoint: its name, shape and dtype.
struct CheckpointArray {
  std::string name;  ///< the leaf's: "layers.0.w_q"
  DType dtype = DType::f32;
  Index shape;                    ///< without padding
  std::vector<std::string> dims;  ///< their names
  /// The size without padding.
  [[nodiscard]] std::uint64_t bytes() const { return static_cast<std::uint64_t>(volume(shape)) * size_of(dtype); }
};

/// One file of a checkpoint as its manifest describes it: its size in bytes, its crc32c, and its path relative to the
/// checkpoint.
struct ManifestFile {
  std::string path;
  std::uint64_t bytes = 0;
  std::uint32_t crc32c = 0;
};

/// The checkpoints that stay in a directory when one is saved. Other earlier ones are removed.
struct Retention {
  int newest = 0;          ///< how many of the newest stay, the saved one included; 0: all
  std::int64_t every = 0;  ///< those of steps that this divides; 0: none
  int best = 0;            ///< how many with the lowest CheckpointMeta::validation_loss stay
};

/// A checkpoint open for reading: `path` is its folder, `meta` what it says about the run, `files` its manifest.
class Checkpoint {
 public:
  /// Reads and checks the manifest and all metadata. Throws UsageError where there is no checkpoint, Error where it is
  /// damaged.
  [[nodiscard]] static Checkpoint open(const std::string& path);

  [[nodiscard]] const std::string& path() const;
  [[nodiscard]] const CheckpointMeta& meta() const;
  /// The leaves, sorted by name. Several may share one array of the folder.
  [[nodiscard]] const std::vector<CheckpointArray>& arrays() const;
  /// Null where there is none.
  [[nodiscard]] const CheckpointArray* find(const std::string& name) const;
  [[nodiscard]] const std::vector<ManifestFile>& files() const;

  /// Reads every `every`th file from `first` on and compares size and checksum; one sentence for each damaged file.
  /// Throws StorageError where the storage refuses to read one.
  [[nodiscard]] std::vector<std::string> damages(std::size_t first = 0, std::size_t every = 1) const;
  /// Reads all floating leaves; one sentence for each that holds infinities or NaNs.
  [[nodiscard]] std::vector<std::string> not_finite() const;
  /// The hyper-rectangle of `shape` at `offset` of a leaf, row-major. Sizes are checked, checksums are not.
  void read(const std::string& name, const Index& offset, const Index& shape, std::span<std::byte> out) const;

 private:
  struct Impl;
  explicit Checkpoint(std::shared_ptr<const Impl> impl) : impl_(std::move(impl)) {}
  std::shared_ptr<const Impl> impl_;
};

/// The folder of a step's checkpoint: "step-00000100".
[[nodiscard]] std::string checkpoint_name(std::int64_t step);
/// The checkpoints of a directory in the order in which to resume from them: the one that LATEST names, then the steps
/// before it, newest first, then those after it. Those half written are not among them.
[[nodiscard]] std::vector<std::string> list_checkpoints(const std::string& directory);
/// The first whole one of list_checkpoints. Damaged ones are named on stderr and passed over; if none is whole, throws
/// Error. Throws StorageError where the storage refuses to read one. Empty where there is no checkpoint.
[[nodiscard]] std::optional<std::string> newest_whole(const std::string& directory);

namespace detail {

/// The step of the folder "step-00000100"; nothing for other names.
[[nodiscard]] std::optional<std::int64_t> step_of(std::string_view name);
/// "x; y; z and 4 more", and the error for a damaged checkpoint.
[[nodiscard]] std::string damage_message(const std::string& path, const std::vector<std::string>& damages);
/// The error for a checkpoint that the storage refuses to read; it may be whole.
[[nodiscard]] std::string refused_message(const std::string& path, const StorageError& error);
/// Names a damaged checkpoint on stderr.
void warn_damaged(const std::string& message);
/// Renames a checkpoint that is `what`, "damaged", to "step-00000100.damaged", which is no longer a checkpoint, and
/// says so on stderr.
void set_aside(const std::string& path, const std::string& what);
/// The error of newest_whole if none of the `count` checkpoints is whole.
[[noreturn]] void fail_none_whole(const std::string& directory, std::size_t count);

/// A zarr array of a checkpoint: one leaf, or leaves of one shape along a first dim.
struct StoredArray {
  CheckpointArray array;
  Index chunks;
  std::string leaves;  ///< their names, "layers.*.w" with a number for the star; "": `array` is one leaf
};

[[nodiscard]] std::string zarr_dtype_of(DType dtype);
[[nodiscard]] ManifestFile describe_file(const std::string& folder, const std::string& path);
/// `arrays` and `meta` as a zarr group in the new folder; gives the paths of the files.
std::vector<std::string> write_metadata(const std::string& folder, const CheckpointMeta& meta,
                                        const std::vector<StoredArray>& arrays);
/// Writes manifest.json, durable.
void write_manifest(const std::string& folder, std::vector<ManifestFile> files);
/// Returns the steps in `before` whose checkpoints `keep` does not retain once `step` is saved, newest first.
[[nodiscard]] std::vector<std::int64_t> not_kept(const std::string& directory, std::vector<std::int64_t> before,
                                                 std::int64_t step, const Retention& keep);
/// The folders in this folder that were being written or removed when a process ended.
[[nodiscard]] std::vector<std::string> half_removed(const std::string& directory);
/// Removes a checkpoint. After a crash it is whole, or its folder has a name that no checkpoint has.
void remove_checkpoint(const std::string& path);
/// Removes what crashed savers have left, and checkpoints before `step` that need not stay. What cannot be removed is
/// named on stderr.
void prune_checkpoints(const std::string& directory, std::int64_t step, const Retention& keep);

}  // namespace detail
}  // namespace shardlib::io

#ifndef SHARDLIB_COMPILED
#include "shardlib/io/checkpoint/impl/folder.hpp"
#endif
