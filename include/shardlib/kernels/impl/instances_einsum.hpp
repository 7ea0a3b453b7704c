// Instances of templates for every dtype, compiled into shardlib::compiled: products and sums of products.
#pragma once

#include "shardlib/spec/dtype.hpp"
#include "shardlib/support/inline.hpp"

#ifdef SHARDLIB_COMPILED

#include "shardlib/kernels/impl/einsum.hpp"

namespace shardlib::kernels {

SHARDLIB_INSTANCE(einsum<DType, DType>)
SHARDLIB_INSTANCE(einsum1<DType, DType>)

}  // namespace shardlib::kernels

#endif
