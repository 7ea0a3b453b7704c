// value_and_grad, explicit_activation_checkpointing, save_for_backward: differentiation, and the control of residuals.
// This typed part walks the trees. autodiff/ has the tape and the backward pass.
#pragma once

#include <cstddef>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "shardlib/ops/record.hpp"
#include "shardlib/ops/result.hpp"
#include "shardlib/spec/dtype.hpp"
#include "shardlib/support/function_ref.hpp"
#include "shardlib/support/handle.hpp"
#include "shardlib/types/gradient.hpp"
#include "shardlib/types/leaves.hpp"
#include "shardlib/types/signature.hpp"
#include "shardlib/types/tree.hpp"

namespace shardlib {

/// The type of `allow_unused(f)`: a loss function that need not depend on all of its weights.
template <class F>
struct AllowUnused {
  F f;
  template <class... Args>
  auto operator()(const Args&... args) const -> std::invoke_result_t<const F&, const Args&...> {
    return f(args...);
  }
};
/// Allows the loss of `f` not to depend on a weight, whose gradient is then zero. Without `allow_unused` that is an
/// error, because most often the function uses a wrong tensor in place of the weight.
/// `value_and_grad(mesh, allow_unused(loss), w, batch)`
template <class F>
AllowUnused<F> allow_unused(F f) {
  return {std::move(f)};
}

namespace detail {
template <class F>
inline constexpr bool is_allow_unused = false;
template <class F>
inline constexpr bool is_allow_unused<AllowUnused<F>> = true;
template <class F>
struct written_function {
  using type = F;
};
template <class F>
struct written_function<AllowUnused<F>> : written_function<F> {};

/// The placeholder for a result that is unknown after a compile error.
using Unknown = Tensor<f32, "?">;

template <class M>
struct IsWeight {
  template <class D, Spec S>
  constexpr bool operator()(std::type_identity<Tensor<D, S>> /*leaf*/) const {
    return checked<rules::weight, M::axes, dtype_v<D>, S>::ok;
  }
};

template <class M, class W, class L, class... Auxiliary>
using loss_and_gradient = std::conditional_t<sizeof...(Auxiliary) == 0, std::pair<L, gradient_t<M, W>>,
                                             std::tuple<L, gradient_t<M, W>, Auxiliary...>>;
template <class M, class W, class L, class... Auxiliary>
struct value_and_gradient {
  static_assert(checked<rules::returned_loss, std::is_void_v<L>, std::is_arithmetic_v<L>>::ok);
  using type = loss_and_gradient<M, W, Unknown, Auxiliary...>;
};
template <class M, class W, class D, Spec S, class... Auxiliary>
struct value_and_gradient<M, W, Tensor<D, S>, Auxiliary...> {
  static_assert(checked<rules::loss, M::axes, dtype_v<D>, S>::ok);
  static_assert(all_leaves<W>(IsWeight<M>()));
  using type = loss_and_gradient<M, W, Tensor<D, S>, Auxiliary...>;
};
template <class M, class W, class L, class A>
struct value_and_gradient<M, W, std::pair<L, A>> : value_and_gradient<M, W, L, A> {};

/// The result of f(weights, args...), or a compile error of this library.
template <bool Callable, class F, class W, class... Args>
struct returned_by {
  using type = std::remove_cvref_t<std::invoke_result_t<F&, const W&, const Args&...>>;
};
template <class F, class W, class... Args>
struct returned_by<false, F, W, Args...> {
  static constexpr Misfit wrong = misfit<typename written_function<F>::type, W, Args...>();
  static_assert(checked<rules::callable, static_cast<int>(sizeof...(Args)), wrong.parameters, wrong.at, wrong.not_const,
                        as_literal(wrong.declared), as_literal(wrong.given)>::ok);
  using type = Unknown;
};

/// Stops at the first mistake, so that the compiler reports only one error.
template <bool Tree, class M, class F, class W, class... Args>
struct differentiated {
  using type = std::pair<Unknown, W>;
};
template <class M, class F, class W, class... Args>
struct differentiated<true, M, F, W, Args...> {
  using returned =
      typename returned_by<std::is_invocable_v<F&, const W&, const Args&...>, std::remove_cvref_t<F>, W, Args...>::type;
  using type = typename value_and_gradient<M, W, returned>::type;
};
template <class M, class F, class W, class... Args>
using value_and_grad_t = typename differentiated<checked_tree<"value_and_grad", W>, M, F, W, Args...>::type;

/// Copies an argument and replaces each leaf with f(leaf, name). An argument that is not a tree is copied unchanged.
/// An empty leaf stays empty; where `weights_of` names an op, it is an error of that op. Elsewhere names are empty.
using LeafChange = FunctionRef<ValuePtr(const ValuePtr&, const std::string&)>;
void change_leaves(const UntypedLeaves<ValuePtr>& list, LeafChange f, const char* weights_of);
template <class T>
[[gnu::noinline, gnu::cold]] T with_leaves(const T& x, LeafChange f, const char* weights_of = nullptr) {
  T copy = x;
  if constexpr (is_tree<T>()) change_leaves(untyped_leaves(copy, weights_of != nullptr), f, weights_of);
  return copy;
}

template <class T>
[[gnu::noinline, gnu::cold]] void each_value(const T& x, FunctionRef<void(const ValuePtr&)> f) {
  if constexpr (is_tree<T>())
    for (const auto& leaf : untyped_leaves(x, false).leaves)
      if (*leaf.pointer != nullptr) f(*leaf.pointer);
}

/// The same value, untracked by the tape, also if the tape tracks the original.
ValuePtr copy_without_slot(const ValuePtr& value);
/// The value under the spec of T. The code that computed a cotangent may have known other axes of the mesh.
ValuePtr with_spec(const ValuePtr& value, const TensorSpec& spec);
/// Zeros in the shape of the value.
ValuePtr zeros_in_shape(const ValuePtr& like);

/// One call of value_and_grad on this device, from the weights to their cotangents. It throws where a gradient would
/// otherwise silently be zero or wrong.
class GradientCall {
 public:
  explicit GradientCall(const DevicePtr& device);
  GradientCall(const GradientCall&) = delete;
  GradientCall& operator=(const GradientCall&) = delete;
  ~GradientCall();
  /// Registers the weight as a leaf of the tape.
  ValuePtr weight(const ValuePtr& value, const std::string& name);
  void argument(const ValuePtr& value, std::size_t number);
  /// The cotangent of a gradient.
  void direction(const ValuePtr& value);
  /// `begin` marks the start of the function, `end` its return.
  void begin();
  void end();
  /// The loss for the caller: without its slot, unless the gradient is itself differentiated.
  [[nodiscard]] ValuePtr returned(const ValuePtr& loss) const;
  /// The same of an auxiliary result. Inside of a function that is differentiated, that function has its gradient.
  [[nodiscard]] ValuePtr auxiliary(const ValuePtr& value) const;
  /// The cotangents of the weights. One is null where the loss does not depend on the weight, which only `unused`
  /// allows.
  std::vector<ValuePtr> backward(const ValuePtr& loss, bool unused);
  /// As above, given the cotangents of several results. One is null where no result depends on the weight.
  std::vector<ValuePtr> transpose(const std::vector<ValuePtr>& results, const std::vector<ValuePtr>& cotangents);

