// Definitions of grad.hpp.
#pragma once

#include "shardlib/grad.hpp"

#include <algorithm>
#include <set>

namespace shardlib::detail {

SHARDLIB_INLINE void fail_next(const OpInfo& op, const Device& device, std::size_t next, std::size_t layers) {
  throw Error(op.describe() + ": layer " + std::to_string(next) + " is said to come next, but there are " +
              std::to_string(layers) + "; count from 0, and give " + std::to_string(layers) + " behind the last one (" +
              device.describe() + ")");
}

SHARDLIB_INLINE Differentiation::Differentiation(const char* op, const std::shared_ptr<Device>& device)
    : op_{op, {}, {}}, device_(device), state_(state(device)), outer_(state_.pass), first_(state_.sequence) {
  state_.pass = State::Pass::forward;
  names_.emplace(state_, names_within(state_, op));
}

SHARDLIB_INLINE Differentiation::~Differentiation() {
  end_forward();
  state_.pass = outer_;
}

SHARDLIB_INLINE void Differentiation::check_outside(const ValuePtr& value, const std::string& what) const {
  if (outer_ == State::Pass::none || !value->slot) return;
  const Node& maker = *value->slot.node;
  throw Error(op_.describe() + ": " + what + " is " +
              (maker.sequence == 0 ? "a weight" : "the result of " + maker.op.describe()) +
              " in a function that is itself differentiated, but a gradient is not differentiated again, so the outer "
              "gradient would miss this use; take `stop_gradient` of it before this call, if that is meant (" +
              device_->describe() + ")");
}

SHARDLIB_INLINE ValuePtr Differentiation::weight(const ValuePtr& value, const Path& path) {
  auto leaf = as_leaf(*value);
  leaf->label = path.text();
  const std::string& title =
      titles_.emplace_back(leaf->label.empty() ? "the weight" : "the weight `" + leaf->label + "`");
  check_outside(value, title);
  bind_names(op_, *value, title);
  weights_.emplace_back(leaf->storage, std::exchange(leaf->storage->weight, &title));
  leaves_.push_back(leaf->slot);
  return leaf;
}

SHARDLIB_INLINE void Differentiation::argument(const ValuePtr& value, std::size_t number) {
  const std::string what = "argument " + std::to_string(number);
  check_outside(value, what);
  bind_names(op_, *value, what);
}

SHARDLIB_INLINE void Differentiation::end_forward() {
  for (auto it = weights_.rbegin(); it != weights_.rend(); ++it) it->first->weight = it->second;
  weights_.clear();
  names_.reset();
  state_.pass = State::Pass::backward;
}

/// A node that the loss is computed from and that was there before: of a function outside, which is differentiated too.
inline const Node* outside_below(const Node* root, std::uint64_t first, const std::vector<Slot>& leaves) {
  std::set<const Node*> seen;
  for (const Slot& leaf : leaves) seen.insert(leaf.node.get());
  std::vector<const Node*> todo{root};
  while (!todo.empty()) {
    const Node* node = todo.back();
    todo.pop_back();
    if (node == nullptr || !seen.insert(node).second) continue;
    if (node->sequence <= first) return node;
    for (const auto& edge : node->edges) todo.push_back(edge.input.node.get());
  }
  return nullptr;
}

SHARDLIB_INLINE std::vector<ValuePtr> Differentiation::backward(const Value& loss, const ValuePtr& one, bool unused) {
  if (outer_ != State::Pass::none)
    if (const Node* node = outside_below(loss.slot.node.get(), first_, leaves_))
      throw Error(op_.describe() + ": its function uses " +
                  (node->sequence == 0 ? "a weight" : "the result of " + node->op.describe()) +
                  " from outside, in a function that is itself differentiated, but a gradient is not differentiated "
                  "again; pass it as an argument, with `stop_gradient` (" +
                  device_->describe() + ")");
  std::vector<ValuePtr> cotangents = detail::backward({{loss.slot, one}}, leaves_);
  for (std::size_t i = 0; i < leaves_.size() && !unused; ++i)
    if (!cotangents[i] && !leaves_[i].node->stopped)
      throw Error(op_.describe() + ": the loss, which is the result of " + loss.made_by.describe() +
                  ", does not depend on " + titles_[i] +
                  ", so its gradient would be zero; use the function's parameter, leave the weight out, or write "
                  "value_and_grad(mesh, allow_unused(f), ...) if zeros are meant (" +
                  device_->describe() + ")");
  return cotangents;
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
        std::string what = value->label.empty() ? by.describe() : value->label;
        kept.push_back({std::move(what), std::string(to_string(*value->spec).view()), value->bytes()});
      }
    }
  }
  std::sort(kept.begin(), kept.end(),
            [](const Kept& a, const Kept& b) { return a.bytes != b.bytes ? a.bytes > b.bytes : a.what < b.what; });
  return kept;
}

}  // namespace shardlib::detail
