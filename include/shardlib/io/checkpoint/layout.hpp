// The arrays and files of a checkpoint, and the device that writes each. It is a pure function of the devices' shards,
// so all devices get the same result. Layers become one array; a small array becomes one file.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "shardlib/io/box.hpp"
#include "shardlib/io/checkpoint/folder.hpp"
#include "shardlib/spec/dtype.hpp"

namespace shardlib::io::detail {

/// A leaf and its holders: the devices of each shard that has elements, by the shard's place in the grid of shards.
struct LeafShards {
  CheckpointArray array;
  Index shard;  ///< its sizes, padding included
  std::map<Index, std::vector<int>> holders;
  bool of_parts = false;  ///< some holders have it on a submesh, so that their shards need not be equal

  [[nodiscard]] bool alike(const LeafShards& other) const {
    return array.dtype == other.array.dtype && array.shape == other.array.shape && array.dims == other.array.dims &&
           shard == other.shard;
  }
  /// The beginning of a shard, and its sizes without padding.
  [[nodiscard]] std::pair<Index, Index> box(const Index& place) const {
    Index offset, sizes;
    for (std::size_t i = 0; i < place.size(); ++i) {
      offset.push_back(place[i] * shard[i]);
      sizes.push_back(std::min(shard[i], array.shape[i] - offset.back()));
    }
    return {offset, sizes};
  }
};
using Leaves = std::map<std::string, LeafShards>;

/// One file of an array: a chunk, which holds the shard at `place` of `count` leaves, or all shards where they are
/// merged.
struct PlannedFile {
  std::string path;  ///< relative to the checkpoint
  std::size_t first = 0, count = 1;
  Index place;
  int writer = 0;
};
struct PlannedArray {
  StoredArray stored;
  std::vector<const LeafShards*> leaves;
  std::size_t ordinal = 0;  ///< devices take turns by it
  bool merged = false;      ///< one device writes the whole array, and is sent what it does not hold
  std::vector<PlannedFile> files;
};

/// No chunk of several leaves is larger than this, so that devices share the work of verifying.
inline constexpr std::uint64_t most_chunk_bytes = std::uint64_t{256} << 20;

/// Leaves whose names differ in one number, which counts from 0, by their common name "layers.*.w". A leaf is in one.
inline std::map<std::string, std::vector<const LeafShards*>> stacks_of(const Leaves& leaves) {
  std::map<std::string, std::map<std::size_t, const LeafShards*>> found;
  for (const auto& [name, leaf] : leaves)
    for (std::size_t begin = 0; begin < name.size();) {
      const std::size_t end = std::min(name.find('.', begin), name.size());
      const std::string_view part = std::string_view(name).substr(begin, end - begin);
      const bool number = !part.empty() && part.size() < 7 && (part == "0" || part[0] != '0') &&
                          part.find_first_not_of("0123456789") == std::string_view::npos;
      if (number) found[name.substr(0, begin) + "*" + name.substr(end)].emplace(std::stoul(std::string(part)), &leaf);
      begin = end + 1;
    }
  std::vector<std::pair<std::size_t, std::string>> largest_first;
  for (const auto& [pattern, members] : found) {
    const bool whole = members.size() > 1 && members.rbegin()->first + 1 == members.size();
    if (whole && std::ranges::all_of(members, [&](const auto& m) { return m.second->alike(*members.begin()->second); }))
      largest_first.emplace_back(members.size(), pattern);
  }
  std::ranges::sort(largest_first, [](const auto& a, const auto& b) {
    return a.first != b.first ? a.first > b.first : a.second < b.second;
  });
  std::map<std::string, std::vector<const LeafShards*>> stacks;
  std::set<const LeafShards*> taken;
  for (const auto& [count, pattern] : largest_first) {
    const auto& members = found[pattern];
    if (std::ranges::any_of(members, [&](const auto& m) { return taken.contains(m.second); })) continue;
    for (const auto& [i, leaf] : members) {
      stacks[pattern].push_back(leaf);
      taken.insert(leaf);
    }
  }
  return stacks;
}

/// "layers.*.w" without its star: "layers.w"; "" where nothing is left.
inline std::string without_star(const std::string& pattern) {
  const std::size_t star = pattern.find('*');
  std::string name = pattern.substr(0, star) + pattern.substr(std::min(pattern.size(), star + 2));
  if (name.ends_with('.')) name.pop_back();
  return name;
}

/// The devices that hold the shard at `place` of all of these leaves.
inline std::vector<int> common_holders(const PlannedArray& array, const Index& place, std::size_t first,
                                       std::size_t count) {
  std::vector<int> common = array.leaves[first]->holders.at(place);
  for (std::size_t i = first + 1; i < first + count; ++i) {
    std::vector<int> both;
    std::ranges::set_intersection(common, array.leaves[i]->holders.at(place), std::back_inserter(both));
    common = std::move(both);
  }
  return common;
}

/// The files of an array, and the chunk that each is.
inline void plan_files(PlannedArray& array, int devices, std::uint64_t merge_below) {
  const LeafShards& leaf = *array.leaves[0];
  const std::size_t n = array.leaves.size();
  const bool stacked = !array.stored.leaves.empty();
  Index chunk = leaf.shard;
  const auto path_of = [&](std::size_t row, const Index& place) {
    std::string key = stacked ? std::to_string(row) : "";
    for (const auto index : place) key += (key.empty() ? "" : ".") + std::to_string(index);
    return array.stored.array.name + "/" + (key.empty() ? "0" : key);
  };
  const auto finish = [&](std::size_t rows) {
    array.stored.chunks = chunk;
    if (stacked) array.stored.chunks.insert(array.stored.chunks.begin(), static_cast<std::int64_t>(rows));
  };
  const auto shard_bytes = static_cast<std::uint64_t>(volume(chunk)) * size_of(leaf.array.dtype);
  std::size_t rows = n;
  const auto fits = [&] {
    if (n % rows != 0 || (rows > 1 && rows * shard_bytes > most_chunk_bytes)) return false;
    for (const auto& [place, holders] : leaf.holders)
      for (std::size_t first = 0; first < n; first += rows)
        if (common_holders(array, place, first, rows).empty()) return false;
    return true;
  };
  while (rows > 1 && !fits()) --rows;
  for (const auto& [place, holders] : leaf.holders)
    for (std::size_t first = 0; first < n; first += rows) {
      const std::vector<int> who = common_holders(array, place, first, rows);
      // Replicas take turns over the arrays.
      array.files.push_back(
          {path_of(first / rows, place), first, rows, place, who[(array.ordinal + first / rows) % who.size()]});
    }
  array.merged = array.files.size() > 1 && array.stored.array.bytes() <= merge_below;
  if (!array.merged) return finish(rows);
  chunk = leaf.array.shape;
  const Index origin(chunk.size(), 0);
  array.files = {{path_of(0, origin), 0, n, origin, static_cast<int>(array.ordinal) % devices}};
  finish(n);
}

/// All arrays, sorted by name. Those of at most `merge_below` bytes are one file.
inline std::vector<PlannedArray> plan_arrays(const Leaves& leaves, int devices, std::uint64_t merge_below) {
  std::map<std::string, PlannedArray> arrays;
  std::set<const LeafShards*> taken;
  for (const auto& [pattern, members] : stacks_of(leaves)) {
    const std::string name = without_star(pattern);
    if (name.empty() || leaves.contains(name) || arrays.contains(name)) continue;
    PlannedArray& array = arrays[name];
    array.leaves = members;
    array.stored = {members[0]->array, {}, pattern};
    array.stored.array.name = name;
    array.stored.array.shape.insert(array.stored.array.shape.begin(), std::ssize(members));
    const std::string before = pattern.substr(0, pattern.find('*'));
    const std::string owner = before.empty() ? "leaf" : before.substr(0, before.size() - 1);
    array.stored.array.dims.insert(array.stored.array.dims.begin(), owner.substr(owner.rfind('.') + 1));
    taken.insert(members.begin(), members.end());
  }
  for (const auto& [name, leaf] : leaves)
    if (!taken.contains(&leaf)) arrays[name] = {{leaf.array, {}, ""}, {&leaf}, 0, false, {}};
  std::vector<PlannedArray> result;
  for (auto& [name, array] : arrays) {
    array.ordinal = result.size();
    plan_files(array, devices, merge_below);
    result.push_back(std::move(array));
  }
  return result;
}

}  // namespace shardlib::io::detail
