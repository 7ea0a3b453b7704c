// What an open checkpoint holds: its manifest, with which files are compared, and which array has which leaves.
#pragma once

#include <nlohmann/json.hpp>

#include <cstddef>
#include <cstdint>
#include <exception>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "shardlib/io/checkpoint/folder.hpp"
#include "shardlib/io/formats/zarr.hpp"
#include "shardlib/io/impl/json.hpp"
#include "shardlib/spec/dtype.hpp"
#include "shardlib/support/crc32c.hpp"
#include "shardlib/support/error.hpp"
#include "shardlib/support/text.hpp"

namespace shardlib::io {

namespace detail {

using nlohmann::json;

inline constexpr std::string_view checkpoint_format = "shardlib-checkpoint";
inline constexpr int checkpoint_version = 2;  ///< 1 has an array for each leaf, and is read too

/// Describes what is wrong with a file; empty if nothing is. Throws StorageError where the storage refuses to read it.
inline std::optional<std::string> damage_of(const std::string& folder, const ManifestFile& expected) {
  const std::string name = "'" + expected.path + "' ";
  try {
    if (!file_exists(folder + "/" + expected.path)) return name + "is missing";
    if (const InputFile file(folder + "/" + expected.path); file.size() != expected.bytes)
      return name + "has " + std::to_string(file.size()) + " bytes instead of " + std::to_string(expected.bytes);
    const ManifestFile found = describe_file(folder, expected.path);
    if (found.crc32c != expected.crc32c)
      return name + "has the checksum " + hex(found.crc32c) + " instead of " + hex(expected.crc32c);
  } catch (const StorageError&) {  // a later try may succeed, and find it whole
    throw;
  } catch (const Error& e) {
    return name + "cannot be read (" + e.what() + ")";
  }
  return std::nullopt;
}

// The first line of manifest.json holds the checksum of the bytes after it, so that damage to the manifest itself
// shows.
inline constexpr std::string_view manifest_start = "{\"crc32c\": \"";
inline constexpr std::string_view manifest_break = "\",\n";

inline std::vector<ManifestFile> read_manifest(const std::string& folder) {
  const std::string path = folder + "/manifest.json";
  const auto fail = [&](const std::string& why) -> void {
    throw Error("checkpoint '" + folder + "' is damaged: 'manifest.json' " + why);
  };
  const Bytes bytes = read_file(path);
  const std::string_view text = as_text(bytes);
  const std::size_t start = manifest_start.size() + 8 + manifest_break.size();
  if (text.size() < start) fail("is truncated");
  const std::string sum = hex(crc32c(as_bytes(text.substr(start))));
  if (text.substr(0, start) != std::string(manifest_start) + sum + std::string(manifest_break))
    fail("does not match its checksum " + sum);
  // The checksum matches, but another program may have written the manifest.
  std::vector<ManifestFile> files;
  json all;
  try {
    all = parse_json(text);
  } catch (const std::exception&) {  // then it lacks the keys below
  }
  const auto entry = [&](const std::string& key) { return all.is_object() && all.contains(key) ? all[key] : json(); };
  if (entry("format") != checkpoint_format) fail("is not of a " + std::string(checkpoint_format));
  if (const json version = entry("version"); version != 1 && version != checkpoint_version)
    fail("has version " + version.dump().substr(0, 60) + ", but this program reads versions 1 to " +
         std::to_string(checkpoint_version));
  const json listed = entry("files");
  for (const auto& [name, file] : listed.items()) {
    ManifestFile one{name, 0, 0};
    const auto wrong = [&] { fail("describes '" + name + "' wrongly"); };
    if (!file.is_object() || !file.contains("bytes") || !file.contains("crc32c") ||
        !file["bytes"].is_number_unsigned() || !file["crc32c"].is_string() || name.empty() || name[0] == '/' ||
        name.find("..") != std::string::npos)
      wrong();
    one.bytes = file["bytes"].get<std::uint64_t>();
    const std::string digits = file["crc32c"].get<std::string>();
    if (digits.size() != 8 || !shardlib::detail::parse_number(digits, one.crc32c, 16)) wrong();
    files.push_back(std::move(one));
  }
  return files;
}

inline CheckpointArray describe_array(const std::string& name, const ZarrArray& array, const json& attributes) {
  const std::string text = attributes.value("dtype", json()) == "bfloat16" ? "bfloat16" : array.info().dtype;
  CheckpointArray result{name, DType::f32, array.info().shape, {}};
  if (const json dims = attributes.value("_ARRAY_DIMENSIONS", json::array()); dims.is_array())
    for (const json& dim : dims) result.dims.push_back(dim.is_string() ? dim.get<std::string>() : dim.dump());
  if (text == "bfloat16" && array.info().dtype == "<u2") {
    result.dtype = DType::bf16;
    return result;
  }
  for (const DType dtype : {DType::f32, DType::f64, DType::i32, DType::u32, DType::u8, DType::bool_})
    if (zarr_dtype_of(dtype) == text) {
      result.dtype = dtype;
      return result;
    }
  throw Error("'" + array.path() + "': the dtype \"" + text + "\" is not supported in a checkpoint");
}

}  // namespace detail

/// The state of a Checkpoint: which array of the folder holds which leaves.
struct Checkpoint::Impl {
  std::string path;
  CheckpointMeta meta;
  std::vector<CheckpointArray> arrays;
  std::vector<ManifestFile> files;
  /// The array of a leaf, and its place there along the first dim if others have theirs.
  struct Place {
    ZarrArray array;
    std::optional<std::int64_t> row;
  };
  std::map<std::string, Place> places;

  /// The leaves that an array holds.
  void add(const std::string& name, const ZarrArray& array) {
    const detail::json attributes = array.attributes();
    CheckpointArray leaf = detail::describe_array(name, array, attributes);
    const auto put = [&](std::optional<std::int64_t> row) {
      if (!places.emplace(leaf.name, Place{array, row}).second)
        throw Error("checkpoint '" + path + "': two arrays hold the leaf '" + leaf.name +
                    "'; go back to an older checkpoint");
      arrays.push_back(leaf);
    };
    const auto found = attributes.find("leaves");
    if (found == attributes.end()) return put(std::nullopt);
    const auto fail = [&](const std::string& why) {
      throw Error("'" + array.path() + "/.zattrs': key \"leaves\" " + why);
    };
    const std::string pattern = found->is_string() ? found->get<std::string>() : "";
    const std::size_t star = pattern.find('*');
    if (star == std::string::npos || star != pattern.rfind('*')) fail("must be a name with one star");
    constexpr std::int64_t most = 1'000'000;  // a number from outside must not allocate without bound
    if (leaf.shape.empty() || leaf.shape[0] > most) fail("needs a first dim of at most " + std::to_string(most));
    const std::int64_t count = leaf.shape[0];
    leaf.shape.erase(leaf.shape.begin());
    if (!leaf.dims.empty()) leaf.dims.erase(leaf.dims.begin());
    for (std::int64_t row = 0; row < count; ++row) {
      leaf.name = pattern.substr(0, star) + std::to_string(row) + pattern.substr(star + 1);
      put(row);
    }
  }
};

}  // namespace shardlib::io
