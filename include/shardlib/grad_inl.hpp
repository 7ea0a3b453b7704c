// Definitions of grad.hpp.
#pragma once

#include "shardlib/grad.hpp"

#include <algorithm>
#include <set>

namespace shardlib::detail {

SHARDLIB_INLINE void fail_next(const OpInfo& op, const Device& device, std::size_t next, std::size_t layers) {
  throw Error(op.describe_call() + ": layer " + std::to_string(next) + " is said to come next, but there are " +
              std::to_string(layers) + "; count from 0, and give " + std::to_string(layers) + " behind the last one (" +
              device.describe() + ")");
}

SHARDLIB_INLINE std::vector<Kept> kept_below(const Node* root) {
  std::vector<Kept> kept;
  std::set<const Node*> seen;
  std::set<const void*> buffers;
  std::vector<const Node*> todo{root};
  while (!todo.empty()) {
    const Node* node = todo.back();
    todo.pop_back();
    if (node == nullptr || !seen.insert(node).second) continue;
    for (const auto& edge : node->edges) {
      todo.push_back(edge.input.node.get());
      for (const auto& value : edge.saved.values) {
        if (value->storage->compute || !buffers.insert(value->storage->buffer.data()).second) continue;
        const auto& by = value->made_by;
        std::string what = value->label.empty() ? by.describe_call() : value->label;
        kept.push_back({std::move(what), std::string(to_string(*value->spec).view()), value->bytes()});
      }
    }
  }
  std::sort(kept.begin(), kept.end(),
            [](const Kept& a, const Kept& b) { return a.bytes != b.bytes ? a.bytes > b.bytes : a.what < b.what; });
  return kept;
}

}  // namespace shardlib::detail
