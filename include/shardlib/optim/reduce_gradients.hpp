// The sums of gradients over the axes along which their weights are replicated.
#pragma once

#include <cstddef>
#include <type_traits>
#include <utility>

#include "shardlib/compute/collectives.hpp"
#include "shardlib/spec/dtype.hpp"
#include "shardlib/spec/spec.hpp"
#include "shardlib/types/gradient.hpp"
#include "shardlib/types/leaves.hpp"
#include "shardlib/types/spec_functions.hpp"
#include "shardlib/types/tensor.hpp"
#include "shardlib/types/tree.hpp"

namespace shardlib {

namespace detail {
/// The type of reduced gradients.
template <class M, class G>
struct reduced_gradient {
  using type = G;
};
template <class M, class W>
struct reduced_gradient<M, Gradient<M, W>> {
  using type = W;
};
template <class M, template <class...> class Of, class... G>
requires is_choice<Of<G...>>
struct reduced_gradient<M, Of<G...>> {
  using type = Of<typename reduced_gradient<M, G>::type...>;
};
template <class M, class D, Spec S>
struct reduced_gradient<M, Tensor<D, S>> {
  using type = Tensor<D, dual_spec<dual_spec<spec_of(rules::without_sums(parsed<S>)), M::axes>(), M::axes>()>;
};

template <class W, class G>
void reduce_into(W& out, G& grads) {
  if constexpr (std::is_same_v<W, G>) {
    out = std::exchange(grads, {});
  } else if constexpr (is_tensor<W>) {
    // A variable: nvcc 13 writes host code that does not compile for the expression in its place.
    static constexpr OpSpec op = shardlib::make_op<G::spec, W::spec>;
    out = all_reduce<op, sum_of<typename G::value_type>>(std::exchange(grads, {}));
  } else if constexpr (has_entries<W>) {
    hold(out, held_by(grads));
    each_entry([](const Path&, auto& sum, auto& grad) { reduce_into(sum, grad); }, {}, out, grads);
  } else {
    [&]<std::size_t... I>(std::index_sequence<I...>) {
      (reduce_into(std::get<I>(fields(out)), std::get<I>(fields(grads))), ...);
    }
    (std::make_index_sequence<tree_width<W>>{});
  }
}

template <Spec A>
struct ReducesLeaf {
  template <class D, Spec S>
  constexpr bool operator()(std::type_identity<Tensor<D, S>> /*leaf*/) const {
    return checked<rules::reduced_leaf, A, dtype_v<D>, S>::ok;
  }
};
}  // namespace detail

/// Sums the gradients of weights that are replicated over some axes of the mesh, where these gradients are partial.
/// It performs one all_reduce per leaf, whose operand is freed behind it, and returns a tree of the weights' types.
/// Leaves that are not partial stay as they are. Call it once per step, after the sums over microbatches.
/// `reduce_gradients(mesh, std::move(grads))` of "M +d" is "M"
template <Spec A, class G>
[[nodiscard]] auto reduce_gradients(const Mesh<A>& /*mesh*/, G grads) ->
    typename detail::reduced_gradient<Mesh<A>, G>::type {
  typename detail::reduced_gradient<Mesh<A>, G>::type out;
  if constexpr (detail::all_leaves<G>(detail::ReducesLeaf<A>())) detail::reduce_into(out, grads);
  return out;
}

/// A compile error without a mesh.
template <class G>
auto reduce_gradients(const G& grads) {
  return detail::wrong_call<"reduce_gradients", "reduce_gradients(mesh, grads)">(grads);
}

}  // namespace shardlib
