// Instances of templates for every dtype, compiled into shardlib::compiled: rows.
#pragma once

#include "shardlib/spec/dtype.hpp"
#include "shardlib/support/inline.hpp"

#ifdef SHARDLIB_COMPILED

#include "shardlib/kernels/impl/rows.hpp"

namespace shardlib::kernels {

#define SHARDLIB_ROWS(T)                            \
  SHARDLIB_INSTANCE(softmax<T>)                     \
  SHARDLIB_INSTANCE(softmax_backward<T>)            \
  SHARDLIB_INSTANCE(sum_exp<T>)                     \
  SHARDLIB_INSTANCE(cross_entropy_backward<T, i32>) \
  SHARDLIB_INSTANCE(cross_entropy_backward<T, u32>) \
  SHARDLIB_INSTANCE(normalize<false, T>)            \
  SHARDLIB_INSTANCE(normalize<true, T>)             \
  SHARDLIB_INSTANCE(normalize_backward<false, T>)   \
  SHARDLIB_INSTANCE(normalize_backward<true, T>)
SHARDLIB_ROWS(f32)
SHARDLIB_ROWS(bf16)
SHARDLIB_ROWS(f64)
#undef SHARDLIB_ROWS

#define SHARDLIB_NORMS(...)                                   \
  SHARDLIB_INSTANCE(affine_norm<false, __VA_ARGS__>)          \
  SHARDLIB_INSTANCE(affine_norm<true, __VA_ARGS__>)           \
  SHARDLIB_INSTANCE(affine_norm_backward<false, __VA_ARGS__>) \
  SHARDLIB_INSTANCE(affine_norm_backward<true, __VA_ARGS__>)
SHARDLIB_NORMS(f32, f32, f32)
SHARDLIB_NORMS(f32, f32, bf16)
SHARDLIB_NORMS(bf16, bf16, bf16)
SHARDLIB_NORMS(bf16, bf16, f32)
SHARDLIB_NORMS(bf16, f32, bf16)
SHARDLIB_NORMS(bf16, f32, f32)
SHARDLIB_NORMS(f64, f64, f64)
#undef SHARDLIB_NORMS

}  // namespace shardlib::kernels

#endif
