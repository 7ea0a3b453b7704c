// value_and_grad, explicit_activation_checkpointing, save_for_backward, and the report of what is kept.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <iterator>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "shardlib/backward.hpp"
#include "shardlib/detail/inline.hpp"
#include "shardlib/gradient.hpp"
#include "shardlib/ops/create.hpp"
#include "shardlib/overlap.hpp"
#include "shardlib/shapes.hpp"
#include "shardlib/tape.hpp"

namespace shardlib {
namespace detail {

[[noreturn, gnu::cold]] SHARDLIB_INLINE void fail_next(const OpInfo& op, const Device& device, std::size_t next,
                                                       std::size_t layers);

using LeafChange = std::function<ValuePtr(const ValuePtr&, const Path&)>;
/// A copy of an argument with each leaf replaced by f(leaf, path); what is no tree is copied. A leaf that holds nothing
/// stays so, but is an error of the op `weights_of` where that is given.
template <class T>
[[gnu::noinline]] T with_leaves(const T& x, const LeafChange& f, const char* weights_of = nullptr) {
  T copy = x;
  const auto change = [&]<class D, Spec S>(const Path& path, Tensor<D, S>& leaf) {
    if (leaf)
      leaf = Tensor<D, S>(f(leaf.value(), path));
    else if (weights_of != nullptr)
      fail_empty(dtype_v<D>, S, std::string(weights_of) + ": the weight `" + path.text() + "`, ");
  };
  if constexpr (is_tree<T>()) visit(change, {}, copy);
  return copy;
}

template <class T>
[[gnu::noinline]] void each_value(const T& x, const std::function<void(const ValuePtr&)>& f) {
  const auto call = [&f](const Path&, const auto& leaf) {
    if (leaf) f(leaf.value());
  };
  if constexpr (is_tree<T>()) visit(call, {}, x);
}

/// One call of value_and_grad on this device: the weights as leaves of its tape, and what it sets in the program's
/// state while it runs. Its errors are those of programs whose gradients would be zero, or wrong, without a word.
class Differentiation {
 public:
  [[gnu::cold]] SHARDLIB_INLINE Differentiation(const char* op, const std::shared_ptr<Device>& device);
  Differentiation(const Differentiation&) = delete;
  Differentiation& operator=(const Differentiation&) = delete;
  [[gnu::cold]] SHARDLIB_INLINE ~Differentiation();

  /// The weight as a leaf. Throws Error if a function that contains this call is differentiated by it.
  [[gnu::cold]] SHARDLIB_INLINE ValuePtr weight(const ValuePtr& value, const Path& path);
  /// Looks at a tensor of argument `number` alike.
  [[gnu::cold]] SHARDLIB_INLINE void argument(const ValuePtr& value, std::size_t number);
  [[nodiscard]] const std::vector<Slot>& leaves() const { return leaves_; }
  /// The function has returned: whoever uses the weights from here on is not differentiated.
  [[gnu::cold]] SHARDLIB_INLINE void end_forward();
  /// The cotangents of the weights, given the loss and its cotangent. A weight that the loss does not depend on, and
  /// that the function takes no stop_gradient of, is an error, or null if weights may be `unused`.
  [[gnu::cold]] SHARDLIB_INLINE std::vector<ValuePtr> backward(const Value& loss, const ValuePtr& one, bool unused);

 private:
  void check_outside(const ValuePtr& value, const std::string& what) const;

