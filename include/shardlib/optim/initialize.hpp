// The first values of a tree of tensors.
#pragma once

#include <cstdint>
#include <string_view>

#include "shardlib/compute/create.hpp"
#include "shardlib/compute/elementwise.hpp"
#include "shardlib/types/tree.hpp"

namespace shardlib {

/// The distribution of a leaf's first values; with deviation 0 they are all the mean.
struct Normal {
  double mean = 0;
  double deviation = 0;
};

/// Gives every leaf of `tree`, whose Arrays have their lengths already, normal numbers as `distribution(name)` says, each
/// leaf from a stream of its own: the same on every mesh. `sizes` has those of all names.
/// `initialize(mesh, model, sizes, seed, [](std::string_view name) { return Normal{0, 0.02}; })`
template <Spec A, class Tree, class F>
void initialize(const Mesh<A>& mesh, Tree& tree, const Sizes& sizes, std::uint64_t seed, const F& distribution) {
  std::uint64_t stream = 0;
  for_each_leaf(
      [&]<class D, Spec S>(std::string_view name, Tensor<D, S>& leaf) {
        const Normal normal = distribution(name);
        leaf = full<D, S>(mesh, sizes, normal.mean);
        if (normal.deviation != 0) leaf = leaf + random_normal<D, S>(mesh, sizes, {seed, stream}) * normal.deviation;
        ++stream;
      },
      tree);
}

}  // namespace shardlib
