// Optimizers and averages of weights, over trees of tensors.
#pragma once

#include <array>
#include <cmath>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "shardlib/compute/elementwise.hpp"
#include "shardlib/kernels/body/optimizers.hpp"
#include "shardlib/optim/leaf_rules.hpp"
#include "shardlib/runtime/tensor.hpp"
#include "shardlib/runtime/value.hpp"
#include "shardlib/spec/dtype.hpp"
#include "shardlib/support/error.hpp"
#include "shardlib/support/inline.hpp"
#include "shardlib/types/leaves.hpp"
#include "shardlib/types/tree.hpp"

namespace shardlib {
namespace detail {

/// The leaves at one place of an optimizer's trees. Pointers are to the values of the trees' tensors.
struct LeafUpdate {
  std::string name;
  LeafFactors factors;
  ValuePtr* weight;
  std::array<ValuePtr*, 2> moments;  ///< as many as the optimizer has
  const ValuePtr* grad;              ///< f32 or bf16
  /// The weight in f32 or bf16, which receives the new weight; null without copies. In f32 it shares the weight's
  /// value.
  ValuePtr* copy;
  const TensorSpec* spec;  ///< of the weight
};

using kernels::body::AdamWNumbers, kernels::body::SgdNumbers, kernels::body::LionNumbers, kernels::body::EmaNumbers;
using kernels::body::AddGradient, kernels::body::MuonMomentum, kernels::body::StepAlong;

/// How a leaf is updated.
using UpdateNumbers =
    std::variant<AdamWNumbers, SgdNumbers, LionNumbers, EmaNumbers, AddGradient, MuonMomentum, StepAlong>;
/// Updates a leaf in one pass. It writes in place into shards without other owners, and else into new ones. Throws
/// for a value that the tape tracks, because the op has no derivative.
SHARDLIB_INLINE void update_in_place(const char* op, const UpdateNumbers& numbers, const LeafUpdate& leaf);

template <class C, Spec S>
inline constexpr bool is_copy_of = std::is_same_v<C, Tensor<f32, S>> || std::is_same_v<C, Tensor<bf16, S>>;

struct CastsLeaf {
  template <dtype D, Spec S, dtype E, Spec T>
  constexpr bool operator()(std::type_identity<Tensor<D, S>> /*to*/, std::type_identity<Tensor<E, T>> /*from*/) const {
    return S == T && (std::is_same_v<D, E> || (floating<D> && floating<E>));
  }
};
SHARDLIB_INLINE void cast_leaves(const UntypedLeaves<const ValuePtr>& from, const UntypedLeaves<ValuePtr>& to);
}  // namespace detail

/// The tree in another floating dtype; the same tensors where it is not another. `cast_tree<Model<bf16>>(weights)`
template <class To, class From>
[[nodiscard]] To cast_tree(const From& from) {
  if constexpr (detail::checked_tree<"cast_tree", From>) {
    To to = same_structure<To>(from);
    static_assert(
        detail::all_leaves_of<detail::CastsLeaf, To, From>({}),
        "cast_tree: leaves at the same place of both trees have the same spec, and the same or floating dtypes");
    detail::cast_leaves(detail::untyped_leaves(from), detail::untyped_leaves(to, false));
    return to;
  } else {
    return {};
  }
}

/// A compile error for a tree in `cast`.
template <dtype D, class Tree>
requires(!tensor<Tree> && detail::is_tree<Tree>()) auto cast(const Tree& tree) {
  return detail::wrong_call<
      "cast", "cast_tree<Model<bf16>>(weights)`, where Model<bf16> is the struct with leaves of that dtype">(tree);
}

namespace detail {
/// Zeros of the leaf's dtype and spec with the sizes of x, whatever its elements are: also infinity times 0 is none.
/// The leaf's dims are those of x from dim `first` on.
[[nodiscard]] SHARDLIB_INLINE ValuePtr zeros_as(const Value& x, const UntypedLeaf<ValuePtr>& leaf, int first = 0);
}  // namespace detail

/// A tree of zeros with the types and sizes of another tree, for AdamW's initial moments. `zeros_like(weights)`
template <class Tree>
[[nodiscard]] Tree zeros_like(const Tree& tree) {
  static_assert(detail::checked_tree<"zeros_like", Tree>);
  Tree zeros = tree;
  for (const auto& leaf : detail::untyped_leaves(zeros).leaves) *leaf.pointer = detail::zeros_as(*leaf.value(), leaf);
  return zeros;
}

namespace detail {
/// Whether an optimizer with N moments takes the types of a leaf: of the weight, the gradient, the moments, a copy.
template <std::size_t N>
struct TakesLeaf {
  template <dtype P, Spec S, dtype G, Spec T, class... R>
  constexpr bool operator()(std::type_identity<Tensor<P, S>> /*weight*/, std::type_identity<Tensor<G, T>> /*grad*/,
                            std::type_identity<R>... /*rest*/) const {
    constexpr int n = N;  // signed, because nvcc warns of a comparison that is always true
    int i = 0;
    const bool moments = ((i++ >= n || std::is_same_v<R, Tensor<f32, S>>)&&...);
    i = 0;
    const bool copies = ((i++ < n || is_copy_of<R, S>)&&...);
    return std::is_same_v<P, f32> && moments && copies && S == T && (std::is_same_v<G, f32> || std::is_same_v<G, bf16>);
  }
};
/// As TakesLeaf; a compile error says why a leaf is not taken. It calls the optimizer by its name.
template <OpName Optimizer, std::size_t N>
struct ChecksLeaf {
  template <dtype P, Spec S, dtype G, Spec T, class... R>
  constexpr bool operator()(std::type_identity<Tensor<P, S>> /*weight*/, std::type_identity<Tensor<G, T>> /*grad*/,
                            std::type_identity<R>... /*rest*/) const {
    constexpr auto all = [](bool moments, auto... holds) {
      std::size_t i = 0;
      return (((i++ < N) != moments || holds) && ...);
    };
    static_assert(all(false, is_copy_of<R, S>...), "an optimizer's copies are f32 or bf16, sharded as the weights");
    return checked<rules::update, Optimizer, dtype_v<P>, S, all(true, std::is_same_v<R, Tensor<P, S>>...), dtype_v<G>,
                   T>::ok;
  }
};
/// The same for a sum or an average, and what is added to it.
template <OpName Op>
struct ChecksSum {
  template <dtype P, Spec S, dtype G, Spec T>
  constexpr bool operator()(std::type_identity<Tensor<P, S>> /*sum*/,
                            std::type_identity<Tensor<G, T>> /*added*/) const {
    return checked<rules::add_in_place, Op, dtype_v<P>, S, dtype_v<G>, T>::ok;
  }
};
template <OpName Op, std::size_t N, class Checks, class Tree, class... More>
constexpr bool takes_trees() {
  if constexpr (!checked_tree<Op, Tree>)
    return false;
  else if constexpr (all_leaves_of<TakesLeaf<N>, Tree, More...>({}))
    return true;
  else
    return all_leaves_of<Checks, Tree, More...>({});
}

/// Throws UsageError unless the learning rate and the settings are finite and at least 0, the scale finite and not 0,
/// `step` at least 0, and each decay of a moment in [0, 1).
SHARDLIB_INLINE void check_step(std::string_view optimizer, double learning_rate, double scale, std::int64_t step,
                                std::initializer_list<double> decays,
                                std::initializer_list<std::pair<std::string_view, double>> settings);

/// Throws UsageError if the decay of a leaf would change the sign of its weights. Notes a step of an optimizer, which
/// all devices of the leaves' mesh must make alike.
SHARDLIB_INLINE void begin_update(const char* optimizer, const std::vector<LeafUpdate>& leaves, double learning_rate,
                                  double weight_decay, double scale, const StepNumber& step);
/// Notes a step of an average.
SHARDLIB_INLINE void note_average(const std::vector<LeafUpdate>& leaves, const LocatedNumber& kept);

using LeafFactorsOf = std::function<LeafFactors(std::string_view)>;
/// The leaves that are not frozen. `rest` are the trees of moments, as many as `moments`, then one of copies, if there
/// is one. Throws, naming `function`, if the trees differ in structure, a leaf is empty, a tree is written twice, a
/// moment shares the weight's memory, or a factor is no finite number of at least 0.
[[nodiscard]] SHARDLIB_INLINE std::vector<LeafUpdate> list_updates(std::string_view function,
                                                                   const LeafFactorsOf& factors, std::size_t moments,
                                                                   const UntypedLeaves<ValuePtr>& weights,
                                                                   const UntypedLeaves<const ValuePtr>& grads,
                                                                   std::span<const UntypedLeaves<ValuePtr>> rest);
/// As above, for N trees of moments.
template <std::size_t N, class Decays, class Tree, class Grads, class... Rest>
[[nodiscard]] std::vector<LeafUpdate> list_updates(std::string_view function, const Decays& decays, Tree& weights,
                                                   const Grads& grads, Rest&... rest) {
  require_factors<Decays>();
  static_assert(sizeof...(Rest) <= N + 1, "an optimizer writes one tree of copies at most");
  static_assert(
      !std::is_const_v<Tree> && (!std::is_const_v<Rest> && ...),
      "an optimizer writes weights, moments and copies, so none of them is const; write update(weights, moments, "
      "grads, rate, scale, step, decays, copies)");
  const std::array<UntypedLeaves<ValuePtr>, sizeof...(Rest)> others{untyped_leaves(rest)...};
  require_matches(decays, weights);
  const auto factors = [&](std::string_view name) { return leaf_factors(decays, name); };
  return list_updates(function, factors, N, untyped_leaves(weights), untyped_leaves(grads), others);
}
/// As above, after a check of all types.
template <OpName Optimizer, std::size_t N, class Decays, class Tree, class Grads, class... Rest>
[[nodiscard]] std::vector<LeafUpdate> leaf_updates(const Decays& decays, Tree& weights, const Grads& grads,
                                                   Rest&... rest) {
  if constexpr (takes_trees<Optimizer, N, ChecksLeaf<Optimizer, N>, Tree, Grads, Rest...>())
    return list_updates<N>(std::string_view(Optimizer), decays, weights, grads, rest...);
  else
    return {};
}

/// Whether these are the arguments of an update whose moments are not those of the optimizer for such weights.
template <class Optimizer, class... Args>
inline constexpr bool other_moments = false;
template <class Optimizer, class W, class M, class G, class Rate, class... More>
inline constexpr bool other_moments<Optimizer, W, M, G, Rate, More...> =
    std::is_arithmetic_v<Rate> && !std::is_same_v<M, typename Optimizer::template Moments<W>>;
/// Whether these are the arguments of an update that cannot write its weights or moments: they are const, or no
/// variables.
template <class... Args>
inline constexpr bool not_written = false;
template <class W, class M, class G, class Rate, class... More>
inline constexpr bool not_written<W, M, G, Rate, More...> =
    std::is_arithmetic_v<std::remove_cvref_t<Rate>> &&
    (std::is_const_v<std::remove_reference_t<W>> || !std::is_lvalue_reference_v<W> ||
     std::is_const_v<std::remove_reference_t<M>> || !std::is_lvalue_reference_v<M>);
/// Whether an optimizer's update does not take arguments of these types, which are references.
template <class Optimizer, class... Args>
concept wrong_arguments =
    sizeof...(Args) < 7 || other_moments<Optimizer, std::remove_cvref_t<Args>...> || not_written<Args...>;
/// A compile error that gives the form of an optimizer's update.
template <OpName Optimizer, class... Args>
auto wrong_update(const Args&... args) {
  return wrong_call<Optimizer,
                    "update(weights, moments, grads, rate, scale, step, decays)`, with the moments that its "
                    "`init(weights)` has made. Weights and moments are variables that are not const">(args...);
}
}  // namespace detail

/// An optimizer of a tree of weights. `init(weights)` makes the moments, sharded as the weights are. `update(weights,
/// moments, grads, learning_rate, scale, step, decays, copies...)` writes weights and moments in place. `scale`
/// multiplies the gradients (for clipping), and `step` counts from 0. `decays(leaf name)` says whether weight_decay
/// applies to a leaf, or gives its LeafFactors. Weights and moments are f32, gradients f32 or bf16. `copies` are
/// optional: the weights in the dtype in which the program computes. Copies in bf16 are written in the same pass.
/// Copies in f32 become the weights themselves. An update without them leaves copies of the old weights: make them
/// again with `cast_tree`. `static_assert(Optimizer<Lion, Weights>)`
template <class O, class Tree>
concept Optimizer = requires(const O& o, Tree& w, typename O::template Moments<Tree>& m,
                             bool (*decays)(std::string_view)) {
  { o.init(w) } -> std::same_as<typename O::template Moments<Tree>>;
  o.update(w, m, w, 1e-3, 1.0, std::int64_t{0}, decays);
};

/// AdamW (Loshchilov and Hutter 2017). With weight_decay 0 it is Adam (Kingma and Ba 2014). beta1, beta2 and epsilon
/// have these papers' names. `init` and `update` are those of an Optimizer, with `Moments` `mu` and `nu`.
/// `AdamW().update(weights, mu, nu, grads, 1e-3, scale, step, decays)`
struct AdamW {
  [[no_unique_address]] detail::NoRate no_rate{};  ///< takes no value
  double beta1 = 0.9, beta2 = 0.95, epsilon = 1e-8, weight_decay = 0.1;

