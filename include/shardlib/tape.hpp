// Reverse-mode differentiation, define-by-run: an op leaves a node with one VJP per operand, each callable alone.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <tuple>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

#include "shardlib/kernels/elementwise.hpp"
#include "shardlib/value.hpp"

namespace shardlib::detail {

/// One op of the program: where the cotangents of its operands go, and how to get them from that of its result. The
/// nodes hold each other, from the loss down to the leaves; there is no global list.
struct Node {
  OpInfo op;
  std::uint64_t sequence = 0;  ///< 0 for leaves; operands have smaller numbers: descending is a valid backward order
  struct Edge {
    Slot input;
    std::vector<ValuePtr> saved;  ///< residuals
    std::function<ValuePtr(const ValuePtr& cotangent, const std::vector<ValuePtr>&)> vjp;
  };
  std::vector<Edge> edges;
  int outputs = 1;
  /// All VJPs at once where that is cheaper (a fused loop) or the only way (a replayed function).
  std::function<std::vector<ValuePtr>(const std::vector<ValuePtr>& cotangents)> joint;
};

/// Copies a block, from or to the f32 that bf16 is summed in.
inline void convert(const Value& from, const Value& to) {
  const Exec exec = from.device->exec();
  if (from.dtype == to.dtype)
    std::memcpy(to.data().data(), from.data().data(), from.bytes());
  else if (from.dtype == DType::bf16)
    kernels::apply_flat(
        exec, from.count(), [](const bf16& x, f32& y) { y = static_cast<f32>(x); }, from.as<const bf16>(),
        to.as<f32>());
  else
    kernels::apply_flat(
        exec, from.count(), [](const f32& x, bf16& y) { y = static_cast<bf16>(x); }, from.as<const f32>(),
        to.as<bf16>());
}

/// Sums the cotangents of the uses of one value: in f32, rounded once; in place where nobody else sees the buffer.
class Accumulator {
 public:
  void add(ValuePtr ct) {
    if (!sum_) {
      sum_ = std::move(ct);
      return;
    }
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
            sum_->as<A>());
    });
  }
  ValuePtr take() {
    if (!owned_ || sum_->dtype == dtype_) return std::move(sum_);
    auto narrow = fresh(*sum_, dtype_);
    convert(*sum_, *narrow);
    return narrow;
  }

 private:
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

/// A place for the gradient of a value that is differentiated by: a node without operands.
inline std::shared_ptr<Value> as_leaf(const Value& value) {
  auto leaf = std::make_shared<Value>(value);
  leaf->slot = {std::make_shared<Node>(), 0};
  return leaf;
}

