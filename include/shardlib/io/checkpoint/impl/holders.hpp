// The shards of leaves that devices hold, as texts between them.
#pragma once

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "shardlib/device/device.hpp"
#include "shardlib/io/agree.hpp"
#include "shardlib/io/box.hpp"
#include "shardlib/io/checkpoint/layout.hpp"
#include "shardlib/io/checkpoint/writer.hpp"
#include "shardlib/runtime/value.hpp"
#include "shardlib/spec/dtype.hpp"
#include "shardlib/support/crc32c.hpp"
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

/// Whether the device of a value is one of the mesh's, or a view of it on a part of the mesh or with other axes.
inline bool on_mesh_of(const Device& mesh, const Device* device) {
  while (device != nullptr && &device->original() != &mesh.original()) device = device->whole().get();
  return device != nullptr;
}

/// This device's leaves by name, and a list of their shards for leaves_together, with whether a submesh has them.
/// Throws Error if leaves share a name, or if one is empty or on another mesh.
inline std::map<std::string, shardlib::detail::ValuePtr> leaves_of(const Device& mesh, const NamedValues& leaves,
                                                                   json& list) {
  std::map<std::string, shardlib::detail::ValuePtr> mine;
  for (const auto& [name, value] : leaves) {
    if (!mine.emplace(name, value).second) throw Error("two leaves have the name '" + name + "'");
    if (!value) throw Error("the leaf '" + name + "' is empty: give it a value first");
    if (!on_mesh_of(mesh, value->device.get()))
      throw Error("the leaf '" + name +
                  "' is on another mesh; make it on the mesh of this call, or on a submesh or `reinterpret` of it");
    const ShardPlace shard = shard_place(name, *value);
    list.push_back({shard.leaf, shard.place, &value->device->original() != &mesh.original()});
  }
  return mine;
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

/// Throws Error if devices of a submesh, or of several, have different values under one name. A pipeline's stages have
/// equal ones. Collective. `remedy` follows "if they are of several submeshes, give the leaves of each names of its own
/// ".
inline void require_equal_holders(Device& device, const std::string& what, const Leaves& leaves,
                                  const std::map<std::string, shardlib::detail::ValuePtr>& mine,
                                  const std::string& remedy) {
  const auto shared = [](const LeafShards& leaf) {
    return leaf.of_parts &&
           std::ranges::any_of(leaf.holders, [](const auto& holders) { return holders.second.size() > 1; });
  };
  if (std::ranges::none_of(leaves, [&](const auto& leaf) { return shared(leaf.second); })) return;
  for (const auto& [name, value] : mine)
    if (shared(leaves.at(name))) static_cast<void>(value->data());  // a deferred value may communicate
  json sums = json::object();
  together(device, what, [&] {
    for (const auto& [name, value] : mine)
      if (shared(leaves.at(name))) {
        const Buffer shard = value->on_host();
        sums[name] = crc32c(std::span(shard.data(), value->bytes()));
      }
  });
  std::vector<json> all;
  for (const std::string& text : gather_texts(device, sums.dump())) all.push_back(json::parse(text));
  together(device, what, [&] {
    for (const auto& [name, leaf] : leaves)
      for (const auto& [place, holders] : leaf.holders)
        for (const int holder : holders)
          if (const int first = holders.front(); shared(leaf) && all[static_cast<std::size_t>(holder)].at(name) !=
                                                                     all[static_cast<std::size_t>(first)].at(name))
            throw Error("the leaf '" + name + "' has other values on device " + std::to_string(holder) +
                        " than on device " + std::to_string(first) +
                        "; if they are of several submeshes, give the leaves of each names of its own " + remedy);
  });
}

}  // namespace shardlib::io::detail
