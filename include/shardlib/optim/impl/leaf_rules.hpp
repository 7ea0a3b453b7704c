// Definitions of leaf_rules.hpp.
#pragma once

#include "shardlib/optim/leaf_rules.hpp"

#include <algorithm>
#include <cstddef>

#include "shardlib/support/error.hpp"

namespace shardlib::detail {

/// The leaves of all layers in one: "layers/*/w_q". A list of them fits a message.
inline std::vector<std::string> folded(const std::vector<std::string>& leaves) {
  std::vector<std::string> names;
  for (const std::string& leaf : leaves) {
    std::string name;
    for (std::size_t begin = 0, end = 0; end != std::string::npos; begin = end + 1) {
      end = leaf.find('/', begin);
      const std::string part = leaf.substr(begin, end - begin);
      const bool number = !part.empty() && std::ranges::all_of(part, [](char c) { return c >= '0' && c <= '9'; });
      name += (begin == 0 ? "" : "/") + (number ? "*" : part);
    }
    if (std::ranges::find(names, name) == names.end()) names.push_back(name);
  }
  return names;
}

SHARDLIB_INLINE void require_match(const std::string& giver, std::string_view pattern,
                                   const std::vector<std::string>& leaves) {
  constexpr std::size_t most = 16;
  if (std::ranges::any_of(leaves, [&](const std::string& leaf) { return leaf_matches(pattern, leaf); })) return;
  const std::vector<std::string> names = folded(leaves);
  std::string list;
  for (std::size_t i = 0; i < names.size() && i < most; ++i) list += (i == 0 ? "" : ", ") + names[i];
  if (names.size() > most) list += " and " + std::to_string(names.size() - most) + " more";
  throw UsageError(giver + " '" + std::string(pattern) +
                   "' matches no leaf; write a name in which a * stands for any text, or leave the pattern out: "
                   "the leaves are " +
                   list);
}

SHARDLIB_INLINE void require_effect(const LeafRules& rules, const std::vector<std::string>& leaves) {
  const auto& list = rules.rules;
  for (std::size_t i = 0; i < list.size(); ++i) {
    const std::string& pattern = list[i].first;
    require_match("LeafRules:", pattern, leaves);
    const std::string* covers = nullptr;  // a later pattern of a leaf with this one
    const bool applies = std::ranges::any_of(leaves, [&](const std::string& leaf) {
      if (!leaf_matches(pattern, leaf)) return false;
      const auto later = std::find_if(list.begin() + static_cast<std::ptrdiff_t>(i) + 1, list.end(),
                                      [&](const auto& rule) { return leaf_matches(rule.first, leaf); });
      if (later != list.end()) covers = &later->first;
      return later == list.end();
    });
    if (!applies)
      throw UsageError("LeafRules: '" + pattern + "' has no effect: later rules, as that of '" + *covers +
                       "', match each of its leaves, and the last rule of a leaf applies; write general patterns "
                       "before special ones");
  }
}

}  // namespace shardlib::detail
