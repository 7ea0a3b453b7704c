// Instances of templates for every dtype, compiled into shardlib::compiled: random numbers.
#pragma once

#include "shardlib/spec/dtype.hpp"
#include "shardlib/support/inline.hpp"

#ifdef SHARDLIB_COMPILED

#include "shardlib/kernels/impl/random.hpp"

namespace shardlib::kernels {

#define SHARDLIB_DRAWS(T)                          \
  SHARDLIB_INSTANCE(fill_random<body::Uniform, T>) \
  SHARDLIB_INSTANCE(fill_random<body::Normal, T>)  \
  SHARDLIB_INSTANCE(fill_random<body::TruncatedNormal, T>)
SHARDLIB_DRAWS(f32)
SHARDLIB_DRAWS(bf16)
SHARDLIB_DRAWS(f64)
#undef SHARDLIB_DRAWS

}  // namespace shardlib::kernels

#endif