  template <class Tree>
  struct Moments {
    Tree mu, nu;
  };
  template <class Tree>
  [[nodiscard]] static Moments<Tree> init(const Tree& weights) {
    return {zeros_like(weights), zeros_like(weights)};
  }
  /// The form of every Optimizer, for code that is given one.
  template <class Tree, class Grads, class Decays = LeafRules, class... Copies>
  void update(Tree& weights, Moments<Tree>& moments, const Grads& grads, double learning_rate, double scale,
              detail::StepNumber step, const Decays& decays, Copies&... copies) const {
    update(weights, moments.mu, moments.nu, grads, learning_rate, scale, step, decays, copies...);
  }
  /// The form for a program that has AdamW alone and holds the two moments itself, as `zeros_like(weights)`. They may
  /// be trees of another type, with the same leaves in f32.
  template <class Tree, class Mu, class Nu, class Grads, class Decays = LeafRules, class... Copies>
  void update(Tree& weights, Mu& mu, Nu& nu, const Grads& grads, double learning_rate, double scale,
              detail::StepNumber step, const Decays& decays, Copies&... copies) const {
    detail::check_step("AdamW", learning_rate, scale, step.number, {beta1, beta2},
                       {{"epsilon", epsilon}, {"weight_decay", weight_decay}});
    const auto leaves = detail::leaf_updates<"AdamW", 2>(decays, weights, grads, mu, nu, copies...);
    detail::begin_update("AdamW", leaves, learning_rate, weight_decay, scale, step);
    for (const auto& leaf : leaves)
      detail::update_in_place("adamw", numbers(learning_rate, scale, step.number, leaf.factors), leaf);
  }
  /// A compile error for fewer arguments, for the moments of another optimizer, and for what cannot be written.
  template <class... Args>
  requires detail::wrong_arguments<AdamW, Args&&...>
  auto update(Args&&... args) const { return detail::wrong_update<"AdamW">(args...); }

