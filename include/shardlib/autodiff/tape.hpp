// Reverse-mode differentiation, define-by-run. Each op records a node with one VJP per operand.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "shardlib/ops/record.hpp"
#include "shardlib/runtime/bindings.hpp"
#include "shardlib/runtime/program_state.hpp"
#include "shardlib/runtime/tensor.hpp"
#include "shardlib/runtime/value.hpp"
#include "shardlib/spec/dtype.hpp"
#include "shardlib/support/handle.hpp"
#include "shardlib/support/inline.hpp"
#include "shardlib/types/numbers_in.hpp"

namespace shardlib::detail {

/// The values of the forward pass that an operand's VJP needs.
struct Residuals {
  std::vector<ValuePtr> values;
  GlobalSizes sizes;  ///< the operand's sizes
};
using VjpFunction = std::function<ValuePtr(const ValuePtr& cotangent, const Residuals&)>;

class Backward;  // backward.hpp

/// One op on the tape: the destinations of its operands' cotangents, and the VJPs that compute them from the result's
/// cotangent. Each node owns the nodes of its operands, down to the leaves. There is no global list.
struct Node : Counted {
  Node() = default;
  SHARDLIB_INLINE ~Node() override;

  OpInfo op;                     ///< without a name for leaves
  Handle<const ModelPart> part;  ///< that the op belongs to
  /// 0 for leaves, except for those of a call inside of a differentiated function. An op's operands have smaller
  /// numbers, so descending order is a valid backward order.
  std::uint64_t sequence = 0;
  std::uint64_t tape = 0;  ///< ProgramState::tape
  struct Edge {
    Slot input;
    Residuals saved;
    VjpFunction vjp;
    bool of_result = false;  ///< the last residual is the op's result
  };
  std::vector<Edge> edges;
  int outputs = 1;
  bool stopped = false;        ///< the program called stop_gradient on this value or on a value computed from it
  bool twice = false;          ///< the residuals are those of the tape, so that the VJPs can be differentiated
  bool takes_product = false;  ///< a product that is the result's cotangent is deferred until the VJP reads it
  /// Casts the result's cotangent to the operands' dtype, once for all VJPs, where the result has another one.
  std::function<ValuePtr(ValuePtr cotangent)> cast_cotangent;
  /// Computes all VJPs at once, where that is cheaper (a fused loop).
  std::function<std::vector<ValuePtr>(const std::vector<ValuePtr>& cotangents)> fused_vjp;
  /// The backward pass of a replayed function. Its leaves are the edges' inputs.
  std::function<Backward(const std::vector<ValuePtr>& cotangents)> remat;

  /// "a weight" or "the result of tanh at trainer.cpp:12", for errors.
  [[nodiscard]] std::string describe() const { return *op.name == 0 ? "a weight" : "the result of " + op.describe(); }
};

/// A copy of the value with a slot that collects its gradient: a node without operands.
SHARDLIB_INLINE Handle<Value> as_leaf(const Value& value);

/// Throws if a function that is differentiated gives the op a value of an earlier tape: the gradient would miss what is
/// behind it.
[[gnu::cold]] SHARDLIB_INLINE void require_this_tape(const OpInfo& op, const Slot& operand, const DevicePtr& device);

/// Records that the program wants no gradient of this value through this use, nor of the values behind it.
SHARDLIB_INLINE void stop_below(const Slot& slot);

/// The value under the spec of T. The code that computed a cotangent may have known other axes of the mesh.
ValuePtr with_spec(const ValuePtr& value, const TensorSpec& spec);
template <class T>
T typed(const ValuePtr& value) {
  return T(with_spec(value, parsed<T::spec>));
}

/// All axes of the specs and, if the function F of a VJP names some, those.
template <class F, Spec... S>
constexpr Spec axes_of_vjp() {
  if constexpr (requires { F::cotangent_axes; })
    return axes_of<S..., F::cotangent_axes>();
  else
    return axes_of<S...>();
}

/// Throws if the cotangent that a VJP of the op `name` returns has other sizes than the operand.
[[gnu::cold]] SHARDLIB_INLINE void require_sizes_of(const GlobalSizes& operand, const char* name,
                                                    const Value& cotangent);

/// Type-erases a VJP. It checks the types of the cotangents: the result's dual in, the operand's dual out. A pending
/// sum over an axis that no type names is not in these types, so f is linear, or names the axes.
// Cold, like `record`: this code only surrounds the kernels, and compilers compile cold code faster.
template <OpName Name, class Out, class X, class F, class... Saved>
struct ErasedVjp {
  static constexpr Spec axes = axes_of_vjp<F, Out::spec, X::spec, Saved::spec...>();
  using Cotangent = Dual<Out, axes>;
  using Due = Dual<X, axes>;
  static constexpr bool with_sizes =
      std::is_invocable_v<const F&, const Cotangent&, const Saved&..., const GlobalSizes&>;