/// Runs the tape from `roots` (slots and their cotangents) down to the leaves, in the same order on every device. Nodes
/// are emptied once used, which frees their residuals. Returns the cotangents of `leaves`; null where none arrived.
inline std::vector<ValuePtr> backward(const std::vector<std::pair<Slot, ValuePtr>>& roots,
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
        edge.saved.clear();
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

/// How one operand's cotangent comes from the result's: f(cotangent, saved...), a typed function, with what it needs.
template <class X, class Saved, class F>
struct Vjp;
template <class X, class... Saved, class F>
struct Vjp<X, std::tuple<Saved...>, F> {
  ValuePtr x;
  std::vector<ValuePtr> saved;
  F f;
};
template <class X, class... Saved, class F>
auto vjp(const X& x, const std::tuple<Saved...>& saved, F f) {
  std::vector<ValuePtr> values;
  std::apply([&](const auto&... s) { (values.push_back(detached(*s.value())), ...); }, saved);
  return Vjp<X, std::tuple<Saved...>, F>{x.value(), std::move(values), std::move(f)};
}
template <class... T>
std::tuple<T...> save(const T&... t) {
  return {t...};
}

/// A VJP that needs the op's own result: f(cotangent, result).
template <class X, class F>
struct VjpOfResult {
  ValuePtr x;
  F f;
};
template <class X, class F>
auto vjp_of_result(const X& x, F f) {
  return VjpOfResult<X, F>{x.value(), std::move(f)};
}

/// The value under the spec of T: a cotangent's maker may have known other axes.
[[gnu::noinline]] inline ValuePtr with_spec(const ValuePtr& value, const TensorSpec& spec) {
  if (value->spec == &spec) return value;
  auto copy = detached(*value);
  copy->spec = &spec;
  return copy;
}
template <class T>
T typed(const ValuePtr& value) {
  return T(with_spec(value, parsed<T::spec>));
}

/// The typed VJP as an erased one. Its cotangents are checked here: result's dual in, operand's dual out.
template <Op Name, class Out, class X, class... Saved, class F>
[[gnu::cold]] Node::Edge make_edge(const Value&, Vjp<X, std::tuple<Saved...>, F>& v) {
  constexpr Spec axes = axes_of<Out::spec, X::spec, Saved::spec...>();
  using Cotangent = Dual<Out, axes>;
  using Returned = std::invoke_result_t<F&, const Cotangent&, const Saved&...>;
  using Due = Dual<X, axes>;
  static_assert(checked<rules::cotangent, Name, Returned::spec, Due::spec>::ok);
  static_assert(std::is_same_v<typename Returned::value_type, typename X::value_type>,
                "a cotangent has its primal's dtype");
  return {v.x->slot, std::move(v.saved), [f = std::move(v.f)](const ValuePtr& ct, const std::vector<ValuePtr>& saved) {
            return [&]<std::size_t... I>(std::index_sequence<I...>) {
              return f(typed<Cotangent>(ct), Saved(saved[I])...).value();
            }
            (std::index_sequence_for<Saved...>{});
          }};
}

template <Op Name, class Out, class X, class F>
Node::Edge make_edge(const Value& out, VjpOfResult<X, F>& v) {
  Vjp<X, std::tuple<Out>, F> full{v.x, {detached(out)}, std::move(v.f)};
  return make_edge<Name, Out>(out, full);
}

/// Counts one execution of an op on this device.
[[gnu::noinline]] inline State::Count& count(const Value& value) {
  auto& counts = state(value.device).counts;
  auto it = counts.find(value.made_by.name);
  if (it == counts.end()) it = counts.emplace(value.made_by.name, State::Count{}).first;
  ++it->second.calls;
  return it->second;
}

/// Makes the node of an op if anything differentiates one of its operands.
[[gnu::noinline]] inline void attach(
    const std::shared_ptr<Value>& out, std::vector<Node::Edge>&& edges,
    std::function<std::vector<ValuePtr>(const std::vector<ValuePtr>&)> joint = nullptr) {
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
  // An operand that nothing differentiates needs no residuals.
  for (auto& edge : edges)
    if (!edge.input) edge = {};
  auto node = std::make_shared<Node>();
  node->op = out->made_by;
  node->sequence = ++s.sequence;
  node->edges = std::move(edges);
  node->joint = std::move(joint);
  out->slot = {std::move(node), 0};
}

/// Makes the bytes of a value: a kernel of the result's shape.
using Kernel = std::function<Buffer(const Value& out)>;

/// Runs a kernel; what it throws gets the op's name and the device.
[[gnu::noinline]] inline Buffer run(const Kernel& kernel, const Value& out) {
  count(out);
  try {
    return kernel(out);
  } catch (const Error& error) {
    const std::string where = " (" + out.device->describe() + ")";
    // In a replay the operands' ops run within this one, and have said their names.
    if (typeid(error) != typeid(Error) || std::string_view(error.what()).ends_with(where)) throw;
    throw Error(out.made_by.describe() + ": " + error.what() + where);
  }
}

/// Computes the value now, or in a replay when somebody asks.
[[gnu::noinline]] inline void evaluate(const std::shared_ptr<Value>& out, Kernel kernel) {
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

/// The op spec of a transpose: from the result's cotangent to the operand's.
template <class Out, class X>
constexpr Op transpose_op() {
  constexpr Spec axes = axes_of<Out::spec, X::spec>();
  return make_op(dual_spec(Out::spec, axes), dual_spec(X::spec, axes));
}

/// Records one op: the result's sizes, the kernel, and one vjp(...) per operand.
// Cold: this is glue around the kernels, and compilers spend less time on code that they need not make fast.
template <Op Name, class Out, class... V>
[[gnu::noinline, gnu::cold]] Out record(const OpInfo& op, const std::shared_ptr<Device>& device, const Extents& global,
                                        Kernel kernel, V... vjps) {
  auto out = make_value(op, device, dtype_v<typename Out::value_type>, parsed<Out::spec>, global);
  if constexpr (sizeof...(V) > 0) {
    std::vector<Node::Edge> edges;
    edges.reserve(sizeof...(V));
    (edges.push_back(make_edge<Name, Out>(*out, vjps)), ...);
    attach(out, std::move(edges));
  }
  evaluate(out, std::move(kernel));
  return Out(std::move(out));
}

/// An op of one operand: the kernel is (const Value& in, const Value& out) -> Buffer.
template <Op Name, class Out, class X, class UnaryKernel, class... V>
Out record_unary(const OpInfo& op, const X& x, const Extents& global, UnaryKernel kernel, V... vjps) {
  return record<Name, Out>(
      op, x.device(), global,
      [in = x.value(), kernel = std::move(kernel)](const Value& out) { return kernel(*in, out); }, std::move(vjps)...);
}

}  // namespace shardlib::detail
