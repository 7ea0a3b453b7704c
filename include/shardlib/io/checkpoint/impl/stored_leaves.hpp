// The state of a Checkpoint: which array of the folder holds which leaves.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "shardlib/io/checkpoint/folder.hpp"
#include "shardlib/io/checkpoint/impl/manifest.hpp"
#include "shardlib/io/formats/zarr.hpp"
#include "shardlib/spec/dtype.hpp"
#include "shardlib/support/error.hpp"

namespace shardlib::io {

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
  void add(const std::string& name, const ZarrArray& array);
};

namespace detail {

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

inline void Checkpoint::Impl::add(const std::string& name, const ZarrArray& array) {
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

}  // namespace shardlib::io
