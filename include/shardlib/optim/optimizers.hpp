// AdamW, the global norm for clipping, and the sums of replicated weights' gradients, over trees of tensors.
#pragma once

#include <cmath>
#include <cstdint>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>

#include "shardlib/compute/collectives.hpp"
#include "shardlib/compute/create.hpp"
#include "shardlib/compute/elementwise.hpp"
#include "shardlib/runtime/value.hpp"
#include "shardlib/support/inline.hpp"
#include "shardlib/types/gradient.hpp"
#include "shardlib/types/spec_functions.hpp"
#include "shardlib/types/tree.hpp"

namespace shardlib {
namespace detail {

/// The sum of the squares of this device's shard, as a scalar of the given spec. It is 0 if `counts` is false,
/// because another device counts the same shard.
[[nodiscard]] SHARDLIB_INLINE ValuePtr sum_of_squares(const Value& x, const TensorSpec& spec, bool counts);

/// The parameters of an AdamW update of one leaf.
struct AdamWNumbers {
  float beta1, beta2, epsilon, decay, rate;
  float correct1, correct2;  ///< correct the moments' bias towards zero
  float clip;                ///< factor of the gradient
};
/// Updates a leaf in one pass. It writes in place into shards without other owners, and else into new ones. `grad` is
/// f32 or bf16. If `copy` is not null, it holds the weight in f32 or bf16 and receives the new weight; in f32 it
/// shares the weight's value.
SHARDLIB_INLINE void adamw(const AdamWNumbers& numbers, ValuePtr& weight, ValuePtr& mu, ValuePtr& nu, const Value& grad,
                           ValuePtr* copy);

/// This device's part of the sum of a leaf's squares, partial over the axes. On an axis that does not shard the leaf,
/// only the first device counts it.
template <Spec Axes, dtype D, Spec S>
[[nodiscard]] auto sum_of_squares(const Tensor<D, S>& leaf) {
  static_assert(checked<rules::norm_leaf, dtype_v<D>, S>::ok);
  using Out = Tensor<f32, dual_spec("", Axes)>;  // "+d +t"
  bool counts = true;
  for (auto axis : rules::mesh_axes(Axes))
    if (parsed<S>.placement(axis).kind == shardlib::Placement::replicated)
      counts = counts && leaf.device()->axis_index(axis) == 0;
  return Out(sum_of_squares(*leaf.value(), parsed<Out::spec>, counts));
}

template <class C, Spec S>
inline constexpr bool is_copy_of = std::is_same_v<C, Tensor<f32, S>> || std::is_same_v<C, Tensor<bf16, S>>;

/// The type of reduced gradients.
template <class M, class G>
struct reduced_gradient {
  using type = G;
};
template <class M, class W>
struct reduced_gradient<M, Gradient<M, W>> {
  using type = W;
};
template <class M, class D, Spec S>
struct reduced_gradient<M, Tensor<D, S>> {
  using type = Tensor<D, dual_spec(dual_spec(spec_of(rules::without_sums(parsed<S>)), M::axes), M::axes)>;
};

template <class W, class G>
void reduce_into(W& out, const G& grads) {
  if constexpr (std::is_same_v<W, G>) {
    out = grads;
  } else if constexpr (is_tensor<W>) {
    out = all_reduce<shardlib::make_op<G::spec, W::spec>, sum_of<typename G::value_type>>(grads);
  } else if constexpr (is_array<W>) {
    out.resize(grads.size());
    for (std::size_t i = 0; i < grads.size(); ++i) reduce_into(out[i], grads[i]);
  } else {
    [&]<std::size_t... I>(std::index_sequence<I...>) {
      (reduce_into(std::get<I>(fields(out)), std::get<I>(fields(grads))), ...);
    }
    (std::make_index_sequence<tree_width<W>>{});
  }
}

}  // namespace detail

/// A tree of empty tensors whose Arrays have the sizes of another tree's. `same_structure<Model<bf16>>(weights)`
template <class To, class From>
[[nodiscard]] To same_structure(const From& from) {
  To to;
  if constexpr (is_array<To>) {
    for (const auto& entry : from) to.push_back(same_structure<typename To::value_type>(entry));
  } else if constexpr (!is_tensor<To>) {
    [&]<std::size_t... I>(std::index_sequence<I...>) {
      const auto field = [&]<std::size_t N>() {
        using Field = std::tuple_element_t<N, detail::field_types<To>>;
        std::get<N>(detail::fields(to)) = same_structure<Field>(std::get<N>(detail::fields(from)));
      };
      (field.template operator()<I>(), ...);
    }
    (std::make_index_sequence<detail::tree_width<To>>{});
  }
  return to;
}

/// The tree in another dtype; the same tensors where it is not another. `cast_tree<Model<bf16>>(weights)`
template <class To, class From>
[[nodiscard]] To cast_tree(const From& from) {
  To to = same_structure<To>(from);
  for_each_leaf([]<dtype D, Spec S>(std::string_view, Tensor<D, S>& leaf, const auto& other) { leaf = cast<D>(other); },
                to, from);
  return to;
}

/// Sums the gradients of weights that are replicated over some axes of the mesh, where these gradients are partial.
/// It performs one all_reduce per leaf and returns a tree of the weights' types. Leaves that are not partial stay as
/// they are. Call it once per step, after the sums over microbatches. `reduce_gradients(mesh, grads)` of "M +d" is
/// "M"
template <Spec A, class G>
[[nodiscard]] auto reduce_gradients(const Mesh<A>& /*mesh*/, const G& grads) ->
    typename detail::reduced_gradient<Mesh<A>, G>::type {
  typename detail::reduced_gradient<Mesh<A>, G>::type out;
  detail::reduce_into(out, grads);
  return out;
}

/// A tree of zeros with the types and sizes of another tree, for AdamW's initial moments. `zeros_like(weights)`
template <class Tree>
[[nodiscard]] Tree zeros_like(const Tree& tree) {
  return map_tree([](const auto& x) { return x * 0.0; }, tree);
}

/// The Euclidean norm of all leaves together, f32 or bf16, over all devices. Each element counts once: a leaf that is
/// replicated over an axis counts on the first device of that axis. `global_norm(mesh, grads)`
template <Spec A, class Tree>
[[nodiscard]] double global_norm(const Mesh<A>& /*mesh*/, const Tree& tree) {
  constexpr Spec everywhere = detail::dual_spec("", A);  // "+d +t"
  Tensor<f32, everywhere> total;
  for_each_leaf(
      [&](std::string_view, const auto& leaf) {
        const auto squares = detail::sum_of_squares<A>(leaf);
        total = total ? total + squares : squares;
      },
      tree);
  return std::sqrt(static_cast<double>(item(all_reduce<make_op<everywhere, "">>(total))));
}

/// AdamW (Loshchilov and Hutter 2017). With weight_decay 0 it is Adam (Kingma and Ba 2014). beta1, beta2 and epsilon
/// are the constants of these papers.
struct AdamW {
  double beta1 = 0.9, beta2 = 0.95, epsilon = 1e-8, weight_decay = 0.1;

