// Definitions of backward.hpp.
#pragma once

#include "shardlib/autodiff/backward.hpp"

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <unordered_map>
#include <utility>

#include "shardlib/autodiff/accumulator.hpp"
#include "shardlib/kernels/elementwise.hpp"
#include "shardlib/runtime/names.hpp"
#include "shardlib/runtime/program_state.hpp"
#include "shardlib/types/call_site.hpp"

namespace shardlib::detail {

class Backward::Pass : public Counted {
 public:
  Pass(const std::vector<std::pair<Slot, ValuePtr>>& roots, std::vector<Slot> leaves, bool twice)
      : leaves_(std::move(leaves)), twice_(twice) {
    for (const Slot& leaf : leaves_) {
      nodes_.push_back(leaf.node);
      if (leaf && leaf.node->sequence != 0) inner_leaves_.insert(leaf.node.get());
    }
    for (const auto& [slot, ct] : roots) {
      if (ct) device_ = ct->device;
      deliver(slot, ct);
    }
  }

  [[nodiscard]] bool stopped(std::size_t leaf) const { return nodes_[leaf] && nodes_[leaf]->stopped; }

  [[nodiscard]] std::size_t leaves() const { return leaves_.size(); }

  std::vector<ValuePtr> run(const std::vector<bool>& wanted) {
    // The forward pass has checked the names of dims. Here, ops of several scopes run together, so nothing is
    // checked.
    std::optional<WithNames> unchecked;
    if (device_) {
      state_ = &program_state(device_);
      unchecked.emplace(*state_, Handle<NameSizes>::make());
    }
    const auto towards = nodes_towards(wanted);
    std::map<Key, Pending> later;
    while (!pending_.empty()) {
      auto next = pending_.extract(std::prev(pending_.end()));
      if (run_vjps(next.mapped(), towards.get())) later.insert(std::move(next));
    }
    pending_ = std::move(later);
    std::vector<ValuePtr> result(leaves_.size());
    for (std::size_t i = 0; i < leaves_.size(); ++i) {
      if (!wanted[i]) continue;
      const auto it = arrived_.find(std::exchange(leaves_[i], {}).node.get());
      if (it != arrived_.end()) result[i] = it->second.outputs[0].take();
    }
    return result;
  }

 private:
  /// Operands have smaller numbers, so descending order is valid. Leaves of number 0 differ by their addresses.
  using Key = std::pair<std::uint64_t, Node*>;
  using Nodes = std::set<const Node*>;
  struct Pending {
    Handle<Node> node;
    std::vector<Accumulator> outputs;   ///< until the first VJP runs
    std::vector<ValuePtr> cotangents;   ///< after that, as are all fields below
    std::vector<Node::Edge> edges;      ///< edges without an input are done
    std::vector<ValuePtr> inputs = {};  ///< cotangents that fused or rematerialized VJPs have computed for the edges
    std::optional<Backward> remat = {};
  };

  static Key key_of(const Handle<Node>& node) { return {node->sequence, node.get()}; }

  void deliver(const Slot& slot, ValuePtr ct) {
    if (!slot || !ct) return;
    const bool leaf = slot.node->sequence == 0 || inner_leaves_.contains(slot.node.get());
    Pending& p = leaf ? arrived_[slot.node.get()] : pending_[key_of(slot.node)];
    if (!p.node) {
      p.node = slot.node;
      p.outputs.resize(static_cast<std::size_t>(slot.node->outputs));
    }
    p.outputs[static_cast<std::size_t>(slot.output)].add(std::move(ct));
  }

  /// The nodes that lead to a wanted leaf; null if no leaf is left out. Cotangents of such a node come only from such
  /// nodes, so they are complete before the other nodes run.
  [[nodiscard]] std::unique_ptr<Nodes> nodes_towards(const std::vector<bool>& wanted) const {
    auto towards = std::make_unique<Nodes>();
    bool all = true;
    for (std::size_t i = 0; i < leaves_.size(); ++i) {
      if (wanted[i])
        towards->insert(leaves_[i].node.get());
      else
        all = all && !leaves_[i];
    }
    if (all && !twice_) return nullptr;
    std::map<Key, const std::vector<Node::Edge>*> below;  // all nodes that may still run, operands first
    std::vector<const std::vector<Node::Edge>*> todo;
    const auto add = [&](const Handle<Node>& node, const std::vector<Node::Edge>& edges) {
      if (below.emplace(key_of(node), &edges).second && !inner_leaves_.contains(node.get())) todo.push_back(&edges);
    };
    for (const auto& [key, p] : pending_) add(p.node, p.outputs.empty() ? p.edges : p.node->edges);
    while (!todo.empty()) {
      const auto& edges = *todo.back();
      todo.pop_back();
      for (const auto& edge : edges)
        if (edge.input) add(edge.input.node, edge.input.node->edges);
    }
    for (const auto& [key, edges] : below)
      for (const auto& edge : *edges)
        if (edge.input && towards->contains(edge.input.node.get())) towards->insert(key.second);
    return towards;
  }

