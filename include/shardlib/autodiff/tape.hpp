// Reverse-mode differentiation, define-by-run: an op leaves a node with one VJP per operand, each callable alone.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "shardlib/ops/record.hpp"
#include "shardlib/runtime/bindings.hpp"
#include "shardlib/runtime/value.hpp"
#include "shardlib/support/inline.hpp"

namespace shardlib::detail {

/// What an operand's VJP needs of the forward pass.
struct Residuals {
  std::vector<ValuePtr> values;
  GlobalSizes sizes;  ///< the operand's
};
using VjpFunction = std::function<ValuePtr(const ValuePtr& cotangent, const Residuals&)>;

class Backward;  // backward.hpp

/// One op of the program: where the cotangents of its operands go, and how to get them from that of its result. The
/// nodes hold each other, from the loss down to the leaves; there is no global list.
struct Node {
  OpInfo op;
  std::uint64_t sequence = 0;  ///< 0 for leaves; operands have smaller numbers: descending is a valid backward order
  struct Edge {
    Slot input;
    Residuals saved;
    VjpFunction vjp;
  };
  std::vector<Edge> edges;
  int outputs = 1;
  bool stopped = false;  ///< stop_gradient has been taken of it, or of what was computed from it
  /// All VJPs at once where that is cheaper (a fused loop).
  std::function<std::vector<ValuePtr>(const std::vector<ValuePtr>& cotangents)> fused_vjp;
  /// The backward pass of a replayed function, of which the edges' inputs are the leaves.
  std::function<std::shared_ptr<Backward>(const std::vector<ValuePtr>& cotangents)> remat;
};

/// A place for the gradient of a value that is differentiated by: a node without operands.
SHARDLIB_INLINE Handle<Value> as_leaf(const Value& value);

/// Records that this use of the value needs no gradient, neither of the value nor of its operands.
SHARDLIB_INLINE void stop_below(const Slot& slot);

/// The value under the spec of T: a cotangent's maker may have known other axes.
ValuePtr with_spec(const ValuePtr& value, const TensorSpec& spec);
template <class T>
T typed(const ValuePtr& value) {
  return T(with_spec(value, parsed<T::spec>));
}

/// The typed VJP as an erased one. Its cotangents are checked here: result's dual in, operand's dual out.
// Cold, like `record`: this is glue around the kernels, and compilers spend less time on code that need not be fast.
template <OpName Name, class Out, class X, class F, class... Saved>
struct ErasedVjp {
  static constexpr Spec axes = axes_of<Out::spec, X::spec, Saved::spec...>();
  using Cotangent = Dual<Out, axes>;
  using Due = Dual<X, axes>;
  static constexpr bool with_sizes =
      std::is_invocable_v<const F&, const Cotangent&, const Saved&..., const GlobalSizes&>;

