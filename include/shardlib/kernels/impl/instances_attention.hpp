// Instances of templates for every dtype, compiled into shardlib::compiled: attention.
#pragma once

#include "shardlib/spec/dtype.hpp"

#ifdef SHARDLIB_COMPILED

#include "shardlib/kernels/impl/attention.hpp"

namespace shardlib::kernels {

#define SHARDLIB_INSTANTIATE(T, R)                                                                                    \
  template void causal_attention(const Exec&, const AttentionLoops&, const T*, const T*, const T*, AttentionSegments, \
                                 R*, accumulator_t<T>*);                                                              \
  template void causal_attention_backward(const Exec&, const AttentionLoops&, const T*, const T*, const T*,           \
                                          AttentionSegments, const T*, const accumulator_t<T>*, const T*, R*, R*, R*);
SHARDLIB_INSTANTIATE(f32, f32)
SHARDLIB_INSTANTIATE(bf16, bf16)
SHARDLIB_INSTANTIATE(bf16, f32)
SHARDLIB_INSTANTIATE(f64, f64)
#undef SHARDLIB_INSTANTIATE

}  // namespace shardlib::kernels

#endif
