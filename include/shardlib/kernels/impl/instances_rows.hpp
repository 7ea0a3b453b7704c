// Instances of templates for every dtype, compiled into shardlib::compiled: rows.
#pragma once

#include <cstdint>

#ifdef SHARDLIB_COMPILED

#include "shardlib/kernels/impl/rows.hpp"

namespace shardlib::kernels {

#define SHARDLIB_INSTANTIATE_NORM(Centered, T)                                                                   \
  template void normalize<Centered>(const Exec&, const T*, T*, std::int64_t, std::int64_t, std::int64_t, double, \
                                    std::int64_t);                                                               \
  template void normalize_backward<Centered>(const Exec&, const T*, const T*, T*, std::int64_t, std::int64_t,    \
                                             std::int64_t, double, std::int64_t);
#define SHARDLIB_INSTANTIATE(T)                                                                                  \
  template void softmax(const Exec&, const T*, T*, std::int64_t, std::int64_t, std::int64_t, std::int64_t);      \
  template void softmax_backward(const Exec&, const T*, const T*, T*, std::int64_t, std::int64_t, std::int64_t); \
  template void sum_exp(const Exec&, const T*, const T*, T*, std::int64_t, std::int64_t, std::int64_t);          \
  template void cross_entropy_backward(const Exec&, const T*, const T*, const T*, const i32*, const T*, T*,      \
                                       std::int64_t, std::int64_t, std::int64_t);                                \
  template void cross_entropy_backward(const Exec&, const T*, const T*, const T*, const u32*, const T*, T*,      \
                                       std::int64_t, std::int64_t, std::int64_t);                                \
  SHARDLIB_INSTANTIATE_NORM(false, T)                                                                            \
  SHARDLIB_INSTANTIATE_NORM(true, T)
SHARDLIB_INSTANTIATE(f32)
SHARDLIB_INSTANTIATE(bf16)
SHARDLIB_INSTANTIATE(f64)
#undef SHARDLIB_INSTANTIATE
#undef SHARDLIB_INSTANTIATE_NORM

}  // namespace shardlib::kernels

#endif
