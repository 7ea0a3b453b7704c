// What a trainer needs for folders of Hugging Face's transformers beside their tensors
// (io/formats/safetensors_files.hpp): config.json, read so that what is not understood is refused by its key.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "shardlib/io/formats/safetensors_files.hpp"
#include "shardlib/run/options.hpp"
#include "shardlib/support/inline.hpp"

namespace shardlib::run {

/// The config.json of a model's folder, its `path`, and which of its keys a program has used. "rope_scaling.factor" is
/// a key of the object `rope_scaling`; a key whose value is null counts as absent. Whatever a program cannot compute is
/// a UsageError that names the file, the key, its value and what is expected. `HuggingFaceConfig
/// config("models/llama")`
class HuggingFaceConfig {
 public:
  /// Reads the file. Throws UsageError where there is none, Error where it is no JSON object.
  explicit HuggingFaceConfig(const std::string& folder);

  [[nodiscard]] const std::string& path() const { return path_; }
  /// Whether the key is there; it counts as used from then on, as by all that follows.
  [[nodiscard]] bool has(const std::string& key);
  /// The value as JSON: `"silu"` with its quotes, `4096`. Throws UsageError for an absent key.
  [[nodiscard]] const std::string& value(const std::string& key);
  /// A whole number of at least 0; an absent key has the value `otherwise`, and without one throws UsageError.
  [[nodiscard]] std::int64_t integer(const std::string& key, std::optional<std::int64_t> otherwise = {});
  /// Throws UsageError unless the key is absent, or its value, as JSON, is one of these.
  void require(const std::string& key, const std::vector<std::string>& expected);
  /// Throws UsageError: the key's value is not `expected`.
  [[noreturn]] void refuse(const std::string& key, const std::string& expected) const;
  /// Gives the option the key's value, or `otherwise` where it is absent (see Options::imply).
  void imply(Options& options, const std::string& option, const std::string& key,
             const std::optional<std::string>& otherwise = {});
  /// Throws UsageError, which lists them, for keys that were not used and are not among `harmless`, which do not change
  /// what the model computes.
  void finish(const std::set<std::string>& harmless) const;

 private:
  std::string path_;
  std::map<std::string, std::string> values_;  ///< JSON by key, without nulls
  std::set<std::string> used_;
};

/// Throws UsageError if the tensor `output` is there and differs from `embedding`: in the model they are one.
/// `require_tied(files, "lm_head.weight", "model.embed_tokens.weight")`
SHARDLIB_INLINE void require_tied(const io::SafetensorsFiles& files, const std::string& output,
                                  const std::string& embedding);

/// Throws UsageError, which begins with the option, unless a model's folder can be written at this path, which is made
/// if need be. For programs that know of it long before they write. `require_writable_folder("exported", "--export")`
SHARDLIB_INLINE void require_writable_folder(const std::string& folder, const std::string& option);

}  // namespace shardlib::run

#ifndef SHARDLIB_COMPILED
#include "shardlib/run/impl/hugging_face.hpp"
#endif
