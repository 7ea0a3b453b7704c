// Definitions of hugging_face.hpp.
#pragma once

#include "shardlib/run/hugging_face.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

#include <charconv>
#include <cstddef>
#include <exception>
#include <filesystem>
#include <system_error>

#include "shardlib/io/file.hpp"
#include "shardlib/io/impl/json.hpp"
#include "shardlib/support/error.hpp"
#include "shardlib/support/excerpt.hpp"

namespace shardlib::run {

SHARDLIB_INLINE HuggingFaceConfig::HuggingFaceConfig(const std::string& folder) : path_(folder + "/config.json") {
  using nlohmann::json;
  constexpr std::uint64_t largest = 10'000'000;
  const auto fail = [&](const std::string& why) { throw Error("'" + path_ + "': " + why); };
  const io::InputFile file(path_);
  if (file.size() > largest) fail("it has more than 10 MB: it is no model's config.json");
  io::Bytes text(file.size());
  file.read(0, text);
  std::string object, twice;  // the object that is read, and a key that it has twice
  std::set<std::string> keys;
  const json::parser_callback_t watch = [&](int depth, json::parse_event_t event, json& parsed) {
    if (event != json::parse_event_t::key || depth > 2) return true;
    const auto key = parsed.get<std::string>();
    if (depth == 1) object = key;
    if (!keys.insert(depth == 1 ? key : object + "." + key).second) twice = key;
    return true;
  };
  json config;
  try {
    config = io::detail::parse_json(io::as_text(text), watch);
  } catch (const std::exception&) {
    fail("it is no JSON: it is no model's config.json, or it is damaged");
  }
  if (!config.is_object()) fail("it must be a JSON object");
  if (!twice.empty()) fail("it has '" + shardlib::detail::excerpt(twice) + "' twice");
  const auto keep = [&](const std::string& key, const json& one) {
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

SHARDLIB_INLINE std::int64_t HuggingFaceConfig::integer(const std::string& key, std::optional<std::int64_t> otherwise) {
  if (!has(key) && otherwise) return *otherwise;
  const std::string& text = value(key);
  std::int64_t number = 0;
  const char* const end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(text.data(), end, number);
  if (error != std::errc() || rest != end || number < 0) refuse(key, "a whole number");
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
                               at == values_.end() ? "absent" : shardlib::detail::excerpt(at->second), expected));
}

SHARDLIB_INLINE void HuggingFaceConfig::imply(Options& options, const std::string& option, const std::string& key,
                                              const std::optional<std::string>& otherwise) {
  options.imply(option, !has(key) && otherwise ? *otherwise : value(key), fmt::format("'{}': {}", path_, key));
}

SHARDLIB_INLINE void HuggingFaceConfig::finish(const std::set<std::string>& harmless) const {
  std::vector<std::string> left;
  constexpr std::size_t most = 8;
  for (const auto& [key, text] : values_)
    if (!used_.contains(key) && !harmless.contains(key) && left.size() < most)
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

SHARDLIB_INLINE void require_writable_folder(const std::string& folder, const std::string& option) {
  std::error_code ignored;
  if (io::file_exists(folder) && !std::filesystem::is_directory(folder, ignored))
    throw UsageError(
        fmt::format("{}: '{}' is no folder, but a model is a folder of files: choose another path", option, folder));
  try {
    io::make_folders(folder);
  } catch (const Error& error) {
    throw UsageError(fmt::format("{}: {}; nothing has been computed yet: check {}", option, error.what(), option));
  }
  io::require_writable(folder + "/config.json", option);
}

}  // namespace shardlib::run
