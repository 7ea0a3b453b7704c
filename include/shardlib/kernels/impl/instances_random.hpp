// Instances of templates for every dtype, compiled into shardlib::compiled: random numbers.
#pragma once

#include <cstdint>
#include <span>

#ifdef SHARDLIB_COMPILED

#include "shardlib/kernels/impl/random.hpp"
#include "shardlib/spec/dtype.hpp"

namespace shardlib::kernels {

#define SHARDLIB_INSTANTIATE(Draw, T)                                                                                  \
  template void fill_random<body::Draw>(const Exec&, T*, std::span<const std::int64_t>, std::span<const std::int64_t>, \
                                        std::span<const std::int64_t>, std::uint64_t, std::uint64_t);
#define SHARDLIB_DRAWS(T) \
  SHARDLIB_INSTANTIATE(Uniform, T) SHARDLIB_INSTANTIATE(Normal, T) SHARDLIB_INSTANTIATE(TruncatedNormal, T)
SHARDLIB_DRAWS(f32)
SHARDLIB_DRAWS(bf16)
SHARDLIB_DRAWS(f64)
#undef SHARDLIB_DRAWS
#undef SHARDLIB_INSTANTIATE

}  // namespace shardlib::kernels

#endif
