// Kernels of elementwise ops for a device's shards.
#pragma once

#include "shardlib/autodiff/tape.hpp"
#include "shardlib/compute/map.hpp"
#include "shardlib/kernels/elementwise.hpp"
#include "shardlib/ops/arithmetic.hpp"
#include "shardlib/ops/elementwise.hpp"
#include "shardlib/runtime/value.hpp"
#include "shardlib/support/inline.hpp"
#include "shardlib/support/wrapping.hpp"

namespace shardlib::detail {

template <class F, class D>
Buffer Pointwise<F, D>::operator()(const Value& out) const {
  Buffer result = allocate(out);
  kernels::apply(
      out.device->exec(), view(out.local),
      [](const D& p, const D& q, D& r) { r = static_cast<D>(F{}(load(p), load(q))); },
      broadcast_operand<const D>(*a, *out.spec), broadcast_operand<const D>(*b, *out.spec),
      whole_operand(result.as<D>(), out));
  return result;
}

/// Throws if the divisor's shard contains a zero.
SHARDLIB_INLINE void check_divisor(const Value& divisor);

template <class F, class D>
Buffer IntegerDivide<F, D>::operator()(const Value& out) const {
  check_divisor(*b);
  return Pointwise<F, D>{a, b}(out);
}

template <class F, class D>
Buffer Linear<F, D>::operator()(const Value& in, const Value& out) const {
  Buffer result = allocate(out);
  kernels::apply_flat(
      out.device->exec(), out.count(), [f = f](const D& a, D& y) { y = static_cast<D>(f(load(a))); }, in.as<const D>(),
      result.as<D>());
  return result;
}

template <class D>
Buffer WhereElseNumber<D>::operator()(const Value& out) const {
  Buffer result = allocate(out);
  kernels::apply(
      out.device->exec(), view(out.local), [k = number](const bool_& m, const D& x, D& y) { y = m ? x : k; },
      broadcast_operand<const bool_>(*c, *out.spec), broadcast_operand<const D>(*a, *out.spec),
      whole_operand(result.as<D>(), out));
  return result;
}

template <class D>
Buffer Where<D>::operator()(const Value& out) const {
  Buffer result = allocate(out);
  kernels::apply(
      out.device->exec(), view(out.local), [](const bool_& m, const D& x, const D& y, D& z) { z = m ? x : y; },
      broadcast_operand<const bool_>(*c, *out.spec), broadcast_operand<const D>(*a, *out.spec),
      broadcast_operand<const D>(*b, *out.spec), whole_operand(result.as<D>(), out));
  return result;
}

template <class To, class D>
Buffer cast_kernel(const Value& in, const Value& out) {
  Buffer result = allocate(out);
  kernels::apply_flat(
      out.device->exec(), out.count(),
      [](const D& a, To& y) { y = static_cast<To>(converted<scalar_of<To>>(load(a))); }, in.as<const D>(),
      result.as<To>());
  return result;
}

}  // namespace shardlib::detail

#ifndef SHARDLIB_COMPILED
#include "shardlib/compute/impl/elementwise.hpp"
#endif
