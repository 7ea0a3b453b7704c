// Loads a tree from files of any format: the leaves' names over all devices, the error that lists the mismatches, new
// values. For impl/ headers.
#pragma once

#include <algorithm>
#include <cstddef>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "shardlib/io/agree.hpp"
#include "shardlib/io/box.hpp"
#include "shardlib/io/checkpoint/folder.hpp"
#include "shardlib/io/checkpoint/writer.hpp"
#include "shardlib/runtime/value.hpp"
#include "shardlib/spec/dtype.hpp"
#include "shardlib/support/error.hpp"
#include "shardlib/support/handle.hpp"
#include "shardlib/support/print.hpp"
#include "shardlib/types/call_site.hpp"

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

/// The names, each behind a space.
inline std::string listed(const std::vector<std::string>& dims) {
  std::string text;
  for (const std::string& dim : dims) text += " " + dim;
  return text;
}

/// Sentences on all in which the arrays of two places differ, "the checkpoint" and "the program". `all_names` has the
/// names that all devices have `here`; an array `there` is extra if it has none of them.
inline std::vector<std::string> differences(const std::vector<CheckpointArray>& there, const std::string& name_there,
                                            const std::vector<CheckpointArray>& here, const std::string& name_here,
                                            const std::set<std::string>& all_names, bool ignore_extra) {
  std::map<std::string, const CheckpointArray*> found;
  std::set<std::string> extra;
  for (const CheckpointArray& array : there) {
    found[array.name] = &array;
    if (!all_names.contains(array.name)) extra.insert(array.name);
  }
  std::vector<std::string> wrong;
  const auto differs = [&](const std::string& name, const std::string& is, const std::string& should) {
    wrong.push_back("'" + name + "' is " + is + " in " + name_there + ", but " + should + " in " + name_here);
  };
  for (const CheckpointArray& array : here) {
    const auto it = found.find(array.name);
    if (it == found.end()) {
      wrong.push_back("'" + array.name + "' is not in " + name_there + did_you_mean(array.name, extra));
      continue;
    }
    const CheckpointArray& other = *it->second;
    if (other.shape != array.shape)
      differs(array.name, show_shape(other.shape), show_shape(array.shape));
    else if (array.dims != other.dims && std::ranges::is_permutation(array.dims, other.dims))  // some have one size
      wrong.push_back(
          "'" + array.name + "' has the dims" + listed(other.dims) + " in " + name_there + ", but" +
          listed(array.dims) + " in " + name_here +
          ": take it in that order, then `rearrange` it, or `rename` the dims if only their names have changed");
    if (other.dtype != array.dtype)
      differs(array.name, std::string(shardlib::name(other.dtype)), std::string(shardlib::name(array.dtype)));
  }
  if (!ignore_extra)
    for (const std::string& name : extra)
      wrong.push_back("'" + name + "' is in " + name_there + ", but not in " + name_here);
  return wrong;
}

/// The error with all that is wrong; nothing if that is empty.
inline void fail_unless_empty(std::string message, const std::vector<std::string>& wrong) {
  if (wrong.empty()) return;
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
inline shardlib::detail::ValuePtr with_buffer(const shardlib::detail::OpInfo& made_by,
                                              const shardlib::detail::Value& like, Buffer buffer) {
  namespace core = shardlib::detail;
  const auto value = core::detached(like);
  value->made_by = made_by;
  value->storage = core::Handle<core::Storage>::make();
  value->storage->buffer = std::move(buffer);
  return core::ValuePtr(value);
}

}  // namespace shardlib::io::detail
