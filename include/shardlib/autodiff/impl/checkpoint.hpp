// Definitions of explicit_activation_checkpointing and save_for_backward.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "shardlib/autodiff/value_and_grad.hpp"
#include "shardlib/runtime/names.hpp"
#include "shardlib/runtime/program_state.hpp"
#include "shardlib/support/error.hpp"
#include "shardlib/support/handle.hpp"
#include "shardlib/support/inline.hpp"

namespace shardlib::detail {

SHARDLIB_INLINE ValuePtr copy_without_slot(const ValuePtr& value) {
  return detached(*value);
}

/// The numbers of the tensors that a function has returned (tensor_number).
struct Returned : Counted {
  std::vector<std::uint64_t> numbers;
};
/// The forward pass of a checkpointed call leaves this for the backward pass.
struct CheckpointedForward {
  std::vector<ValuePtr> saved;
  FunctionRun ran;
  Handle<Returned> returned;
  Handle<NameSizes> names;  ///< the scope of names that was open
  Handle<const Kept> kept;
};

/// Throws if the function has not done the same as in the forward pass, now that it has run again up to its result.
inline void check_same(const CheckpointedForward& forward, const ProgramState& s, const Value& result) {
  const FunctionRun &then = forward.ran, &now = s.ran;
  if (then == now && s.next_saved == forward.saved.size()) return;
  const auto numbers = [](const char* what, std::size_t before, std::size_t again) {
    return std::string(what) + " " + std::to_string(before) + " in the forward pass and " + std::to_string(again) +
           " now";
  };
  fail_replay(result.made_by,
              then.ops != now.ops       ? numbers("the number of ops is", then.ops, now.ops)
              : then.calls != now.calls ? "other ops have run, or ops of other tensors, sizes, numbers or random keys"
                                        : numbers("the number of saved values is", forward.saved.size(), s.next_saved),
              result.device);
}

/// The backward pass of a checkpointed call. It runs the function again from its arguments and its saved values, and
/// differentiates it by the `wanted` arguments. Ops are deferred and run only if a VJP reads their value.
inline Backward replay(const CheckpointedCall& call, const std::vector<bool>& wanted,
                       const CheckpointedForward& forward, const std::vector<ValuePtr>& cotangents,
                       const DevicePtr& device) {
  std::vector<Slot> leaves;
  const auto fresh = [&](const ValuePtr& value, const std::string&) -> ValuePtr {
    auto leaf = wanted[leaves.size()] ? as_leaf(*value) : detached(*value);
    leaves.push_back(leaf->slot);
    return leaf;
  };
  std::vector<std::pair<Slot, ValuePtr>> roots;
  ValuePtr result, other;
  const auto root = [&](const ValuePtr& value) {
    if (roots.size() == cotangents.size())
      fail_replay(value->made_by, "its result has more tensors than in the forward pass", device);
    if (tensor_number(*value) != forward.returned->numbers[roots.size()]) other = value;
    roots.emplace_back(value->slot, cotangents[roots.size()]);
    result = value;
  };
  {
    ProgramState& s = program_state(device);
    const WithMode mode(s, ProgramState::Mode::replay, forward.saved, forward.kept);
    s.ran.number = forward.ran.number;
    const WithNames scope(s, forward.names);
    call.run(fresh, root);
    if (result) {
      check_same(forward, s, *result);
      if (roots.size() != cotangents.size())
        fail_replay(result->made_by, "its result has fewer tensors than in the forward pass", device);
      if (other) fail_replay(other->made_by, "it returns another tensor", device);
    }
  }
  return {roots, std::move(leaves)};
}

/// The names of a policy's ops, which commas part.
inline Handle<const Kept> kept_by(const RecomputePolicy& policy) {
  using Ops = std::vector<std::string>;
  constexpr bool marked = true, all_occur = true;
  if (policy.name == "marked") return Handle<Kept>::make(marked);
  if (policy.name == "everything") return Handle<Kept>::make(!marked);
  if (policy.name == "dots")
    return Handle<Kept>::make(
        !marked, Ops{"einsum_unreduced", "einsum_bias", "einsum_scatter", "grouped_einsum", "causal_attention"});
  if (policy.name == "attention") return Handle<Kept>::make(!marked, Ops{"causal_attention"}, all_occur);
  Ops ops;
  for (std::size_t begin = 0, end = 0; end != std::string::npos; begin = end + 1) {
    end = policy.name.find(',', begin);
    ops.push_back(policy.name.substr(begin, end - begin));
  }
  return Handle<Kept>::make(!marked, std::move(ops), all_occur);
}

/// The path of the part of the model that holds all weights among the values: "layers/3". Null if there is none.
inline Handle<const ModelPart> common_part(const std::vector<ValuePtr>& values) {
  std::string_view common;
  for (const ValuePtr& value : values) {
    if (!value->is_leaf()) continue;
    const std::string_view path = value->label;
    if (common.empty()) common = path;
    while (!path.starts_with(common) || (path.size() > common.size() && path[common.size()] != '/')) {
      const auto parent = common.rfind('/');
      if (parent == std::string_view::npos) return nullptr;
      common = common.substr(0, parent);
    }
  }
  return common.empty() ? nullptr : Handle<const ModelPart>::make(std::string(common));
}

/// How many ops of on_submeshes this device has run.
inline std::int64_t submesh_ops(const ProgramState& s) {
  const auto it = s.counts.find("on_submeshes");
  return it == s.counts.end() ? 0 : it->second.calls;
}

struct CheckpointForward::Parts : Counted {
  Parts(std::vector<ValuePtr> values, const RecomputePolicy& policy)
      : inputs(std::move(values)),
        device(inputs.front()->device),
        submesh_ops_before(&device->original() == &device->root() ? submesh_ops(program_state(device)) : 0),
        part(program_state(device).part, program_state(device).observer ? common_part(inputs) : nullptr) {
    if (policy.name == "none") return;
    kept = kept_by(policy);
    ProgramState& s = program_state(device);
    mode.emplace(s, ProgramState::Mode::checkpoint, std::vector<ValuePtr>{}, kept);
    s.ran.number = ++s.numbers;
    if (std::ranges::any_of(inputs, [](const ValuePtr& x) { return bool(x->slot); })) s.checkpoint = s.sequence + 1;
  }
  /// Throws if the function has not run an op that the policy names.
  void check_occur(const std::vector<ValuePtr>& saved) const {
    if (submesh_ops(program_state(device)) > submesh_ops_before) return;  // another submesh may run the op
    for (const std::string& op : kept->ops) {
      const auto is_result = [&](const ValuePtr& value) { return value->made_by.name == op; };
      if (!kept->all_occur || std::ranges::any_of(saved, is_result)) continue;
      std::string ran;
      for (const auto& [name, count] : program_state(device).counts)
        if (count.calls > 0) ran += (ran.empty() ? "`" : ", `") + name + "`";
      throw Error("explicit_activation_checkpointing: the policy keeps the results of `" + op +
                  "`, but the function runs no such op; name one that it runs (this program has run " + ran +
                  "), or none, dots, marked, attention or everything (" + device->describe() + ")");
    }
  }
  std::vector<ValuePtr> inputs;
  DevicePtr device;
  std::int64_t submesh_ops_before;          ///< 0 in a submesh, whose devices may run the function alone
  WithValue<Handle<const ModelPart>> part;  ///< that runs, for traces
  Handle<const Kept> kept;
  std::optional<WithMode> mode;  ///< set while the function runs
  Handle<Node> node;
  Handle<Returned> returned = Handle<Returned>::make();
};
SHARDLIB_INLINE CheckpointForward::CheckpointForward(std::vector<ValuePtr> inputs, const RecomputePolicy& policy) {
  if (inputs.empty()) return;
  const ProgramState& s = program_state(inputs.front()->device);
  if (s.mode == ProgramState::Mode::eager && !s.twice) parts_ = Handle<Parts>::make(std::move(inputs), policy);
}
SHARDLIB_INLINE CheckpointForward::~CheckpointForward() = default;
SHARDLIB_INLINE bool CheckpointForward::active() const {
  return parts_ && parts_->mode;
}
SHARDLIB_INLINE bool CheckpointForward::finish(Handle<const CheckpointedCall> call) {
  auto& device = parts_->device;
  const auto& scopes = program_state(device).scopes;
  const CheckpointedForward forward{std::move(program_state(device).saved), program_state(device).ran, parts_->returned,
                                    scopes.empty() ? Handle<NameSizes>::make() : scopes.back(), parts_->kept};
  parts_->mode.reset();
  parts_->check_occur(forward.saved);
  auto node = Handle<Node>::make();
  node->op = {"explicit_activation_checkpointing", {}, {}};
  node->part = program_state(device).part;
  std::vector<bool> wanted;
  for (const ValuePtr& value : parts_->inputs) {
    require_this_tape(node->op, value->slot, device);
    wanted.push_back(bool(value->slot));
    node->edges.push_back({value->slot, {{detached(*value)}, {}}, nullptr});
  }
  if (std::ranges::find(wanted, true) == wanted.end()) return false;
  auto& residuals = node->edges.front().saved.values;
  residuals.insert(residuals.end(), forward.saved.begin(), forward.saved.end());
  node->sequence = ++program_state(device).sequence;
  node->tape = program_state(device).tape;
  node->outputs = 0;
  node->remat = [call = std::move(call), wanted, forward, device](const std::vector<ValuePtr>& cotangents) {
    return replay(*call, wanted, forward, cotangents, device);
  };
  parts_->node = std::move(node);
  return true;
}
SHARDLIB_INLINE ValuePtr CheckpointForward::connect(const ValuePtr& value) {
  if (value->slot)
    throw Error("explicit_activation_checkpointing: its function returns a tensor from outside, " +
                value->slot.node->describe() + "; pass that as an argument, or its gradient would be lost (" +
                value->device->describe() + ")");
  parts_->returned->numbers.push_back(tensor_number(*value));
  auto connected = detached(*value);
  connected->checkpoint = 0;
  Slot slot{parts_->node, parts_->node->outputs++};
  if (is_floating(value->dtype)) connected->slot = std::move(slot);  // integers have no derivative
  return connected;
}

SHARDLIB_INLINE ValuePtr saved_value(const OpInfo& op, const ValuePtr& x) {
  ProgramState& s = program_state(x->device);
  if (s.mode == ProgramState::Mode::eager || s.mode == ProgramState::Mode::start || !s.kept->marked) return x;
  if (s.mode == ProgramState::Mode::checkpoint) {
    auto residuals = detached(*x);
    residuals->made_by = op;
    s.saved.push_back(std::move(residuals));
    return x;
  }
  // In a replay, use the saved value instead of computing it.
  auto known = Handle<Value>::make(*x);
  known->storage = next_saved(s, *x).storage;
  return known;
}

}  // namespace shardlib::detail
