// A model's safetensors as Hugging Face's folders have them: one file, or several (shards) with an index.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "shardlib/io/formats/safetensors.hpp"
#include "shardlib/support/inline.hpp"

namespace shardlib::io {

/// The tensors of a safetensors file, or of all files of a folder, by name, and their `path`; reads are thread-safe.
class SafetensorsFiles {
 public:
  /// Opens the file of this path, or in a folder model.safetensors, or else the shards that
  /// model.safetensors.index.json names. Throws UsageError where the folder has neither or lacks a shard, Error where a
  /// header is wrong or where index and shards disagree about which tensor is where.
  explicit SafetensorsFiles(const std::string& path);

  [[nodiscard]] const std::string& path() const { return path_; }
  /// Whether `path` is a folder.
  [[nodiscard]] bool is_folder() const { return is_folder_; }
  /// One, or the shards in the order of their names.
  [[nodiscard]] const std::vector<SafetensorsFile>& files() const { return files_; }

  /// An `entry` and the `file` that has it; both are null if there is none.
  struct Found {
    const SafetensorsFile* file = nullptr;
    const SafetensorsEntry* entry = nullptr;
  };
  /// The tensor of this name.
  [[nodiscard]] Found find(const std::string& name) const;

  /// A line by which ranks compare what they see: the path, how many tensors there are, and a checksum of their names
  /// and first numbers. `files.describe()`
  [[nodiscard]] std::string describe() const;

 private:
  void require_index(const std::map<std::string, std::string>& weight_map) const;

  std::string path_;
  bool is_folder_ = false;
  std::vector<SafetensorsFile> files_;
  std::map<std::string, std::pair<std::size_t, std::size_t>> places_;  ///< file and entry of each tensor
};

/// Shards are at most so long, unless one tensor is longer.
inline constexpr std::uint64_t safetensors_shard_bytes = 5'000'000'000;

/// Writes a folder that SafetensorsFiles reads, and creates it if needed: one file, or, if the tensors have more than
/// `most_bytes`, shards in the order of names and an index. The files of an earlier model are removed once the new one
/// is whole, so a reader never sees parts of both, and a kill leaves one of them. Shards are called
/// model-new-00001-of-00003 where the earlier model has their names. Throws as write_safetensors does.
/// `write_safetensors_folder("exported", tensors)`
void write_safetensors_folder(const std::string& folder, std::vector<SafetensorsTensor> tensors,
                              const std::map<std::string, std::string>& metadata = {},
                              std::uint64_t most_bytes = safetensors_shard_bytes);

}  // namespace shardlib::io

#ifndef SHARDLIB_COMPILED
#include "shardlib/io/formats/impl/safetensors_files.hpp"
#endif
