// Ops called without their op spec: declarations that say so, where the compiler would say "no matching function".
#pragma once

#include "shardlib/detail/require.hpp"
#include "shardlib/tensor.hpp"

namespace shardlib {

#define SHARDLIB_NEEDS_OP_SPEC(name) \
  template <dtype D, Spec S>         \
  auto name(const Tensor<D, S>& x) -> Tensor<D, detail::result_of<rules::no_op_spec, Op(#name), S>>;
SHARDLIB_NEEDS_OP_SPEC(all_gather)
SHARDLIB_NEEDS_OP_SPEC(reduce_scatter)
SHARDLIB_NEEDS_OP_SPEC(all_reduce)
SHARDLIB_NEEDS_OP_SPEC(all_reduce_max)
SHARDLIB_NEEDS_OP_SPEC(all_to_all)
SHARDLIB_NEEDS_OP_SPEC(slice)
SHARDLIB_NEEDS_OP_SPEC(to_partial)
SHARDLIB_NEEDS_OP_SPEC(mean)
SHARDLIB_NEEDS_OP_SPEC(max)
SHARDLIB_NEEDS_OP_SPEC(argmax)
SHARDLIB_NEEDS_OP_SPEC(rearrange)
SHARDLIB_NEEDS_OP_SPEC(merge)
#undef SHARDLIB_NEEDS_OP_SPEC

#define SHARDLIB_NEEDS_OP_SPEC(name)                      \
  template <dtype D, Spec S, dtype E, Spec T>             \
  auto name(const Tensor<D, S>& x, const Tensor<E, T>& y) \
      -> Tensor<D, detail::result_of<rules::no_op_spec2, Op(#name), S, T>>;
SHARDLIB_NEEDS_OP_SPEC(einsum_unreduced)
SHARDLIB_NEEDS_OP_SPEC(index_unreduced)
#undef SHARDLIB_NEEDS_OP_SPEC

/// There is no `einsum` that communicates by itself.
template <Op O, dtype D, Spec S, dtype E, Spec T>
auto einsum(const Tensor<D, S>& x, const Tensor<E, T>& y) -> Tensor<D, detail::result_of<rules::no_einsum, O, S, T>>;
template <dtype D, Spec S, dtype E, Spec T>
auto einsum(const Tensor<D, S>& x, const Tensor<E, T>& y)
    -> Tensor<D, detail::result_of<rules::no_einsum, Op("..."), S, T>>;

}  // namespace shardlib