 private:
  struct Parts;
  Handle<Parts> parts_;
};

/// Registers the weights of a call, and checks the arguments of its function.
template <class W, class... Args>
W tracked_weights(GradientCall& call, const char* op, const W& weights, const Args&... args) {
  W tracked = with_leaves(
      weights, [&](const ValuePtr& value, const std::string& name) { return call.weight(value, name); }, op);
  std::size_t number = 0;
  [[maybe_unused]] const auto look = [&](const auto& arg) {
    ++number;
    each_value(arg, [&](const ValuePtr& value) { call.argument(value, number); });
  };
  (look(args), ...);
  return tracked;
}

/// The auxiliary results of a function for the caller: tensors, trees of tensors, and tuples of those. Other types stay
/// as they are.
template <class T>
T auxiliary_parts(const GradientCall& call, const T& x) {
  if constexpr (requires { std::tuple_size<T>::value; })
    return std::apply([&](const auto&... parts) { return T{auxiliary_parts(call, parts)...}; }, x);
  else
    return with_leaves(x, [&](const ValuePtr& value, const std::string&) { return call.auxiliary(value); });
}
/// Splits a function's result into (loss, auxiliary results for the caller).
template <class D, Spec S>
std::pair<Tensor<D, S>, std::nullptr_t> loss_and_auxiliary(const GradientCall& /*call*/, const Tensor<D, S>& loss) {
  return {loss, nullptr};
}
template <class L, class A>
std::pair<L, A> loss_and_auxiliary(const GradientCall& call, const std::pair<L, A>& result) {
  return {result.first, auxiliary_parts(call, result.second)};
}

void set_gradients(const UntypedLeaves<const ValuePtr>& weights, const UntypedLeaves<ValuePtr>& grads,
                   const std::vector<ValuePtr>& cotangents);
/// The gradient of `weights` from the leaves' cotangents. A leaf without a cotangent gets zeros.
template <class G, class W>
G collect(const W& weights, const std::vector<ValuePtr>& cotangents) {
  G grads = same_structure<G>(weights);
  set_gradients(untyped_leaves(weights), untyped_leaves(grads, false), cotangents);
  return grads;
}

}  // namespace detail

/// Computes f(weights, args...) and its gradient by the weights. The loss is a scalar that is partial over every axis
/// of the mesh, "+d +t". Gradients have the type Dual<leaf>. Within the call, a dim's name has one size. Throws if
/// the loss does not depend on a weight. `auto [loss, grads] = value_and_grad(mesh, f, weights, batch);`, and for a
/// function that returns std::pair(loss, accuracy):
/// `auto [loss, grads, accuracy] = value_and_grad(mesh, f, weights, batch);`
template <Spec A, class F, class W, class... Args>
[[nodiscard]] auto value_and_grad(const Mesh<A>& mesh, F&& f, const W& weights, const Args&... args)
    -> detail::value_and_grad_t<Mesh<A>, F, W, Args...> {
  using Result = detail::value_and_grad_t<Mesh<A>, F, W, Args...>;
  if constexpr (std::is_same_v<std::tuple_element_t<0, Result>, detail::Unknown>) {
    return Result{};  // one mistake gives one error
  } else {
    detail::GradientCall call(mesh.device());
    const W tracked = detail::tracked_weights(call, "value_and_grad", weights, args...);
    call.begin();
    const auto [loss, auxiliary] = detail::loss_and_auxiliary(call, f(tracked, args...));
    Result result{};
    const detail::ValuePtr& total =
        (detail::Calling("value_and_grad", {}, {}), loss.value());  // an error if it is empty
    std::get<0>(result) = std::tuple_element_t<0, Result>(call.returned(total));
    call.end();
    const auto cotangents = call.backward(total, detail::is_allow_unused<std::remove_cvref_t<F>>);
    if constexpr (std::tuple_size_v<Result> == 3) std::get<2>(result) = auxiliary;
    std::get<1>(result) = detail::collect<std::tuple_element_t<1, Result>>(weights, cotangents);
    return result;
  }
}

namespace detail {
inline constexpr Literal one_function =
    "value_and_grad(mesh, f, weights, ...)`, where f is one function, `loss<f32>` or a lambda that calls one, "
    "and each argument has a type: `Batch{x, y}`, not `{x, y}`";
/// The mesh of a call whose function has no type. g++ converts it first, so that the sentence stands first.
struct MeshBeforeName {
  template <Spec A>
  MeshBeforeName(const Mesh<A>&) noexcept(  // NOLINT(google-explicit-constructor): it is the mesh
      checked<rules::wrong_call, OpName("value_and_grad"), one_function, 1 + sizeof(Mesh<A>)>::ok);
};
}  // namespace detail
/// A compile error for the name of a template, or of several functions.
auto value_and_grad(detail::MeshBeforeName mesh, ...) -> Tensor<f32, "?">;
/// A compile error for a call without the mesh as the first argument, or without weights.
template <class First, class... Args>
requires(sizeof...(Args) < 2 || !requires { First::axes; }) auto value_and_grad(const First& first,
                                                                                const Args&... args) {
  return detail::wrong_call<"value_and_grad", "value_and_grad(mesh, f, weights, ...)">(first, args...);
}

/// `name` selects the results that explicit_activation_checkpointing keeps for the backward pass besides the arguments.
/// `none` recomputes nothing and keeps everything. `marked` keeps the arguments of save_for_backward. `dots` keeps the
/// results of einsums and of attention, `attention` those of causal_attention. `everything` recomputes everything and
/// keeps nothing. Other names are ops, whose results it keeps.
/// `RecomputePolicy{"einsum_unreduced,all_gather"}`
struct RecomputePolicy {
  std::string name = "marked";
};

namespace detail {
ValuePtr saved_value(const OpInfo& op, const ValuePtr& x);
/// A call of a checkpointed function with its arguments, which the backward pass runs again.
struct CheckpointedCall : Counted {
  /// Calls the function with each leaf of its arguments changed, and passes each leaf of the result to `take`.
  virtual void run(LeafChange change, FunctionRef<void(const ValuePtr&)> take) const = 0;
};
template <class F, class... Args>
struct CheckpointedCallOf final : CheckpointedCall {
  F f;
  std::tuple<Args...> inputs;
  explicit CheckpointedCallOf(const F& function, const Args&... args)
      : f(function), inputs{with_leaves(args, [](const ValuePtr& value, const std::string&) {
          return copy_without_slot(value);
        })...} {}
  void run(LeafChange change, FunctionRef<void(const ValuePtr&)> take) const override {
    const auto fresh =
        std::apply([&](const auto&... x) { return std::tuple<Args...>{with_leaves(x, change)...}; }, inputs);
    each_value(std::apply(f, fresh), take);
  }
};

/// The forward pass of a checkpointed call, and its node on the tape.
class CheckpointForward {
 public:
  /// Not active if the policy keeps everything, if there are no residuals to keep, or inside another checkpointed
  /// call, which then covers this one.
  CheckpointForward(std::vector<ValuePtr> inputs, const RecomputePolicy& policy);
  CheckpointForward(const CheckpointForward&) = delete;
  CheckpointForward& operator=(const CheckpointForward&) = delete;
  ~CheckpointForward();
  [[nodiscard]] bool active() const;
  /// Call it after the function has run. Returns false if the tape tracks none of the arguments.
  bool finish(Handle<const CheckpointedCall> call);
  /// A leaf of the result, as an output of the node.
  ValuePtr connect(const ValuePtr& value);

