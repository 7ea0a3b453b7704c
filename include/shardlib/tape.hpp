// Reverse-mode differentiation, define-by-run: an op leaves a node with one VJP per operand, each callable alone.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <tuple>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

#include "shardlib/bindings.hpp"
#include "shardlib/kernels/elementwise.hpp"
#include "shardlib/observe.hpp"
#include "shardlib/padding.hpp"
#include "shardlib/value.hpp"

namespace shardlib::detail {

/// What an operand's VJP needs of the forward pass.
struct Residuals {
  std::vector<ValuePtr> values;
  GlobalSizes sizes;  ///< the operand's
};
using Pull = std::function<ValuePtr(const ValuePtr& cotangent, const Residuals&)>;

/// One op of the program: where the cotangents of its operands go, and how to get them from that of its result. The
/// nodes hold each other, from the loss down to the leaves; there is no global list.
struct Node {
  OpInfo op;
  std::uint64_t sequence = 0;  ///< 0 for leaves; operands have smaller numbers: descending is a valid backward order
  struct Edge {
    Slot input;
    Residuals saved;
    Pull vjp;
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

/// How one operand's cotangent comes from the result's: f(cotangent, saved...), a typed function, with what it needs;
/// or f(cotangent, saved..., global sizes of the operand). Lives as long as the call of `record` that it is made for.
template <class X, class F, class... Saved>
struct Vjp {
  const ValuePtr* x;
  std::array<const ValuePtr*, sizeof...(Saved)> saved;
  F f;
};
template <class... T>
std::tuple<const T&...> save(const T&... t) {
  return {t...};
}
template <class X, class... Saved, class F>
auto vjp(const X& x, std::tuple<const Saved&...> saved, F f) {
  return std::apply(
      [&](const auto&... s) {
        return Vjp<X, F, Saved...>{&x.value(), {&s.value()...}, std::move(f)};
      },
      saved);
}

/// A VJP that needs the op's own result: f(cotangent, result).
template <class X, class F>
struct VjpOfResult {
  const ValuePtr* x;
  F f;
};
template <class X, class F>
auto vjp_of_result(const X& x, F f) {
  return VjpOfResult<X, F>{&x.value(), std::move(f)};
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
// Cold, like `record`: this is glue around the kernels, and compilers spend less time on code that need not be fast.
template <Op Name, class Out, class X, class F, class... Saved>
struct ErasedVjp {
  static constexpr Spec axes = axes_of<Out::spec, X::spec, Saved::spec...>();
  using Cotangent = Dual<Out, axes>;
  using Due = Dual<X, axes>;
  static constexpr bool with_sizes =
      std::is_invocable_v<const F&, const Cotangent&, const Saved&..., const GlobalSizes&>;

  [[gnu::cold]] static ValuePtr pull(const F& f, const ValuePtr& ct, const Residuals& saved) {
    return pull(f, ct, saved, std::index_sequence_for<Saved...>{});
  }
  template <std::size_t... I>
  [[gnu::cold]] static ValuePtr pull(const F& f, const ValuePtr& ct, const Residuals& saved,
                                     std::index_sequence<I...> /*saved*/) {
    const auto call = [&] {
      if constexpr (with_sizes)
        return f(typed<Cotangent>(ct), Saved(saved.values[I])..., saved.sizes);
      else
        return f(typed<Cotangent>(ct), Saved(saved.values[I])...);
    };
    using Returned = decltype(call());
    static_assert(checked<rules::cotangent, Name, Returned::spec, Due::spec>::ok);
    static_assert(std::is_same_v<typename Returned::value_type, typename X::value_type>,
                  "a cotangent has its primal's dtype");
    return call().value();
  }
  [[gnu::cold]] static Pull make(F f) {
    // Functions without state share one type.
    if constexpr (std::is_empty_v<F> && std::is_default_constructible_v<F>)
      return +[](const ValuePtr& ct, const Residuals& saved) { return pull(F{}, ct, saved); };
    else
      return [f = std::move(f)](const ValuePtr& ct, const Residuals& saved) { return pull(f, ct, saved); };
  }
};

/// One operand of an op, where the cotangent goes: a Vjp without types. `of_result`: the result is saved.
struct EdgeSource {
  const ValuePtr* x;
  std::array<const ValuePtr*, 3> saved;
  bool of_result;
  Pull pull;
};
template <Op Name, class Out, class X, class F, class... Saved>
EdgeSource erased(const Vjp<X, F, Saved...>& v) {
  static_assert(sizeof...(Saved) <= 3);
  EdgeSource source{v.x, {}, false, nullptr};
  // Integers have no derivative, so the op that their cotangent would need may not exist.
  if constexpr (floating<typename X::value_type>) source.pull = ErasedVjp<Name, Out, X, F, Saved...>::make(v.f);
  std::copy(v.saved.begin(), v.saved.end(), source.saved.begin());
  return source;
}
template <Op Name, class Out, class X, class F>
EdgeSource erased(const VjpOfResult<X, F>& v) {
  return {v.x, {}, true, ErasedVjp<Name, Out, X, F, Out>::make(v.f)};
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
  auto node = std::make_shared<Node>();
  node->op = out->made_by;
  node->sequence = ++s.sequence;
  node->edges = std::move(edges);
  node->joint = std::move(joint);
  out->slot = {std::move(node), 0};
}

/// Makes the bytes of a value: a kernel of the result's shape.
using Kernel = std::function<Buffer(const Value& out)>;

/// Runs a kernel; what it throws gets the op's name and the device. This is where the padding of every result becomes
/// zero, whatever the op made of it; so sums, einsums and collectives need not know of padding.
[[gnu::noinline]] inline Buffer run(const Kernel& kernel, const Value& out) {
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

/// `record` without types: what all ops share.
[[gnu::noinline]] inline ValuePtr record_erased(const OpInfo& op, const std::shared_ptr<Device>& device, DType dtype,
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

/// Records one op: the result's sizes, the kernel, and one vjp(...) per operand.
template <Op Name, class Out, class... V>
[[gnu::noinline, gnu::cold]] Out record(const OpInfo& op, const std::shared_ptr<Device>& device,
                                        const GlobalSizes& global, Kernel kernel, const V&... vjps) {
  std::array<EdgeSource, sizeof...(V)> sources{erased<Name, Out>(vjps)...};
  return Out(record_erased(op, device, dtype_v<typename Out::value_type>, parsed<Out::spec>, global, std::move(kernel),
                           sources));
}

/// The kernel of an op of one operand: (in, out) -> the bytes of out.
using UnaryKernel = std::function<Buffer(const Value& in, const Value& out)>;
[[gnu::noinline]] inline Kernel bind_operand(const ValuePtr& in, UnaryKernel&& kernel) {
  return [in, kernel = std::move(kernel)](const Value& out) { return kernel(*in, out); };
}

/// Kernels without state become function pointers: one type of std::function for all of them.
template <class K>
UnaryKernel erased_kernel(const K& kernel) {
  using Function = Buffer (*)(const Value&, const Value&);
  if constexpr (std::is_convertible_v<K, Function>)
    return static_cast<Function>(kernel);
  else
    return kernel;
}

/// An op of one operand.
template <Op Name, class Out, class X, class K, class... V>
Out record_unary(const OpInfo& op, const X& x, const GlobalSizes& global, const K& kernel, const V&... vjps) {
  return record<Name, Out>(op, x.device(), global, bind_operand(x.value(), erased_kernel(kernel)), vjps...);
}

}  // namespace shardlib::detail