  template <std::size_t... I>
  [[gnu::cold]] static auto call(const F& f, const ValuePtr& ct, const Residuals& saved,
                                 std::index_sequence<I...> /*saved*/) {
    if constexpr (with_sizes)
      return f(typed<Cotangent>(ct), Saved(saved.values[I])..., saved.sizes);
    else
      return f(typed<Cotangent>(ct), Saved(saved.values[I])...);
  }
  [[gnu::cold]] static ValuePtr vjp(const F& f, const ValuePtr& ct, const Residuals& saved) {
    constexpr std::index_sequence_for<Saved...> all;
    using Returned = decltype(call(f, ct, saved, all));
    static_assert(checked<rules::cotangent, Name, Returned::spec, Due::spec>::ok);
    if constexpr (!std::is_same_v<typename Returned::value_type, typename X::value_type>)
      static_assert(checked<rules::cotangent_dtype, Name, dtype_v<typename Returned::value_type>,
                            dtype_v<typename X::value_type>>::ok);
    ValuePtr due = call(f, ct, saved, all).value();
    if constexpr (requires { F::cotangent_axes; })
      require_sizes_of(saved.sizes, Name.text, *due);  // the library's have them
    return due;
  }
  [[gnu::cold]] static VjpFunction make(const void* f) {
    // All functions without state share one type.
    if constexpr (std::is_empty_v<F> && std::is_default_constructible_v<F>)
      return +[](const ValuePtr& ct, const Residuals& saved) { return vjp(F{}, ct, saved); };
    else
      return [f = *static_cast<const F*>(f)](const ValuePtr& ct, const Residuals& saved) { return vjp(f, ct, saved); };
  }
};

/// A type-erased Vjp of one operand. `of_result` says that the VJP also needs the op's result.
struct EdgeSource {
  const ValuePtr* x;
  std::array<const ValuePtr*, 4> saved = {};
  VjpFunction vjp = nullptr;
  bool of_result = false;
};
/// An EdgeSource that refers to the Vjp. Because it owns nothing, it costs little code in each `record`.
struct VjpRef {
  const ValuePtr* x;
  std::array<const ValuePtr*, 4> saved = {};
  const void* f = nullptr;
  VjpFunction (*make)(const void* f) = nullptr;  ///< null of integers
  bool of_result = false;

