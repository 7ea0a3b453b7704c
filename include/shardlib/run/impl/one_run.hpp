// Checks that all ranks run the same program on the same data set, in the same folder.
#pragma once

#include <fmt/format.h>

#include <array>
#include <cstddef>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include "shardlib/io/agree.hpp"
#include "shardlib/run/impl/run_identity.hpp"
#include "shardlib/run/training.hpp"
#include "shardlib/support/error.hpp"
#include "shardlib/support/version.hpp"

namespace shardlib::run::detail {

/// The first line of a resolved configuration in which two devices differ, or nothing.
inline std::optional<std::array<std::string, 2>> difference(const std::string& a, const std::string& b) {
  std::istringstream mine(a), theirs(b);
  for (std::string x, y; !mine.eof() || !theirs.eof();) {
    if (!std::getline(mine, x)) x.clear();
    if (!std::getline(theirs, y)) y.clear();
    if (x != y) return std::array{x, y};
  }
  return std::nullopt;
}

/// Throws UsageError, the same on all devices, unless they run the same program on the same data. Ranks with other
/// settings would otherwise train silently, each its own model.
inline void require_one_run(const DevicePtr& device, const Training& training, const std::string& configuration,
                            const Data& data) {
  if (device->size() == 1) return;
  const std::string mine =
      fmt::format("shardlib {}\n--run {}\n--resume {}\ninitial weights: {}\n{}\ndata = {}\nvalidation data = {}\n",
                  SHARDLIB_VERSION, training.directory, training.resume, training.initial_weights, configuration,
                  loader_hash(data.train.get(), "none"), loader_hash(data.validation.get(), "none"));
  const std::vector<std::string> all = io::gather_texts(*device, mine);
  std::string others;
  std::optional<std::array<std::string, 2>> first;
  for (std::size_t i = 1; i < all.size(); ++i) {
    const auto differs = difference(all[0], all[i]);
    if (!differs || (first && *differs != *first)) continue;
    first = differs;
    others += (others.empty() ? "" : ", ") + std::to_string(i);
  }
  if (!first) return;
  const auto shown = [](const std::string& line) { return line.empty() ? "nothing" : "`" + line + "`"; };
  throw UsageError(
      fmt::format("the ranks run different programs: rank 0 has {}, but rank {} has {}; start all ranks with "
                  "the same settings, data and program",
                  shown((*first)[0]), others, shown((*first)[1])));
}

}  // namespace shardlib::run::detail
