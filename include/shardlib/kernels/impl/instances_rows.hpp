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

#define SHARDLIB_INSTANTIATE_AFFINE(Centered, T, W, R)                                                              \
  template void affine_norm<Centered>(const Exec&, const T*, const W*, const W*, R*, std::int64_t, std::int64_t,    \
                                      std::int64_t, double, std::int64_t);                                          \
  template void affine_norm_backward<Centered>(const Exec&, const T*, const W*, const R*, T*, W*, W*, std::int64_t, \
                                               std::int64_t, std::int64_t, double, std::int64_t);
#define SHARDLIB_INSTANTIATE(T, W, R)         \
  SHARDLIB_INSTANTIATE_AFFINE(false, T, W, R) \
  SHARDLIB_INSTANTIATE_AFFINE(true, T, W, R)
SHARDLIB_INSTANTIATE(f32, f32, f32)
SHARDLIB_INSTANTIATE(f32, f32, bf16)
SHARDLIB_INSTANTIATE(bf16, bf16, bf16)
SHARDLIB_INSTANTIATE(bf16, bf16, f32)
SHARDLIB_INSTANTIATE(bf16, f32, bf16)
SHARDLIB_INSTANTIATE(bf16, f32, f32)
SHARDLIB_INSTANTIATE(f64, f64, f64)
#undef SHARDLIB_INSTANTIATE
#undef SHARDLIB_INSTANTIATE_AFFINE

}  // namespace shardlib::kernels

#endif
