// Definitions of tape.hpp.
#pragma once

#include "shardlib/tape.hpp"

#include <algorithm>
#include <map>
#include <unordered_map>

#include "shardlib/kernels/elementwise.hpp"
#include "shardlib/observe.hpp"
#include "shardlib/padding.hpp"

namespace shardlib::detail {

/// Copies a block, from or to the f32 that bf16 is summed in.
inline void convert(const Value& from, const Value& to) {
  const Exec exec = from.device->exec();
  if (from.dtype == to.dtype)
    exec.copy(to.storage->buffer.data(), from.data().data(), from.bytes());
  else if (from.dtype == DType::bf16)
    kernels::apply_flat(
        exec, from.count(), [](const bf16& x, f32& y) { y = static_cast<f32>(x); }, from.as<const bf16>(),
        to.storage->buffer.as<f32>());
  else
    kernels::apply_flat(
        exec, from.count(), [](const f32& x, bf16& y) { y = static_cast<bf16>(x); }, from.as<const f32>(),
        to.storage->buffer.as<bf16>());
}

/// Sums the cotangents of the uses of one value: in f32, rounded once; in place where nobody else sees the buffer.
class Accumulator {
 public:
  void add(ValuePtr ct) {
    if (!sum_) {
      sum_ = std::move(ct);
      return;
    }
    if (!state(ct->device).observer) return add_to_sum(ct);
    Value shape = *sum_;
    shape.made_by = {"accumulate", {}, {}};
    shape.storage = std::make_shared<Storage>();  // its own, or the sum would seem to be in use
    observed(shape, [&] {
      note_read(*sum_);
      add_to_sum(ct);
      return sum_->storage->buffer;
    });
  }
  ValuePtr take() {
    if (!owned_ || sum_->dtype == dtype_) return std::move(sum_);
    auto narrow = fresh(*sum_, dtype_);
    convert(*sum_, *narrow);
    return narrow;
  }

