// Loops with a typed carry: scan_layers over layers, fori by a count, scan along a dim. They record the ops of f, as a
// loop in C++ does, and apply recompute and prefetch to each iteration.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "shardlib/ops/layout.hpp"
#include "shardlib/ops/prefetch.hpp"
#include "shardlib/ops/unstack.hpp"
#include "shardlib/ops/value_and_grad.hpp"
#include "shardlib/spec/dtype.hpp"
#include "shardlib/support/error.hpp"
#include "shardlib/types/self_contained.hpp"
#include "shardlib/types/signature.hpp"
#include "shardlib/types/tree.hpp"

namespace shardlib {

/// Options of a loop. `recompute` selects the results that each iteration keeps for the backward pass, as in
/// explicit_activation_checkpointing; `none` keeps everything. With options, the function captures nothing, or
/// numbers by value. `{.recompute = {"dots"}}`
struct LoopOptions {
  RecomputePolicy recompute = {"none"};
};

/// The type of `with_prefetch(gather, f)`. Call it like a function of layers that are not gathered.
template <class G, class F>
struct WithPrefetch {
  G gather;
  F f;
  template <class Carry, class Layer, class... Extra>
  auto operator()(const Carry& carry, const Layer& layer, const Extra&... extra) const
      -> std::invoke_result_t<const F&, const Carry&, const std::invoke_result_t<const G&, const Layer&>&,
                              const Extra&...> {
    return f(carry, gather(layer), extra...);
  }
};
/// A function for scan_layers, which passes `gather(layer)` to f and starts the all_gathers of the next layer while a
/// layer runs, forward and backward, as `prefetch` does. `gather` and f capture nothing, or numbers by value.
/// `x = scan_layers(with_prefetch(gather, layer), w.layers, x, {.recompute = {"dots"}})`
template <class G, class F>
auto with_prefetch(G gather, F f)
    -> std::enable_if_t<detail::owned_function<"with_prefetch", G> && detail::owned_function<"with_prefetch", F>,
                        WithPrefetch<G, F>> {
  return {std::move(gather), std::move(f)};
}
/// A compile error for one function.
template <class F>
auto with_prefetch(const F& f) {
  return detail::wrong_call<"with_prefetch", "with_prefetch(gather, f)">(f);
}
template <class G, class F>
inline constexpr bool self_contained<WithPrefetch<G, F>> = self_contained<G>&& self_contained<F>;

namespace detail {

/// The result of f(args...), or a compile error of this library and Unknown.
template <bool Callable, OpName Name, class F, class... Args>
struct loop_result {
  using type = std::remove_cvref_t<std::invoke_result_t<const F&, const Args&...>>;
};
template <OpName Name, class F, class... Args>
struct loop_result<false, Name, F, Args...> {
  static constexpr Misfit wrong = misfit<F, Args...>();
  static_assert(checked<rules::loop_function, Name, static_cast<int>(sizeof...(Args)), wrong.parameters, wrong.at,
                        wrong.not_const, as_literal(wrong.declared), as_literal(wrong.given)>::ok);
  using type = Unknown;
};
/// The error about a wrapped function names what the function inside does not take.
template <OpName Name, class F, class... Args>
struct loop_result<false, Name, Checkpointed<F>, Args...> : loop_result<false, Name, F, Args...> {};
template <OpName Name, class G, class F, class Carry, class Layer, class... Extra>
requires std::is_object_v<std::invoke_result_t<const G&, const Layer&>>
struct loop_result<false, Name, WithPrefetch<G, F>, Carry, Layer, Extra...>
    : loop_result<false, Name, F, Carry, std::invoke_result_t<const G&, const Layer&>, Extra...> {
};
template <OpName Name, class F, class... Args>
using loop_result_t = typename loop_result<std::is_invocable_v<const F&, const Args&...>, Name, F, Args...>::type;

/// Whether f returns the type of its carry, or a compile error and false.
template <OpName Name, class Carry, class R>
constexpr bool check_carry() {
  if constexpr (is_tensor<Carry> && is_tensor<R>)
    static_assert(checked<rules::carry, Name, dtype_v<typename Carry::value_type>, Carry::spec,
                          dtype_v<typename R::value_type>, R::spec>::ok);
  else if constexpr (!std::is_same_v<R, Carry> && !std::is_same_v<R, Unknown>)
    static_assert(checked<rules::carry_type, Name, name_of_type<Carry>, name_of_type<R>>::ok);
  return std::is_same_v<R, Carry>;
}
template <OpName Name, class F, class Carry, class... Args>
constexpr bool keeps_carry() {
  if constexpr (checked_tree<Name, Carry>)
    return check_carry<Name, Carry, loop_result_t<Name, F, Args...>>();
  else
    return false;
}

/// `prefetched_layers` at the first tensor of the carry that is differentiated.
template <class Carry, class G, class Layer>
Carry prefetch_at(const Carry& carry, const G& gathers, const std::vector<Layer>& layers, std::size_t next,
                  bool again) {
  const OpInfo op{"scan_layers", {}, {}};
  std::size_t at = 0, leaves = 0, leaf = 0;
  bool tracked = false;
  each_value(carry, [&](const ValuePtr& value) {
    if (!tracked && is_tracked(value)) at = leaves, tracked = true;
    ++leaves;
  });
  return with_leaves(carry, [&](const ValuePtr& value, const std::string&) {
    return leaf++ == at ? prefetched_layers(op, value, gathers, layers, next, again) : value;
  });
}
/// Starts the gathers of the layers from `next` on, if f prefetches. The backward pass gathers again if f recomputes.
template <class F, class Layers, class Carry>
void prefetch_for(const F& /*f*/, const Layers& /*layers*/, std::size_t /*next*/, Carry& /*x*/) {}
template <class G, class F, class Layers, class Carry>
void prefetch_for(const WithPrefetch<G, F>& f, const Layers& layers, std::size_t next, Carry& x) {
  x = prefetch_at(x, f.gather, layers, next, false);
}
template <class G, class F, class Layers, class Carry>
void prefetch_for(const Checkpointed<WithPrefetch<G, F>>& f, const Layers& layers, std::size_t next, Carry& x) {
  x = prefetch_at(x, f.f.gather, layers, next, f.policy.name != "none");
}

template <class F, class Layers, class Carry, class... Extra>
Carry scan_list(const F& f, const Layers& layers, Carry x, const Extra&... extra) {
  for (std::size_t i = 0; i < layers.size(); ++i) {
    prefetch_for(f, layers, i, x);
    x = f(x, layers[i], extra...);
  }
  prefetch_for(f, layers, layers.size(), x);
  return x;
}
template <class F, class Layers, class Carry, class... Extra>
Carry scan_checked(const F& f, const Layers& layers, const Carry& x, const Extra&... extra) {
  if constexpr (!is_array<Layers>) {
    static_assert(checked<rules::layer_list, is_array<Layers>, name_of_type<Layers>>::ok);
    return x;
  } else if constexpr (keeps_carry<"scan_layers", F, Carry, Carry, typename Layers::value_type, Extra...>()) {
    return scan_list(f, layers, x, extra...);
  } else {
    return x;
  }
}
template <DimName Dim, class F, class W, class Carry, class... Extra>
Carry scan_stacked(const F& f, const W& stacked, const Carry& x, const Extra&... extra) {
  if constexpr (check_stacked<"scan_layers", Dim, W>()) {
    DimSize size = 0;
    return scan_checked(f, unstack_tree<Dim>(OpInfo{"scan_layers", Dim, {}}, stacked, size), x, extra...);
  } else {
    return x;
  }
}
template <OpName Name, class F>
Checkpointed<F> recomputed(F f, const LoopOptions& options) {
  static_assert(owned_function<Name, F>);
  return {std::move(f), options.recompute};
}

}  // namespace detail

/// Applies f(carry, layer, extra...) to each layer of a list, from the first to the last, and returns the last carry. A
/// carry is a tensor or a tree of tensors, and f returns its type. No layers return x.
/// `x = scan_layers(layer, w.layers, x)` or, to recompute, `scan_layers(layer, w.layers, x, {.recompute = {"dots"}},
/// mask)`
template <class F, class Layers, class Carry, class... Extra>
Carry scan_layers(F f, const Layers& layers, const Carry& x, const Extra&... extra) {
  return detail::scan_checked(f, layers, x, extra...);
}
template <class F, class Layers, class Carry, class... Extra>
Carry scan_layers(F f, const Layers& layers, const Carry& x, const LoopOptions& options, const Extra&... extra) {
  if constexpr (detail::check_arguments<"scan_layers", Extra...>())
    return detail::scan_checked(detail::recomputed<"scan_layers">(std::move(f), options), layers, x, extra...);
  else
    return x;
}
/// The same for a tree of stacked tensors, whose first dim is the stacked one, and unsharded. f takes a part of it:
/// a struct of these tensors without that dim, or an Unstacked. The gradients are also stacked.
/// `x = scan_layers<"layer">(layer, stacked, x)`
template <DimName Dim, class F, class W, class Carry, class... Extra>
Carry scan_layers(F f, const W& stacked, const Carry& x, const Extra&... extra) {
  return detail::scan_stacked<Dim>(f, stacked, x, extra...);
}
template <DimName Dim, class F, class W, class Carry, class... Extra>
Carry scan_layers(F f, const W& stacked, const Carry& x, const LoopOptions& options, const Extra&... extra) {
  if constexpr (detail::check_arguments<"scan_layers", Extra...>())
    return detail::scan_stacked<Dim>(detail::recomputed<"scan_layers">(std::move(f), options), stacked, x, extra...);
  else
    return x;
}

/// A compile error for a call without the carry.
template <DimName... Dim, class F, class Layers>
auto scan_layers(const F& f, const Layers& layers) {
  return detail::wrong_call<"scan_layers", "scan_layers(f, w.layers, x)">(f, layers);
}

namespace detail {

[[noreturn, gnu::noinline, gnu::cold]] inline void fail_count(std::int64_t count) {
  throw Error("fori: the number of iterations is " + std::to_string(count) + "; it must not be negative");
}
template <class F, class Carry, class... Extra>
Carry repeat(std::int64_t count, const F& f, Carry x, const Extra&... extra) {
  if (count < 0) fail_count(count);
  if constexpr (keeps_carry<"fori", F, Carry, std::int64_t, Carry, Extra...>())
    for (std::int64_t i = 0; i < count; ++i) x = f(i, x, extra...);
  return x;
}

/// The results of one step of a scan, as a tree.
template <class Carry, class Y>
struct ScanStep {
  Carry carry;
  Y y;
};
template <class Carry, class Y>
ScanStep<Carry, Y> scan_step(const std::pair<Carry, Y>& result) {
  return {result.first, result.second};
}
template <class F>
struct ScanFunction {
  F f;
  template <class... Args>
  auto operator()(const Args&... args) const {
    return scan_step(f(args...));
  }
};
/// Whether f returns std::pair(carry, a tensor or a tree), or a compile error and false.
template <class Carry, class R>
inline constexpr bool is_scan_result = checked<rules::scan_result, false, name_of_type<R>>::ok && false;
template <class Carry>
inline constexpr bool is_scan_result<Carry, Unknown> = false;
template <class Carry, class C, class Y>
inline constexpr bool is_scan_result<Carry, std::pair<C, Y>> =
    check_carry<"scan", Carry, C>() && checked_tree<"scan", Y>;

template <DimName Dim, class Body, class F, class Carry, class Xs, class... Extra>
auto scan_steps(const Body& body, const F& /*f*/, Carry carry, const Xs& xs, const Extra&... extra) {
  using R = loop_result_t<"scan", F, Carry, part_t<Dim, Xs>, Extra...>;
  if constexpr (!is_scan_result<Carry, R>) {
    return std::pair(carry, carry);
  } else {
    std::vector<std::tuple_element_t<1, R>> ys;
    DimSize size = 0;
    for (const auto& x : unstack_tree<Dim>(OpInfo{"scan", Dim, {}}, xs, size)) {
      const auto step = body(carry, x, extra...);
      carry = step.carry;
      ys.push_back(step.y);
    }
    return std::pair(carry, stack_trees<Dim>(OpInfo{"scan", Dim, {}}, ys, size));
  }
}
template <DimName Dim, class Body, class F, class Carry, class Xs, class... Extra>
auto scan_along(const Body& body, const F& f, const Carry& carry, const Xs& xs, const Extra&... extra) {
  if constexpr (checked_tree<"scan", Carry> && check_stacked<"scan", Dim, Xs>())
    return scan_steps<Dim>(body, f, carry, xs, extra...);
  else
    return std::pair(carry, carry);
}

}  // namespace detail

/// Calls `carry = f(i, carry, extra...)` for i = 0, 1, ..., count - 1, and returns the last carry. A carry is a tensor
/// or a tree of tensors, and f returns its type. `h = fori(8, step, h, w)`, or `fori(8, step, h, {.recompute =
/// {"dots"}}, w)`
template <class F, class Carry, class... Extra>
Carry fori(WholeNumber count, F f, const Carry& carry, const Extra&... extra) {
  return detail::repeat(count, f, carry, extra...);
}
template <class F, class Carry, class... Extra>
Carry fori(WholeNumber count, F f, const Carry& carry, const LoopOptions& options, const Extra&... extra) {
  if constexpr (detail::check_arguments<"fori", Extra...>())
    return detail::repeat(count, detail::recomputed<"fori">(std::move(f), options), carry, extra...);
  else
    return carry;
}

/// A compile error where the number of iterations is not first, or not whole.
template <class F, class... Args>
requires(!detail::whole_number<F>) auto fori(const F& f, const Args&... args) {
  return detail::wrong_call<"fori", "fori(8, f, carry)">(f, args...);
}

/// Calls f(carry, x, extra...) for each part of xs, a tensor or a tree of tensors, along their first dim, which is
/// unsharded. f returns std::pair(carry, y). Returns the last carry, and all y stacked along that dim, which is padded
/// as in xs. Tensors give a tensor, and structs give a StackedTree. `auto [h, ys] = scan<"L">(cell, h0, xs, w);`
template <DimName Dim, class F, class Carry, class Xs, class... Extra>
auto scan(F f, const Carry& carry, const Xs& xs, const Extra&... extra) {
  return detail::scan_along<Dim>(detail::ScanFunction<F>{f}, f, carry, xs, extra...);
}
template <DimName Dim, class F, class Carry, class Xs, class... Extra>
auto scan(F f, const Carry& carry, const Xs& xs, const LoopOptions& options, const Extra&... extra) {
  static_assert(detail::owned_function<"scan", F>);
  if constexpr (detail::check_arguments<"scan", Extra...>()) {
    const Checkpointed<detail::ScanFunction<F>> body{{f}, options.recompute};
    return detail::scan_along<Dim>(body, f, carry, xs, extra...);
  } else {
    return std::pair(carry, carry);
  }
}
/// A compile error without the dim.
template <class... Args>
requires(sizeof...(Args) >= 3) auto scan(const Args&... args) {
  return detail::wrong_call<"scan", "scan<\"L\">(f, carry, xs)">(args...);
}

}  // namespace shardlib
