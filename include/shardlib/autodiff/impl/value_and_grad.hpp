// Definitions of value_and_grad.hpp.
#pragma once

#include "shardlib/autodiff/value_and_grad.hpp"

#include <algorithm>
#include <set>

#include "shardlib/support/error.hpp"
#include "shardlib/support/stopwatch.hpp"

namespace shardlib::detail {

SHARDLIB_INLINE void change_leaves(const UntypedLeaves<ValuePtr>& list, LeafChange f, const char* weights_of) {
  for (const auto& leaf : list.leaves)
    if (*leaf.pointer != nullptr)
      *leaf.pointer = f(*leaf.pointer, leaf.name);
    else if (weights_of != nullptr)
      fail_empty(leaf.dtype, leaf.text,
                 std::string(weights_of) + ": the weight" + (leaf.name.empty() ? "" : " `" + leaf.name + "`") + ", ");
}

SHARDLIB_INLINE ValuePtr zeros_in_shape(const ValuePtr& like) {
  auto zero = detached(*like);
  zero->storage = Handle<Storage>::make(allocate(*zero));
  zero->device->exec().zero(zero->data().data(), zero->bytes());
  return zero;
}

SHARDLIB_INLINE void set_gradients(const UntypedLeaves<const ValuePtr>& weights, const UntypedLeaves<ValuePtr>& grads,
                                   const std::vector<ValuePtr>& cotangents) {
  for (std::size_t i = 0; i < cotangents.size(); ++i) {
    const ValuePtr& ct = cotangents[i];
    *grads.leaves[i].pointer = with_spec(ct ? ct : zeros_in_shape(weights.leaves[i].value()), *grads.leaves[i].spec);
  }
}

SHARDLIB_INLINE Differentiation::Differentiation(const char* op, const DevicePtr& device, bool nested)
    : op_{op, {}, {}},
      device_(device),
      state_(program_state(device)),
      outer_(state_.pass),
      nested_(nested && outer_ == ProgramState::Pass::forward),
      outer_twice_(state_.twice),
      first_(state_.sequence),
      tape_(state_.tape, outer_ == ProgramState::Pass::none ? ++state_.sequence : state_.tape) {
  if (nested && state_.mode != ProgramState::Mode::eager)
    throw Error(op_.describe() +
                ": inside explicit_activation_checkpointing or prefetch a gradient is not computed; call it outside (" +
                device_->describe() + ")");
  if (outer_ == ProgramState::Pass::none) state_.began = first_;
  state_.twice = false;  // unless begin_forward finds that the gradient is differentiated
  state_.pass = ProgramState::Pass::forward;
  names_.emplace(state_, names_within(state_, op));
}

SHARDLIB_INLINE Differentiation::~Differentiation() {
  end_forward();
  state_.pass = outer_;
}

SHARDLIB_INLINE void Differentiation::look_outside(const ValuePtr& value, const std::string& what) {
  if (outer_ == ProgramState::Pass::none || !value->slot) return;
  require_this_tape(op_, value->slot, device_);
  if (nested_) {
    twice_ = true;
    return;
  }
  throw Error(op_.describe() + ": " + what + " is " + value->slot.node->describe() +
              " in a function that is itself differentiated, but this gradient is not differentiated again, so the "
              "outer gradient would miss this use; take `stop_gradient` of it before this call, if that is meant (" +
              device_->describe() + ")");
}

SHARDLIB_INLINE ValuePtr Differentiation::weight(const ValuePtr& value, const std::string& name) {
  auto leaf = as_leaf(*value);
  leaf->label = name;
  if (nested_) {  // the number says that the leaf is newer than the function around this call
    leaf->slot.node->sequence = ++state_.sequence;
    leaf->slot.node->twice = true;
    if (value->slot)  // the leaf is a copy of a value of that function
      leaf->slot.node->edges.push_back({value->slot, {}, [](const ValuePtr& ct, const Residuals&) { return ct; }});
  }
  const std::string title = leaf->label.empty() ? "the weight" : "the weight `" + leaf->label + "`";
  look_outside(value, title);
  bind_names(op_, *value, title);
  leaf->storage->weight = &weights_.emplace_back(Differentiated{title, value->slot, leaf->storage->weight});
  running_.push_back(leaf->storage);
  leaves_.push_back(leaf->slot);
  return leaf;
}

SHARDLIB_INLINE void Differentiation::argument(const ValuePtr& value, std::size_t number) {
  const std::string what = "argument " + std::to_string(number);
  look_outside(value, what);
  bind_names(op_, *value, what);
}

SHARDLIB_INLINE void Differentiation::begin_forward() {
  state_.twice = twice_;
}

SHARDLIB_INLINE void Differentiation::end_forward() {
  state_.twice = outer_twice_;
  for (auto it = running_.rbegin(); it != running_.rend(); ++it) (*it)->weight = (*it)->weight->around;
  running_.clear();
  names_.reset();
  state_.pass = ProgramState::Pass::backward;
}

/// A node below `root` that existed before this call: it belongs to an enclosing function that is differentiated as
/// well.
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

SHARDLIB_INLINE std::vector<ValuePtr> Differentiation::transpose(
    const std::vector<std::pair<Slot, ValuePtr>>& roots) const {
  if (outer_ != ProgramState::Pass::none && !twice_)
    for (const auto& [slot, ct] : roots)
      if (const Node* node = outside_below(slot.node.get(), first_, leaves_))
        throw Error(op_.describe() + ": its function uses " + node->describe() +
                    " from outside, in a function that is itself differentiated, so the outer gradient would miss "
                    "this use; pass it as an argument, with `stop_gradient` if no gradient is meant (" +
                    device_->describe() + ")");
  return Backward(roots, leaves_, twice_).run();
}

SHARDLIB_INLINE std::vector<ValuePtr> Differentiation::backward(const Value& loss, const ValuePtr& one, bool unused) {
  std::vector<ValuePtr> cotangents = transpose({{loss.slot, one}});
  if (unused) return cotangents;
  const std::string result = "the loss, which is the result of " + loss.made_by.describe() + ", ";
  require_used(cotangents, result + "does not depend on ",
               "use the function's parameter, leave the weight out, or write value_and_grad(mesh, allow_unused(f), "
               "...) if zeros are meant");
  if (!cotangents.empty() && std::ranges::none_of(cotangents, [](const ValuePtr& ct) { return bool(ct); }))
    throw Error(op_.describe() + ": " + result +
                "depends on the weights through stop_gradient alone, so all gradients would be zero; take "
                "stop_gradient of a part of it, or write value_and_grad(mesh, allow_unused(f), ...) if zeros are "
                "meant (" +
                device_->describe() + ")");
  return cotangents;
}

SHARDLIB_INLINE void Differentiation::require_used(const std::vector<ValuePtr>& cotangents, const std::string& what,
                                                   const char* remedy) const {
  for (std::size_t i = 0; i < leaves_.size(); ++i)
    if (!cotangents[i] && !leaves_[i].node->stopped)
      throw Error(op_.describe() + ": " + what + weights_[i].title + ", so its gradient would be zero; " + remedy +
                  " (" + device_->describe() + ")");
}

struct GradientCall::Parts : Counted {
  explicit Parts(const DevicePtr& d) : device(d), differentiation("value_and_grad", d, true), overlap(std::nullopt) {}
  [[nodiscard]] std::size_t live() const { return device->pool()->stats().live; }