  /// The parameters of a leaf's update.
  [[nodiscard]] detail::AdamWNumbers numbers(double learning_rate, double scale, std::int64_t step,
                                             LeafFactors leaf) const {
    const auto f = [](double x) { return static_cast<float>(x); };
    const auto correction = [&](double beta) { return f(1 / (1 - std::pow(beta, static_cast<double>(step + 1)))); };
    return {
        f(beta1),          f(beta2),          f(epsilon), f(weight_decay * leaf.decay), f(learning_rate * leaf.rate),
        correction(beta1), correction(beta2), f(scale)};
  }
};

/// Stochastic gradient descent with `momentum`, with `nesterov` Nesterov's (Sutskever et al. 2013). `weight_decay`
/// times the weight is added to the gradient. `init` and `update` are those of an Optimizer, with `Moments` `mu`.
/// `SGD{.nesterov = true}.update(weights, moments, grads, 1e-2, scale, step, decays)`
struct SGD {
  [[no_unique_address]] detail::NoRate no_rate{};  ///< takes no value
  double momentum = 0.9, weight_decay = 0;
  bool nesterov = false;

  template <class Tree>
  struct Moments {
    Tree mu;
  };
  template <class Tree>
  [[nodiscard]] static Moments<Tree> init(const Tree& weights) {
    return {zeros_like(weights)};
  }
  template <class Tree, class Grads, class Decays = LeafRules, class... Copies>
  void update(Tree& weights, Moments<Tree>& moments, const Grads& grads, double learning_rate, double scale,
              detail::StepNumber step, const Decays& decays, Copies&... copies) const {
    detail::check_step("SGD", learning_rate, scale, step.number, {momentum}, {{"weight_decay", weight_decay}});
    const auto f = [](double x) { return static_cast<float>(x); };
    const auto leaves = detail::leaf_updates<"SGD", 1>(decays, weights, grads, moments.mu, copies...);
    detail::begin_update("SGD", leaves, learning_rate, weight_decay, scale, step);
    for (const auto& leaf : leaves)
      detail::update_in_place("sgd",
                              detail::SgdNumbers{f(momentum), f(weight_decay * leaf.factors.decay),
                                                 f(learning_rate * leaf.factors.rate), f(scale), nesterov},
                              leaf);
  }
  /// A compile error for fewer arguments, for the moments of another optimizer, and for what cannot be written.
  template <class... Args>
  requires detail::wrong_arguments<SGD, Args&&...>
  auto update(Args&&... args) const { return detail::wrong_update<"SGD">(args...); }
};

/// Lion (Chen et al. 2023): steps of the size of the learning rate, along the sign of a mean of gradients. It wants a
/// learning rate 3 to 10 times smaller than AdamW's, and a `weight_decay` larger by as much. `beta1` and `beta2` are
/// the paper's. `init` and `update` are those of an Optimizer, with the `Moments` of SGD. `Lion().update(weights,
/// moments, grads, 1e-4, scale, step, decays)`
struct Lion {
  [[no_unique_address]] detail::NoRate no_rate{};  ///< takes no value
  double beta1 = 0.9, beta2 = 0.99, weight_decay = 0.3;

