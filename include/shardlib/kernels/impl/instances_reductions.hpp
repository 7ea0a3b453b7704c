// Instances of templates for every dtype, compiled into shardlib::compiled: reductions.
#pragma once

#include "shardlib/spec/dtype.hpp"
#include "shardlib/support/inline.hpp"

#ifdef SHARDLIB_COMPILED

#include "shardlib/kernels/impl/reduce.hpp"

namespace shardlib::kernels {

SHARDLIB_INSTANCE(reduce<detail::SumOp, DType>)
SHARDLIB_INSTANCE(reduce<detail::ProdOp, DType>)
SHARDLIB_INSTANCE(reduce<detail::MaxOp, DType>)
SHARDLIB_INSTANCE(reduce<detail::MinOp, DType>)
SHARDLIB_INSTANCE(extremum_backward<DType>)
SHARDLIB_INSTANCE(prod_backward<DType>)
SHARDLIB_INSTANCE(sum_of_squares<f32>)
SHARDLIB_INSTANCE(sum_of_squares<bf16>)
SHARDLIB_INSTANCE(argmax<DType>)

}  // namespace shardlib::kernels

#endif
