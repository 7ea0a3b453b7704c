// The kernel of einsum_unreduced for a device's shards: a batched matrix product.
#pragma once

#include "shardlib/autodiff/tape.hpp"
#include "shardlib/kernels/einsum.hpp"
#include "shardlib/ops/einsum.hpp"
#include "shardlib/runtime/value.hpp"
#include "shardlib/support/inline.hpp"

namespace shardlib::detail {

/// The floating-point operations of an einsum, two for each multiply-add.
[[nodiscard]] SHARDLIB_INLINE double einsum_flops(const Value& x, const Value& y);

template <OpSpec O>
const kernels::EinsumPlan& einsum_plan() {
  using Ids = EinsumIds<O>;
  static constexpr auto plan =
      kernels::plan_einsum(Ids::view(Ids::ids.in[0]), Ids::view(Ids::ids.in[1]), Ids::view(Ids::ids.out));
  return plan;
}

template <class D, class R>
Buffer Einsum<D, R>::operator()(const Value& out) const {
  Buffer result = allocate(out);
  add_flops(out, einsum_flops(*a, *b));
  kernels::einsum(out.device->exec(), *plan, dtype_c<D>, dtype_c<R>, a->data().data(), view(a->local), b->data().data(),
                  view(b->local), result.data());
  return result;
}

template <OpSpec O, class D, class R>
Buffer einsum_of_one(const Value& in, const Value& out) {
  using Ids = EinsumIds<O>;
  Buffer result = allocate(out);
  kernels::einsum1(out.device->exec(), dtype_c<D>, dtype_c<R>, Ids::view(Ids::ids.in[0]), view(in.local),
                   Ids::view(Ids::ids.out), in.data().data(), result.data());
  return result;
}

}  // namespace shardlib::detail

#ifndef SHARDLIB_COMPILED
#include "shardlib/compute/impl/einsum.hpp"
#endif
