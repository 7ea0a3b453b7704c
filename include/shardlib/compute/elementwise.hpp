// Kernels of elementwise ops for a device's shards.
#pragma once

#include "shardlib/autodiff/tape.hpp"
#include "shardlib/compute/map.hpp"
#include "shardlib/kernels/elementwise.hpp"
#include "shardlib/ops/arithmetic.hpp"
#include "shardlib/ops/elementwise.hpp"
#include "shardlib/runtime/value.hpp"
#include "shardlib/support/function.hpp"
#include "shardlib/support/inline.hpp"
#include "shardlib/support/wrapping.hpp"

namespace shardlib::detail {

// The functions of the loops below, which a device can call.
template <class F, class D>
struct PointwiseElement {
  SHARDLIB_FUNCTION void operator()(const D& p, const D& q, D& r) const { r = static_cast<D>(F{}(load(p), load(q))); }
};
template <class F, class D>
struct LinearElement {
  F f;
  SHARDLIB_FUNCTION void operator()(const D& a, D& y) const { y = static_cast<D>(f(load(a))); }
};
template <class D>
struct WhereElseNumberElement {
  D number;
  SHARDLIB_FUNCTION void operator()(const bool_& m, const D& x, D& y) const { y = m ? x : number; }
};
struct WhereElement {
  template <class D>
  SHARDLIB_FUNCTION void operator()(const bool_& m, const D& x, const D& y, D& z) const {
    z = m ? x : y;
  }
};
struct CastElement {
  template <class D, class To>
  SHARDLIB_FUNCTION void operator()(const D& a, To& y) const {
    y = static_cast<To>(converted<scalar_of<To>>(load(a)));
  }
};

template <class F, class D>
Buffer Pointwise<F, D>::operator()(const Value& out) const {
  Buffer result = allocate(out);
  kernels::apply(out.device->exec(), view(out.local), PointwiseElement<F, D>{},
                 broadcast_operand<const D>(*a, *out.spec), broadcast_operand<const D>(*b, *out.spec),
                 whole_operand(result.as<D>(), out));
  return result;
}

/// Throws if the divisor's shard contains a zero.
SHARDLIB_INLINE void check_divisor(const Value& divisor);

template <class F, class D>
Buffer IntegerDivide<F, D>::operator()(const Value& out) const {
  a->storage->materialize();  // a wait between the check and this op's end would report the check without its name
  check_divisor(*b);
  return Pointwise<F, D>{a, b}(out);
}

template <class F, class D>
Buffer Linear<F, D>::operator()(const Value& in, const Value& out) const {
  Buffer result = allocate(out);
  kernels::apply_flat(out.device->exec(), out.count(), LinearElement<F, D>{f}, in.as<const D>(), result.as<D>());
  return result;
}

template <class D>
Buffer WhereElseNumber<D>::operator()(const Value& out) const {
  Buffer result = allocate(out);
  kernels::apply(out.device->exec(), view(out.local), WhereElseNumberElement<D>{number},
                 broadcast_operand<const bool_>(*c, *out.spec), broadcast_operand<const D>(*a, *out.spec),
                 whole_operand(result.as<D>(), out));
  return result;
}

template <class D>
Buffer Where<D>::operator()(const Value& out) const {
  Buffer result = allocate(out);
  kernels::apply(out.device->exec(), view(out.local), WhereElement{}, broadcast_operand<const bool_>(*c, *out.spec),
                 broadcast_operand<const D>(*a, *out.spec), broadcast_operand<const D>(*b, *out.spec),
                 whole_operand(result.as<D>(), out));
  return result;
}

template <class To, class D>
Buffer cast_kernel(const Value& in, const Value& out) {
  Buffer result = allocate(out);
  kernels::apply_flat(out.device->exec(), out.count(), CastElement{}, in.as<const D>(), result.as<To>());
  return result;
}

}  // namespace shardlib::detail

#ifndef SHARDLIB_COMPILED
#include "shardlib/compute/impl/elementwise.hpp"
#endif
