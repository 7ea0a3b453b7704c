// Declarations of what makes arrays from nothing, and of dropout, which draws random numbers too.
#pragma once

#include <cstdint>
#include <type_traits>

#include "shardlib/shapes/result.hpp"

namespace shardlib {

// Sizes are global, padding is zero.

/// `full<f32, "B/d L">(mesh, {{"B", 8}, {"L", 16}}, 1.0)`
template <dtype D, Spec S, Spec A>
auto full(const Mesh<A>& mesh, Sizes sizes, double value, Site site = Site::current())
    -> Tensor<D, detail::result_of<rules::create, Op("full"), A, S>>;
template <dtype D, Spec S, Spec A>
auto zeros(const Mesh<A>& mesh, Sizes sizes, Site site = Site::current())
    -> Tensor<D, detail::result_of<rules::create, Op("zeros"), A, S>>;
template <dtype D, Spec S, Spec A>
auto ones(const Mesh<A>& mesh, Sizes sizes, Site site = Site::current())
    -> Tensor<D, detail::result_of<rules::create, Op("ones"), A, S>>;
/// 0, 1, 2, ... along one dim: global indices, whatever the sharding. `iota<"L/t">(mesh, 128)`, padded
/// `iota<"L/t">(mesh, {125, 128})`
template <Spec S, Spec A>
auto iota(const Mesh<A>& mesh, DimSize size, Site site = Site::current())
    -> Tensor<i32, detail::result_of<rules::iota, A, S>>;
/// True where the row may see the column: row >= column. `causal_mask<"Qlen Klen">(mesh, 128, 128)`
template <Spec S, Spec A>
auto causal_mask(const Mesh<A>& mesh, DimSize rows, DimSize columns, Site site = Site::current())
    -> Tensor<bool_, detail::result_of<rules::create, Op("causal_mask"), A, S>>;

/// Names a sequence of random numbers: each array takes a stream of its own.
struct RandomKey {
  std::uint64_t seed = 0;
  std::uint64_t stream = 0;
};
// Numbers are keyed by the global index of the element: the same array on every mesh, and with any padding.
template <dtype D, Spec S, Spec A>
auto random_normal(const Mesh<A>& mesh, Sizes sizes, RandomKey key, Site site = Site::current())
    -> Tensor<detail::after_t<detail::is_float<"random_normal", D>, D>,
              detail::result_of<rules::create, Op("random_normal"), A, S>>;
/// Normal numbers within two standard deviations.
template <dtype D, Spec S, Spec A>
auto random_truncated_normal(const Mesh<A>& mesh, Sizes sizes, RandomKey key, Site site = Site::current())
    -> Tensor<detail::after_t<detail::is_float<"random_truncated_normal", D>, D>,
              detail::result_of<rules::create, Op("random_truncated_normal"), A, S>>;
/// Uniform in [0, 1).
template <dtype D, Spec S, Spec A>
auto random_uniform(const Mesh<A>& mesh, Sizes sizes, RandomKey key, Site site = Site::current())
    -> Tensor<detail::after_t<detail::is_float<"random_uniform", D>, D>,
              detail::result_of<rules::create, Op("random_uniform"), A, S>>;

/// Each element is zero with probability `rate`, else x / (1 - rate) (Srivastava et al. 2014). Keyed by the global
/// index: the same elements on every mesh, and nothing is kept for the backward pass. `dropout(x, 0.1, {seed, step})`
template <dtype D, Spec S>
auto dropout(const Tensor<D, S>& x, double rate, RandomKey key, Site site = Site::current())
    -> Tensor<detail::after_t<detail::is_float<"dropout", D>, D>, detail::result_of<rules::cast, true, true, S>>;

/// A scalar as a number on the host: only where every device reads the same one. `item(loss)` of ""
template <dtype D, Spec S>
auto item(const Tensor<D, S>& x, Site site = Site::current())
    -> std::enable_if_t<detail::checked<rules::item, S>::ok, D>;

}  // namespace shardlib
