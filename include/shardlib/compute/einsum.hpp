// The kernel of einsum_unreduced for a device's shards: a batched matrix product.
#pragma once

#include "shardlib/autodiff/tape.hpp"
#include "shardlib/kernels/einsum.hpp"
#include "shardlib/ops/einsum.hpp"
#include "shardlib/runtime/value.hpp"
#include "shardlib/spec/dtype.hpp"
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

/// A product whose plan is made at run time.
template <class D>
struct PlannedEinsum {
  kernels::EinsumPlan plan;
  ValuePtr a, b;
  Buffer operator()(const Value& out) const { return Einsum<D, D>{&plan, a, b}(out); }
};
using ProductKernel = Kernel (*)(const kernels::EinsumPlan& plan, const ValuePtr& a, const ValuePtr& b);
/// Records a product of operands and result of one dtype. Its VJPs, if it has any, are products of the same kind, with
/// kernels that `product` makes.
SHARDLIB_INLINE ValuePtr record_product_erased(const OpInfo& op, const ValuePtr& x, const ValuePtr& y, DType dtype,
                                               const TensorSpec& spec, const kernels::EinsumPlan& plan, Kernel&& kernel,
                                               ProductKernel product);
template <class Out, class K>
Out record_product(const OpInfo& op, const ValuePtr& x, const ValuePtr& y, const K& kernel) {
  using D = typename Out::value_type;
  return Out(record_product_erased(
      op, x, y, dtype_v<D>, parsed<Out::spec>, *kernel.plan, Kernel(kernel),
      +[](const kernels::EinsumPlan& plan, const ValuePtr& a, const ValuePtr& b) -> Kernel {
        return PlannedEinsum<D>{plan, a, b};
      }));
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
