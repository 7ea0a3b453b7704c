// Kernels of windows and conv_unreduced for a device's shards: the elements under each window, and a matrix product.
#pragma once

#include "shardlib/autodiff/tape.hpp"
#include "shardlib/compute/einsum.hpp"
#include "shardlib/kernels/einsum.hpp"
#include "shardlib/ops/convolution.hpp"
#include "shardlib/runtime/value.hpp"
#include "shardlib/support/inline.hpp"

namespace shardlib::detail {

/// The elements of a tensor under each window, as a dense array. Zero where a window has no element.
struct UnderWindows {
  Shape shape;
  Buffer elements;

  /// `x` is the tensor; the result `out` and the other operand `y` have the sizes of the dims that x lacks. If x has
  /// the window's dims, element k of a window comes from its part k.
  SHARDLIB_INLINE UnderWindows(const Value& x, const Value& y, const Value& out, const TensorSpec& seen,
                               const OpParts& lengths, const WindowLoops& loops, bool transposed);
};

/// Two for each multiply-add.
[[nodiscard]] SHARDLIB_INLINE double conv_flops(const TensorSpec& seen, const Shape& shape, const Value& y);

template <class D>
Buffer Convolution<D>::operator()(const Value& out) const {
  const UnderWindows windows(*x, *y, out, *seen, *lengths, loops, transposed);
  Buffer result = allocate(out);
  add_flops(out, conv_flops(*seen, windows.shape, *y));
  kernels::einsum(out.device->exec(), *plan, dtype_c<D>, dtype_c<D>, windows.elements.data(), view(windows.shape),
                  y->data().data(), view(y->local), result.data());
  return result;
}

}  // namespace shardlib::detail

#ifndef SHARDLIB_COMPILED
#include "shardlib/compute/impl/convolution.hpp"
#endif