  /// Updates `weights` in place. `scale` multiplies the gradients (for clipping), and `step` counts from 0.
  /// `decays(leaf name)` says whether weight_decay applies to a leaf. Weights and moments are f32, gradients f32 or
  /// bf16. `copies` are optional: the weights in the dtype in which the program computes. Copies in bf16 are written
  /// in the same pass. Copies in f32 become the weights themselves.
  template <class Tree, class Mu, class Nu, class Grads, class Decays, class... Copies>
  void update(Tree& weights, Mu& mu, Nu& nu, const Grads& grads, double learning_rate, double scale, std::int64_t step,
              const Decays& decays, Copies&... copies) const {
    static_assert(sizeof...(Copies) <= 1, "AdamW: one tree of copies at most");
    const auto f = [](double x) { return static_cast<float>(x); };
    const auto correction = [&](double beta) { return f(1 / (1 - std::pow(beta, static_cast<double>(step + 1)))); };
    for_each_leaf(
        [&]<dtype P, Spec S, class M, class V, dtype G, Spec T, class... C>(
            std::string_view name, Tensor<P, S> & p, M & m, V & v, const Tensor<G, T>& g, C&... copy) {
          constexpr bool moments = std::is_same_v<M, Tensor<P, S>> && std::is_same_v<V, Tensor<P, S>>;
          static_assert(detail::checked<rules::update, dtype_v<P>, S, moments, dtype_v<G>, T>::ok);
          static_assert((detail::is_copy_of<C, S> && ...), "AdamW: copies are f32 or bf16, sharded as the weights");
          if constexpr (legal<rules::update, dtype_v<P>, S, moments, dtype_v<G>, T>) {
            const detail::AdamWNumbers numbers{
                f(beta1),         f(beta2),          f(epsilon),        decays(name) ? f(weight_decay) : 0.0F,
                f(learning_rate), correction(beta1), correction(beta2), f(scale)};
            // The tensors release their values, so that the update is their only owner.
            const auto released = []<class X>(X& x) {
              detail::ValuePtr value = x.value();
              x = {};
              return value;
            };
            detail::ValuePtr copied;
            ((copied = released(copy)), ...);
            detail::ValuePtr weight = released(p), mu_of = released(m), nu_of = released(v);
            detail::adamw(numbers, weight, mu_of, nu_of, *g.value(), copied ? &copied : nullptr);
            p = Tensor<P, S>(weight);
            m = Tensor<P, S>(mu_of);
            v = Tensor<P, S>(nu_of);
            ((copy = C(copied)), ...);
          }
        },
        weights, mu, nu, grads, copies...);
  }
};

}  // namespace shardlib

#ifndef SHARDLIB_COMPILED
#include "shardlib/optim/impl/optimizers.hpp"
#endif
