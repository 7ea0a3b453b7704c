// Definitions of safetensors_files.hpp.
#pragma once

#include "shardlib/io/formats/safetensors_files.hpp"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <array>
#include <filesystem>
#include <set>
#include <span>
#include <string_view>
#include <system_error>

#include "shardlib/io/file.hpp"
#include "shardlib/io/impl/json.hpp"
#include "shardlib/support/crc32c.hpp"
#include "shardlib/support/error.hpp"
#include "shardlib/support/text.hpp"

namespace shardlib::io {
namespace detail {

using nlohmann::json;
using shardlib::detail::excerpt;

inline constexpr const char* safetensors_single = "model.safetensors";
inline constexpr const char* safetensors_index = "model.safetensors.index.json";

/// A name in the folder itself, which no index may leave.
inline bool is_safetensors_name(std::string_view name) {
  return name.ends_with(".safetensors") && name.find('/') == std::string_view::npos &&
         name.find('\0') == std::string_view::npos && name.size() < 256;
}

/// "model-00002-of-00003.safetensors"
inline std::string shard_name(std::string_view stem, std::size_t number, std::size_t count) {
  return fmt::format("{}-{:05}-of-{:05}.safetensors", stem, number, count);
}

/// How the names of `count` new shards begin: those that the index names stay until it names the new ones.
inline std::string_view new_shard_stem(const std::string& index, std::size_t count) {
  if (!file_exists(index)) return "model";
  const Bytes former = read_file(index);
  return as_text(former).find('"' + shard_name("model", 1, count)) == std::string_view::npos ? "model" : "model-new";
}

inline bool is_shard_name(std::string_view name) {
  return std::ranges::any_of(
      std::array<std::string_view, 2>{"model-#####-of-#####.safetensors", "model-new-#####-of-#####.safetensors"},
      [name](std::string_view pattern) {
        return std::equal(name.begin(), name.end(), pattern.begin(), pattern.end(),
                          [](char c, char p) { return p == '#' ? c >= '0' && c <= '9' : c == p; });
      });
}

/// Maps tensors to the names of their shards. Duplicate tensors, of which a parser would keep one, are refused.
inline std::map<std::string, std::string> parse_index(const std::string& path) {
  const auto fail = [&](const std::string& why) { throw Error("'" + path + "': " + why); };
  const json index = read_foreign_json(path, 100, "an index of safetensors files", "weight_map");
  if (!index.is_object() || !index.contains("weight_map") || !index["weight_map"].is_object())
    fail("it must be a JSON object with the object 'weight_map', from tensors to files");
  std::map<std::string, std::string> weight_map;
  for (const auto& [name, shard] : index["weight_map"].items()) {
    if (!shard.is_string() || !is_safetensors_name(shard.get<std::string>()))
      fail("tensor '" + excerpt(name) + "': " + excerpt(shard.dump(-1, ' ', true)) +
           " is not the name of a .safetensors file of this folder");
    weight_map[name] = shard.get<std::string>();
  }
  if (weight_map.empty()) fail("its 'weight_map' names no tensor");
  return weight_map;
}

inline void remove_if_there(const std::string& path) {
  std::error_code error;
  std::filesystem::remove(path, error);
  if (error) throw Error("cannot remove '" + path + "', a part of an earlier model: " + error.message());
}

}  // namespace detail

SHARDLIB_INLINE SafetensorsFiles::SafetensorsFiles(const std::string& path)
    : path_(path), is_folder_(io::is_folder(path)) {
  std::map<std::string, std::string> weight_map;
  if (!is_folder_) {
    files_.emplace_back(path);
  } else if (file_exists(path + "/" + detail::safetensors_single)) {
    files_.emplace_back(path + "/" + detail::safetensors_single);
  } else if (file_exists(path + "/" + detail::safetensors_index)) {
    weight_map = detail::parse_index(path + "/" + detail::safetensors_index);
    std::set<std::string> shards;
    for (const auto& [name, shard] : weight_map) shards.insert(shard);
    for (const std::string& shard : shards) {
      if (!file_exists(path + "/" + shard))
        throw UsageError(fmt::format("'{}/{}' names the file '{}', which is not in the folder: fetch it too", path,
                                     detail::safetensors_index, shardlib::detail::excerpt(shard)));
      files_.emplace_back(path + "/" + shard);
    }
  } else {
    std::string other;
    for (const char* name : {"pytorch_model.bin", "pytorch_model.bin.index.json"})
      if (file_exists(path + "/" + name))
        other = fmt::format(", but {}, which is not read: save the model as safetensors", name);
    throw UsageError(fmt::format("the folder '{}' has neither {} nor {}{}", path, detail::safetensors_single,
                                 detail::safetensors_index, other));
  }
  for (std::size_t i = 0; i < files_.size(); ++i) {
    const auto& entries = files_[i].entries();
    for (std::size_t k = 0; k < entries.size(); ++k) {
      if (const auto [at, fresh] = places_.try_emplace(entries[k].name, i, k); !fresh)
        throw Error(fmt::format("the tensor '{}' is in '{}' and in '{}' too: the folder has parts of two models",
                                shardlib::detail::excerpt(entries[k].name), files_[at->second.first].path(),
                                files_[i].path()));
    }
  }
  if (!weight_map.empty()) require_index(weight_map);
}

SHARDLIB_INLINE void SafetensorsFiles::require_index(const std::map<std::string, std::string>& weight_map) const {
  const std::string index = path_ + "/" + detail::safetensors_index;
  const char* remedy = ": index and files are not of the same model; fetch them again";
  for (const auto& [name, shard] : weight_map)
    if (const Found found = find(name); found.file == nullptr || found.file->path() != path_ + "/" + shard)
      throw Error(fmt::format("'{}' has the tensor '{}' in '{}', which does not have it{}", index,
                              shardlib::detail::excerpt(name), shard, remedy));
  for (const auto& [name, place] : places_)
    if (!weight_map.contains(name))
      throw Error(fmt::format("'{}' has the tensor '{}', which '{}' does not name{}", files_[place.first].path(),
                              shardlib::detail::excerpt(name), index, remedy));
}

SHARDLIB_INLINE SafetensorsFiles::Found SafetensorsFiles::find(const std::string& name) const {
  const auto at = places_.find(name);
  if (at == places_.end()) return {};
  const SafetensorsFile& file = files_[at->second.first];
  return {&file, &file.entries()[at->second.second]};
}

SHARDLIB_INLINE std::string SafetensorsFiles::describe() const {
  std::string text;
  for (const auto& [name, place] : places_) {
    const SafetensorsFile& file = files_[place.first];
    const SafetensorsEntry& entry = file.entries()[place.second];
    std::string first(std::min<std::uint64_t>(entry.end - entry.begin, 4096), '\0');
    file.read_bytes(entry, 0, std::as_writable_bytes(std::span(first)));
    text += name + first;
  }
  return fmt::format("{}, {} tensor{}, crc32c {:08x}", path_, places_.size(), places_.size() == 1 ? "" : "s",
                     crc32c(as_bytes(text)));
}

SHARDLIB_INLINE void write_safetensors_folder(const std::string& folder, std::vector<SafetensorsTensor> tensors,
                                              const std::map<std::string, std::string>& metadata,
                                              std::uint64_t most_bytes) {
  if (file_exists(folder) && !is_folder(folder))
    throw UsageError("cannot write a model into '" + folder + "': it is not a folder; choose another path");
  make_folders(folder);
  std::ranges::sort(tensors, {}, &SafetensorsTensor::name);
  const auto bytes_of = [](const SafetensorsTensor& tensor) {
    return static_cast<std::uint64_t>(volume(tensor.shape)) * detail::safetensors_item(tensor.dtype);
  };
  std::vector<std::vector<SafetensorsTensor>> shards(1);
  std::uint64_t total = 0, filled = 0;
  for (SafetensorsTensor& tensor : tensors) {
    const std::uint64_t bytes = bytes_of(tensor);
    if (!shards.back().empty() && filled + bytes > most_bytes) {
      shards.emplace_back();
      filled = 0;
    }
    filled += bytes;
    total += bytes;
    shards.back().push_back(std::move(tensor));
  }
  const std::string single = folder + "/" + detail::safetensors_single,
                    index = folder + "/" + detail::safetensors_index;
  std::set<std::string> written;
  if (shards.size() == 1) {
    write_safetensors(single, std::move(shards[0]), metadata);
    detail::remove_if_there(index);
  } else {
    if (shards.size() > 99999) throw Error("cannot write '" + folder + "': there would be more than 99999 files");
    const std::string_view stem = detail::new_shard_stem(index, shards.size());
    detail::json weight_map = detail::json::object();
    for (std::size_t i = 0; i < shards.size(); ++i) {
      const std::string name = detail::shard_name(stem, i + 1, shards.size());
      written.insert(name);
      for (const SafetensorsTensor& tensor : shards[i]) weight_map[tensor.name] = name;
      write_safetensors(folder + "/" + name, std::move(shards[i]), metadata);
    }
    const detail::json whole{{"metadata", {{"total_size", total}}}, {"weight_map", weight_map}};
    replace_file(index, as_bytes(whole.dump(2) + "\n"), true);
    detail::remove_if_there(single);
  }
  std::vector<std::string> stale;
  for (const auto& entry : std::filesystem::directory_iterator(folder))
    if (const std::string name = entry.path().filename().string();
        detail::is_shard_name(name) && !written.contains(name))
      stale.push_back(entry.path().string());
  for (const std::string& path : stale) detail::remove_if_there(path);
}

}  // namespace shardlib::io
