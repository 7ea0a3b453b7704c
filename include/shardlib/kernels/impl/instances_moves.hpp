// Instances of templates for every dtype, compiled into shardlib::compiled: lookups and sorting.
#pragma once

#include "shardlib/spec/dtype.hpp"
#include "shardlib/support/inline.hpp"

#ifdef SHARDLIB_COMPILED

#include "shardlib/kernels/impl/index.hpp"
#include "shardlib/kernels/impl/ordering.hpp"

namespace shardlib::kernels {

SHARDLIB_INSTANCE(argsort<DType>)
SHARDLIB_INSTANCE(join_ids<i32>)
SHARDLIB_INSTANCE(join_ids<u32>)
SHARDLIB_INSTANCE(gather<DType>)
SHARDLIB_INSTANCE(scatter_add<DType>)

}  // namespace shardlib::kernels

#endif