 private:
  void add_to_sum(const ValuePtr& ct) {
    if (!owned_) {
      dtype_ = sum_->dtype;
      const DType wide = dtype_ == DType::bf16 ? DType::f32 : dtype_;
      if (wide != dtype_ || sum_.use_count() > 1 || sum_->storage.use_count() > 1 || !sum_->data().unique()) {
        auto copy = fresh(*sum_, wide);
        convert(*sum_, *copy);
        sum_ = std::move(copy);
      }
      owned_ = true;
    }
    visit_dtype(ct->dtype, [&](auto zero) {
      using T = decltype(zero);
      using A = accumulator_t<T>;
      if constexpr (floating<T>)
        kernels::apply_flat(
            ct->device->exec(), ct->count(), [](const T& x, A& sum) { sum += static_cast<A>(x); }, ct->as<const T>(),
            sum_->storage->buffer.as<A>());
    });
  }
  static std::shared_ptr<Value> fresh(const Value& like, DType dtype) {
    auto value = std::make_shared<Value>(like);
    value->dtype = dtype;
    value->storage = std::make_shared<Storage>(Storage{allocate(*value), nullptr});
    return value;
  }
  ValuePtr sum_;
  DType dtype_ = DType::f32;
  bool owned_ = false;
};

SHARDLIB_INLINE std::shared_ptr<Value> as_leaf(const Value& value) {
  auto leaf = std::make_shared<Value>(value);
  leaf->slot = {std::make_shared<Node>(), 0};
  return leaf;
}

SHARDLIB_INLINE std::vector<ValuePtr> backward(const std::vector<std::pair<Slot, ValuePtr>>& roots,
                                               const std::vector<Slot>& leaves) {
  struct Pending {
    std::shared_ptr<Node> node;
    std::vector<Accumulator> outputs;
  };
  // Ordered by sequence; leaves all have 0 and are told apart by address.
  std::map<std::pair<std::uint64_t, Node*>, Pending> pending;
  std::unordered_map<Node*, Pending> arrived;
  const auto deliver = [&](const Slot& slot, ValuePtr ct) {
    if (!slot || !ct) return;
    Pending& p = slot.node->sequence == 0 ? arrived[slot.node.get()] : pending[{slot.node->sequence, slot.node.get()}];
    if (!p.node) {
      p.node = slot.node;
      p.outputs.resize(static_cast<std::size_t>(slot.node->outputs));
    }
    p.outputs[static_cast<std::size_t>(slot.output)].add(std::move(ct));
  };
  for (const auto& [slot, ct] : roots) deliver(slot, ct);
  while (!pending.empty()) {
    auto next = pending.extract(std::prev(pending.end()));
    Pending& p = next.mapped();
    std::vector<ValuePtr> cts;
    for (auto& output : p.outputs) cts.push_back(output.take());
    auto edges = std::exchange(p.node->edges, {});
    if (p.node->joint) {
      const auto joint = std::exchange(p.node->joint, nullptr);
      auto inputs = joint(cts);
      cts.clear();
      for (std::size_t i = 0; i < edges.size(); ++i) deliver(edges[i].input, std::move(inputs[i]));
    } else {
      for (auto& edge : edges) {
        if (!edge.input) continue;
        deliver(edge.input, edge.vjp(cts[0], edge.saved));
        edge.saved.values.clear();
      }
    }
  }
  std::vector<ValuePtr> result;
  for (const Slot& leaf : leaves) {
    const auto it = arrived.find(leaf.node.get());
    result.push_back(it == arrived.end() ? nullptr : it->second.outputs[0].take());
  }
  return result;
}

SHARDLIB_INLINE ValuePtr with_spec(const ValuePtr& value, const TensorSpec& spec) {
  if (value->spec == &spec) return value;
  auto copy = detached(*value);
  copy->spec = &spec;
  return copy;
}

SHARDLIB_INLINE State::Count& count(const Value& value) {
  auto& counts = state(value.device).counts;
  auto it = counts.find(value.made_by.name);
  if (it == counts.end()) it = counts.emplace(value.made_by.name, State::Count{}).first;
  ++it->second.calls;
  return it->second;
}

SHARDLIB_INLINE void attach(const std::shared_ptr<Value>& out, std::vector<Node::Edge>&& edges,
                            std::function<std::vector<ValuePtr>(const std::vector<ValuePtr>&)> joint) {
  bool any = false;
  for (const auto& edge : edges) any = any || edge.input;
  if (!any) return;
  State& s = state(out->device);
  if (s.mode == State::Mode::checkpoint) {
    const auto outside = std::find_if(edges.begin(), edges.end(), [](const auto& e) { return bool(e.input); });
    const Node& maker = *outside->input.node;
    throw Error(out->made_by.describe_call() + " of result `" + std::string(to_string(*out->spec).view()) +
                "`: inside explicit_activation_checkpointing it uses a tensor from outside, " +
                (maker.sequence == 0 ? "a weight" : "the result of " + maker.op.describe_call()) +
                "; pass that as an argument, or its gradient would be lost (" + out->device->describe() + ")");
  }
  auto node = std::make_shared<Node>();
  node->op = out->made_by;
  node->sequence = ++s.sequence;
  node->edges = std::move(edges);
  node->joint = std::move(joint);
  out->slot = {std::move(node), 0};
}

SHARDLIB_INLINE Buffer run(const Kernel& kernel, const Value& out) {
  count(out);
  try {
    Buffer result = observed(out, [&] { return kernel(out); });
    // A buffer that others hold too is an operand's, passed on, or a collective's: its padding is zero already.
    if (out.global.is_padded() && result.unique()) zero_padding(out, result);
    return result;
  } catch (const Error& error) {
    const std::string where = " (" + out.device->describe() + ")";
    // In a replay the operands' ops run within this one, and have said their names.
    if (typeid(error) != typeid(Error) || std::string_view(error.what()).ends_with(where)) throw;
    throw Error(out.made_by.describe() + ": " + error.what() + where);
  }
}

SHARDLIB_INLINE void evaluate(const std::shared_ptr<Value>& out, Kernel kernel) {
  if (state(out->device).mode != State::Mode::replay) {
    out->storage->buffer = run(kernel, *out);
    return;
  }
  // A copy without storage and slot: the storage must not hold itself.
  auto shape = std::make_shared<Value>(*out);
  shape->slot = {};
  shape->storage = nullptr;
  out->storage->compute = [kernel = std::move(kernel), shape = std::move(shape)] { return run(kernel, *shape); };
}

SHARDLIB_INLINE ValuePtr record_erased(const OpInfo& op, const std::shared_ptr<Device>& device, DType dtype,
                                       const TensorSpec& spec, const GlobalSizes& global, Kernel&& kernel,
                                       std::span<EdgeSource> sources) {
  auto out = make_value(op, device, dtype, spec, global);
  std::vector<Node::Edge> edges;
  for (EdgeSource& source : sources) {
    auto& edge = edges.emplace_back();
    if (!(*source.x)->slot) continue;  // an operand that nothing differentiates needs no residuals
    edge = {(*source.x)->slot, {{}, (*source.x)->global}, std::move(source.pull)};
    for (const ValuePtr* saved : source.saved)
      if (saved != nullptr) edge.saved.values.push_back(detached(**saved));
    if (source.of_result) edge.saved.values.push_back(detached(*out));
  }
  attach(out, std::move(edges));
  evaluate(out, std::move(kernel));
  return out;
}

SHARDLIB_INLINE Kernel bind_operand(const ValuePtr& in, UnaryKernel&& kernel) {
  return [in, kernel = std::move(kernel)](const Value& out) { return kernel(*in, out); };
}

}  // namespace shardlib::detail
