// Instances of templates for every dtype, compiled into shardlib::compiled: scans.
#pragma once

#include "shardlib/spec/dtype.hpp"
#include "shardlib/support/inline.hpp"

#ifdef SHARDLIB_COMPILED

#include "shardlib/kernels/impl/scans.hpp"

namespace shardlib::kernels {

SHARDLIB_INSTANCE(cumulate<detail::SumOp, DType>)
SHARDLIB_INSTANCE(cumulate<detail::ProdOp, DType>)
SHARDLIB_INSTANCE(cumulate<detail::MaxOp, DType>)
SHARDLIB_INSTANCE(cumprod_backward<DType>)
SHARDLIB_INSTANCE(cummax_backward<DType>)
SHARDLIB_INSTANCE(linear_scan<DType>)
SHARDLIB_INSTANCE(linear_scan_ends<DType>)
SHARDLIB_INSTANCE(linear_scan_backward<DType>)
SHARDLIB_INSTANCE(linear_scan_backward_ends<DType>)

}  // namespace shardlib::kernels

#endif
