// Folders of Hugging Face's transformers, for trainers: a strict reader of config.json, and the export of a run.
// io/formats/safetensors_files.hpp reads the tensors.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "shardlib/device/device.hpp"
#include "shardlib/io/formats/safetensors_files.hpp"
#include "shardlib/io/formats/safetensors_tree.hpp"
#include "shardlib/run/options.hpp"
#include "shardlib/run/training.hpp"
#include "shardlib/support/inline.hpp"

namespace shardlib::run {

/// The config.json of a model's folder, its `path`, and the keys that a program has used. "rope_scaling.factor" is a
/// key of the object `rope_scaling`. A key with the value null counts as absent, except in is_null. A setting that a
/// program cannot compute is a UsageError that names the file, the key, its value and the expected values.
/// `HuggingFaceConfig config("models/llama")`
class HuggingFaceConfig {
 public:
  /// Reads the file. Throws UsageError if there is none, Error if it is not a JSON object.
  [[gnu::cold]] explicit HuggingFaceConfig(const std::string& folder);

  [[nodiscard]] const std::string& path() const { return path_; }
  /// Whether the key exists. This call, like those below, marks the key as used.
  [[nodiscard, gnu::cold]] bool has(const std::string& key);
  /// Whether the key exists with the value null, where an absent key would mean another value.
  [[nodiscard, gnu::cold]] bool is_null(const std::string& key);
  /// The value as JSON: `"silu"` with its quotes, or `4096`. Throws UsageError for an absent key.
  [[nodiscard, gnu::cold]] const std::string& value(const std::string& key);
  /// The value as JSON, which may be null, or `otherwise` for an absent key.
  [[nodiscard, gnu::cold]] std::string json(const std::string& key, const std::string& otherwise);
  /// Returns the first of these alternative keys that exists, or the first key if none does. Throws UsageError if
  /// another one has a different value.
  [[nodiscard, gnu::cold]] std::string first_of(const std::vector<std::string>& keys);
  /// The value as a whole number of at least 0. For an absent key it returns `otherwise`, or throws UsageError without
  /// one.
  [[nodiscard, gnu::cold]] std::int64_t integer(const std::string& key, std::optional<std::int64_t> otherwise = {});
  /// Throws UsageError unless the key is absent or its value, as JSON, is one of `expected`.
  [[gnu::cold]] void require(const std::string& key, const std::vector<std::string>& expected);
  /// Throws UsageError, which says that the key's value is not `expected`.
  [[noreturn, gnu::cold]] void refuse(const std::string& key, const std::string& expected) const;
  /// Gives the option the key's value, or `otherwise` if the key is absent (see Options::imply).
  [[gnu::cold]] void imply(Options& options, const std::string& option, const std::string& key,
                           const std::optional<std::string>& otherwise = {});
  /// Throws UsageError for keys that were not used and are not among `harmless`, and lists them. A harmless key does
  /// not change what the model computes. The name of an object there stands for all its keys. Keys that mean this in
  /// every model, such as `transformers_version`, are harmless anyway.
  [[gnu::cold]] void finish(const std::set<std::string>& harmless) const;

 private:
  std::string path_;
  std::map<std::string, std::string> values_;  ///< JSON by key, without nulls
  std::set<std::string> nulls_, used_;
};

/// Gives --tokenizer the tokenizer.json of the folder `loaded`, if it has one and the user has not given the option.
/// For a GPT-2 it may also be the folder itself, with `merges.txt` and `vocab.json`: they do not say how texts are cut,
/// which is known of GPT-2 alone. `imply_tokenizer(options, "models/llama")`
SHARDLIB_INLINE void imply_tokenizer(Options& options, const std::string& loaded, bool gpt2 = false);

/// Throws UsageError if the tensor `output` exists and differs from `embedding`, because the model ties them.
/// `require_tied(files, "lm_head.weight", "model.embed_tokens.weight")`
SHARDLIB_INLINE void require_tied(const io::SafetensorsFiles& files, const std::string& output,
                                  const std::string& embedding);

/// Throws UsageError, which begins with the option, unless a model can be written into this folder. Creates the folder
/// if needed. Call it before training. `require_writable_folder(training, "exported", "--export")`
SHARDLIB_INLINE void require_writable_folder(const Training& training, const std::string& folder,
                                             const std::string& option);

/// Throws UsageError, which begins with --logits, unless this safetensors file can be written, or if it would replace a
/// model, or a file of another format. Call it before training.
/// `require_logits_file(training, "logits.safetensors")`
SHARDLIB_INLINE void require_logits_file(const Training& training, const std::string& path);

/// Throws UsageError if an export into `folder` would replace what --load reads: that folder, or a file in it.
/// `require_other_folder("models/tuned", "models/llama")`
SHARDLIB_INLINE void require_other_folder(const std::string& folder, const std::string& loaded);

/// Prints on the first rank what a user of --load may not expect: that the run's checkpoint replaces the loaded
/// weights, and that the tokenizer of bytes is not the model's. `note_loaded(training, data, "models/llama")`
SHARDLIB_INLINE void note_loaded(const Training& training, const Data& data, const std::string& loaded);

/// Does --export: writes the weights of the run's newest whole checkpoint into a folder, the files of the run's
/// tokenizer, under Hugging Face's names, and then config.json with this text. An old config.json is removed first, so
/// an incomplete folder is not a model. `checkpoints` are in another folder than the run's if it is not empty. The
/// first device writes, and every device calls it. `export_folder(device, "runs/tuned", "models/tuned", table, json)`
SHARDLIB_INLINE void export_folder(Device& device, const std::string& run, const std::string& folder,
                                   const io::StoredTable& table, const std::string& config,
                                   const std::string& checkpoints = "");

/// A number with a point or an exponent, as transformers expects floats. `json_float(2) == "2.0"`
[[nodiscard]] SHARDLIB_INLINE std::string json_float(double x);

}  // namespace shardlib::run

#ifndef SHARDLIB_COMPILED
#include "shardlib/run/impl/hugging_face.hpp"
#endif