  /// Runs the node's VJPs towards the nodes in `towards` (null: all). Returns true if VJPs remain.
  bool run_vjps(Pending& p, const Nodes* towards) {
    const auto due = [&](const Node* node) { return towards == nullptr || towards->contains(node); };
    if (!due(p.node.get())) return true;
    const WithValue part(state_->part, p.node->part);
    if (!p.outputs.empty()) {
      for (auto& output : p.outputs) p.cotangents.push_back(output.take());
      p.outputs.clear();
      if (twice_ && !p.node->twice) fail_twice(p.node->op, device_);
      if (p.node->cast_cotangent) {
        const TransposeOf line(p.node->op.site);
        p.cotangents[0] = p.node->cast_cotangent(std::move(p.cotangents[0]));
      }
      p.edges = twice_ ? p.node->edges : std::exchange(p.node->edges, {});
      if (p.node->fused_vjp)
        p.inputs = run_fused(*p.node, p.cotangents);
      else if (p.node->remat)
        p.remat = std::exchange(p.node->remat, nullptr)(p.cotangents);
      if (p.remat || !p.inputs.empty()) p.cotangents.clear();
    }
    if (p.remat) {
      std::vector<bool> wanted;
      for (const auto& edge : p.edges) wanted.push_back(edge.input && due(edge.input.node.get()));
      p.inputs = p.remat->run(wanted);
      for (std::size_t i = 0; i < p.edges.size(); ++i)
        if (p.remat->stopped(i)) stop_below(p.edges[i].input);
    }
    bool left = false;
    for (std::size_t i = 0; i < p.edges.size(); ++i) {
      auto& edge = p.edges[i];
      if (!edge.input) continue;
      if (!due(edge.input.node.get())) {
        left = true;
        continue;
      }
      const Slot input = std::exchange(edge.input, {});
      const TransposeOf line(p.node->op.site);
      const WithValue defers(state_->defers_products, !twice_ && input.node->takes_product);
      deliver(input, p.inputs.empty() ? run_vjp(p, edge) : std::move(p.inputs[i]));
      edge.saved.values.clear();
    }
    return left;
  }

  std::vector<ValuePtr> run_fused(Node& node, const std::vector<ValuePtr>& cotangents) {
    const TransposeOf line(node.op.site);
    if (!twice_) return std::exchange(node.fused_vjp, nullptr)(cotangents);
    Transposing transposing{node.op};
    const WithValue here(state_->transposing, &transposing);
    return node.fused_vjp(cotangents);
  }
  ValuePtr run_vjp(Pending& p, Node::Edge& edge) {
    // The last VJP has the cotangent alone, if no other node has it.
    const bool last = !twice_ && std::ranges::none_of(p.edges, [](const Node::Edge& e) { return bool(e.input); });
    const ValuePtr ct = last ? std::move(p.cotangents[0]) : p.cotangents[0];
    if (!twice_) {
      if (p.node->twice)  // the pass before this one has used them with their slots
        for (ValuePtr& saved : edge.saved.values) saved = detached(*saved);
      return edge.vjp(ct, edge.saved);
    }
    if (edge.of_result) {
      auto result = Handle<Value>::make(*edge.saved.values.back());
      result->slot = {p.node, 0};
      edge.saved.values.back() = std::move(result);
    }
    Transposing transposing{p.node->op};
    const WithValue here(state_->transposing, &transposing);
    return edge.vjp(ct, edge.saved);
  }

  std::vector<Slot> leaves_;
  const bool twice_;
  std::vector<Handle<const Node>> nodes_;  ///< nodes of the leaves
  Nodes inner_leaves_;  ///< those with a number, which may have an operand in a function around this pass
  DevicePtr device_;
  ProgramState* state_ = nullptr;  ///< of the device, while ops run
  std::map<Key, Pending> pending_;
  std::unordered_map<Node*, Pending> arrived_;
};

SHARDLIB_INLINE Backward::Backward(const std::vector<std::pair<Slot, ValuePtr>>& roots, std::vector<Slot> leaves,
                                   bool twice)
    : pass_(Handle<Pass>::make(roots, std::move(leaves), twice)) {}

SHARDLIB_INLINE std::vector<ValuePtr> Backward::run() {
  return run(std::vector<bool>(pass_->leaves(), true));
}

SHARDLIB_INLINE std::vector<ValuePtr> Backward::run(const std::vector<bool>& wanted) {
  return pass_->run(wanted);
}

SHARDLIB_INLINE bool Backward::stopped(std::size_t leaf) const {
  return pass_->stopped(leaf);
}

SHARDLIB_INLINE ValuePtr cotangent_of_loss(const DevicePtr& device, DType dtype) {
  static constexpr TensorSpec scalar;
  const Kernel fill = [](const Value& out) {
    Buffer result = allocate(out);
    // By a kernel: a copy from the host would wait for the forward pass.
    visit_dtype(out.dtype, [&]<class D>(D /*zero*/) {
      if constexpr (floating<D>)
        kernels::apply_flat(out.device->exec(), 1, kernels::body::ConstantElement<D>{D(1.0F)}, result.as<D>());
    });
    return result;
  };
  return evaluate(make_recorded({"full", {}, {}}, device, dtype, scalar, {}, {}), fill);
}

}  // namespace shardlib::detail
