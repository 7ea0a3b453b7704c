// Instances of templates for every dtype, compiled into shardlib::compiled: rows.
#pragma once

#include <cstdint>

#ifdef SHARDLIB_COMPILED

#include "shardlib/kernels/impl/rows.hpp"

namespace shardlib::kernels {

#define SHARDLIB_INSTANTIATE(T)                                                                                        \
  template void softmax(const Exec&, const T*, T*, std::int64_t, std::int64_t, std::int64_t, std::int64_t);            \
  template void softmax_backward(const Exec&, const T*, const T*, T*, std::int64_t, std::int64_t, std::int64_t);       \
  template void sum_exp(const Exec&, const T*, const T*, T*, std::int64_t, std::int64_t, std::int64_t);                \
  template void cross_entropy_backward(const Exec&, const T*, const T*, const T*, const i32*, const T*, T*,            \
                                       std::int64_t, std::int64_t, std::int64_t);                                      \
  template void cross_entropy_backward(const Exec&, const T*, const T*, const T*, const u32*, const T*, T*,            \
                                       std::int64_t, std::int64_t, std::int64_t);                                      \
  template void rms_norm(const Exec&, const T*, T*, std::int64_t, std::int64_t, std::int64_t, double, std::int64_t);   \
  template void rms_norm_backward(const Exec&, const T*, const T*, T*, std::int64_t, std::int64_t, std::int64_t,       \
                                  double, std::int64_t);                                                               \
  template void layer_norm(const Exec&, const T*, T*, std::int64_t, std::int64_t, std::int64_t, double, std::int64_t); \
  template void layer_norm_backward(const Exec&, const T*, const T*, T*, std::int64_t, std::int64_t, std::int64_t,     \
                                    double, std::int64_t);
SHARDLIB_INSTANTIATE(f32)
SHARDLIB_INSTANTIATE(bf16)
SHARDLIB_INSTANTIATE(f64)
#undef SHARDLIB_INSTANTIATE

}  // namespace shardlib::kernels

#endif