 private:
  struct Parts;
  Handle<Parts> parts_;
};

}  // namespace detail

/// The type of `explicit_activation_checkpointing(f)`. Call it like `f`.
template <class F>
struct Checkpointed {
  F f;
  RecomputePolicy policy = {};  ///< what is kept
  template <class... Args>
  auto operator()(const Args&... args) const -> std::invoke_result_t<const F&, const Args&...> {
    using R = std::invoke_result_t<const F&, const Args&...>;
    static_assert((detail::owned_argument<"explicit_activation_checkpointing", Args> && ...));
    static_assert(detail::check_arguments<"explicit_activation_checkpointing", Args...>() || true);  // one error
    static_assert(detail::is_tree<R>(),
                  "explicit_activation_checkpointing: the function returns a tensor or a tree of tensors");
    std::vector<detail::ValuePtr> values;
    (detail::each_value(args, [&](const detail::ValuePtr& value) { values.push_back(value); }), ...);
    detail::CheckpointForward forward(std::move(values), policy);
    if (!forward.active()) return f(args...);
    const auto call = detail::Handle<detail::CheckpointedCallOf<F, Args...>>::make(f, args...);
    const R out = std::apply(f, call->inputs);
    if (!forward.finish(call)) return out;
    return detail::with_leaves(
        out, [&](const detail::ValuePtr& value, const std::string&) { return forward.connect(value); });
  }
};
/// Wraps f so that its residuals are only the arguments and the values that pass through save_for_backward. The
/// backward pass recomputes the other values that the derivatives need, and nothing else. f runs again in the
/// backward pass, so it may capture nothing, or numbers by value. Pass tensors and configurations as arguments: the
/// call keeps a copy of them. With a `policy` it keeps other values. Throws if the policy names an op that f does not
/// run. `explicit_activation_checkpointing(layer)(x, w, config)`
template <class F>
auto explicit_activation_checkpointing(F f, RecomputePolicy policy = {})
    -> std::enable_if_t<detail::owned_function<"explicit_activation_checkpointing", F>, Checkpointed<F>> {
  return {std::move(f), std::move(policy)};
}
/// A compile error for other arguments.
template <class F, class... Args>
requires(sizeof...(Args) > 0 && !(std::is_convertible_v<Args, RecomputePolicy> &&
                                  ...)) auto explicit_activation_checkpointing(const F& f, const Args&... args) {
  return detail::wrong_call<"explicit_activation_checkpointing", "explicit_activation_checkpointing(f, {\"dots\"})(x)">(
      f, args...);
}

/// A tree of the same values without a gradient, such as a frozen model. `stop_gradient(reference)`
template <class Tree>
requires(!tensor<Tree>) Tree stop_gradient(const Tree& tree, Site site = Site::current()) {
  return map_tree([&](const auto& leaf) { return stop_gradient(leaf, site); }, tree);
}

/// Keeps x as a residual inside explicit_activation_checkpointing. Elsewhere it changes nothing, because all
/// residuals are kept. `save_for_backward(q)`
template <dtype D, Spec S>
auto save_for_backward(const Tensor<D, S>& x, Site site = Site::current()) -> Tensor<D, S> {
  return Tensor<D, S>(detail::saved_value({"save_for_backward", {}, site}, x.value()));
}
SHARDLIB_FORM(save_for_backward, "save_for_backward(q)")

}  // namespace shardlib