  DevicePtr device;
  Differentiation differentiation;
  std::optional<OverlapScope> overlap;
  std::size_t before = 0;  ///< bytes of the pool in use when the function began
  Stopwatch::Part outside{};
};
SHARDLIB_INLINE GradientCall::GradientCall(const DevicePtr& device) : parts_(Handle<Parts>::make(device)) {}
SHARDLIB_INLINE GradientCall::~GradientCall() = default;
SHARDLIB_INLINE void require_mesh(const Value& value, const DevicePtr& device, const std::string& what) {
  if (value.device == device || &value.device->root() != &device->root()) return;
  const bool one_mesh = &value.device->original() == &device->original();
  throw Error("value_and_grad: " + what + " is on " + value.device->describe_view() + ", but the call is for mesh " +
              to_string(device->axes()) +
              (one_mesh ? "; `reinterpret` it for that mesh (no traffic)"
                        : ", and a gradient is typed by the axes of one mesh; call value_and_grad with the mesh of the "
                          "weights, or bring tensors over with `on_submeshes` (no traffic)"));
}
SHARDLIB_INLINE ValuePtr GradientCall::weight(const ValuePtr& value, const std::string& name) {
  if (value->device != parts_->device)
    require_mesh(*value, parts_->device, name.empty() ? "the weight" : "the weight `" + name + "`");
  return parts_->differentiation.weight(value, name);
}
SHARDLIB_INLINE void GradientCall::argument(const ValuePtr& value, std::size_t number) {
  parts_->differentiation.argument(value, number);
}
SHARDLIB_INLINE void GradientCall::direction(const ValuePtr& value) {
  require_mesh(*value, parts_->device, "the direction");
  parts_->differentiation.look_outside(value, "the direction");
}
SHARDLIB_INLINE void GradientCall::begin() {
  parts_->differentiation.begin_forward();
  parts_->overlap.emplace(parts_->device);
  parts_->before = parts_->live();
  parts_->outside = program_state(parts_->device).stopwatch.change(Stopwatch::forward);
}
SHARDLIB_INLINE void GradientCall::end() {
  parts_->overlap->end_forward();
  parts_->differentiation.end_forward();
  ProgramState& s = program_state(parts_->device);
  s.residual_bytes = std::max(parts_->live(), parts_->before) - parts_->before;
  s.stopwatch.change(Stopwatch::backward);
}
SHARDLIB_INLINE ValuePtr GradientCall::returned(const ValuePtr& loss) const {
  return parts_->differentiation.twice() ? loss : ValuePtr(detached(*loss));
}
SHARDLIB_INLINE ValuePtr GradientCall::auxiliary(const ValuePtr& value) const {
  return parts_->differentiation.nested() ? value : ValuePtr(detached(*value));
}
SHARDLIB_INLINE std::vector<ValuePtr> GradientCall::backward(const ValuePtr& loss, bool unused) {
  require_mesh(*loss, parts_->device, "the loss");
  const ValuePtr one = cotangent_of_loss(parts_->device, loss->dtype);
  auto cotangents = parts_->differentiation.backward(*loss, one, unused);
  parts_->overlap->end_backward();
  program_state(parts_->device).stopwatch.change(parts_->outside);
  return cotangents;
}

SHARDLIB_INLINE std::vector<ValuePtr> GradientCall::transpose(const std::vector<ValuePtr>& results,
                                                              const std::vector<ValuePtr>& cotangents) {
  std::vector<std::pair<Slot, ValuePtr>> roots;
  for (std::size_t i = 0; i < results.size(); ++i) {
    const GlobalSizes &sizes = results[i]->global, &given = cotangents[i]->global;
    if (!(sizes.logical == given.logical && sizes.padded == given.padded))
      throw Error("hessian_vector_product: the direction `" + std::string(to_string(*cotangents[i]->spec).view()) +
                  "` has other sizes than its weight; give it the same ones (" + parts_->device->describe() + ")");
    roots.emplace_back(results[i]->slot, cotangents[i]);
  }
  auto all = parts_->differentiation.transpose(roots);
  parts_->overlap->end_backward();
  program_state(parts_->device).stopwatch.change(parts_->outside);
  return all;
}

SHARDLIB_INLINE std::vector<SavedResidual> residuals_below(const Node* root) {
  std::vector<SavedResidual> residuals;
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
        residuals.push_back({std::move(what), std::string(to_string(*value->spec).view()), value->bytes()});
      }
    }
  }
  std::sort(residuals.begin(), residuals.end(), [](const SavedResidual& a, const SavedResidual& b) {
    return a.bytes != b.bytes ? a.bytes > b.bytes : a.what < b.what;
  });
  return residuals;
}

}  // namespace shardlib::detail
