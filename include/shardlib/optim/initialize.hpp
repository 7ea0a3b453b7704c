// Initial values of a tree of tensors.
#pragma once

#include <cstdint>
#include <string_view>
#include <type_traits>

#include "shardlib/compute/create.hpp"
#include "shardlib/compute/elementwise.hpp"
#include "shardlib/optim/impl/settings.hpp"
#include "shardlib/types/tree.hpp"

namespace shardlib {

/// The distribution of a leaf's initial values. With a deviation of 0 all values equal the mean.
struct Normal {
  double mean = 0;
  double deviation = 0;
};

/// Fills every leaf of `tree` with normal numbers from `distribution(name)`. Each leaf uses its own stream, and the
/// values are the same on every mesh. The Arrays must have their lengths already, and a std::optional or std::variant
/// what it is to hold. `sizes` gives the sizes of all names. The stream is the leaf's number in the tree: where ranks
/// of a pipeline hold different trees, give each a seed of its own. Throws UsageError if a deviation is negative or not
/// finite. `initialize(mesh, model, sizes, seed,
/// [](std::string_view name) { return Normal{0, 0.02}; })`
template <Spec A, class Tree, class F>
void initialize(const Mesh<A>& mesh, Tree& tree, const Sizes& sizes, std::uint64_t seed, const F& distribution,
                Site site = Site::current()) {
  static_assert(!std::is_const_v<Tree>, "initialize: it writes the leaves of the tree, which must not be const");
  static_assert(std::is_invocable_r_v<Normal, const F&, std::string_view>,
                "initialize: distribution(name) takes the name of a leaf and returns a Normal, "
                "[](std::string_view name) { return Normal{0, 0.02}; }");
  std::uint64_t stream = 0;
  for_each_leaf(
      [&]<class D, Spec S>(std::string_view name, Tensor<D, S>& leaf) {
        const Normal normal = distribution(name);
        detail::require_setting("initialize", "the deviation", normal.deviation, name);
        leaf = full<D, S>(mesh, sizes, normal.mean, site);
        if (normal.deviation != 0)
          leaf = leaf + random_normal<D, S>(mesh, sizes, {seed, stream}, site) * normal.deviation;
        ++stream;
      },
      tree);
}
/// A compile error for fewer arguments.
template <Spec A, class Tree, class... More>
requires(sizeof...(More) < 2) void initialize(const Mesh<A>& mesh, Tree& tree, const Sizes& sizes,
                                              const More&... more) {
  detail::wrong_call<"initialize", "initialize(mesh, weights, sizes, seed, distribution)">(mesh, tree, sizes, more...);
}
/// A compile error for a pipeline's mesh of all stages.
template <class M, class Tree, class F>
requires requires {
  M::stage_axes;
}
void initialize(const M& mesh, Tree& tree, const Sizes& sizes, std::uint64_t seed, const F& f) {
  detail::wrong_call<"initialize", "initialize(mesh.stage(), weights, sizes, seed, distribution)">(mesh, tree, sizes,
                                                                                                   seed, f);
}
/// A compile error without a mesh.
template <class Tree, class... More>
void initialize(Tree& tree, const Sizes& sizes, const More&... more) {
  detail::wrong_call<"initialize", "initialize(mesh, weights, sizes, seed, distribution)">(tree, sizes, more...);
}

}  // namespace shardlib
