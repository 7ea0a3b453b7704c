// Definitions of check_replicas.hpp.
#pragma once

#include "shardlib/run/check_replicas.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <optional>
#include <span>
#include <string_view>

#include "shardlib/comm/collective_call.hpp"
#include "shardlib/io/agree.hpp"
#include "shardlib/support/crc32c.hpp"
#include "shardlib/support/error.hpp"

namespace shardlib::run::detail {

/// A device's checksum of one leaf or number. Plain data, which the other devices read.
struct Checksum {
  std::uint64_t name = 0, value = 0;
};

inline std::uint64_t checksum_of(const shardlib::detail::Value& leaf) {
  const Buffer shard = leaf.on_host();
  return io::crc32c(std::span(shard.data(), leaf.bytes()));
}

/// The axis indices of the device `rank`.
inline std::vector<int> axis_indices(const Device& device, int rank) {
  std::vector<int> result(device.axes().size());
  for (std::size_t i = result.size(); i-- > 0; rank /= device.axes()[i].size) result[i] = rank % device.axes()[i].size;
  return result;
}

/// Whether devices along the axis hold the same values of a leaf. A number has no spec, and is the same on all devices.
inline bool is_replicated(const TensorSpec* spec, std::string_view axis) {
  return spec == nullptr || spec->placement(axis).kind == Placement::replicated;
}

/// "devices 0, 2, 3 hold one value, device 1 another", or nothing if all hold the same.
inline std::string disagreement(const std::vector<std::pair<int, std::uint64_t>>& copies) {
  std::vector<std::pair<std::uint64_t, std::vector<int>>> by_value;
  for (const auto& [rank, value] : copies) {
    auto same = std::ranges::find(by_value, value, [](const auto& entry) { return entry.first; });
    if (same == by_value.end()) same = by_value.insert(same, {value, {}});
    same->second.push_back(rank);
  }
  if (by_value.size() < 2) return {};
  std::ranges::sort(by_value, {}, [](const auto& entry) {  // the majority first
    return std::pair(-static_cast<std::int64_t>(entry.second.size()), entry.second.front());
  });
  std::string text;
  for (const auto& [value, ranks] : by_value)
    text += fmt::format("{}{} {} {}", text.empty() ? "" : ", ", ranks.size() == 1 ? "device" : "devices",
                        fmt::join(ranks, ", "),
                        text.empty() ? (ranks.size() == 1 ? "holds one value" : "hold one value") : "another");
  return text;
}

inline std::uint64_t key_of(const std::string& name) {
  return shardlib::detail::Fingerprint().add(name).value();
}

/// The checksums of all devices.
class GatheredChecksums {
 public:
  /// Collective.
  GatheredChecksums(Device& device, const io::detail::NamedValues& leaves, const ReplicatedNumbers& numbers)
      : device_(device) {
    std::vector<Checksum> mine;
    for (const auto& [name, number] : numbers) mine.push_back({key_of(name), number});
    for (const auto& [name, leaf] : leaves) mine.push_back({key_of(name), leaf ? checksum_of(*leaf) : 0});
    std::string text(mine.size() * sizeof(Checksum), '\0');
    if (!mine.empty()) std::memcpy(text.data(), mine.data(), text.size());
    texts_ = io::gather_texts(device, text);
  }

  /// How the replicas of this device's shard of a leaf differ, or of a number, which has none; empty if they do not.
  [[nodiscard]] std::string difference(const std::string& name, const shardlib::detail::Value* leaf) const {
    const TensorSpec* const spec = leaf != nullptr ? leaf->spec : nullptr;
    // A leaf may be on another factorization of the mesh, which has the same ranks.
    const bool seen = leaf != nullptr && &leaf->device->original() == &device_;
    const Device& mesh = seen ? *leaf->device : device_;
    const std::vector<int> here = axis_indices(mesh, device_.rank());
    std::vector<std::pair<int, std::uint64_t>> copies;
    std::vector<bool> along(here.size());
    for (int rank = 0; rank < device_.size(); ++rank) {
      const std::vector<int> there = axis_indices(mesh, rank);
      bool same_shard = true;
      for (std::size_t i = 0; i < here.size(); ++i)
        same_shard = same_shard && (there[i] == here[i] || is_replicated(spec, mesh.axes()[i].name));
      const auto value = same_shard ? find(static_cast<std::size_t>(rank), key_of(name)) : std::nullopt;
      if (!value) continue;
      copies.emplace_back(rank, *value);
      for (std::size_t i = 0; i < here.size(); ++i) along[i] = along[i] || there[i] != here[i];
    }
    std::vector<std::string> over;
    for (std::size_t i = 0; i < along.size(); ++i)
      if (along[i]) over.push_back(mesh.axes()[i].name);
    const std::string how = disagreement(copies);
    return how.empty() ? how : fmt::format("is replicated over {}, but {}", fmt::join(over, ","), how);
  }

 private:
  [[nodiscard]] std::optional<std::uint64_t> find(std::size_t rank, std::uint64_t key) const {
    const std::string& from = texts_[rank];
    Checksum entry;
    for (std::size_t at = 0; at < from.size(); at += sizeof entry) {
      std::memcpy(&entry, from.data() + at, sizeof entry);
      if (entry.name == key) return entry.value;
    }
    return std::nullopt;
  }

  const Device& device_;
  std::vector<std::string> texts_;
};

SHARDLIB_INLINE void check_replicas(Device& device, const io::detail::NamedValues& leaves,
                                    const ReplicatedNumbers& numbers, const std::string& when) {
  if (device.size() == 1 || device.is_dry()) return;  // a step that calls it can be planned
  const GatheredChecksums checksums(device, leaves, numbers);
  std::string found;
  int more = 0;
  const auto note = [&](const std::string& what, const std::string& how) {
    if (how.empty()) return;
    found.empty() ? static_cast<void>(found = what + " " + how) : static_cast<void>(++more);
  };
  for (const auto& [name, number] : numbers) note("`" + name + "`", checksums.difference(name, nullptr));
  for (const auto& [name, leaf] : leaves) {
    if (!leaf) continue;
    note(fmt::format("the leaf `{}` of spec `{}`", name, std::string_view(to_string(*leaf->spec))),
         checksums.difference(name, leaf.get()));
  }
  if (more > 0) found += fmt::format("; {} more differ{}", more, more == 1 ? "s" : "");
  // Each device compares the replicas of its own values. All throw what the first device has found.
  for (const std::string& difference : io::gather_texts(device, found)) {
    if (!difference.empty())
      throw Error(fmt::format(
          "check_replicas {}: {}: a device has computed something else, or a program has changed its copy alone", when,
          difference));
  }
}

}  // namespace shardlib::run::detail