  [[gnu::cold]] static ValuePtr vjp(const F& f, const ValuePtr& ct, const Residuals& saved) {
    return vjp(f, ct, saved, std::index_sequence_for<Saved...>{});
  }
  template <std::size_t... I>
  [[gnu::cold]] static ValuePtr vjp(const F& f, const ValuePtr& ct, const Residuals& saved,
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
  [[gnu::cold]] static VjpFunction make(F f) {
    // Functions without state share one type.
    if constexpr (std::is_empty_v<F> && std::is_default_constructible_v<F>)
      return +[](const ValuePtr& ct, const Residuals& saved) { return vjp(F{}, ct, saved); };
    else
      return [f = std::move(f)](const ValuePtr& ct, const Residuals& saved) { return vjp(f, ct, saved); };
  }
};

/// One operand of an op, where the cotangent goes: a Vjp without types. `of_result`: the result is saved.
struct EdgeSource {
  const ValuePtr* x;
  std::array<const ValuePtr*, 4> saved;
  bool of_result;
  VjpFunction vjp;
};
template <OpName Name, class Out, class X, class F, class... Saved>
EdgeSource erased(const Vjp<X, F, Saved...>& v) {
  static_assert(sizeof...(Saved) <= 4);
  EdgeSource source{v.x, {}, false, nullptr};
  // Integers have no derivative, so the op that their cotangent would need may not exist.
  if constexpr (floating<typename X::value_type>) source.vjp = ErasedVjp<Name, Out, X, F, Saved...>::make(v.f);
  std::copy(v.saved.begin(), v.saved.end(), source.saved.begin());
  return source;
}
template <OpName Name, class Out, class X, class F, class... Saved>
EdgeSource erased(const VjpOfResult<X, F, Saved...>& v) {
  static_assert(sizeof...(Saved) <= 4);
  EdgeSource source{v.x, {}, true, ErasedVjp<Name, Out, X, F, Saved..., Out>::make(v.f)};
  std::copy(v.saved.begin(), v.saved.end(), source.saved.begin());
  return source;
}

/// Counts one execution of an op on this device.
[[gnu::cold]] SHARDLIB_INLINE ProgramState::Count& count(const Value& value);

/// Counts floating-point operations of the op that makes the value, which runs: `count` has been called.
[[gnu::cold]] SHARDLIB_INLINE void add_flops(const Value& value, double flops);

/// Makes the node of an op if anything differentiates one of its operands.
[[gnu::cold]] SHARDLIB_INLINE void attach(
    const Handle<Value>& out, std::vector<Node::Edge>&& edges,
    std::function<std::vector<ValuePtr>(const std::vector<ValuePtr>&)> fused_vjp = nullptr);

/// Cotangents of several operands that one kernel makes, an op of its own in counts and traces: `fill` writes the
/// shards. Null for operands that are not `wanted`; at least one is. `due`: the cotangents' specs.
[[gnu::cold]] SHARDLIB_INLINE std::vector<ValuePtr> fused_cotangents(
    const OpInfo& op, std::span<const ValuePtr> operands, std::span<const bool> wanted,
    std::span<const TensorSpec* const> due,
    const std::function<void(const Value& first, std::span<const ValuePtr> cotangents)>& fill);

/// Makes the bytes of a value: a kernel of the result's shape.
using Kernel = std::function<Buffer(const Value& out)>;

/// Runs a kernel; what it throws gets the op's name and the device. This is where the padding of every result becomes
/// zero, whatever the op made of it; so sums, einsums and collectives need not know of padding.
[[gnu::cold]] SHARDLIB_INLINE Buffer run(const Kernel& kernel, const Value& out);

/// Computes the value on demand, not now.
[[gnu::cold]] SHARDLIB_INLINE void defer(const ValuePtr& out, Kernel kernel);

/// Computes the value now, or leaves it for later: in a replay.
[[gnu::cold]] SHARDLIB_INLINE void evaluate(const Handle<Value>& out, Kernel kernel);

/// `record` without types: what all ops share.
[[gnu::cold]] SHARDLIB_INLINE ValuePtr record_erased(const OpInfo& op, const std::shared_ptr<Device>& device,
                                                     DType dtype, const TensorSpec& spec, const GlobalSizes& global,
                                                     Kernel&& kernel, std::span<EdgeSource> sources);

template <OpName Name, class Out, class K, class... V>
[[gnu::noinline, gnu::cold]] Out record(const OpInfo& op, const DevicePtr& device, const GlobalSizes& global,
                                        const K& kernel, const V&... vjps) {
  std::array<EdgeSource, sizeof...(V)> sources{erased<Name, Out>(vjps)...};
  return Out(
      record_erased(op, device, dtype_v<typename Out::value_type>, parsed<Out::spec>, global, Kernel(kernel), sources));
}

/// Adds the value to a sum of its shape, in the accumulator's type.
using AddKernel = std::function<void(const Value& out, std::byte* sum)>;
/// A cotangent that is zero but for few elements: left for later, so that it can be added to a sum without being made.
[[gnu::cold]] SHARDLIB_INLINE ValuePtr record_addend_erased(const OpInfo& op, const std::shared_ptr<Device>& device,
                                                            DType dtype, const TensorSpec& spec,
                                                            const GlobalSizes& global, Kernel&& kernel,
                                                            AddKernel&& add);
template <class Out, class K, class Add>
Out record_addend(const OpInfo& op, const DevicePtr& device, const GlobalSizes& global, const K& kernel,
                  const Add& add) {
  return Out(record_addend_erased(op, device, dtype_v<typename Out::value_type>, parsed<Out::spec>, global,
                                  Kernel(kernel), AddKernel(add)));
}

/// The kernel of an op of one operand: (in, out) -> the bytes of out.
using UnaryKernel = std::function<Buffer(const Value& in, const Value& out)>;
[[gnu::cold]] SHARDLIB_INLINE Kernel bind_operand(const ValuePtr& in, UnaryKernel&& kernel);

/// Kernels without state become function pointers: one type of std::function for all of them.
template <class K>
UnaryKernel erased_kernel(const K& kernel) {
  using Function = Buffer (*)(const Value&, const Value&);
  if constexpr (std::is_convertible_v<K, Function>)
    return static_cast<Function>(kernel);
  else
    return kernel;
}

template <OpName Name, class Out, class X, class K, class... V>
Out record_unary(const OpInfo& op, const X& x, const GlobalSizes& global, const K& kernel, const V&... vjps) {
  return record<Name, Out>(op, x.device(), global, bind_operand(x.value(), erased_kernel(kernel)), vjps...);
}

}  // namespace shardlib::detail

#ifndef SHARDLIB_COMPILED
#include "shardlib/autodiff/impl/tape.hpp"
#endif