  template <class Tree>
  using Moments = SGD::Moments<Tree>;
  template <class Tree>
  [[nodiscard]] static Moments<Tree> init(const Tree& weights) {
    return SGD::init(weights);
  }
  template <class Tree, class Grads, class Decays = LeafRules, class... Copies>
  void update(Tree& weights, Moments<Tree>& moments, const Grads& grads, double learning_rate, double scale,
              detail::StepNumber step, const Decays& decays, Copies&... copies) const {
    detail::check_step("Lion", learning_rate, scale, step.number, {beta1, beta2}, {{"weight_decay", weight_decay}});
    const auto f = [](double x) { return static_cast<float>(x); };
    const auto leaves = detail::leaf_updates<"Lion", 1>(decays, weights, grads, moments.mu, copies...);
    detail::begin_update("Lion", leaves, learning_rate, weight_decay, scale, step);
    for (const auto& leaf : leaves)
      detail::update_in_place("lion",
                              detail::LionNumbers{f(beta1), f(beta2), f(weight_decay * leaf.factors.decay),
                                                  f(learning_rate * leaf.factors.rate), f(scale)},
                              leaf);
  }
  /// A compile error for fewer arguments, for the moments of another optimizer, and for what cannot be written.
  template <class... Args>
  requires detail::wrong_arguments<Lion, Args&&...>
  auto update(Args&&... args) const { return detail::wrong_update<"Lion">(args...); }
};

/// Adds gradients in f32 or bf16 to sums in f32, in place: those of several microbatches. `update` does not reset the
/// sums: begin each step with `sums = zeros_like(weights)`. `accumulate(sums, grads)`
template <class Sums, class Grads>
void accumulate(Sums& sums, const Grads& grads) {
  static_assert(!std::is_const_v<Sums>, "accumulate: it writes the sums, so they must not be const");
  if constexpr (detail::takes_trees<"accumulate", 0, detail::ChecksSum<"accumulate">, Sums, Grads>())
    for (const auto& leaf : detail::list_updates<0>("accumulate", LeafRules(), sums, grads))
      detail::update_in_place("accumulate", detail::AddGradient{}, leaf);
}

/// A step of an exponential moving average of weights, in f32 and in place: kept * average + (1 - kept) * weight. The
/// average of a leaf that `decays`, as an optimizer takes it, freezes stays as it is.
/// `update_average(average, weights, 0.999, decays)`
template <class Tree, class Weights, class Decays = LeafRules>
void update_average(Tree& average, const Weights& weights, detail::LocatedNumber kept, const Decays& decays = {}) {
  static_assert(!std::is_const_v<Tree>, "update_average: it writes the average, which must not be const");
  const double part = kept.operand;
  if (!(part >= 0 && part <= 1)) throw UsageError("update_average: the part that it keeps is in [0, 1]");
  const detail::EmaNumbers numbers{static_cast<float>(part), static_cast<float>(1 - part)};
  if constexpr (detail::takes_trees<"update_average", 0, detail::ChecksSum<"update_average">, Tree, Weights>()) {
    const auto leaves = detail::list_updates<0>("update_average", decays, average, weights);
    detail::note_average(leaves, kept);
    for (const auto& leaf : leaves) detail::update_in_place("update_average", numbers, leaf);
  }
}
/// A compile error for fewer arguments.
template <class Tree, class Weights>
void update_average(const Tree& average, const Weights& weights) {
  detail::wrong_call<"update_average", "update_average(average, weights, 0.999)">(average, weights);
}

}  // namespace shardlib

#ifndef SHARDLIB_COMPILED
#include "shardlib/optim/impl/optimizers.hpp"
#endif
