// Instances of templates for every dtype, compiled into shardlib::compiled: attention.
#pragma once

#include "shardlib/spec/dtype.hpp"
#include "shardlib/support/inline.hpp"

#ifdef SHARDLIB_COMPILED

#include "shardlib/kernels/impl/attention.hpp"

namespace shardlib::kernels {

SHARDLIB_INSTANCE(causal_attention<f32, f32>)
SHARDLIB_INSTANCE(causal_attention<bf16, bf16>)
SHARDLIB_INSTANCE(causal_attention<bf16, f32>)
SHARDLIB_INSTANCE(causal_attention<f64, f64>)
SHARDLIB_INSTANCE(causal_attention_backward<f32, f32>)
SHARDLIB_INSTANCE(causal_attention_backward<bf16, bf16>)
SHARDLIB_INSTANCE(causal_attention_backward<bf16, f32>)
SHARDLIB_INSTANCE(causal_attention_backward<f64, f64>)

}  // namespace shardlib::kernels

#endif
