// Definitions of hugging_face.hpp.
#pragma once

#include "shardlib/run/hugging_face.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <cstddef>
#include <filesystem>
#include <system_error>

#include "shardlib/device/launch.hpp"
#include "shardlib/io/agree.hpp"
#include "shardlib/io/checkpoint/checkpoint.hpp"
#include "shardlib/io/file.hpp"
#include "shardlib/io/formats/safetensors.hpp"
#include "shardlib/io/impl/json.hpp"
#include "shardlib/run/console.hpp"
#include "shardlib/run/run_directory.hpp"
#include "shardlib/support/error.hpp"
#include "shardlib/support/text.hpp"

namespace shardlib::run {

SHARDLIB_INLINE HuggingFaceConfig::HuggingFaceConfig(const std::string& folder) : path_(folder + "/config.json") {
  using nlohmann::json;
  if (!io::file_exists(path_) && io::file_exists(folder + "/manifest.json"))
    throw UsageError("'" + folder +
                     "' is a checkpoint of a run, not a model of Hugging Face: a run resumes from its checkpoints with "
                     "--run; only --export writes such a model");
  const json config = io::detail::read_foreign_json(path_, 10, "a model's config.json");
  if (!config.is_object()) throw Error("'" + path_ + "': it must be a JSON object");
  const auto keep = [&](const std::string& key, const json& one) {
    if (one.is_null()) nulls_.insert(key);
    if (!one.is_null()) values_[key] = one.dump(-1, ' ', true);
  };
  for (const auto& [key, one] : config.items()) {
    if (!one.is_object() || one.empty()) keep(key, one);
    if (one.is_object())
      for (const auto& [inner, part] : one.items()) keep(key + "." + inner, part);
  }
}

SHARDLIB_INLINE bool HuggingFaceConfig::has(const std::string& key) {
  used_.insert(key);
  return values_.contains(key);
}

SHARDLIB_INLINE const std::string& HuggingFaceConfig::value(const std::string& key) {
  if (!has(key)) throw UsageError(fmt::format("'{}' has no '{}', which the model needs", path_, key));
  return values_.at(key);
}

SHARDLIB_INLINE bool HuggingFaceConfig::is_null(const std::string& key) {
  used_.insert(key);
  return nulls_.contains(key);
}

SHARDLIB_INLINE std::string HuggingFaceConfig::json(const std::string& key, const std::string& otherwise) {
  return has(key) ? values_.at(key) : is_null(key) ? "null" : otherwise;
}

SHARDLIB_INLINE std::string HuggingFaceConfig::first_of(const std::vector<std::string>& keys) {
  const std::string* first = nullptr;
  for (const std::string& key : keys) {
    if (!has(key)) continue;
    if (first == nullptr) first = &key;
    // 10000 and 10000.0 are one value.
    if (nlohmann::json::parse(values_.at(key)) != nlohmann::json::parse(values_.at(*first)))
      refuse(key, fmt::format("{}, as '{}'", shardlib::detail::excerpt(values_.at(*first)), *first));
  }
  return first == nullptr ? keys.at(0) : *first;
}

SHARDLIB_INLINE std::int64_t HuggingFaceConfig::integer(const std::string& key, std::optional<std::int64_t> otherwise) {
  if (!has(key) && otherwise) return *otherwise;
  const std::string& text = value(key);
  std::int64_t number = 0;
  if (!shardlib::detail::parse_number(text, number) || number < 0) refuse(key, "a whole number");
  return number;
}

SHARDLIB_INLINE void HuggingFaceConfig::require(const std::string& key, const std::vector<std::string>& expected) {
  if (!has(key)) return;
  for (const std::string& one : expected)
    if (values_.at(key) == one) return;
  refuse(key, fmt::format("{}", fmt::join(expected, " or ")));
}

SHARDLIB_INLINE void HuggingFaceConfig::refuse(const std::string& key, const std::string& expected) const {
  const auto at = values_.find(key);
  throw UsageError(fmt::format("'{}': '{}' is {}, but this program computes models where it is {}", path_,
                               shardlib::detail::excerpt(key),
                               at != values_.end()    ? shardlib::detail::excerpt(at->second)
                               : nulls_.contains(key) ? "null"
                                                      : "absent",
                               expected));
}

SHARDLIB_INLINE void HuggingFaceConfig::imply(Options& options, const std::string& option, const std::string& key,
                                              const std::optional<std::string>& otherwise) {
  options.imply(option, !has(key) && otherwise ? *otherwise : value(key), fmt::format("'{}': {}", path_, key));
}

SHARDLIB_INLINE void HuggingFaceConfig::finish(const std::set<std::string>& harmless) const {
  std::vector<std::string> left;
  constexpr std::size_t most = 8;
  std::set<std::string> all{
      "_attn_implementation_autoset", "_name_or_path",        "dtype",    "initializer_range", "torch_dtype",
      "transformers.js_config",       "transformers_version", "use_cache"};
  all.insert(harmless.begin(), harmless.end());
  const auto is_harmless = [&](const std::string& key) {
    return std::ranges::any_of(all, [&](const std::string& h) { return key == h || key.starts_with(h + "."); });
  };
  for (const auto& [key, text] : values_)
    if (!used_.contains(key) && !is_harmless(key) && left.size() < most)
      left.push_back(fmt::format("'{}' ({})", shardlib::detail::excerpt(key, 40), shardlib::detail::excerpt(text, 40)));
  if (!left.empty())
    throw UsageError(
        fmt::format("'{}' has {}, and this program does not know whether that changes what the model "
                    "computes: remove what does not",
                    path_, fmt::join(left, ", ")));
}

SHARDLIB_INLINE void require_tied(const io::SafetensorsFiles& files, const std::string& output,
                                  const std::string& embedding) {
  const auto [output_file, out] = files.find(output);
  const auto [embedding_file, in] = files.find(embedding);
  if (out == nullptr || in == nullptr) return;
  bool same = out->shape == in->shape && in->shape.size() == 2;
  for (std::int64_t row = 0; same && row < in->shape[0]; ++row) {
    std::vector<float> a(static_cast<std::size_t>(in->shape[1])), b(a.size());
    output_file->read_f32(*out, {row, 0}, {1, in->shape[1]}, a);
    embedding_file->read_f32(*in, {row, 0}, {1, in->shape[1]}, b);
    same = a == b;
  }
  if (!same)
    throw UsageError(
        fmt::format("in '{}', '{}' differs from '{}', but this model's output layer is its embedding: it cannot hold "
                    "both",
                    files.path(), output, embedding));
}

SHARDLIB_INLINE void require_writable_folder(const Training& training, const std::string& folder,
                                             const std::string& option) {
  require_no_run_file(folder, option, training.directory);
  std::error_code ignored;
  if (io::file_exists(folder) && !std::filesystem::is_directory(folder, ignored))
    throw UsageError(
        fmt::format("{}: '{}' is not a folder, but a model is a folder of files: choose another path", option, folder));
  if (io::file_exists(folder + "/LATEST"))
    throw UsageError(fmt::format("{}: '{}' has the checkpoints of a run: choose another folder", option, folder));
  try {
    io::make_folders(folder);
  } catch (const Error& error) {
    throw UsageError(fmt::format("{}: {}; nothing has been computed yet: check {}", option, error.what(), option));
  }
  io::require_writable(folder + "/config.json", option);
  naming_option(option, [&] { io::require_no_other_format(folder + "/model.safetensors"); });
}

SHARDLIB_INLINE void require_logits_file(const Training& training, const std::string& path) {
  require_output(training, path, "--logits");
  naming_option("--logits", [&] {
    io::require_no_other_format(path);
    std::error_code none;
    const bool replaces = std::filesystem::file_size(path, none) > 0 && !none;
    if (std::filesystem::path(path).filename() == "model.safetensors" ||
        (replaces && io::SafetensorsFile(path).find("logits") == nullptr))
      throw UsageError(
          fmt::format("'{}' is, or has the name of, a file of a model, whose weights the logits would replace; choose "
                      "another path",
                      path));
  });
}

SHARDLIB_INLINE void require_other_folder(const std::string& folder, const std::string& loaded) {
  namespace fs = std::filesystem;
  if (folder.empty() || loaded.empty()) return;
  std::error_code ignored;
  const fs::path path(loaded), its = fs::is_directory(path, ignored) ? path : fs::absolute(path).parent_path();
  if (fs::equivalent(folder, its, ignored))
    throw UsageError(
        fmt::format("--export '{}' would replace the weights of --load '{}': choose another folder", folder, loaded));
}

SHARDLIB_INLINE void imply_tokenizer(Options& options, const std::string& loaded, bool gpt2) {
  if (loaded.empty() || options.given("--tokenizer")) return;
  const auto has = [&](const char* name) { return io::file_exists(loaded + "/" + name); };
  const char* const origin = "the folder of --load";
  if (has("tokenizer.json"))
    options.imply("--tokenizer", loaded + "/tokenizer.json", origin);
  else if (gpt2 && has("merges.txt") && has("vocab.json"))
    options.imply("--tokenizer", loaded, origin);
}

SHARDLIB_INLINE void note_loaded(const Training& training, const Data& data, const std::string& loaded) {
  if (loaded.empty() || training.plan || !training.graph.empty() || world_rank() != 0) return;
  const std::string& run = training.directory;
  const bool trains_them = training.frozen_weights.empty();
  if (trains_them && !run.empty() && io::file_exists(run) && !io::list_checkpoints(run + "/checkpoints").empty())
    print_console(fmt::format(
        "note: the run in '{}' has a checkpoint, so its weights are used, not those of --load '{}'\n", run, loaded));
  const auto ids = static_cast<std::int64_t>(data.tokenizer->vocabulary_size());
  if (training.tokenizer == Training().tokenizer && ids != data.vocabulary)
    print_console(fmt::format(
        "note: --tokenizer {} has {} ids and the loaded model {}: without the model's own tokenizer, prompts, "
        "samples and texts mean nothing to it\n",
        training.tokenizer, ids, data.vocabulary));
}

SHARDLIB_INLINE void export_folder(Device& device, const std::string& run, const std::string& folder,
                                   const io::StoredTable& table, const std::string& config,
                                   const std::string& checkpoints) {
  io::together(device, "--export", [&] {
    if (device.rank() != 0) return;
    const auto newest = io::newest_whole(checkpoints.empty() ? run + "/checkpoints" : checkpoints);
    if (!newest) throw UsageError("the run has no checkpoint yet");
    const std::string path = folder + "/config.json";
    std::error_code error;
    std::filesystem::remove(path, error);
    if (error) throw Error("cannot remove '" + path + "' of an earlier model: " + error.message());
    io::export_safetensors_folder(io::Checkpoint::open(*newest), folder, table);
    // The run's copy is what the model was trained with.
    for (const auto& file : std::filesystem::directory_iterator(run + "/tokenizer", error)) {
      const std::string name = file.path().filename().string();
      const std::string known = name == "vocab.bpe" ? "merges.txt" : name == "encoder.json" ? "vocab.json" : name;
      io::replace_file(folder + "/" + known, io::read_file(file.path().string()), true);
    }
    io::replace_file(path, io::as_bytes(config), true);
  });
}

SHARDLIB_INLINE std::string json_float(double x) {
  const std::string text = fmt::format("{}", x);
  return text.find_first_of(".e") == std::string::npos ? text + ".0" : text;
}

}  // namespace shardlib::run
