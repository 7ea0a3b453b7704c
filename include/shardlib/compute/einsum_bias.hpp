// The kernel of einsum_bias and einsum_bias_gelu for a device's shards.
#pragma once

#include <utility>

#include "shardlib/compute/einsum.hpp"
#include "shardlib/compute/elementwise.hpp"
#include "shardlib/compute/map.hpp"
#include "shardlib/kernels/einsum.hpp"
#include "shardlib/kernels/einsum_epilogue.hpp"
#include "shardlib/kernels/elementwise.hpp"
#include "shardlib/ops/einsum_bias.hpp"
#include "shardlib/runtime/value.hpp"
#include "shardlib/spec/dtype.hpp"
#include "shardlib/support/function.hpp"
#include "shardlib/support/inline.hpp"
#include "shardlib/support/wrapping.hpp"

namespace shardlib::detail {

/// The sum of a product and a bias, and its gelu.
template <class D>
struct BiasGeluElement {
  SHARDLIB_FUNCTION void operator()(const D& product, const D& bias, D& sum, D& y) const {
    PointwiseElement<WrappingSum, D>{}(product, bias, sum);
    y = static_cast<D>(gelu_function{}(load(sum)));
  }
};

/// Whether the dims are the last ones of the result, in its order.
[[nodiscard]] SHARDLIB_INLINE bool are_last_dims(const TensorSpec& some, const TensorSpec& result);

template <class D>
Buffer EinsumBias<D>::operator()(const Value& out) const {
  const Buffer result = allocate(out);
  add_flops(out, einsum_flops(*a, *b));
  const Exec exec = out.device->exec();
  const bool both = gelu && gelu->wanted;
  if (kernels::has_epilogues(exec) && are_last_dims(*bias->spec, *out.spec)) {
    Buffer y = both ? allocate(out) : Buffer();
    if (kernels::einsum_with_epilogue(
            exec, *plan, dtype_v<D>, a->data().data(), view(a->local), b->data().data(), view(b->local), result.data(),
            {.bias = bias->data().data(), .bias_size = bias->count(), .gelu = both ? y.data() : nullptr})) {
      if (both) keep_result(*gelu, std::move(y), out);
      return result;
    }
  }
  kernels::einsum(exec, *plan, dtype_c<D>, dtype_c<D>, a->data().data(), view(a->local), b->data().data(),
                  view(b->local), result.data());
  const auto product = whole_operand(result.as<const D>(), out);
  const auto added = broadcast_operand<const D>(*bias, *out.spec);
  const auto sum = whole_operand(result.as<D>(), out);
  if (both) {
    keep_result(*gelu, allocate(out), out);
    kernels::apply(exec, view(out.local), BiasGeluElement<D>{}, product, added, sum,
                   whole_operand(gelu->result.template as<D>(), out));
  } else {
    kernels::apply(exec, view(out.local), PointwiseElement<WrappingSum, D>{}, product, added, sum);
  }
  return result;
}

}  // namespace shardlib::detail

#ifndef SHARDLIB_COMPILED
#include "shardlib/compute/impl/einsum_bias.hpp"
#endif