  /// Without a function if the tape does not track the operand.
  [[nodiscard, gnu::cold]] SHARDLIB_INLINE EdgeSource source() const;
};
template <OpName Name, class Out, class X, class F, class... Saved>
VjpRef erased(const Vjp<X, F, Saved...>& v) {
  static_assert(sizeof...(Saved) <= 4);
  VjpRef ref{.x = v.x, .f = &v.f};
  // Integers have no derivative. The op that computes their cotangent may not exist, so do not instantiate it.
  if constexpr (floating<typename X::value_type>) ref.make = ErasedVjp<Name, Out, X, F, Saved...>::make;
  std::copy(v.saved.begin(), v.saved.end(), ref.saved.begin());
  return ref;
}
template <OpName Name, class Out, class X, class F, class... Saved>
VjpRef erased(const VjpOfResult<X, F, Saved...>& v) {
  static_assert(sizeof...(Saved) <= 4);
  VjpRef ref{.x = v.x, .f = &v.f, .of_result = true};
  if constexpr (floating<typename X::value_type>) ref.make = ErasedVjp<Name, Out, X, F, Saved..., Out>::make;
  std::copy(v.saved.begin(), v.saved.end(), ref.saved.begin());
  return ref;
}

/// Counts one execution of an op on this device.
[[gnu::cold]] SHARDLIB_INLINE ProgramState::Count& count(const Value& value);

/// Counts floating-point operations of the op that computes the value. Call it while the op runs, after `count`.
[[gnu::cold]] SHARDLIB_INLINE void add_flops(const Value& value, double flops);

/// Creates the op's node if the tape tracks one of the operands. Its VJPs can be differentiated if `twice`: then the
/// residuals have kept their slots.
[[gnu::cold]] SHARDLIB_INLINE void attach(
    const Handle<Value>& out, std::vector<Node::Edge>&& edges,
    std::function<std::vector<ValuePtr>(const std::vector<ValuePtr>&)> fused_vjp = nullptr, bool twice = false);

/// Computes the cotangents of several operands with one kernel, which counts and traces show as one op. `fill` writes
/// the shards. The result is null for operands that are not `wanted`; at least one is wanted. `due` holds the
/// cotangents' specs.
[[gnu::cold]] SHARDLIB_INLINE std::vector<ValuePtr> fused_cotangents(
    const OpInfo& op, std::span<const ValuePtr> operands, std::span<const bool> wanted,
    std::span<const TensorSpec* const> due,
    const std::function<void(const Value& first, std::span<const ValuePtr> cotangents)>& fill);

/// Computes a value's shard.
using Kernel = std::function<Buffer(const Value& out)>;

/// Runs a kernel, adds the op's name and the device to its errors, and sets the padding of the result to zero. Sums,
/// einsums and collectives can therefore ignore padding.
[[gnu::cold]] SHARDLIB_INLINE Buffer run(const Kernel& kernel, const Value& out);

/// An op between the two halves of `run_async`. One that communicates has its PendingCollective in `finish`.
struct PendingOp {
  Buffer result;  ///< receives the result
  Kernel finish;  ///< waits for the result
};
/// Runs an op whose result comes later: `start` starts it, and `finish` of what it returns runs when something reads
/// the result. The op counts at its start. Its errors are as those of `run`, and the observer receives it, with what it
/// has read at its start, when it completes. In a dry run the observer receives it at its start, so that plans show
/// also what nothing reads.
[[gnu::cold]] SHARDLIB_INLINE void run_async(const ValuePtr& out, const std::function<PendingOp()>& start,
                                             NumbersIn numbers = {});

/// Whether the checkpointed function that runs now keeps the result of this op (RecomputePolicy).
[[nodiscard, gnu::cold]] SHARDLIB_INLINE bool keeps(const Value& out);

/// Computes the value now, or defers it in a replay, and returns it. A value that a policy keeps is computed once, and
/// so are the `extra` values that the kernel writes for the backward pass. The kernel's `numbers` must be the same in a
/// replay.
// `run` is a function of its own, because a deferred value calls it later.
[[gnu::cold]] SHARDLIB_INLINE ValuePtr evaluate(const Handle<Value>& out, Kernel kernel,
                                                std::span<const ValuePtr> extra = {}, NumbersIn numbers = {});

/// The result of an op, on the tape but not computed.
[[nodiscard, gnu::cold]] SHARDLIB_INLINE Handle<Value> make_recorded(const OpInfo& op, const DevicePtr& device,
                                                                     DType dtype, const TensorSpec& spec,
                                                                     const GlobalSizes& global,
                                                                     std::span<EdgeSource> sources);

/// Records an op and computes its result. `copy(kernel)` is the kernel, which holds `numbers`.
[[gnu::cold]] SHARDLIB_INLINE ValuePtr record_erased(const OpInfo& op, const DevicePtr& device, DType dtype,
                                                     const TensorSpec& spec, const GlobalSizes& global,
                                                     std::span<const VjpRef> vjps, const void* kernel,
                                                     Kernel (*copy)(const void* kernel), NumbersIn numbers);
template <class K>
[[gnu::cold]] Kernel copy_of_kernel(const void* kernel) {
  return *static_cast<const K*>(kernel);
}
template <OpName Name, class Out, class K, class... V>
Out record(const OpInfo& op, const DevicePtr& device, const GlobalSizes& global, const K& kernel, const V&... vjps) {
  const std::array<VjpRef, sizeof...(V)> refs{erased<Name, Out>(vjps)...};
  return Out(record_erased(op, device, dtype_v<typename Out::value_type>, parsed<Out::spec>, global, refs, &kernel,
                           copy_of_kernel<K>, numbers_in(kernel)));
}

/// The spec of the cotangent of a value, on the axes of its spec and of the op's `other` tensors. It lasts.
[[nodiscard]] SHARDLIB_INLINE const TensorSpec& lasting_dual(const TensorSpec& spec,
                                                             std::initializer_list<const TensorSpec*> others);

/// The kernel of an op of one operand.
using UnaryKernel = std::function<Buffer(const Value& in, const Value& out)>;
SHARDLIB_INLINE ValuePtr record_linear_erased(const OpInfo& op, const ValuePtr& x, const TensorSpec& spec,
                                              const GlobalSizes& global, UnaryKernel forward, UnaryKernel transpose);
template <class Out, class X, class K, class T>
Out record_linear(const OpInfo& op, const X& x, const GlobalSizes& global, const K& forward, const T& transpose) {
  return Out(record_linear_erased(op, x.value(), parsed<Out::spec>, global, forward, transpose));
}

/// Records a deferred cotangent that is a product. `with_slope` is its kernel with an epilogue: it returns an empty
/// buffer where there is none. See Storage::with_gelu_slope.
[[gnu::cold]] SHARDLIB_INLINE ValuePtr defer_product(
    const Handle<Value>& out, Kernel&& kernel, std::function<Buffer(const Value& out, const Value& x)>&& with_slope);

/// Adds the value to a sum of the same shape and dtype.
using AddKernel = std::function<void(const Value& out, std::byte* sum)>;
/// Records a deferred cotangent that is zero except in a few elements. A sum can add it without materializing it.
[[gnu::cold]] SHARDLIB_INLINE ValuePtr record_addend_erased(const OpInfo& op, const DevicePtr& device, DType dtype,
                                                            const TensorSpec& spec, const GlobalSizes& global,
                                                            Kernel&& kernel, AddKernel&& add);

/// The kernel of an op of one operand, with the operand. K is a function pointer, which many ops share, or a struct.
template <class K>
struct OfOperand {
  ValuePtr in;
  K kernel;
  Buffer operator()(const Value& out) const { return kernel(*in, out); }
};
template <class K>
NumbersIn numbers_in(const OfOperand<K>& kernel) {
  return numbers_in(kernel.kernel);
}
template <OpName Name, class Out, class X, class K, class... V>
Out record_unary(const OpInfo& op, const X& x, const GlobalSizes& global, const K& kernel, const V&... vjps) {
  if constexpr (sizeof...(V) == 0) note_operand(*x.value());
  return record<Name, Out>(op, x.device(), global, OfOperand<std::decay_t<K>>{x.value(), kernel}, vjps...);
}

}  // namespace shardlib::detail

#ifndef SHARDLIB_COMPILED
#include "shardlib/autodiff/impl/tape.hpp"
#endif
