// Loads a tree from files of any format: the leaves' names over all devices, the error that lists the mismatches, new
// values. For impl/ headers.
#pragma once

#include <algorithm>
#include <cstddef>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "shardlib/io/agree.hpp"
#include "shardlib/io/checkpoint/writer.hpp"
#include "shardlib/runtime/value.hpp"
#include "shardlib/support/error.hpp"
#include "shardlib/support/handle.hpp"
#include "shardlib/support/print.hpp"

namespace shardlib::io::detail {

/// " (did you mean 'layers.0.w_q'?)", or nothing where no name is near.
inline std::string did_you_mean(const std::string& name, const std::set<std::string>& candidates) {
  const std::string* best = nullptr;
  std::size_t least = std::max<std::size_t>(2, name.size() / 3) + 1;
  for (const std::string& candidate : candidates) {
    const std::size_t distance = run::detail::edit_distance(name, candidate);
    if (distance < least) {
      least = distance;
      best = &candidate;
    }
  }
  return best == nullptr ? "" : " (nearest there: '" + *best + "')";
}

/// The error with all that is wrong; nothing if that is empty.
inline void fail_unless_fitting(const std::string& what, const std::vector<std::string>& wrong) {
  if (wrong.empty()) return;
  std::string message = what + " does not fit this program:";
  constexpr std::size_t most = 20;
  for (std::size_t i = 0; i < wrong.size() && i < most; ++i) message += "\n  " + wrong[i];
  if (wrong.size() > most) message += "\n  and " + std::to_string(wrong.size() - most) + " more";
  throw UsageError(message);
}

/// The names in stored(name, value), a vector, for the leaves of all devices. Collective; throws if a leaf is empty.
template <class F>
std::set<std::string> names_together(Device& device, const NamedValues& leaves, F stored) {
  std::string mine;
  together(device, "", [&] {
    for (const auto& [name, value] : leaves) {
      if (!value)
        throw UsageError("load: the leaf '" + name +
                         "' is empty: make the tree first (zeros or random values), for its sizes");
      for (const std::string& one : stored(name, *value)) mine += one + "\n";
    }
  });
  std::set<std::string> names;
  for (const std::string& text : gather_texts(device, mine))
    for (std::size_t begin = 0; begin < text.size(); begin = text.find('\n', begin) + 1)
      names.insert(text.substr(begin, text.find('\n', begin) - begin));
  return names;
}

/// A value like another one, with its own memory.
inline shardlib::detail::ValuePtr with_buffer(const shardlib::detail::Value& like, Buffer buffer) {
  namespace core = shardlib::detail;
  const auto value = core::detached(like);
  value->made_by = {"load", {}, {}};
  value->storage = core::Handle<core::Storage>::make();
  value->storage->buffer = std::move(buffer);
  return core::ValuePtr(value);
}

}  // namespace shardlib::io::detail
