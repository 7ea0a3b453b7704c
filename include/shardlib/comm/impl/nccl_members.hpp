// The members of a group exchange these facts before they use NCCL.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "shardlib/comm/communicator.hpp"
#include "shardlib/comm/nccl.hpp"
#include "shardlib/memory/buffer.hpp"
#include "shardlib/memory/region.hpp"

namespace shardlib::detail::nccl {

/// The facts of one member.
struct Member {
  bool has_nccl = false;
  std::uint64_t process = 0;  ///< a number of its process
  HardwareName hardware{};
  UniqueId id{};                   ///< of the group, from its first member
  std::array<char, 256> reason{};  ///< why it has no NCCL
};

/// A number that each process has for itself, on whatever machine it is.
inline std::uint64_t process_number() {
  static const std::uint64_t number = [] {
    std::random_device random;
    return (std::uint64_t{random()} << 32) | random();
  }();
  return number;
}

/// What the member with this number says. `id` is one that it gives.
inline Member member(const Use& use, int rank, const UniqueId& id) {
  Member mine;
  mine.has_nccl = use.library.functions != nullptr;
  mine.process = process_number() + (use.apart ? static_cast<std::uint64_t>(rank) + 1 : 0);
  mine.hardware = use.pool->device_memory()->hardware();
  mine.id = id;
  const std::string& reason = use.library.reason;
  std::copy_n(reason.begin(), std::min(reason.size(), mine.reason.size() - 1), mine.reason.begin());
  return mine;
}

/// The members of a group, by rank. All of them call it.
inline std::vector<Member> meet(Communicator& group, const Member& mine) {
  const auto ranks = static_cast<std::size_t>(group.size());
  // Other members may read and write them after this one has failed.
  const auto members = std::make_shared<std::vector<Member>>(ranks + 1);
  members->back() = mine;
  group
      .all_gather(Buffer(&members->back(), sizeof mine, members), Buffer(members->data(), ranks * sizeof mine, members))
      .wait();
  return {members->begin(), members->end() - 1};
}

/// Why a group cannot use NCCL; empty if it can.
inline std::string obstacle(std::span<const Member> all) {
  for (const Member& member : all)
    if (!member.has_nccl) return member.reason.data();
  for (std::size_t i = 0; i < all.size(); ++i)
    for (std::size_t k = 0; k < i; ++k)
      if (all[i].hardware == all[k].hardware)
        return "ranks " + std::to_string(k) + " and " + std::to_string(i) +
               " of a group have the same GPU, which NCCL does not allow";
  return "";
}

/// Whether two members are threads of one process.
inline bool shares_process(std::span<const Member> all) {
  for (std::size_t i = 0; i < all.size(); ++i)
    for (std::size_t k = 0; k < i; ++k)
      if (all[i].process == all[k].process) return true;
  return false;
}

}  // namespace shardlib::detail::nccl
