// Instances of templates for every dtype, compiled into shardlib::compiled: random numbers.
#pragma once

#include <cstdint>
#include <span>

#ifdef SHARDLIB_COMPILED

#include "shardlib/kernels/impl/random.hpp"
#include "shardlib/spec/dtype.hpp"

namespace shardlib::kernels {

#define SHARDLIB_INSTANTIATE(T)                                                                                      \
  template void fill_uniform(const Exec&, T*, std::span<const std::int64_t>, std::span<const std::int64_t>,          \
                             std::span<const std::int64_t>, std::uint64_t, std::uint64_t);                           \
  template void fill_normal(const Exec&, T*, std::span<const std::int64_t>, std::span<const std::int64_t>,           \
                            std::span<const std::int64_t>, std::uint64_t, std::uint64_t);                            \
  template void fill_truncated_normal(const Exec&, T*, std::span<const std::int64_t>, std::span<const std::int64_t>, \
                                      std::span<const std::int64_t>, std::uint64_t, std::uint64_t);
SHARDLIB_INSTANTIATE(f32)
SHARDLIB_INSTANTIATE(bf16)
SHARDLIB_INSTANTIATE(f64)
#undef SHARDLIB_INSTANTIATE

}  // namespace shardlib::kernels

#endif
