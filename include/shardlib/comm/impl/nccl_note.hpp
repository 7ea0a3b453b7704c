// Definition of the note of nccl.hpp.
#pragma once

#include <cstddef>
#include <map>
#include <string>
#include <vector>

#include "shardlib/comm/impl/nccl_members.hpp"
#include "shardlib/comm/nccl.hpp"

namespace shardlib::detail::nccl {

SHARDLIB_INLINE std::string note(Communicator& everybody, const Use& use) {
  const std::vector<Member> all = meet(everybody, member(use, everybody.rank(), {}));
  if (everybody.rank() != 0) return "";
  std::map<std::string, std::vector<std::size_t>> without;  // NCCL, by the reason
  std::map<HardwareName, std::vector<std::size_t>> sharing;
  for (std::size_t i = 0; i < all.size(); ++i)
    (all[i].has_nccl ? sharing[all[i].hardware] : without[all[i].reason.data()]).push_back(i);
  std::string text;
  const auto add = [&](const std::string& groups, const std::vector<std::size_t>& devices, const std::string& why) {
    constexpr std::size_t most = 16;
    text += "note: " + groups + (devices.size() == 1 ? " device " : " devices ");
    for (std::size_t i = 0; i < devices.size() && i < most; ++i)
      text += (i == 0 ? "" : ", ") + std::to_string(devices[i]);
    if (devices.size() > most) text += " and " + std::to_string(devices.size() - most) + " more";
    text += " communicate through host memory in place of NCCL, as " + why + "\n";
  };
  for (const auto& [why, devices] : without) add("the groups of", devices, why);
  for (const auto& [gpu, devices] : sharing)
    if (devices.size() > 1) add("groups of several of", devices, "these have the same GPU, which NCCL does not allow");
  return text;
}

}  // namespace shardlib::detail::nccl
