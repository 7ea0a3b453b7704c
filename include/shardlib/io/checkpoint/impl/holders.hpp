// The shards of leaves that devices hold, as texts between them.
#pragma once

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "shardlib/io/box.hpp"
#include "shardlib/io/checkpoint/layout.hpp"
#include "shardlib/runtime/value.hpp"
#include "shardlib/spec/dtype.hpp"
#include "shardlib/support/error.hpp"

namespace shardlib::io::detail {

using nlohmann::json;

/// The place of this device's shard in the grid of shards.
inline Index place_of(const shardlib::detail::Value& x) {
  Index place;
  for (int i = 0; i < x.spec->rank(); ++i)
    place.push_back(shardlib::detail::shard_index(*x.device, x.spec->dims[i].axes));
  return place;
}

/// This device's shard of a leaf: its description, which is the same on all devices, and its place.
struct ShardPlace {
  json leaf;
  json place;  ///< null if the shard is nothing but padding
};

inline ShardPlace shard_place(const std::string& name, const shardlib::detail::Value& x) {
  Index shape, shard;
  std::vector<std::string> dims;
  for (int i = 0; i < x.spec->rank(); ++i) {
    shape.push_back(x.global.logical[i]);
    dims.emplace_back(x.spec->dims[i].name);
    shard.push_back(std::max<std::int64_t>(x.local[i], 1));
  }
  const bool padding = shardlib::detail::product(shardlib::detail::true_shape(x)) == 0;
  return {{name, static_cast<int>(x.dtype), shape, dims, shard}, padding ? json() : json(place_of(x))};
}

/// The leaves of all devices. Each device has sent a list of descriptions and places, and may have sent whether a leaf
/// is on a submesh. Devices may hold different leaves (pipeline stages), and several may hold the same shard.
inline Leaves leaves_together(const std::vector<std::string>& lists) {
  Leaves leaves;
  std::map<std::string, json> described;
  for (std::size_t d = 0; d < lists.size(); ++d)
    for (const json& entry : json::parse(lists[d])) {
      const json& about = entry[0];
      const std::string name = about[0];
      LeafShards& leaf = leaves[name];
      if (const auto [it, fresh] = described.try_emplace(name, about); fresh)
        leaf = {{name, static_cast<DType>(about[1].get<int>()), about[2].get<Index>(),
                 about[3].get<std::vector<std::string>>()},
                about[4].get<Index>(),
                {}};
      else if (it->second != about)
        throw Error("the leaf '" + name + "' has another shape, dtype or layout on device " + std::to_string(d));
      leaf.of_parts = leaf.of_parts || (entry.size() > 2 && entry[2].get<bool>());
      if (!entry[1].is_null()) leaf.holders[entry[1].get<Index>()].push_back(static_cast<int>(d));
    }
  for (const auto& [name, leaf] : leaves) {
    std::size_t count = 1;
    for (std::size_t i = 0; i < leaf.shard.size(); ++i)
      count *= static_cast<std::size_t>((leaf.array.shape[i] + leaf.shard[i] - 1) / leaf.shard[i]);
    if (leaf.holders.size() != count)
      throw Error("the devices hold " + std::to_string(leaf.holders.size()) + " of the " + std::to_string(count) +
                  " shards of '" + name + "'");
  }
  return leaves;
}

}  // namespace shardlib::io::detail
