// Adafactor: second moments of matrices as one number for each row and one for each column.
#pragma once

#include <cstdint>
#include <tuple>
#include <type_traits>
#include <vector>

#include "shardlib/optim/optimizers.hpp"
#include "shardlib/runtime/bindings.hpp"
#include "shardlib/spec/dtype.hpp"
#include "shardlib/support/error.hpp"
#include "shardlib/support/inline.hpp"
#include "shardlib/types/leaves.hpp"
#include "shardlib/types/spec_functions.hpp"
#include "shardlib/types/tree.hpp"

namespace shardlib {

template <bool Rows, class W>
class Factors;

namespace detail {

template <Spec S>
inline constexpr bool is_factored = parsed<S>.rank() >= 2;

template <bool Rows, Spec S>
constexpr Spec factor_spec() {
  TensorSpec factor = parsed<S>;
  for (int i = factor.rank(); i-- > 0;)
    if (is_factored<S> ? (i == 0) != Rows : !Rows) factor.dims.erase(i);
  return spec_of(factor);
}

template <bool Rows, class W>
struct factors_of {
  using type = Factors<Rows, W>;
};
template <bool Rows, class D, Spec S>
struct factors_of<Rows, Tensor<D, S>> {
  using type = Tensor<f32, factor_spec<Rows, S>()>;
};
template <bool Rows, template <class...> class Of, class... W>
requires is_choice<Of<W...>>
struct factors_of<Rows, Of<W...>> {
  using type = Of<typename factors_of<Rows, W>::type...>;
};
template <bool Rows, class Tuple>
struct factor_fields;
template <bool Rows, class... F>
struct factor_fields<Rows, std::tuple<F...>> {
  using type = std::tuple<typename factors_of<Rows, F>::type...>;
};

/// Whether the rows and columns of a leaf can be told apart: its dims that are numbers differ.
struct HasDistinctDims {
  template <class D, Spec S>
  constexpr bool operator()(std::type_identity<Tensor<D, S>> /*leaf*/) const {
    for (int i = 0; i < parsed<S>.rank(); ++i)
      if (parsed<S>.find(parsed<S>.dims[i].name) != i) return false;
    return true;
  }
};
/// Whether Adafactor takes the leaves of a tree of weights, of gradients and of copies.
template <class Tree, class... More>
constexpr bool takes_factored() {
  if constexpr (takes_trees<"Adafactor", 0, ChecksLeaf<"Adafactor", 0>, Tree, More...>()) {
    static_assert(all_leaves<Tree>(HasDistinctDims()),
                  "Adafactor: a leaf has the same number for two dims, so that rows and columns cannot be told apart; "
                  "give its dims names");
    return all_leaves<Tree>(HasDistinctDims());
  } else {
    return false;
  }
}
/// Zeros as the factors of each weight.
SHARDLIB_INLINE void zero_factors(const UntypedLeaves<const ValuePtr>& weights, const UntypedLeaves<ValuePtr>& rows,
                                  const UntypedLeaves<ValuePtr>& cols);

}  // namespace detail

/// A tree's factors of second moments: of a leaf "A/d B/t C" the rows "A/d", or the columns "B/t C". A leaf with one
/// dim has rows of its own spec, which are its second moments, and a column "". Through `as_tuple` and `fields_of`,
/// functions of trees accept it together with W. `Factors<true, Weights>`
template <bool Rows, class W>
class Factors {
 public:
  using fields_of = W;
  auto& as_tuple() { return fields_; }
  const auto& as_tuple() const { return fields_; }

 private:
  typename detail::factor_fields<Rows, detail::field_types<W>>::type fields_;
};
template <bool Rows, Spec N, class T>
class Factors<Rows, Array<N, T>> : public std::vector<typename detail::factors_of<Rows, T>::type> {
 public:
  using std::vector<typename detail::factors_of<Rows, T>::type>::vector;
};

template <bool Rows, Spec N, class T>
inline constexpr bool is_array<Factors<Rows, Array<N, T>>> = true;

/// Adafactor (Shazeer and Stern 2018) without its first moment: AdamW's second moment, but of a leaf with two dims or
/// more it keeps the means over the columns and over the rows. Its first dim is the rows, all others together the
/// columns: "M/d K/t D" keeps "M/d" and "K/t D", each of them whole on the devices of the other's axes. Sums over these
/// axes are all_reduces of a row and of a column. Updates whose root mean square exceeds `clip` are scaled down to it.
/// With `scale_parameter` a step is also multiplied by the root mean square of the weights, of at least `least_scale`.
/// `init` and `update` are those of an Optimizer, with `Moments` `rows` and `cols`. `Adafactor().update(weights,
/// moments, grads, 1e-3, scale, step, decays)`
struct Adafactor {
  [[no_unique_address]] detail::NoRate no_rate{};  ///< takes no value
  double decay_power = 0.8;  ///< the second moments' decay in step t (from 1) is 1 - t^-decay_power
  double epsilon = 1e-30;    ///< added to squares of gradients
  double clip = 1;
  double weight_decay = 0;  ///< decoupled, as AdamW's
  bool scale_parameter = false;
  double least_scale = 1e-3;

  template <class Tree>
  struct Moments {
    typename detail::factors_of<true, Tree>::type rows;
    typename detail::factors_of<false, Tree>::type cols;
  };
  template <class Tree>
  [[nodiscard]] static Moments<Tree> init(const Tree& weights) {
    using M = Moments<Tree>;
    M moments{same_structure<decltype(M::rows)>(weights), same_structure<decltype(M::cols)>(weights)};
    if constexpr (detail::takes_factored<Tree, Tree>())
      detail::zero_factors(detail::untyped_leaves(weights), detail::untyped_leaves(moments.rows),
                           detail::untyped_leaves(moments.cols));
    return moments;
  }
  template <class Tree, class Grads, class Decays = LeafRules, class... Copies>
  void update(Tree& weights, Moments<Tree>& moments, const Grads& grads, double learning_rate, double scale,
              detail::StepNumber step, const Decays& decays, Copies&... copies) const {
    detail::check_step("Adafactor", learning_rate, scale, step.number, {},
                       {{"decay_power", decay_power},
                        {"epsilon", epsilon},
                        {"weight_decay", weight_decay},
                        {"least_scale", least_scale}});
    if (!(clip > 0))
      throw UsageError("Adafactor: clip is " + detail::show_number(clip) +
                       "; give a number above 0, and for updates of any size infinity");
    // The types of `moments` follow from those of the weights.
    if constexpr (detail::takes_factored<Tree, Grads, Copies...>()) {
      const auto leaves =
          detail::list_updates<2>("Adafactor", decays, weights, grads, moments.rows, moments.cols, copies...);
      detail::begin_update("Adafactor", leaves, learning_rate, weight_decay, scale, step);
      for (const auto& leaf : leaves) update(leaf, learning_rate, scale, step.number);
    }
  }
  /// A compile error for fewer arguments, for the moments of another optimizer, and for what cannot be written.
  template <class... Args>
  requires detail::wrong_arguments<Adafactor, Args&&...>
  auto update(Args&&... args) const { return detail::wrong_update<"Adafactor">(args...); }

 private:
  SHARDLIB_INLINE void update(const detail::LeafUpdate& leaf, double learning_rate, double scale,
                              std::int64_t step) const;
};

}  // namespace shardlib

#ifndef SHARDLIB_COMPILED
#include "shardlib/optim/impl/adafactor.hpp"
#endif