  OpInfo op_;
  std::shared_ptr<Device> device_;
  State& state_;
  State::Pass outer_;               ///< other than `none`: within a function that is differentiated
  const std::uint64_t first_;       ///< nodes up to this number are of the function outside
  std::optional<WithNames> names_;  ///< while the function runs
  std::vector<Slot> leaves_;
  std::deque<std::string> titles_;  ///< of the weights: "the weight `layers/0/w`"
  std::vector<std::pair<std::shared_ptr<Storage>, const std::string*>>
      weights_;  ///< and what their storage said before
};

/// The backward pass of a checkpointed call: replays f lazily from its arguments and what it saved, to differentiate
/// the replay by the arguments that are `wanted`. Ops of the replay compute their value only if a VJP asks for it.
/// `names`: the scope of names that was open in the forward pass.
template <class F, class Args>
std::shared_ptr<Backward> replay(const F& f, const Args& args, const std::vector<bool>& wanted,
                                 const std::vector<ValuePtr>& saved, const std::vector<ValuePtr>& cotangents,
                                 const std::shared_ptr<Device>& device, const std::shared_ptr<NameSizes>& names) {
  std::vector<Slot> leaves;
  const LeafChange fresh = [&](const ValuePtr& value, const Path&) {
    auto leaf = wanted[leaves.size()] ? as_leaf(*value) : detached(*value);
    leaves.push_back(leaf->slot);
    return leaf;
  };
  std::vector<std::pair<Slot, ValuePtr>> roots;
  {
    const WithMode mode(state(device), State::Mode::replay, saved);
    const WithNames scope(state(device), names);
    const Args inputs = std::apply([&](const auto&... x) { return Args{with_leaves(x, fresh)...}; }, args);
    const auto out = std::apply(f, inputs);
    std::size_t i = 0;
    each_value(out, [&](const ValuePtr& value) { roots.emplace_back(value->slot, cotangents[i++]); });
  }
  return std::make_shared<Backward>(roots, leaves);
}

template <class R>
  requires any_result<R>
struct checkpoint_hook<R> {
  template <class F, class... Args>
  static R run(const F& f, const Args&... args) {
    static_assert(is_tree<R>(),
                  "explicit_activation_checkpointing: the function returns a tensor or a tree of tensors");
    std::vector<ValuePtr> values;
    (each_value(args, [&](const ValuePtr& value) { values.push_back(value); }), ...);
    if (values.empty()) return f(args...);
    const auto device = values.front()->device;
    // Inside another checkpointed call this one is part of it.
    if (state(device).mode != State::Mode::eager) return f(args...);

    const LeafChange detach = [](const ValuePtr& value, const Path&) { return detached(*value); };
    const std::tuple<Args...> inputs{with_leaves(args, detach)...};
    std::vector<ValuePtr> saved;
    R out = [&] {
      const WithMode mode(state(device), State::Mode::checkpoint);
      R result = std::apply(f, inputs);
      saved = std::move(state(device).saved);
      return result;
    }();

    auto node = std::make_shared<Node>();
    node->op = {"explicit_activation_checkpointing", {}, {}};
    std::vector<bool> wanted;
    for (const ValuePtr& value : values) {
      wanted.push_back(bool(value->slot));
      node->edges.push_back({value->slot, {{detached(*value)}, {}}, nullptr});
    }
    if (std::find(wanted.begin(), wanted.end(), true) == wanted.end()) return out;
    auto& kept = node->edges.front().saved.values;
    kept.insert(kept.end(), saved.begin(), saved.end());
    node->sequence = ++state(device).sequence;
    const auto& scopes = state(device).scopes;
    const auto names = scopes.empty() ? std::make_shared<NameSizes>() : scopes.back();
    node->nested = [f, inputs, wanted, saved, device, names](const std::vector<ValuePtr>& cotangents) {
      return replay(f, inputs, wanted, saved, cotangents, device, names);
    };
    int output = 0;
    const LeafChange connect = [&](const ValuePtr& value, const Path&) {
      auto connected = detached(*value);
      connected->slot = {node, output++};
      return connected;
    };
    R connected = with_leaves(out, connect);
    node->outputs = output;
    return connected;
  }
};

template <class R>
  requires any_result<R>
struct prefetch_hook<R> {
  template <class F, class Layers>
  static R run(const R& x, const F& gathers, const Layers& layers, std::size_t next, const Site& site) {
    const OpInfo op{"prefetch", {}, site};
    if (next > layers.size()) fail_next(op, *x.device(), next, layers.size());
    const auto of = [&gathers](std::vector<typename Layers::value_type> some) -> std::function<void()> {
      return [gathers, some = std::move(some)] {
        for (const auto& layer : some) static_cast<void>(gathers(layer));
      };
    };
    const auto begin = layers.begin(), here = begin + static_cast<std::ptrdiff_t>(next);
    const auto ahead = std::min<std::ptrdiff_t>(2, layers.end() - here);
    const auto behind = std::min<std::ptrdiff_t>(2, here - begin);
    // In the order in which they will be needed.
    return R(prefetched(op, x.value(), of({here, here + ahead}),
                        of({std::reverse_iterator(here), std::reverse_iterator(here - behind)})));
  }
};

/// What a function returns beside its loss, of which nothing is differentiated any more: tensors, trees of them, tuples
/// of those; other things as they are.
template <class T>
T without_gradient(const T& x) {
  if constexpr (requires { std::tuple_size<T>::value; })
    return std::apply([](const auto&... parts) { return T{without_gradient(parts)...}; }, x);
  else
    return with_leaves(x, [](const ValuePtr& value, const Path&) { return detached(*value); });
}

template <class R>
  requires any_result<R>
struct value_and_grad_hook<R> {
  template <class M, class F, class W, class... Args>
  static R run(const M& mesh, F& f, const W& weights, const Args&... args) {
    Differentiation call("value_and_grad", mesh.device());
    const W tracked = with_leaves(
        weights, [&](const ValuePtr& value, const Path& path) { return call.weight(value, path); }, "value_and_grad");
    std::size_t number = 0;
    [[maybe_unused]] const auto look = [&](const auto& arg) {
      ++number;
      each_value(arg, [&](const ValuePtr& value) { call.argument(value, number); });
    };
    (look(args), ...);
    State& s = state(mesh.device());
    OverlapScope overlap(mesh.device());
    const auto live = [&] { return mesh.device()->pool()->stats().live; };
    const std::size_t before = live();
    const Stopwatch::Part outside = s.stopwatch.change(Stopwatch::forward);
    const auto [loss, auxiliary] = loss_and_auxiliary(f(tracked, args...));
    overlap.end_forward();
    call.end_forward();
    s.kept = std::max(live(), before) - before;
    s.stopwatch.change(Stopwatch::backward);
    using Loss = std::remove_const_t<decltype(loss)>;
    const auto one = full<typename Loss::value_type, "">(mesh, {}, 1.0);
    auto cotangents = call.backward(*loss.value(), one.value(), is_allow_unused<std::remove_cvref_t<F>>);
    overlap.end_backward();
    s.stopwatch.change(outside);
    R result{};
    std::get<0>(result) = Loss(detached(*loss.value()));
    if constexpr (std::tuple_size_v<R> == 3) std::get<2>(result) = auxiliary;
    auto& grads = std::get<1>(result);
    if constexpr (is_array<W>) grads.resize(weights.size());
    std::size_t i = 0;
    collect<M>(mesh, weights, grads, cotangents, i);
    return result;
  }

  /// A function's result as (loss, what else it returns without its gradient).
  template <dtype D, Spec S>
  static std::pair<Tensor<D, S>, std::nullptr_t> loss_and_auxiliary(const Tensor<D, S>& loss) {
    return {loss, nullptr};
  }
  template <class L, class A>
  static std::pair<L, A> loss_and_auxiliary(const std::pair<L, A>& result) {
    return {result.first, without_gradient(result.second)};
  }

  /// The cotangents of the leaves as the gradient of `weights`; zeros where none has arrived.
  template <class M, class W, class G>
  static void collect(const M& mesh, const W& weights, G& grads, std::vector<ValuePtr>& cotangents, std::size_t& i) {
    if constexpr (is_tensor<W>) {
      auto& ct = cotangents[i++];
      if (!ct) {  // the program has said that the loss need not depend on it
        auto zero = detached(*weights.value());
        zero->storage = std::make_shared<Storage>(Storage{allocate(*zero), nullptr});
        zero->device->exec().zero(zero->data().data(), zero->bytes());
        ct = zero;
      }
      grads = typed<G>(ct);
    } else if constexpr (is_array<W>) {
      grads.resize(weights.size());
      for (std::size_t k = 0; k < weights.size(); ++k) collect<M>(mesh, weights[k], grads[k], cotangents, i);
    } else {
      [&]<std::size_t... I>(std::index_sequence<I...>) {
        (collect<M>(mesh, std::get<I>(fields(weights)), std::get<I>(fields(grads)), cotangents, i), ...);
      }(std::make_index_sequence<tree_width<W>>{});
    }
  }
};

}  // namespace detail

template <dtype D, Spec S>
auto save_for_backward(const Tensor<D, S>& x, Site site) -> Tensor<D, S> {
  auto& state = detail::state(x.device());
  if (state.mode == detail::State::Mode::eager || state.mode == detail::State::Mode::start) return x;
  if (state.mode == detail::State::Mode::checkpoint) {
    auto kept = detail::detached(*x.value());
    kept->made_by = {"save_for_backward", {}, site};
    state.saved.push_back(std::move(kept));
    return x;
  }
  // Replay: the value that was kept, in the place of the one that would have to be computed.
  auto known = detail::Handle<detail::Value>::make(*x.value());
  known->storage = state.saved.at(state.next_saved++)->storage;
  return Tensor<D, S>(std::move(known));
}

/// One tensor that waits for the backward pass.
struct Kept {
  std::string what;  ///< the leaf's name, or the op that made it and the line of the call
  std::string spec;
  std::size_t bytes = 0;  ///< on this device
};

namespace detail {

/// What the nodes below `root` keep.
SHARDLIB_INLINE std::vector<Kept> kept_below(const Node* root);

}  // namespace detail

/// What differentiating f(weights, args...) keeps for the backward pass on this device, each buffer once, largest
/// first; weights that some VJP needs are there too, under their names. Runs f forward once.
template <class F, class W, class... Args>
std::vector<Kept> kept_for_backward(F&& f, const W& weights, const Args&... args) {
  std::optional<detail::Differentiation> call;
  const W tracked = detail::with_leaves(weights, [&](const detail::ValuePtr& value, const detail::Path& path) {
    if (!call) call.emplace("kept_for_backward", value->device);
    return call->weight(value, path);
  });
  const auto loss = f(tracked, args...);
  detail::OverlapScope(loss.value()->device).end_forward();
  return detail::kept_below(loss.value()->slot.node.get());
}

}  // namespace shardlib

#ifndef SHARDLIB_COMPILED
#include "shardlib/grad_inl.hpp"
#endif
